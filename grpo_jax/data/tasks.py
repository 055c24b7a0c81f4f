"""Where problems come from. An example is a dict of `question`, `solution` (ends in `#### answer`) and `answer`.

A question is a text, or a list of messages, each with a text `role` and a text `content`, as in TRL (see data.chat).
"""

import dataclasses
import json
import pathlib
import re
from typing import Any, Callable, Sequence

from grpo_jax import config
from grpo_jax.data import chat
from grpo_jax.data.arithmetic import ALPHABET, Arithmetic
from grpo_jax.settings import ConfigError

_CALCULATOR = re.compile(r"<<[^<>]*>>")  # GSM8K's notes to a calculator: not text to imitate


@dataclasses.dataclass(frozen=True)
class Task:
  train: Sequence[dict[str, Any]]
  test: Sequence[dict[str, Any]]
  alphabet: str  # every character of its examples


def arithmetic(path: str) -> Task:
  """Sums of several steps, generated. `path` must be empty."""
  if path:
    raise ConfigError(
      f"data.path={path!r}: the arithmetic task makes its own problems; leave data.path empty"
    )
  return Task(Arithmetic("train"), Arithmetic("test"), ALPHABET)


def gsm8k(path: str) -> Task:
  """Grade-school word problems from `path`/{train,test}.jsonl, or through TensorFlow Datasets if `path` is empty."""
  splits = [
    _jsonl(pathlib.Path(path).expanduser() / f"{s}.jsonl", _number) if path else _tfds(s)
    for s in ("train", "test")
  ]
  return _task(splits)


def math(path: str) -> Task:
  """Problems with formulas for answers from `path`/{train,test}.jsonl, as MATH-500 has them: objects with `problem` (or
  `question`) and `answer`; a `solution` is what a warm start imitates."""
  if not path:
    raise ConfigError(
      "data.path is empty: the task math needs a folder with train.jsonl and test.jsonl"
    )
  splits = [
    _jsonl(pathlib.Path(path).expanduser() / f"{s}.jsonl", _formula) for s in ("train", "test")
  ]
  return _task(splits)


def _task(splits):
  texts = (
    text
    for split in splits
    for example in split
    for text in (*_contents(example["question"]), example["solution"])
  )
  return Task(*splits, alphabet="".join(sorted(set().union(*texts))))


TASKS = {"arithmetic": arithmetic, "gsm8k": gsm8k, "math": math}


def make_task(data: config.Data) -> Task:
  """The task that the config names. Raises ConfigError for an unknown name or unreadable data."""
  if data.task not in TASKS:
    raise ConfigError(f"data.task={data.task!r} is unknown: choose one of {', '.join(TASKS)}")
  return TASKS[data.task](data.path)


def _contents(question):
  return [question] if isinstance(question, str) else [message["content"] for message in question]


def _jsonl(path: pathlib.Path, read: Callable[[Any, str], dict[str, Any]]) -> list[dict[str, Any]]:
  try:
    text = path.read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(
      f"data.path: cannot read {path} ({error}); it must be a folder with train.jsonl and test.jsonl"
    ) from None
  examples = []
  for number, line in enumerate(
    text.split("\n"), start=1
  ):  # not splitlines: U+2028 may stand inside a JSON string
    if line.strip():
      examples.append(read(_object(line, f"{path} line {number}"), f"{path} line {number}"))
  if not examples:
    raise ConfigError(
      f"data.path: {path} is empty; each line must be an object with question and answer"
    )
  return examples


def _object(line, where):
  try:
    return json.loads(line)
  except json.JSONDecodeError as error:
    raise ConfigError(
      f"data.path: {where} is not JSON ({error}); each line must be one object"
    ) from None


def _tfds(split: str) -> list[dict[str, Any]]:
  try:
    import tensorflow_datasets as tfds  # imported here: slow, and only this source needs it
    import tensorflow_datasets.text.gsm8k  # registers the builder; to find it by name TFDS would need TensorFlow

    source = tfds.data_source("gsm8k", split=split)
    rows = [{key: value.decode() for key, value in row.items()} for row in source]
  except (
    Exception
  ) as error:  # no package, no network, no disk, a damaged folder: the way out is the same
    raise ConfigError(
      "data.task=gsm8k: TensorFlow Datasets could not provide it"
      f" ({type(error).__name__}: {' '.join(str(error).split()):.160}); pass"
      " --config.data.path=FOLDER with train.jsonl and test.jsonl, or prepare it where there is a"
      ' network: python -c "import tensorflow_datasets as tfds, tensorflow_datasets.text.gsm8k;'
      " tfds.data_source('gsm8k')\""
    ) from error
  return [_number(row, f"tfds gsm8k {split} example {i}") for i, row in enumerate(rows)]


def _text(row, where, *names, kinds=str):
  """The first of the fields that is there."""
  found = next(
    (row[name] for name in names if isinstance(row, dict) and isinstance(row.get(name), kinds)),
    None,
  )
  if found is None:
    raise ConfigError(
      f"data.path: {where} has no text field {' or '.join(map(repr, names))}; each must have one"
    )
  if isinstance(found, list):
    chat.check(found, f"data.path: {where}")
  return found


def _formula(row: Any, where: str) -> dict[str, Any]:
  question, answer = (
    _text(row, where, "problem", "question", kinds=(str, list)),
    _text(row, where, "answer"),
  )
  return {
    "question": question,
    "solution": _text(row, where, "solution", "answer"),
    "answer": answer,
  }


def _number(row: Any, where: str) -> dict[str, Any]:
  question = _text(row, where, "question", kinds=(str, list))
  solution = _CALCULATOR.sub("", _text(row, where, "answer"))
  _, anchor, answer = solution.rpartition("####")
  if not anchor:
    raise ConfigError(f"data.path: {where}: the answer must end in '#### NUMBER'")
  return {"question": question, "solution": solution, "answer": answer.replace(",", "").strip()}
