"""Exams: published test sets by name. `EXAMS` has a record for each exam.

A run evaluates exams (`eval.tasks`) in addition to its test examples, and never trains on them.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import re
from typing import Any, get_type_hints
import zlib

import numpy as np

from grpo_jax import calls
from grpo_jax.data.files.rows import Chosen, Example, Examples, Row, SplitRows
from grpo_jax.data.files.splits import rows_of_test
from grpo_jax.data.prompt_template import fields_of
from grpo_jax.data.tasks import examples
from grpo_jax.data.tasks.code import code_example
from grpo_jax.settings import LARGEST_INT, ConfigError, shown

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BOXED = "{question}\n\nReason step by step, and put the final answer into \\boxed{{}}."
_LETTER = (
  "{question}\n\nReason step by step. The last line of your answer must be 'Answer: X', where X is"
  " the letter of the right option."
)
# LiveCodeBench allows 6 seconds a case and 4 GiB. reward.timeout limits all cases together.
_CODE = "code(seconds=24, case_seconds=6, memory=4)"


@dataclasses.dataclass(frozen=True)
class Exam:
  """A published test set.

  Attributes:
    maker: maker(rows, entry) -> a function that maps a row, and its name in error messages, to an
      example.
    function: The reward function that scores the completions.
    prompt: The template of the prompts.
    hub: The files on huggingface.co: OWNER/NAME/FILE, perhaps with * for several files. "" if the
      entry must have a path.
  """

  maker: "Callable[[SplitRows, Entry], MakeExample]"
  function: str
  prompt: str
  hub: str


MakeExample = Callable[[Row, str], Example]


def _each(make: MakeExample) -> "Callable[[SplitRows, Entry], MakeExample]":
  """The `Exam.maker` of examples that depend on their row alone."""
  return lambda rows, entry: make


def _columns(rows: SplitRows, entry: "Entry") -> MakeExample:
  """The `Exam.maker` of rows with any columns. Examples must have the fields of the template."""
  return examples.ExampleMaker(
    rows, rows.columns(), (), fields_of(entry.prompt or entry.exam.prompt)
  )


def _gpqa(rows: SplitRows, entry: "Entry") -> MakeExample:
  return functools.partial(_gpqa_example, seed=entry.seed)


def _gpqa_example(row: Row, where: str, seed: int) -> Example:
  """The example of a GPQA row. The seed and the question determine the order of the options."""
  question = _texts(row, where, "Question")[0].strip()
  names = ("Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
  options = [option.strip() for option in _texts(row, where, *names)]
  key = np.array([seed % 2**64, zlib.crc32(question.encode())], np.uint64)
  order = np.argsort(np.random.Philox(key=key).random_raw(len(options)), kind="stable").tolist()
  return _choice(question, [options[i] for i in order], _LETTERS[order.index(0)])  # 0 is correct


def _mmlu_pro(row: Row, where: str) -> Example:
  """The example of an MMLU-Pro row, with up to ten options and the letter of the right option."""
  question, letter = _texts(row, where, "question", "answer")
  options = row.get("options")
  if not isinstance(options, list) or not all(isinstance(one, str) for one in options):
    raise ConfigError(f"data.path: {where}: options must be a list of texts")
  if letter not in list(_LETTERS[: len(options)]):
    raise ConfigError(f"data.path: {where}: answer is {shown(letter)}, the letter of no option")
  return _choice(question, options, letter)


def _choice(question: str, options: Sequence[str], letter: str) -> Example:
  """A multiple-choice example: the options follow the question, and the answer is a letter."""
  lines = [f"{name}) {option}" for name, option in zip(_LETTERS, options)]
  return {"question": "\n".join([question, "", *lines]), "answer": letter}


def _ifeval(row: Row, where: str) -> Example:
  """The example of an IFEval row: a prompt, its instructions, and the arguments of each."""
  (question,) = _texts(row, where, "prompt")
  names, arguments = row.get("instruction_id_list"), row.get("kwargs")
  for column, value in (("instruction_id_list", names), ("kwargs", arguments)):
    if not isinstance(value, list) or len(value) != len(names or ()):
      raise ConfigError(f"data.path: {where}: {column} must be a list with an entry each")
  return {"question": question, "instruction_id_list": names, "kwargs": arguments}


def _texts(row: Row, where: str, *names: str) -> list[str]:
  """The text columns `names` of a row. Raises ConfigError if one is missing or not a text."""
  for name in names:
    if not isinstance(row, Mapping) or not isinstance(row.get(name), str):
      raise ConfigError(f"data.path: {where} has no text {name!r}")
  return [row[name] for name in names]


_MATH = _each(examples.math)

EXAMS: dict[str, Exam] = {
  "aime24": Exam(_MATH, "math", _BOXED, "HuggingFaceH4/aime_2024/data/train-*.parquet"),
  "aime25": Exam(_MATH, "math", _BOXED, "MathArena/aime_2025/data/train-*.parquet"),
  "amc23": Exam(_MATH, "math", _BOXED, "math-ai/amc23/*test*.parquet"),
  "math500": Exam(_MATH, "math", _BOXED, "HuggingFaceH4/MATH-500/test.jsonl"),
  "gsm8k": Exam(_each(examples.gsm8k), "math", _BOXED, "openai/gsm8k/main/test-*.parquet"),
  "svamp": Exam(_each(examples.svamp), "math", _BOXED, "ChilleD/SVAMP/*test*.parquet"),
  "gpqa_diamond": Exam(_gpqa, "choice", _LETTER, "Idavidrein/gpqa/gpqa_diamond.csv"),
  "mmlu_pro": Exam(_each(_mmlu_pro), "choice", _LETTER, "TIGER-Lab/MMLU-Pro/data/test-*.parquet"),
  "ifeval": Exam(_each(_ifeval), "ifeval", "{question}", "google/IFEval/ifeval_input_data.jsonl"),
  "humaneval": Exam(
    _each(code_example),
    _CODE,
    "{question}",
    "openai/openai_humaneval/openai_humaneval/test-*.parquet",
  ),
  "livecodebench": Exam(
    _each(code_example),
    _CODE,
    "{question}",
    "livecodebench/code_generation_lite/test*.jsonl",
  ),
  "columns": Exam(_columns, "flexible", "{question}", ""),
}


@dataclasses.dataclass(frozen=True)
class Entry:
  """An entry of eval.tasks: an exam, the path of its rows, and the options of the evaluation.

  Attributes:
    name: The name of the exam in metrics.
    exam: The exam.
    path: The file or folder with the rows. "" downloads `Exam.hub`.
    function: The reward function that scores completions. "" means `Exam.function`.
    prompt: The template of prompts. "" means `Exam.prompt`.
    samples: The number of samples of each problem. -1 means eval.samples.
    max_tokens: The most tokens of a completion. 0 means sampling.max_tokens.
    examples: The number of problems in a fixed random subset. 0 means all.
    seed: The seed of the order of a question's options.
  """

  name: str
  exam: Exam
  path: str
  function: str = ""
  prompt: str = ""
  samples: int = -1
  max_tokens: int = 0
  examples: int = 0
  seed: int = 0


_NO_OPTIONS = ("name", "exam", "path")  # fields of an entry that no option sets
_LEAST = {"samples": 0, "max_tokens": 1, "examples": 1, "seed": 0}  # the least value of an option
# NAME=EXAM(options):PATH. Options have ")" only in quoted texts and in one level of brackets.
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_OPTIONS = rf"\((?:[^()'\"]|{_QUOTED}|\((?:[^()'\"]|{_QUOTED})*\))*\)"
_ENTRY = re.compile(
  rf"(?:(?P<name>\w+)=)?(?P<exam>\w+)(?P<options>{_OPTIONS})?(?::(?P<path>.+))?", re.DOTALL
)


def entries_of(tasks: Sequence[str]) -> list[Entry]:
  """Parses the entries of eval.tasks.

  Args:
    tasks: Each is EXAM, EXAM:PATH, EXAM(samples=4,...):PATH or NAME=EXAM...

  Raises:
    ConfigError: An entry cannot be read, or two have the same name.
  """
  found = [_entry(text) for text in tasks]
  names = [entry.name for entry in found]
  for name in names:
    if names.count(name) > 1:
      raise ConfigError(f"eval.tasks has two entries named {name}: write NAME={name}:PATH")
  return found


def path_in(text: str) -> tuple[str, str]:
  """Splits an entry of eval.tasks into (text before the path, path). The path may be ""."""
  match = _ENTRY.fullmatch(text)
  path = match["path"] if match else None
  return (text[: -len(path)], path) if path else (text, "")


def _entry(text: str) -> Entry:
  """Parses one entry of eval.tasks. An option sets the field of `Entry` with its name."""
  match = _ENTRY.fullmatch(text)
  if not match:
    raise ConfigError(
      f"eval.tasks holds {text!r}: write EXAM:FILE, such as math500:test.jsonl, or"
      " math500(samples=4,max_tokens=2048):test.jsonl"
    )
  if match["exam"] not in EXAMS:
    raise ConfigError(
      f"eval.tasks holds {text!r}: {match['exam']!r} is no exam: choose one of {', '.join(EXAMS)}"
    )
  _, options = calls.parse(match["exam"] + (match["options"] or ""), "eval.tasks")
  types = {name: hint for name, hint in get_type_hints(Entry).items() if name not in _NO_OPTIONS}
  for name, value in options.items():
    if name not in types:
      raise ConfigError(f"eval.tasks holds {text!r}: it takes {', '.join(types)}, and not {name}")
    if type(value) is not types[name] or not _LEAST.get(name, 0) <= _size(value) <= LARGEST_INT:
      least = f" of at least {_LEAST[name]}" if name in _LEAST else ""
      expected = "a text" if types[name] is str else f"a whole number{least}"
      raise ConfigError(f"eval.tasks holds {text!r}: {name} must be {expected}, got {shown(value)}")
  name = match["name"] or match["exam"]
  if not match["path"] and not EXAMS[match["exam"]].hub:
    raise ConfigError(f"eval.tasks holds {text!r}: write {match['exam']}:FILE")
  return Entry(name=name, exam=EXAMS[match["exam"]], path=match["path"] or "", **options)


def _size(value: Any) -> int:
  """The size that limits apply to: the value of a number, or the length of a text."""
  return len(value) if isinstance(value, str) else value


def problems(entry: Entry) -> Sequence[Example]:
  """The examples of an entry. Indexing reads an example from its file.

  Raises:
    ConfigError: There are no rows, or their file cannot be read or downloaded.
  """
  rows = rows_of_test(entry.path, entry.exam.hub)
  found = Examples(rows, entry.exam.maker(rows, entry))
  if not 0 < entry.examples < len(found):
    return found
  # The key is fixed, so that all runs evaluate the same subset.
  words = np.random.Philox(key=np.array([0, 2**64 - 2], np.uint64)).random_raw(len(found))
  return Chosen(found, np.sort(np.argsort(words, kind="stable")[: entry.examples]))
