"""What a step's time is spent on."""

import time


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
