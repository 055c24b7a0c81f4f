"""Calls reward functions of users, whose code may do anything.

A function gets copies of its arguments. An exception that it raises, SystemExit included, becomes a
RewardError with a one-line message. If a call in the process of the run does not return, a warning
names the function every minute.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
import contextlib
import copy
import inspect
import threading
from typing import Any, TypeVar

from grpo_jax import timing
from grpo_jax.foreign import describe, printing_to_stderr
from grpo_jax.rewards.answer import (
  Answer,
  CallLog,
  ContractError,
  RewardError,
  answer_of,
  joined,
  no_answer,
)
from grpo_jax.rewards.conversation import texts_of
from grpo_jax.rewards.marks import has_mark
from grpo_jax.settings import ConfigError, RunFailed

SECONDS_BETWEEN_WARNINGS = 60.0
# No function gets a column of this name, which is a parameter of the method __call__ of an object.
HIDDEN = "self"
# The arguments that every function gets besides the columns.
EXTRA_ARGUMENTS = ("step", "log_metric", "log_extra")

Columns = Mapping[str, Sequence[Any]]

_ATOMS = (str, int, float, bool, type(None))

T = TypeVar("T")


def call_here(function: Callable[..., Any], name: str, columns: Columns, step: int = 0) -> Answer:
  """Calls a function in this process. Prints of the function go to stderr, as in a worker.

  Args:
    function: The reward function.
    name: The name of the function in messages.
    columns: The arguments: lists with one entry for each completion, `completions` among them.
    step: The number of the step.

  Raises:
    RewardError: The function raised an exception or did not return rewards. SystemExit counts, too,
      so that a function cannot end a run silently.
  """
  with (
    timing.telling(
      lambda waited: f"warning: reward function {name} has not returned for {waited:g} s",
      SECONDS_BETWEEN_WARNINGS,
    ),
    printing_to_stderr(),
  ):
    return call(function, name, columns, step)


def call_in_parts(
  function: Callable[..., Any], name: str, columns: Columns, step: int, group_size: int
) -> Answer:
  """As `call_here`, but retries a call that raises an exception, with fewer completions per call.

  It retries each group of `group_size` completions, and then each completion of a group that fails.
  If the function raises for a single completion, that completion has no reward. A function with the
  mark `whole_groups` gets no part of a group: if it raises for a group, the group has no reward.
  """
  count = len(columns["completions"])
  try:
    return call_here(function, name, columns, step)
  except RewardError as error:
    part_size = group_size if count > group_size else 1
    if isinstance(error.__cause__, ConfigError):  # no call of the function would succeed
      raise
    is_smallest = count <= 1 or (part_size == 1 and has_mark(function, "whole_groups"))
    # A function that breaks the contract would do so with fewer completions, too.
    if isinstance(error, ContractError) or is_smallest:
      return no_answer(count, "error", str(error))
  parts = [range(start, min(start + part_size, count)) for start in range(0, count, part_size)]
  return joined(
    count,
    (
      (rows, call_in_parts(function, name, rows_of(columns, rows), step, group_size))
      for rows in parts
    ),
  )


def call(function: Callable[..., Any], name: str, columns: Columns, step: int = 0) -> Answer:
  """As `call_here`, but without the warnings, and prints go to stdout."""
  log = CallLog(len(columns["completions"]))
  with failing_as_reward_error(name):
    values = finished(function(**arguments(function, columns, step, log)))
  return answer_of(name, values, texts_of(columns["completions"]), log)


async def call_async(
  function: Callable[..., Any], name: str, columns: Columns, step: int, timeout: float
) -> Answer:
  """As `call`, for an async function, which runs in the current event loop.

  Raises:
    TimeoutError: The function has not returned after `timeout` seconds.
    RewardError: The function raised an exception or did not return rewards.
  """
  log = CallLog(len(columns["completions"]))
  with failing_as_reward_error(name):
    waiting = asyncio.ensure_future(function(**arguments(function, columns, step, log)))
    # asyncio.wait_for is no use: the function itself may raise a TimeoutError, which looks alike.
    done, _ = await asyncio.wait([waiting], timeout=timeout)
    values = waiting.result() if done else None
  if not done:  # outside of the block above, which would make this TimeoutError a RewardError
    waiting.cancel()
    raise TimeoutError
  return answer_of(name, values, texts_of(columns["completions"]), log)


@contextlib.contextmanager
def failing_as_reward_error(name: str) -> Iterator[None]:
  """Wraps any exception in a RewardError, except for RunFailed and KeyboardInterrupt."""
  try:
    yield
  except (RunFailed, KeyboardInterrupt):
    raise
  except ConfigError as error:  # a built-in function lacks its package
    raise RewardError(str(error)) from error
  except BaseException as error:
    raise RewardError(f"reward function {name} raised {describe(error)}") from error


def finished(values: Any) -> Any:
  """The value that a function returned: the result of an awaitable, or the list of an iterator."""
  if inspect.isawaitable(values):
    values = in_thread(lambda: asyncio.run(_result_of(values))).result()
  return list(values) if isinstance(values, Iterator) else values


def arguments(
  function: Callable[..., Any], columns: Columns, step: int, log: CallLog
) -> dict[str, Any]:
  """Builds the keyword arguments of a call, with copies of columns, which the call may change."""
  shown = {name: values for name, values in columns.items() if name != HIDDEN}
  copies = {name: own_copy(values) for name, values in taken_by(function, shown).items()}
  return copies | {"step": step, "log_metric": log.metric, "log_extra": log.extra}


def taken_by(function: Callable[..., Any], given: Mapping[str, T]) -> dict[str, T]:
  """Selects from `given` the arguments that a function names, or all if it has `**columns`."""
  try:
    parameters = inspect.signature(function).parameters
  except (TypeError, ValueError):  # some functions that are written in C have none
    return dict(given)
  if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
    return dict(given)
  return {name: value for name, value in given.items() if name in parameters}


def rows_of(columns: Columns, rows: Sequence[int]) -> dict[str, list[Any]]:
  """Selects the entries with the indices `rows` from every column."""
  return {column: [values[row] for row in rows] for column, values in columns.items()}


def is_async(function: Callable[..., Any]) -> bool:
  """Whether a function, or an object's __call__, is an `async def`."""
  return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
    getattr(type(function), "__call__", None)  # noqa: B004  it is a method, not a test
  )


