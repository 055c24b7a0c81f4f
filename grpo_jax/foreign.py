"""Code of others that runs in this process: what it raises is an Exception, or it is Ctrl-C.

A user's code, or a package that it calls, may call sys.exit. SystemExit is no Exception, so it
would pass all that deals with errors, and end a run without a line and with code 0.
"""

import asyncio
from collections.abc import Coroutine, Iterator
import contextlib
from typing import Any, TypeVar

T = TypeVar("T")


class Ended(Exception):
  """Code of others raised something that is no Exception, such as SystemExit. That is the cause."""


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
  """What the block raises and is no Exception becomes an `Ended`.

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
  """What a coroutine returns, as `asyncio.run` gives it, also if a task of others calls sys.exit.

  asyncio stores SystemExit in its task, and then raises it out of the event loop. Here the loop
  goes on, so that the exit ends this task alone, as an error does. Who waits for the task gets it.
  """
  with contextlib.suppress(SystemExit), asyncio.Runner() as runner:
    task = runner.get_loop().create_task(main)
    while not task.done():
      with contextlib.suppress(SystemExit):
        runner.get_loop().run_until_complete(task)
  return task.result()


def _is_end_of_task(error: BaseException) -> bool:
  if not isinstance(error, asyncio.CancelledError):
    return False
  try:
    task = asyncio.current_task()
  except RuntimeError:  # no event loop runs here
    return False
  return task is not None and task.cancelling() > 0
