"""Calls reward functions of users, whose code may do anything.

A function gets its own copies of its arguments. What it raises, sys.exit included, becomes one
line. One that does not return is named every minute.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import copy
import inspect
import pathlib
import traceback
from typing import Any

from grpo_jax import patience
from grpo_jax.settings import ConfigError, RunFailed

SECONDS_BETWEEN_WARNINGS = 60.0

_ATOMS = (str, int, float, bool, type(None))


class RewardError(RunFailed):
  """A reward function failed, or returned something that is not a reward."""


def call(function: Callable[..., Any], name: str, columns: Mapping[str, Sequence[Any]]) -> Any:
  """function(**columns) on copies of the columns.

  Args:
    function: The reward function.
    name: What messages call it.
    columns: Its arguments.

  Raises:
    RewardError: It raised something. sys.exit counts, so that a function cannot end a run quietly.
  """
  own_columns = {column: own_copy(values) for column, values in columns.items()}
  with patience.telling(
    lambda waited: f"warning: reward function {name} has not returned for {waited:g} s",
    SECONDS_BETWEEN_WARNINGS,
  ):
    try:
      values = function(**own_columns)
      return list(values) if isinstance(values, Iterator) else values
    except (RunFailed, KeyboardInterrupt):
      raise
    except ConfigError as error:  # a built-in function lacks its package
      raise RewardError(str(error)) from error
    except BaseException as error:
      raise RewardError(f"reward function {name} raised {describe(error)}") from error


def check_arguments(function: Callable[..., Any], name: str, key: str, columns: list[str]) -> None:
  """Checks that a function can be called with keyword arguments of these names.

  Args:
    function: The reward function.
    name: What messages call it.
    key: The config key that names it.
    columns: The names of its arguments.

  Raises:
    ConfigError: It is an async function, or lacks one of the arguments, or needs another one.
  """
  if inspect.iscoroutinefunction(function):
    raise ConfigError(f"{key}: {name} is an async function, which is not supported: use def")
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # some functions that are written in C have none
    return
  try:
    signature.bind(**dict.fromkeys(columns))
  except TypeError as error:
    raise ConfigError(
      f"{key}: {name}{signature} cannot be called ({error}): it gets the keyword arguments"
      f" {', '.join(columns)}; take those that it does not read as **columns"
    ) from None


def describe(error: BaseException, file: pathlib.Path | None = None) -> str:
  """An exception in one line: its type, its message, and the line of the user's code.

  Args:
    error: The exception.
    file: The file of the user. None means the file in which it was raised.
  """
  text = " ".join(text_of(error).split())
  named = f"{type(error).__name__}: {text:.200}" if text else type(error).__name__
  if isinstance(error, SyntaxError):
    return named  # it names its file and line itself
  frames = [
    frame
    for frame in traceback.extract_tb(error.__traceback__)
    if (frame.filename != __file__ if file is None else frame.filename == str(file))
  ]
  return f"{named} ({frames[-1].filename} line {frames[-1].lineno})" if frames else named


def text_of(value: Any, convert: Callable[[Any], str] = str) -> str:
  """str(value) or repr(value), of an object of the user whose own method may raise."""
  try:
    return convert(value)
  except Exception:
    return f"{type(value).__name__} that cannot be printed"


def own_copy(value: Any) -> Any:
  """A copy that shares no list or dict with `value`."""
  if isinstance(value, _ATOMS):
    return value
  if type(value) is list:
    return [item if type(item) in _ATOMS else own_copy(item) for item in value]
  if type(value) is dict:
    return {key: own_copy(item) for key, item in value.items()}
  return copy.deepcopy(value)
