"""Makes examples from the rows of files, with a function for each layout."""

from collections.abc import Mapping, Sequence
import itertools
import re
from typing import Any

from grpo_jax.data.files.rows import Example, Row, SplitRows, check_texts_and_depth
from grpo_jax.data.images.messages import has_empty_places, with_sources
from grpo_jax.data.images.of_prompts import IMAGE_COLUMNS, GivenImages
from grpo_jax.data.prompt_template import fields_of, fill, names_of, value_of
from grpo_jax.data.tokenizers import chat
from grpo_jax.settings import ConfigError

# GSM8K's annotations for a calculator, such as <<5+6=11>>. The warm start must not imitate them.
_CALCULATOR = re.compile(r"<<[^<>]*>>")
# Prompts, reward functions and the warm start read these fields as texts. Files may have numbers.
_TEXT_FIELDS = ("question", "answer", "solution", "task")
# The run gives reward functions arguments of these names. Only a column that the first row has, or
# that a template uses, replaces them: a stray one in a later row must not.
_REWARD_ARGUMENTS = ("prompts", "messages")
_ABSENT = object()


def gsm8k(row: Row, where: str) -> Example:
  """Makes an example from a row with `question` and an `answer` that ends in '#### NUMBER'."""
  question = _question(row, where, "question")
  solution = _CALCULATOR.sub("", _text(row, where, "answer"))
  _, anchor, answer = solution.rpartition("####")
  if not anchor:
    raise ConfigError(f"data.path: {where}: the answer must end in '#### NUMBER'")
  return {"question": question, "solution": solution, "answer": answer.replace(",", "").strip()}


def math(row: Row, where: str) -> Example:
  """Makes an example from a row with a problem, an answer and perhaps a solution.

  The columns are `problem` (or `question`), `answer` and `solution`, perhaps capitalized. An
  answer may be a number, and replaces a missing solution.
  """
  question = _question(row, where, "problem", "question", "Problem", "Question")
  answer = _as_text(_field(row, where, ("answer", "Answer"), (str, int, float)))
  solutions = (row.get(name) for name in ("solution", "Solution"))
  solution = next((one for one in solutions if isinstance(one, str)), answer)
  return {"question": question, "solution": solution, "answer": answer}


def svamp(row: Row, where: str) -> Example:
  """Makes an example from a row of SVAMP: Body, Question (or question_concat), Equation, Answer."""
  if isinstance(row, Mapping) and isinstance(row.get("question_concat"), str):
    question = row["question_concat"]
  else:
    body, asked = _text(row, where, "Body").strip(), _text(row, where, "Question").strip()
    question = f"{body}{' ' if body.endswith(('.', '?', '!', ',')) else ', '}{asked}"
  answer = _as_text(_field(row, where, ("Answer",), (str, int, float)))
  answer = re.sub(r"\.0+$", "", answer.strip())
  equation = row.get("Equation")
  worked = f"{equation.strip()} = {answer}\n" if isinstance(equation, str) else ""
  return {"question": question, "solution": f"{worked}#### {answer}", "answer": answer}


