"""Says on stderr what takes long, so that no program is silent while it waits."""

from collections.abc import Callable, Iterator
import contextlib
import sys
import threading
import time

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


class Clock:
  """Seconds since the clock was made, in all and by name.

  Attributes:
    laps: Seconds that were spent on each name.
  """

  def __init__(self) -> None:
    self._start = self._last = time.perf_counter()
    self.laps: dict[str, float] = {}

  def lap(self, name: str) -> None:
    """Counts the time since the last lap for `name`."""
    now = time.perf_counter()
    self.laps[name] = self.laps.get(name, 0.0) + now - self._last
    self._last = now

  def total(self) -> float:
    """Seconds since the clock was made."""
    return time.perf_counter() - self._start
