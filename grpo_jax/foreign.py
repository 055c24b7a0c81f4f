"""Runs code of the user in this process, so that it raises only an Exception or Ctrl-C.

The code, or a package that it calls, may call sys.exit. SystemExit is not an Exception, so
`except Exception` would not catch it, and it would end a run silently with exit code 0.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
import contextlib
from pathlib import Path
import sys
import threading
import traceback
from typing import Any, TextIO, TypeVar

T = TypeVar("T")
# These files call code of the user, so `describe` skips their frames.
_OWN_FILES = [str(Path(__file__).parent / "rewards" / name) for name in ("call.py", "answer.py")]


_printing = threading.Lock()  # guards the next list
_stdouts: list[TextIO] = []  # sys.stdout for each block of `printing_to_stderr` that has begun


@contextlib.contextmanager
def printing_to_stderr() -> Iterator[None]:
  """Lets prints within the block go to stderr, because a program may read stdout.

  This holds for the whole process. Blocks of several threads may overlap: the last one that ends
  restores what the first one found. With contextlib.redirect_stdout, prints could stay redirected.
  """
  with _printing:
    _stdouts.append(sys.stdout)
    sys.stdout = sys.stderr
  try:
    yield
  finally:
    with _printing:
      first = _stdouts[0]  # found by the first block; the other entries only count open blocks
      _stdouts.pop()
      if not _stdouts:
        sys.stdout = first


class Ended(Exception):
  """Code of the user raised what is no Exception, such as SystemExit. `__cause__` holds it."""


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
  """Raises `Ended` if the block raises something that is not an Exception.

  Two such errors pass unchanged, because the block does not cause them: KeyboardInterrupt, and the
  cancellation of the asyncio task in which the block runs.

  Raises:
    Ended: The block raised SystemExit or another error that is not an Exception.
  """
  try:
    yield
  except BaseException as error:
    if isinstance(error, (Exception, KeyboardInterrupt)) or _is_end_of_task(error):
      raise
    raise Ended(f"it ended with {error!r}") from error


def run(main: Coroutine[Any, Any, T]) -> T:
  """Returns the result of `main`, as `asyncio.run` does, even if another task calls sys.exit.

  asyncio stores a SystemExit in the task that raised it, and also raises it out of the event loop.
  Here the loop then continues, so that the SystemExit ends only that task, like any other error.
  Code that awaits the task receives it.
  """
  with contextlib.suppress(SystemExit), asyncio.Runner() as runner:
    task = runner.get_loop().create_task(main)
    while not task.done():
      with contextlib.suppress(SystemExit):
        runner.get_loop().run_until_complete(task)
  return task.result()


def describe(error: BaseException, file: Path | None = None) -> str:
  """Describes an exception in one line: type, message, and the line of the user's code.

  Args:
    error: The exception.
    file: The file of the user's code. None means the file that raised the exception, but not a
      file of this package that calls code of the user.
  """
  if isinstance(error, Ended) and error.__cause__ is not None:  # `Ended` only wraps it
    error = error.__cause__
  text = " ".join(text_of(error).split())
  named = f"{type(error).__name__}: {text:.200}" if text else type(error).__name__
  if isinstance(error, SyntaxError):
    return named  # it names its file and line itself
  frames = [
    frame
    for frame in traceback.extract_tb(error.__traceback__)
    if (frame.filename not in _OWN_FILES if file is None else frame.filename == str(file))
  ]
  return f"{named} ({frames[-1].filename} line {frames[-1].lineno})" if frames else named


def text_of(value: Any, convert: Callable[[Any], str] = str) -> str:
  """Returns `convert(value)`, or a substitute if the `__str__` or `__repr__` of `value` raises."""
  try:
    return convert(value)
  except Exception:
    return f"{type(value).__name__} that cannot be printed"


def _is_end_of_task(error: BaseException) -> bool:
  """Whether `error` cancels the current asyncio task, and not just a task that it awaits."""
  if not isinstance(error, asyncio.CancelledError):
    return False
  try:
    task = asyncio.current_task()
  except RuntimeError:  # no event loop runs here
    return False
  return task is not None and task.cancelling() > 0
