"""The tasks of the package reasoning_gym: `data` draws their problems and `rewards` scores answers.

A config names a task with its knobs, as in `chain_sum(min_terms=2, max_terms=3)`. A dataset is an
object of the package: `dataset[i]` makes a problem, and `dataset.score_answer` scores an answer.
The package is optional and takes more than a second to import, so it is imported when it is needed.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import difflib
import random
import threading
import traceback
from typing import Any

import numpy as np

from grpo_jax import calls
from grpo_jax.foreign import printing_to_stderr
from grpo_jax.settings import ConfigError, shown

# Tasks that cannot be used -> the reasons.
REFUSED = {
  "codeio": "another process makes other problems, because they come from programs that use sets",
  "composite": "it only mixes other tasks; name these instead",
  "game_of_life_halting": "its verifier accepts any answer",
}

_GLOBAL_STATE = threading.RLock()  # of random and numpy
_OURS = ("seed", "size")  # fields of a dataset's config that grpo_jax sets, not the user
_KINDS: dict[type, str] = {  # the type of a knob's default -> the values that it accepts
  bool: "True or False",
  int: "a whole number",
  float: "a number",
  str: "a string",
  list: "a list",
  tuple: "a list",
}


@dataclasses.dataclass(frozen=True)
class GymTask:
  """A task as a config names it.

  Attributes:
    call: The text in the config: the task's name with its knobs.
    name: The name of the task.
    knobs: The values of the knobs that the config sets, by their names.
  """

  call: str
  name: str
  knobs: Mapping[str, Any]


def names() -> list[str]:
  """The sorted names of all tasks that can be used. ConfigError if the package is not installed."""
  return sorted(name for name in _datasets() if name not in REFUSED)


def knobs_of(name: str) -> dict[str, Any]:
  """The knobs of a task, with their defaults."""
  config = _datasets()[name][1]()
  fields = [field.name for field in dataclasses.fields(config)]
  return {field: getattr(config, field) for field in fields if field not in _OURS}


def category_of(name: str) -> str:
  """The subject of a task, such as "algebra": the subpackage of reasoning_gym that defines it."""
  category: str = _datasets()[name][0].__module__.split(".")[1]
  return category


def parse(call: str, key: str) -> GymTask:
  """Reads a task with its knobs. `open_dataset` checks whether their values fit together.

  Args:
    call: The task, such as `gsm_symbolic` or `chain_sum(min_terms=2)`.
    key: The config key that holds `call`, for error messages.

  Raises:
    ConfigError: The task or a knob does not exist, the value of a knob has the wrong type, or the
      package is not installed.
  """
  name, knobs = calls.parse(call, key)
  if name in REFUSED:
    raise ConfigError(f"{key}: the task {name} of reasoning_gym is refused: {REFUSED[name]}")
  if name not in _datasets():
    raise ConfigError(
      f"{key}: reasoning_gym has no task {shown(name)}{_close(name, names())};"
      " python -m grpo_jax.data --list shows all"
    )
  defaults = knobs_of(name)
  for knob, value in knobs.items():
    if knob in _OURS:
      raise ConfigError(
        f"{key}: {name}({knob}=...): grpo_jax chooses the {knob} itself, so that a run that resumes"
        " draws the same problems; leave it out"
      )
    if knob not in defaults:
      known = f"; its knobs are {', '.join(defaults)}" if defaults else "; it has no knobs"
      raise ConfigError(
        f"{key}: {name} has no knob {shown(knob)}{_close(knob, list(defaults))}{known}"
      )
    if problem := _problem(value, defaults[knob]):
      raise ConfigError(f"{key}: {name}({knob}={shown(value)}): {problem}")
  return GymTask(call, name, knobs)


def open_dataset(task: GymTask, seed: int, size: int, key: str = "data.path") -> Any:
  """Makes the package's dataset of a task.

  Args:
    task: The task.
    seed: The seed of problem 0. In most tasks, problem i has the seed `seed + i`.
    size: How many problems the dataset has.
    key: The config key that holds the task, for error messages.

  Raises:
    ConfigError: The package refuses the values of the knobs.
  """
  import reasoning_gym

  try:
    with same_everywhere(seed):
      dataset = reasoning_gym.create_dataset(task.name, seed=seed, size=size, **task.knobs)
  except Exception as error:  # an AssertionError, or another error that the knobs cause
    raise ConfigError(f"{key}: {task.call}: reasoning_gym refuses it: {_reason(error)}") from None
  _put_in_order(dataset, task.name)
  return dataset


@contextlib.contextmanager
def same_everywhere(seed: int) -> Iterator[None]:
  """Seeds the global generators of `random` and numpy within the block, and restores them after.

  Some tasks draw from these generators, which the whole process shares. So one thread at a time is
  in the block. Output that a task prints goes to stderr, because a program may read stdout.
  """
  with _GLOBAL_STATE:
    state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy accepts no larger seeds
    try:
      with printing_to_stderr():
        yield
    finally:
      random.setstate(state)
      np.random.set_state(numpy_state)


class _InOrder(set[str]):
  """A set that iterates in sorted order, because string hashes differ between processes."""

  def __iter__(self) -> Iterator[str]:
    return iter(sorted(super().__iter__()))

  def __sub__(self, other: Any) -> "_InOrder":
    return _InOrder(super().__sub__(other))


def _put_in_order(dataset: Any, name: str) -> None:
  """Patches datasets that draw from a set, so that all processes make the same problems."""
  if isinstance(getattr(dataset, "letters", None), set):  # isomorphic_strings, ransom_note
    dataset.letters = _InOrder(dataset.letters)
  if name == "polynomial_multiplication":
    monomials = dataset._get_monomials
    dataset._get_monomials = lambda rng: sorted(monomials(rng), key=str)


def _datasets() -> Mapping[str, tuple[Any, Any]]:
  """The name of each task -> (the class of its dataset, the class of its config)."""
  try:
    from reasoning_gym.factory import DATASETS
  except ImportError:
    raise ConfigError(
      "data.task=reasoning_gym needs the package reasoning-gym: pip install -e '.[reasoning-gym]'"
    ) from None
  datasets: Mapping[str, tuple[Any, Any]] = DATASETS
  return datasets


def _close(name: str, known: list[str]) -> str:
  close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
  return f": did you mean {' or '.join(close)}?" if close else ""


def _problem(value: Any, default: Any) -> str:
  """The requirement that the value of a knob with this default violates, or "" for a valid one."""
  kind = type(default)
  if default is None:  # any type is passed on, and the package checks it
    return ""
  if kind not in _KINDS:
    return f"a config cannot write a value of type {kind.__name__}, so it keeps its default"
  fits = type(value) is kind or (kind is float and type(value) is int)
  fits = fits or (kind in (list, tuple) and type(value) in (list, tuple))
  return "" if fits else f"it must be {_KINDS[kind]}"


def _reason(error: Exception) -> str:
  """Describes an error of the package in one line: its message, or the line of code that raised."""
  text = " ".join(str(error).split())
  frames = traceback.extract_tb(error.__traceback__)
  return text[:200] or (frames[-1].line or "")[:200] or type(error).__name__
