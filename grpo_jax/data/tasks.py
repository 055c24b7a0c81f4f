"""Tasks: the training and test examples of a problem, generated or read from files.

An example is a dict with three fields. `question` is a text, or a conversation as in TRL: a list of
messages, each with a text `role` and a text `content` (see data.chat). `solution` is the text that
the warm start imitates. `answer` is the gold answer that the reward functions read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import json
import pathlib
import re
from typing import TYPE_CHECKING, Any

from grpo_jax import files
from grpo_jax.data import chat
from grpo_jax.data.arithmetic import ALPHABET, Arithmetic
from grpo_jax.data.code import code_example
from grpo_jax.data.download import check_connection
from grpo_jax.settings import ConfigError, is_text

if TYPE_CHECKING:
  from grpo_jax.config import Data

Example = dict[str, Any]

# GSM8K's annotations for a calculator, such as <<5+6=11>>. The warm start must not imitate them.
_CALCULATOR = re.compile(r"<<[^<>]*>>")
_DEEPEST = 32  # of lists and objects in each other, in a row


@dataclasses.dataclass(frozen=True)
class Task:
  """The examples of a task.

  Attributes:
    train: The training examples.
    test: The test examples.
    alphabet: Every character of the examples, for a tokenizer of characters. If it is not given,
      it is collected from their questions and solutions.
  """

  train: Sequence[Example]
  test: Sequence[Example]
  alphabet: str = ""

  def __post_init__(self) -> None:
    if not self.alphabet:
      characters: set[str] = set()
      for example in (*self.train, *self.test):
        characters.update(*_contents(example.get("question", "")), example.get("solution", ""))
      object.__setattr__(self, "alphabet", "".join(sorted(characters)))  # the class is frozen


def make_task(data: "Data") -> Task:
  """The task that `data.task` names.

  Raises:
    ConfigError: The name is unknown, or the data cannot be read.
  """
  if data.task not in TASKS:
    raise ConfigError(
      f"data.task={data.task!r} is unknown: choose one of {', '.join(TASKS)}, or call"
      " grpo_jax.register_task first"
    )
  return TASKS[data.task](data.path)


def arithmetic(path: str) -> Task:
  """Generated sums of several steps. `path` must be empty."""
  if path:
    raise ConfigError(
      f"data.path={path!r}: the arithmetic task makes its own problems; leave data.path empty"
    )
  return Task(Arithmetic("train"), Arithmetic("test"), ALPHABET)


def gsm8k(path: str) -> Task:
  """GSM8K, grade-school word problems whose answers are numbers.

  They are read from train.jsonl and test.jsonl in the folder `path`. If `path` is empty, they come
  from TensorFlow Datasets.
  """
  train, test = (
    _read_jsonl(path, split, _gsm8k_example) if path else _gsm8k_from_tfds(split)
    for split in ("train", "test")
  )
  return Task(train, test)


def math(path: str) -> Task:
  """Problems whose answers are formulas, from train.jsonl and test.jsonl in the folder `path`.

  The fields are those of MATH-500: a line is an object with `problem` (or `question`) and `answer`.
  A `solution` may be added. Without it, the warm start imitates the answer.
  """
  return _from_folder(path, "math", _math_example)


def code(path: str) -> Task:
  """Programming problems with tests, in the layout of MBPP: see `data/code.py`."""
  return _from_folder(path, "code", code_example)


TASKS: dict[str, Callable[[str], Task]] = {
  "arithmetic": arithmetic,
  "gsm8k": gsm8k,
  "math": math,
  "code": code,
}


def _contents(question: str | chat.Messages) -> Iterator[str]:
  if isinstance(question, str):
    yield question
  else:
    yield from (message["content"] for message in question)


def _from_folder(path: str, name: str, make_example: Callable[[Any, str], Example]) -> Task:
  if not path:
    raise ConfigError(
      f"data.path is empty: the task {name} needs a folder with train.jsonl and test.jsonl"
    )
  train, test = (_read_jsonl(path, split, make_example) for split in ("train", "test"))
  return Task(train, test)


def _read_jsonl(
  folder: str, split: str, make_example: Callable[[Any, str], Example]
) -> list[Example]:
  """The examples in the file of a split.

  Args:
    folder: The folder with the file.
    split: "train" or "test".
    make_example: Makes an example of the JSON value of a line. The second argument names the line
      in errors.
  """
  path = pathlib.Path(folder).expanduser() / f"{split}.jsonl"
  try:
    text = files.read_bytes(path).decode("utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(
      f"data.path: cannot read {path} ({error}); it must be a folder with train.jsonl and"
      " test.jsonl"
    ) from None
  examples = []
  # Not splitlines(), because it also splits at U+2028, which may be part of a JSON string.
  for number, line in enumerate(text.split("\n"), start=1):
    if line.strip():
      where = f"{path} line {number}"
      example = make_example(_parse_line(line, where), where)
      _check_values(example, where)
      examples.append(example)
  if not examples:
    raise ConfigError(
      f"data.path: {path} is empty; each line must be an object with question and answer"
    )
  return examples


def _parse_line(line: str, where: str) -> Any:
  try:
    return json.loads(line)
  except (ValueError, RecursionError) as error:  # a ValueError is also an int of 4,300 digits
    raise ConfigError(
      f"data.path: {where} is not JSON ({error}); each line must be one object"
    ) from None


def _check_values(value: Any, where: str, depth: int = 0) -> None:
  """Refuses what JSON can hold, but later steps cannot compute with or write."""
  if isinstance(value, str) and not is_text(value):
    raise ConfigError(
      f"data.path: {where} has half of a surrogate pair (such as \\ud800), which is no character:"
      " remove it"
    )
  if depth > _DEEPEST:
    raise ConfigError(f"data.path: {where} has more than {_DEEPEST} levels of lists and objects")
  if isinstance(value, Mapping):
    value = [*value.keys(), *value.values()]
  if isinstance(value, list):
    for item in value:
      _check_values(item, where, depth + 1)


def _gsm8k_from_tfds(split: str) -> list[Example]:
  try:
    # Imported here because the import is slow and no other task needs the package. The second
    # import registers the data set, too. TFDS would need TensorFlow to find it by its name.
    import tensorflow_datasets as tfds
    from tensorflow_datasets.text.gsm8k import gsm8k as module

    builder = module.Gsm8k(file_format="array_record")
    if not builder.is_prepared():
      # Without a network, TFDS would try again for minutes.
      check_connection(module._URLS[split], "GSM8K", builder.data_dir)
    source = tfds.data_source("gsm8k", split=split)
    rows = [{key: value.decode() for key, value in row.items()} for row in source]
  except Exception as error:
    # There may be no package, no network, no disk space, or a damaged folder. Each has an exception
    # of its own kind, and the user can do the same about all of them.
    raise ConfigError(
      "data.task=gsm8k: TensorFlow Datasets could not provide it"
      f" ({type(error).__name__}: {' '.join(str(error).split()):.160}); pass"
      " --config.data.path=FOLDER with train.jsonl and test.jsonl, or prepare it where there is a"
      ' network: python -c "import tensorflow_datasets as tfds, tensorflow_datasets.text.gsm8k;'
      " tfds.data_source('gsm8k')\""
    ) from error
  return [_gsm8k_example(row, f"tfds gsm8k {split} example {i}") for i, row in enumerate(rows)]


def _gsm8k_example(row: Any, where: str) -> Example:
  question = _question(row, where, "question")
  solution = _CALCULATOR.sub("", _text(row, where, "answer"))
  _, anchor, answer = solution.rpartition("####")
  if not anchor:
    raise ConfigError(f"data.path: {where}: the answer must end in '#### NUMBER'")
  return {"question": question, "solution": solution, "answer": answer.replace(",", "").strip()}


def _math_example(row: Any, where: str) -> Example:
  question = _question(row, where, "problem", "question")
  answer = _text(row, where, "answer")
  solution = _text(row, where, "solution", "answer")
  return {"question": question, "solution": solution, "answer": answer}


def _question(row: Any, where: str, *names: str) -> str | chat.Messages:
  """The first of the fields `names` that is a text or a conversation."""
  question = _field(row, where, names, (str, list))
  if not isinstance(question, str):
    chat.check(question, f"data.path: {where}")
  return question


def _text(row: Any, where: str, *names: str) -> str:
  """The first of the fields `names` that is a text."""
  return _field(row, where, names, (str,))


def _field(row: Any, where: str, names: Sequence[str], types: tuple[type, ...]) -> Any:
  if isinstance(row, Mapping):
    for name in names:
      if isinstance(row.get(name), types):
        return row[name]
  raise ConfigError(
    f"data.path: {where} has no text field {' or '.join(map(repr, names))}; each must have one"
  )
