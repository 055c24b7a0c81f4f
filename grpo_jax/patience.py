"""Says on stderr what takes long, so that no program is silent while it waits."""

from collections.abc import Callable, Iterator
import contextlib
import sys
import threading

_SECONDS = 8.0


@contextlib.contextmanager
def telling(line: Callable[[float], str], seconds: float) -> Iterator[None]:
  """Prints line(seconds so far) each time that the block has taken so many seconds more."""
  ended = threading.Event()

  def tell() -> None:
    waited = 0.0
    while not ended.wait(seconds):
      waited += seconds
      print(line(waited), file=sys.stderr, flush=True)

  teller = threading.Thread(target=tell, daemon=True)
  teller.start()
  try:
    yield
  finally:
    ended.set()
    teller.join()


def told_if_slow(what: str | Callable[[], str]) -> contextlib.AbstractContextManager[None]:
  """Prints `what`, such as "reading FILE", after each 8 seconds that the block has not ended."""

  def line(waited: float) -> str:
    return f"still {what if isinstance(what, str) else what()} after {waited:.0f} seconds"

  return telling(line, _SECONDS)
