"""Clocks: durations, time limits, and messages about code that takes long."""

from collections.abc import Callable, Iterator
import contextlib
import signal
import sys
import threading
import time
from typing import Any

_SECONDS_TO_RAISE_AGAIN = 1.0  # for code that catches everything, even TookTooLong

# Metrics that measure time, beside those of time/. They differ even between equal runs.
_OF_CLOCK = (
  "perf/tokens_per_second",
  "rollout/learner_idle",
  "rollout/queue",
  "rollout/sampler_idle",
  "rollout/seats_idle",
)


def is_of_clock(metric: str) -> bool:
  """Whether a metric measures time, so that it differs when a run is repeated."""
  return metric.startswith("time/") or metric in _OF_CLOCK


def duration(seconds: float) -> str:
  """A duration in two units at most: 45s, 2m10s, 3h05m, 2d04h."""
  s = round(seconds)
  if s < 60:
    return f"{s}s"
  if s < 3600:
    return f"{s // 60}m{s % 60:02d}s"
  if s < 86400:
    return f"{s // 3600}h{s % 3600 // 60:02d}m"
  return f"{s // 86400}d{s % 86400 // 3600:02d}h"


class TookTooLong(BaseException):
  """A block exceeded its time limit. Not an Exception, so that `except Exception` lets it pass."""


@contextlib.contextmanager
def telling(line: Callable[[float], str], seconds: float) -> Iterator[None]:
  """While the block runs, prints `line(seconds so far)` to stderr every `seconds` seconds."""
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


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
  """Raises TookTooLong in the block if the block takes longer than `seconds`.

  The limit works only in the main thread of a system with alarms. Elsewhere there is none. A call
  of a library is not interrupted until it returns to Python.
  """
  is_main = threading.current_thread() is threading.main_thread()
  if not is_main or not hasattr(signal, "setitimer"):
    yield
    return

  def stop(*_: Any) -> None:
    raise TookTooLong

  previous_handler = signal.signal(signal.SIGALRM, stop)
  # The alarm is repeated, for a block that catches the first TookTooLong.
  signal.setitimer(signal.ITIMER_REAL, seconds, _SECONDS_TO_RAISE_AGAIN)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous_handler)


class Clock:
  """Measures the seconds since the clock was made, in all and by name.

  Attributes:
    laps: The seconds that were counted for each name.
  """

  def __init__(self) -> None:
    self._start = self._last = time.perf_counter()
    self.laps: dict[str, float] = {}

  def lap(self, name: str) -> None:
    """Counts the time since the last lap for `name`."""
    now = time.perf_counter()
    self.laps[name] = self.laps.get(name, 0.0) + now - self._last
    self._last = now

  def restart(self) -> None:
    """Begins a lap. The time since the last lap counts for no name."""
    self._last = time.perf_counter()

  def total(self) -> float:
    """Seconds since the clock was made."""
    return time.perf_counter() - self._start
