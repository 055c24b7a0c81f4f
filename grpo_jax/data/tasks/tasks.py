"""Tasks: the training and test examples of a problem, generated or read from files.

An example is a dict. The tasks in this module have these fields: `question` is a text, or a
conversation as in TRL: a list of messages, each with a text `role` and a text `content` (see
tokenizers/chat.py). `solution` is the text that the warm start imitates. `answer` is the gold
answer that reward functions read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from pathlib import Path
import random
import string
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax import registry
from grpo_jax.data.files import tfds
from grpo_jax.data.files.given import OfProgram, keep_rows
from grpo_jax.data.files.rows import Example, Examples, InMemory, chosen_from, first
from grpo_jax.data.files.splits import examples_of, hold_out, rows_of
from grpo_jax.data.images.of_prompts import GivenImages
from grpo_jax.data.prompt_template import fields_of
from grpo_jax.data.tasks import countdown as number_games
from grpo_jax.data.tasks import examples, verifiers_tasks
from grpo_jax.data.tasks.arithmetic import ALPHABET, Arithmetic
from grpo_jax.data.tasks.code import code_example
from grpo_jax.data.tasks.drawn import canvas
from grpo_jax.data.tasks.drawn import clocks as drawn_clocks
from grpo_jax.data.tasks.drawn import count_shapes as shape_counts
from grpo_jax.data.tasks.drawn import odd_one_out as odd_shapes
from grpo_jax.data.tasks.mixture import Mixture, Source, columns_of, mix, mixture_of, sources_of
from grpo_jax.data.tasks.products import ALPHABET as PRODUCTS_ALPHABET
from grpo_jax.data.tasks.products import Products
from grpo_jax.data.tasks.reasoning_gym import Problems
from grpo_jax.data.tasks.seeds import Seeds
from grpo_jax.data.tasks.word_problems import WordProblems, numbers_of
from grpo_jax.data.tokenizers import chat
from grpo_jax.problems import gym
from grpo_jax.settings import ConfigError

if TYPE_CHECKING:
  from grpo_jax.config import Data


_SOME = 16  # problems of reasoning_gym whose characters are read, because making all takes long


@dataclasses.dataclass(frozen=True)
class Task:
  """The examples of a task.

  Attributes:
    train: The training examples.
    test: The test examples. Empty if data.held_out takes them from the training examples, or if the
      run does not evaluate.
    alphabet: Every character of the examples, for a character-level tokenizer. If it is "",
      `characters` collects them.
  """

  train: Sequence[Example]
  test: Sequence[Example]
  alphabet: str = ""

  def characters(self) -> str:
    """The alphabet. If it is "", this reads the questions and solutions of all examples.

    For problems of reasoning_gym, it reads only a few and adds all printable ASCII characters.
    """
    if self.alphabet:
      return self.alphabet
    found: set[str] = set()
    for split in (self.train, self.test):
      for part in split.parts if isinstance(split, Mixture) else [split]:
        if isinstance(chosen_from(part), Problems):
          found.update(string.printable)
          part = part[:_SOME]
        for i in range(len(part)):
          solution = part[i].get("solution")
          found.update(*_contents(part[i].get("question") or ""))
          found.update(solution if isinstance(solution, str) else "")
    return "".join(sorted(found))


def make_task(data: "Data") -> Task:
  """Makes the task, or the mixture of tasks, that the section `data` of a config describes.

  Raises:
    ConfigError: The name of a task is unknown, or the data cannot be read.
  """
  mixture = mixture_of(data)
  if not mixture:
    if data.prompts or data.weights:
      key = "prompts" if data.prompts else "weights"
      raise ConfigError(f"config key data.{key} is for the sources of data.mixture; leave it empty")
    if data.columns and data.task != "columns":
      raise ConfigError(
        f"config key data.columns is {data.columns}: task {data.task} has columns of its own; set"
        " data.task=columns"
      )
    return _one_task(data, Source(data.task, data.task, data.path), data.prompt)
  if data.path and data.mixture:  # else the mixture comes from data.path, for reasoning_gym
    raise ConfigError(
      f"config key data.path is {data.path!r}: with data.mixture each source brings its own, as"
      " TASK:PATH; leave it empty"
    )
  templates = templates_of(data)

  def open_source(source: Source) -> tuple[Sequence[Example], Sequence[Example]]:
    """(training examples, test examples) of a source."""
    task = _one_task(data, source, templates.get(source.name, data.prompt))
    return task.train, task.test

  return Task(*mix(mixture, data.weights, open_source))


def no_test_split(path: str) -> ConfigError:
  """The error for data at `path` without a test split, if a test split is needed."""
  return ConfigError(
    f"data.path: there is no test split in {path} (test.jsonl or test.parquet); add it, or hold a"
    " part of the training rows out: --config.data.held_out=0.05"
  )


def name_of(data: "Data") -> str:
  """The name of the data set in messages: its task, or the sources of its mixture."""
  return " + ".join(source.name for source in sources_of(mixture_of(data))) or data.task


def characters(data: "Data", task: Task, with_others: bool = False) -> str:
  """Every character of a task and of the prompt templates, for a character-level tokenizer.

  `with_others`: Whether tools or environments also write text. This adds all printable ASCII.
  """
  templates = "".join([data.prompt, *data.prompts])
  others = string.printable if with_others else ""
  return task.characters() + templates.replace("{question}", "") + others


def templates_of(data: "Data") -> dict[str, str]:
  """The templates of data.prompts, keyed by the source's name. Empty if data.prompts is empty.

  Raises:
    ConfigError: The number of templates is not the number of sources.
  """
  mixture = mixture_of(data)
  if len(data.prompts) not in (0, len(mixture)):
    raise ConfigError(
      f"config key data.prompts has {len(data.prompts)} templates: write one for each of"
      f" data.mixture = {mixture}, or none, so that data.prompt is that of all"
    )
  return dict(zip([source.name for source in sources_of(mixture)], data.prompts))


def arithmetic(path: str) -> Task:
  """Generated sums of several steps. `path` must be empty."""
  _refuse_path(path, "arithmetic")
  return Task(Arithmetic("train"), Arithmetic("test"), ALPHABET)


def countdown(path: str) -> Task:
  """Generated problems: combine three numbers so that they make a target. `path` must be empty."""
  _refuse_path(path, "countdown")
  return Task(
    number_games.Countdown("train"), number_games.Countdown("test"), number_games.ALPHABET
  )


def products(path: str) -> Task:
  """Generated products, for a policy that may call a calculator. `path` must be empty."""
  _refuse_path(path, "products")
  return Task(Products("train"), Products("test"), PRODUCTS_ALPHABET)


def word_problems(path: str) -> Task:
  """Generated word problems of one step. `path` may limit the numbers (see `numbers_of`)."""
  numbers = numbers_of(path)
  return Task(WordProblems("train", numbers), WordProblems("test", numbers))


def reasoning_gym(path: str) -> Task:
  """One task of the package reasoning_gym. `path` is its name, perhaps with knobs.

  data.path may name several tasks, which become the sources of a mixture.
  """
  task = gym.parse(path, "data.path")
  return Task(Problems(task, "train"), Problems(task, "test"))


def verifiers(path: str) -> Task:
  """The tasks of a taskset of the package verifiers, whose id is `path`."""
  _require_path(path, "verifiers")
  return Task(verifiers_tasks.examples(path), ())


def seeds(path: str) -> Task:
  """Seeds for an environment that makes the prompts. `path` must be empty."""
  _refuse_path(path, "seeds")
  return Task(Seeds("train"), Seeds("test"), string.printable)


def count_shapes(path: str) -> Task:
  """Drawn images: how many shapes of a kind are there? `path` is their size, such as 96, or ""."""
  return _drawn("count_shapes", path, shape_counts.problem, canvas.draw_shapes)


def clocks(path: str) -> Task:
  """Drawn images: what time is it? `path` as for `count_shapes`."""
  return _drawn("clocks", path, drawn_clocks.problem, drawn_clocks.draw)


def odd_one_out(path: str) -> Task:
  """Drawn images: which shape of a grid differs? `path` as for `count_shapes`."""
  return _drawn("odd_one_out", path, odd_shapes.problem, canvas.draw_shapes)


def _drawn(
  name: str,
  path: str,
  make: Callable[[random.Random], canvas.Problem],
  draw: Callable[[Any], np.ndarray],
) -> Task:
  train, test = (canvas.examples(name, split, path, make, draw) for split in ("train", "test"))
  return Task(train, test, canvas.ALPHABET)


def gsm8k(path: str) -> Task:
  """GSM8K, grade-school word problems whose answers are numbers.

  The rows come from train.jsonl and test.jsonl in the folder `path`. If `path` is "", they come
  from TensorFlow Datasets.
  """
  if path:
    return Task(*examples_of(path, examples.gsm8k))
  train, test = (
    [
      examples.gsm8k(row, f"tfds gsm8k {split} example {i}")
      for i, row in enumerate(tfds.gsm8k(split))
    ]
    for split in ("train", "test")
  )
  return Task(train, test)


def math(path: str) -> Task:
  """Problems whose answers are formulas, from train.jsonl and test.jsonl in the folder `path`.

  A line is an object as in MATH-500, with `problem` (or `question`), `answer` and perhaps
  `solution`. Without a solution, the warm start imitates the answer.
  """
  _require_path(path, "math")
  return Task(*examples_of(path, examples.math))


def svamp(path: str) -> Task:
  """SVAMP, word problems of one step, with the field names of the original files."""
  _require_path(path, "svamp")
  return Task(*examples_of(path, examples.svamp))


def code(path: str) -> Task:
  """Programming problems with tests, in the layout of MBPP: see `data/tasks/code.py`."""
  _require_path(path, "code")
  return Task(*examples_of(path, code_example))


def columns(path: str, added: Sequence[str] = (), needed: Sequence[str] = ()) -> Task:
  """Rows with any columns. See `examples.ExampleMaker` for `added` and `needed`."""
  _require_path(path, "columns")
  train, test = rows_of(path, "train"), rows_of(path, "test")
  names = dict.fromkeys([*train.columns(), *(test.columns() if test is not None else ())])
  given = Path(path).expanduser()
  folder = str(given if given.is_dir() else given.parent)
  make = examples.ExampleMaker(train, list(names), added, needed, folder)
  return Task(Examples(train, make), Examples(test, make) if test is not None else ())


TASKS: dict[str, Callable[[str], Task]] = {
  "arithmetic": arithmetic,
  "gsm8k": gsm8k,
  "math": math,
  "svamp": svamp,
  "code": code,
  "countdown": countdown,
  "products": products,
  "word_problems": word_problems,
  "reasoning_gym": reasoning_gym,
  "seeds": seeds,
  "count_shapes": count_shapes,
  "clocks": clocks,
  "odd_one_out": odd_one_out,
  "verifiers": verifiers,
  "columns": columns,
}


READS_ROWS = ("columns", "math", "gsm8k", "svamp", "code")  # tasks that read rows from data.path


def given_path(data: "Data", rows: Any, key: str = "data") -> str:
  """Keeps a program's rows in this process. Returns the value of data.path that refers to them.

  Args:
    data: The section `data` of the config.
    rows: The training rows, such as a list of dicts or a Dataset, or a dict of splits: `train`, and
      perhaps `test`.
    key: The name of the rows in messages.

  Raises:
    ConfigError: The task reads no rows, or `rows` are not rows.
  """
  if data.mixture or data.task not in READS_ROWS:
    task = "data.mixture is set" if data.mixture else f"data.task is {data.task!r}"
    raise ConfigError(
      f"{key}: {task}, which reads other data: set data.task to {' or '.join(READS_ROWS)}; columns"
      " takes any rows, and data.prompt makes prompts of them"
    )
  return keep_rows(rows, key=key)


def _one_task(data: "Data", source: Source, template: str) -> Task:
  """Makes the task of a source. Small splits are read into memory.

  If the source has no test split, the share data.held_out of its training examples becomes one.
  Rows of the task `columns` must have the fields of `template`.

  Raises:
    ConfigError: The data cannot be read, a single task has a test split although data.held_out is
      set, or a source of a mixture has none.
  """
  if source.task not in TASKS:
    key = f"data.mixture: {source.task!r}" if data.mixture else f"data.task={source.task!r}"
    raise ConfigError(
      f"{key} is unknown: choose one of {', '.join(TASKS)}, or call grpo_jax.register_task first"
    )
  if source.task == "columns":
    added = columns_of(source.name, data.columns, data.mixture)
    task = columns(source.path, added, fields_of(template))
  else:
    task = TASKS[source.task](source.path)
  train = _in_memory(task.train, data.count_at_start)
  test = _in_memory(task.test, data.count_at_start)
  # In a mixture, data.held_out is for the sources without a test split. Each needs one, because the
  # evaluation gives the accuracy of each.
  if data.held_out and len(test) and not data.mixture:
    raise ConfigError(
      f"config key data.held_out is {data.held_out}: task {source.task} has a test split; set 0"
    )
  if not len(test) and data.held_out:
    train, test = hold_out(train, data.held_out)
  if not len(test) and data.mixture:
    raise no_test_split(source.path)
  return Task(first(train, data.train_examples), test, task.alphabet)


def _in_memory(split: Sequence[Example], at_most: int) -> Sequence[Example]:
  """Reads all examples of a file with at most `at_most` rows and no images, which checks them."""
  if not isinstance(split, Examples) or len(split) > at_most:
    return split
  has_images = any(isinstance(value, GivenImages) for value in split[0].values())
  return split if has_images else InMemory(split, len(split))


def _contents(question: str | chat.Messages) -> Iterator[str]:
  """Yields the texts of a question, which may be a list of texts, numbers or messages."""
  for message in [question] if isinstance(question, str) else question:
    if not isinstance(message, Mapping):
      yield str(message)
    else:
      content = message.get("content") or ""
      parts = [{"text": content}] if isinstance(content, str) else content
      yield from (part["text"] for part in parts if "text" in part)


def _refuse_path(path: str, task: str) -> None:
  if path:
    raise ConfigError(
      f"data.path={path!r}: the {task} task makes its own problems; leave data.path empty"
    )


def _require_path(path: str, task: str) -> None:
  if not path:
    raise ConfigError(
      f"data.path is empty: the task {task} needs a folder with train.jsonl and test.jsonl"
    )


MakeTask = Callable[[str], Task]


def register_task(make: MakeTask) -> MakeTask:
  """Registers a program's task under the name of its function, for `data.task`.

  It can be used as a decorator. A saved config contains only the name, so a program that resumes
  the run must register the function first.

  Args:
    make: make(path) -> `Task`, called with data.path. An example is a dict with `question` (a text
      or a list of messages), `solution` if there is a warm start, and the fields that the reward
      functions read, such as `answer`. All examples have the same fields. The splits may be any
      objects with `__len__` and `__getitem__`. A split of more than data.count_at_start examples
      reads each example when a batch needs it.

  Returns:
    The function.

  Raises:
    ConfigError: A task of grpo_jax has this name, or the function has no name.
  """

  def make_and_check(path: str) -> Task:
    return _checked(make(path), f"task {registry.name_of(make)}")

  registry.register("task", TASKS, make, make_and_check)
  return make


def _checked(task: Any, name: str) -> Task:
  """Checks that a program returned a task, and wraps its splits so that reads check examples."""
  if not isinstance(task, Task):
    raise ConfigError(f"{name} returned a {type(task).__name__}: it must be a grpo_jax.Task")
  train, test = _examples(task.train, f"{name}: train"), task.test
  if not isinstance(test, tuple) or test:
    test = _examples(test, f"{name}: test")
  return Task(train, test, task.alphabet)


def _examples(given: Any, where: str) -> Examples:
  """Wraps the examples of a program, so that each is checked when it is read.

  `given` is a split as the program returned it, and `where` its name in error messages.
  """
  rows = OfProgram(given, where)
  if not len(rows):
    raise ConfigError(f"{where} has no examples")
  first = rows[0]

  def checked(row: Example, name: str) -> Example:
    """Returns the example `row`. Raises ConfigError, with the name of the row, if it is invalid."""
    if "question" not in row:
      raise ConfigError(f"{name} must be a dict with a question")
    if row.keys() != first.keys():
      fields, expected = ", ".join(row), ", ".join(first)
      raise ConfigError(f"{name} has the fields {fields}, and the first one {expected}")
    if not isinstance(row["question"], str):
      chat.check_messages(row["question"], name)
    return row

  return Examples(rows, checked)