class ExampleMaker:
  """Makes examples from rows with any columns.

  An example has all columns that occur in any row, and the fields that data.columns adds. A column
  that its row lacks is None. Columns `prompts` and `messages` that nothing uses, and that the first
  row lacks, are left out: reward functions get arguments of these names from the run.
  """

  def __init__(
    self,
    rows: SplitRows,
    names: Sequence[str],
    added: Sequence[str],
    needed: Sequence[str],
    folder: str = "",
  ) -> None:
    """Checks that the rows have the columns that the config names.

    Args:
      rows: The training rows, at least one.
      names: The columns that occur in any training or test row.
      added: data.columns: "NAME=COLUMN" copies a column, and "NAME=TEMPLATE" fills a template with
        columns in braces. A column may be a nested field, such as "reward_model.ground_truth".
      needed: The fields in the template of prompts.
      folder: The folder that relative paths of images start from.

    Raises:
      ConfigError: An entry of `added` is malformed, has the name of another, or names a column that
        no row has.
    """
    self._folder = folder
    self._added: dict[str, str] = {}
    absent = dict.fromkeys(names)  # a row in which every column is None
    for entry in added:
      name, equals, source = entry.partition("=")
      if not (name and equals and source):
        raise ConfigError(
          f"data.columns holds {entry!r}: write NAME=COLUMN, such as answer=final_answer, or"
          " NAME=TEMPLATE with columns in braces"
        )
      if "{" not in source and not _has(rows, names, source):
        raise ConfigError(
          f"data.columns holds {entry!r}: no row has a column {source!r}; {rows.where(0)} and the"
          f" rows that follow have {', '.join(names_of(absent | rows[0]))}"
        )
      if name in self._added:
        raise ConfigError(
          f"data.columns holds two entries for {name!r}, {self._added[name]!r} and {source!r}:"
          " leave one of them out"
        )
      self._added[name] = source
    in_templates = itertools.chain(*(fields_of(source) for source in self._added.values()))
    # For a name that no row has, `fill` raises an error that lists the existing fields.
    self._columns_read = [name for name in dict.fromkeys(in_templates) if _has(rows, names, name)]
    copied = [source for source in self._added.values() if "{" not in source]
    used = {name.partition(".")[0] for name in (*self._columns_read, *copied, *needed)}
    self._names = [
      name for name in names if name in rows[0] or name in used or name not in _REWARD_ARGUMENTS
    ]
    self._prompt_fields = [
      name for name in needed if name in self._added or _has(rows, names, name)
    ]

  def __call__(self, row: Row, where: str) -> Example:
    """Makes the example of a row. `where` is the name of the row in error messages.

    Raises:
      ConfigError: The row lacks a field of a template, or its messages or images are invalid.
    """
    columns = {name: row.get(name) for name in self._names}
    _check_has(columns, self._columns_read, where)
    example = dict(columns)
    for name, source in self._added.items():
      is_template = "{" in source
      example[name] = (
        fill(source, columns, "data.columns") if is_template else value_of(columns, source)
      )
    _check_has(example, self._prompt_fields, where)
    for name in _TEXT_FIELDS:
      if isinstance(example.get(name), (int, float)):
        example[name] = _as_text(example[name])
    for name in IMAGE_COLUMNS:
      if name in example:
        # `Examples` checks an example, but does not look into `GivenImages`.
        check_texts_and_depth(example[name], where)
        example[name] = GivenImages(example[name], f"data.path: {where}: {name}", self._folder)
    for name in self._prompt_fields:
      if isinstance(example.get(name), list):
        place = f"data.path: {where}: {name}"
        # Messages may contain images as paths, URLs or bytes. A source reads them later.
        example[name] = with_sources(example[name], place, self._folder)
        if any(isinstance(one, Mapping) for one in example[name]):  # else it is a list of texts
          chat.check_messages(example[name], place)
        if has_empty_places(example[name]) and not example.keys() & {*IMAGE_COLUMNS}:
          raise ConfigError(
            f"data.path: {where}: {name} has places for images, and there is no column"
            f" {' or '.join(IMAGE_COLUMNS)}"
          )
    return example


def _has(rows: SplitRows, names: Sequence[str], field: str) -> bool:
  """Whether any row has a column or a nested field. Looking for a nested field reads the rows."""
  if field in names:
    return True
  column = field.partition(".")[0]
  return column in names and any(
    value_of(rows[place], field, _ABSENT) is not _ABSENT for place in range(len(rows))
  )


def _check_has(example: Example, fields: Sequence[str], where: str) -> None:
  """Raises ConfigError if one of `fields` is missing or None in an example."""
  for name in fields:
    if value_of(example, name) is None:
      raise ConfigError(f"data.path: {where} has no {name!r}, which the config names")


def _as_text(value: str | int | float) -> str:
  """A value as text, without ".0" for a whole float."""
  is_whole = isinstance(value, float) and value.is_integer()
  return str(int(value) if is_whole else value)


def _question(row: Row, where: str, *names: str) -> str | chat.Messages:
  """The first of the fields `names` that is a text or a conversation."""
  question = _field(row, where, names, (str, list))
  if not isinstance(question, str):
    chat.check_messages(question, f"data.path: {where}")
  return question


def _text(row: Row, where: str, *names: str) -> str:
  """The first of the fields `names` that is a text."""
  return _field(row, where, names, (str,))


def _field(row: Row, where: str, names: Sequence[str], types: tuple[type, ...]) -> Any:
  """The first of the fields `names` with one of `types`. Raises ConfigError if there is none."""
  if isinstance(row, Mapping):
    for name in names:
      if isinstance(row.get(name), types):
        return row[name]
  raise ConfigError(
    f"data.path: {where} has no text field {' or '.join(map(repr, names))}; each must have one"
  )
