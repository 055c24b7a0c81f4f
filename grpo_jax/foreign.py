"""Code of others that runs in this process: what it raises is an Exception, or it is Ctrl-C.

A user's code, or a package that it calls, may call sys.exit. SystemExit is no Exception, so it
would pass all that deals with errors, and end a run without a line and with code 0.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
import contextlib
from pathlib import Path
import traceback
from typing import Any, TypeVar

T = TypeVar("T")
# An exception that a user's code raised was on its way through these.
_OWN_FILES = [str(Path(__file__).parent / "rewards" / name) for name in ("call.py", "answer.py")]


class Ended(Exception):
  """Code of others raised something that is no Exception, such as SystemExit. That is the cause."""


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
  """Turns whatever the block raises that is no Exception into an `Ended`.

  Two things stay as they are, because they do not come from the block: Ctrl-C, and the end of the
  asyncio task that the block runs in.

  Raises:
    Ended: The block raised SystemExit, or the like.
  """
  try:
    yield
  except BaseException as error:
    if isinstance(error, (Exception, KeyboardInterrupt)) or _is_end_of_task(error):
      raise
    raise Ended(f"it ended with {error!r}") from error


def run(main: Coroutine[Any, Any, T]) -> T:
  """Returns a coroutine's result, as `asyncio.run` does, also if a task of others calls sys.exit.

  asyncio stores SystemExit in its task, and then raises it out of the event loop. Here the loop
  goes on, so that the exit ends this task alone, as an error does. Who waits for the task gets it.
  """
  with contextlib.suppress(SystemExit), asyncio.Runner() as runner:
    task = runner.get_loop().create_task(main)
    while not task.done():
      with contextlib.suppress(SystemExit):
        runner.get_loop().run_until_complete(task)
  return task.result()


def describe(error: BaseException, file: Path | None = None) -> str:
  """An exception in one line: its type, its message, and the line of the user's code.

  Args:
    error: The exception.
    file: The file of the user. None means the file in which it was raised.
  """
  if isinstance(error, Ended) and error.__cause__ is not None:
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
  """str(value) or repr(value), of an object of the user whose own method may raise."""
  try:
    return convert(value)
  except Exception:
    return f"{type(value).__name__} that cannot be printed"


def _is_end_of_task(error: BaseException) -> bool:
  if not isinstance(error, asyncio.CancelledError):
    return False
  try:
    task = asyncio.current_task()
  except RuntimeError:  # no event loop runs here
    return False
  return task is not None and task.cancelling() > 0