def check_arguments(
  function: Callable[..., Any],
  name: str,
  key: str,
  columns: Sequence[str],
  optional: Collection[str] = (),
) -> None:
  """Checks that a function can be called with keyword arguments of these names.

  Args:
    function: The reward function.
    name: The name of the function in messages.
    key: The config key that names the function.
    columns: The names of the arguments, without `EXTRA_ARGUMENTS`.
    optional: The names in `columns` that the function may omit. It then does not get them.

  Raises:
    ConfigError: The function does not accept all arguments, requires another one, or is an async
      generator.
  """
  if inspect.isasyncgenfunction(function):
    raise ConfigError(f"{key}: {name} yields in an async function: return a list instead")
  # Each name once: one of EXTRA_ARGUMENTS replaces a column of the same name.
  names = [name for name in dict.fromkeys([*columns, *EXTRA_ARGUMENTS]) if name != HIDDEN]
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # some functions that are written in C have none
    return
  taken = taken_by(function, dict.fromkeys(names))
  try:  # `bind` fails for a name that the function does not take, unless it is optional
    signature.bind(**{name: None for name in names if name in taken or name not in optional})
  except TypeError as error:
    raise ConfigError(
      f"{key}: {name}{signature} cannot be called ({error}): it gets the keyword arguments"
      f" {', '.join(names)}; take those that it does not read as **columns"
    ) from None


def needed_by(function: Callable[..., Any]) -> list[str]:
  """The names of the keyword arguments of a function that have no default."""
  try:
    parameters = inspect.signature(function).parameters.values()
  except (TypeError, ValueError):  # some functions that are written in C have none
    return []
  by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
  return [one.name for one in parameters if one.kind in by_name and one.default is one.empty]


def own_copy(value: Any) -> Any:
  """A copy that shares no list or dict with `value`. Images of the data become Pillow images."""
  if isinstance(value, _ATOMS):
    return value
  if type(value) is list:
    return [item if type(item) in _ATOMS else own_copy(item) for item in value]
  if type(value) is dict:
    return {key: own_copy(item) for key, item in value.items()}
  if hasattr(value, "for_reward"):  # decoded where the function is called
    return value.for_reward()
  return copy.deepcopy(value)


async def _result_of(waiting: Awaitable[T]) -> T:
  return await waiting


def in_thread(make: Callable[[], T]) -> "Future[T]":
  """Calls `make` in a new thread, because a notebook already runs an event loop in this one.

  The thread is a daemon, so that Python can exit after Ctrl-C: before it exits, Python waits for
  other threads, also for those of an executor.
  """
  future: Future[T] = Future()

  def run() -> None:
    try:
      future.set_result(make())
    except BaseException as error:
      future.set_exception(error)

  threading.Thread(target=run, name="rewards", daemon=True).start()
  return future
