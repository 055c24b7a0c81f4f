"""Shows the progress of slow work: what it is and how much of it is done.

  with doing("tokenising", 7473, "prompts") as work:
    for some in parts:
      ...
      work.advance(len(some))

Code reports its work here and knows no terminal. A thread passes the work in progress to a
`Display` a few times a second. The default display prints a line to stderr now and then.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import os
import sys
import threading
import time
from typing import Protocol

from grpo_jax.timing import duration

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_BETWEEN_LINES = 8.0
_SECONDS_BETWEEN_LATE_LINES = 60.0
_SECONDS_OF_A_PAUSE = 1.0  # after such a pause, silence is counted from the start of the next work
_EARLY_SECONDS = 120.0  # after them, lines are rare, so that hours of work do not fill a log


class Work:
  """Slow work that is in progress. Work may be nested.

  Attributes:
    what: The name of the work, such as "tokenising".
    total: The number of units to do. 0 if unknown.
    unit: The name of the units, such as "prompts".
    done: The number of units that are done.
    began: The time at which the work began, by `time.monotonic`.
    is_routine: Whether the same work was done before, such as a step of a run. Lines are rare then.
    is_once: Whether the work happens once in the enclosing work, such as a compilation.
    once: The seconds of this work that will not recur, such as compilation. `seconds_left` leaves
      them out.
  """

  def __init__(
    self, what: str, total: int = 0, unit: str = "", *, is_routine: bool, is_once: bool = False
  ) -> None:
    self.what, self.total, self.unit = what, total, unit
    self.is_routine, self.is_once = is_routine, is_once
    self.done, self.began, self.once = 0, time.monotonic(), 0.0

  def advance(self, count: int = 1) -> None:
    """Adds `count` units to those that are done."""
    self.done += count

  def reach(self, done: int) -> None:
    """Sets the number of units that are done in all."""
    self.done = done

  @property
  def text(self) -> str:
    """The name of the work and its progress, such as "tokenising 3,072 of 7,473 prompts"."""
    if self.total < 2:
      return self.what
    return f"{self.what} {min(self.done, self.total):,} of {self.total:,} {self.unit}"

  def seconds_left(self, now: float) -> float | None:
    """Estimates the seconds left from the mean time of a unit. None if no unit or all are done."""
    if not 0 < self.done < self.total:
      return None
    return max(0.0, now - self.began - self.once) / self.done * (self.total - self.done)


class Display(Protocol):
  """Shows the work in progress, for example on a terminal."""

  def show(self, works: Sequence[Work]) -> None:
    """Shows nested works, the outermost first. Called a few times a second.

    `works` is empty when the last work has ended.
    """


def describe(works: Sequence[Work], now: float) -> str:
  """Describes nested works in one line.

  Args:
    works: At least one work, the outermost first.
    now: The current time, by `time.monotonic`.

  Returns:
    A line such as "step 1: sampling 210 of 512 completions (12s, about 17s left)". The first time
    is how long the innermost work has taken. The second is how long the innermost work that has an
    estimate will still take.
  """
  text = ": ".join(work.text for work in works)
  seconds = now - works[-1].began
  times = [duration(seconds)] if seconds >= 1 else []
  # A compilation that is going on must not lengthen the estimates of the works around it.
  estimated_at = min((work.began for work in works if work.is_once), default=now)
  estimates = [left for work in works if (left := work.seconds_left(estimated_at)) is not None]
  if estimates and estimates[-1] >= 1:
    times.append(f"about {duration(estimates[-1])} left")
  return f"{text} ({', '.join(times)})" if times else text


def _print(text: str, works: Sequence[Work]) -> None:
  del works
  print(text, file=sys.stderr, flush=True)


class Lines:
  """Prints a line about slow work, first every few seconds and later every minute."""

  def __init__(self, write: Callable[[str, Sequence[Work]], None] = _print) -> None:
    """`write` is called with a line and the works that the line describes."""
    self._write = write
    self._silent_since = self._ended_at = -float("inf")

  def show(self, works: Sequence[Work]) -> None:
    """Prints a line about the works in progress, if a line is due."""
    now = time.monotonic()
    if not works:
      self._ended_at = now
      return
    outermost = works[0]
    # After a pause, silence counts from the start of the work. Works that follow each other
    # without a pause count as one.
    if outermost.began > self._ended_at + _SECONDS_OF_A_PAUSE:
      self._silent_since = max(self._silent_since, outermost.began)
    silent = now - self._silent_since
    if outermost.is_routine or now - outermost.began > _EARLY_SECONDS:
      # Silence before this work does not count, so that short steps of a run print no lines.
      is_due = min(silent, now - outermost.began) >= _SECONDS_BETWEEN_LATE_LINES
    else:
      is_due = silent >= _SECONDS_BETWEEN_LINES
    if is_due:
      self._silent_since = now
      self._write(describe(works, now), works)


class _Looking:
  """A thread that calls `look` a few times a second, until `stop`.

  It runs only while there is work, because a process must have no other threads when it forks, as
  the process of reward functions does.
  """

  def __init__(self, look: Callable[[], None]) -> None:
    self._look, self._is_over = look, threading.Event()
    self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
    self._thread.start()

  def stop(self) -> None:
    """Stops the thread and waits until it has ended."""
    self._is_over.set()
    self._thread.join()

  def _run(self) -> None:
    while not self._is_over.wait(_SECONDS_BETWEEN_LOOKS):
      self._look()


class Progress:
  """The work in progress in this process, and the displays that show it."""

  def __init__(self) -> None:
    self._forget()

  def _forget(self) -> None:
    """Resets everything. A forked child calls this, because it has neither thread nor work."""
    self._works: list[tuple[int, Work]] = []  # thread id and work
    self._displays: list[Display] = [Lines()]
    self._lock = threading.RLock()
    self._looking: _Looking | None = None

  def begin(
    self,
    what: str,
    total: int = 0,
    unit: str = "",
    *,
    is_routine: bool = False,
    is_once: bool = False,
  ) -> Work:
    """Begins work that `end` ends. `Work` explains the arguments."""
    work = Work(what, total, unit, is_routine=is_routine, is_once=is_once)
    with self._lock:
      self._works.append((threading.get_ident(), work))
      if self._looking is None:  # the first work starts the thread that shows works
        self._looking = _Looking(self.show_now)
    return work

  def end(self, work: Work) -> None:
    """Ends work that `begin` began. After the last work, the thread stops."""
    with self._lock:
      self._works = [one for one in self._works if one[1] is not work]
      if self._works or self._looking is None:
        return
      self._displays[-1].show(())
      looking, self._looking = self._looking, None
    looking.stop()  # without the lock, for which the thread may wait

  @contextlib.contextmanager
  def doing(
    self, what: str, total: int = 0, unit: str = "", *, is_routine: bool = False
  ) -> Iterator[Work]:
    """Names the work of the block, so that a display can show it.

    Args:
      what: The name of the work, such as "tokenising".
      total: The number of units to do. 0 if unknown.
      unit: The name of the units that `total` and `Work.advance` count, such as "prompts".
      is_routine: Whether the same work was done before, so that lines about it are rare.
    """
    work = self.begin(what, total, unit, is_routine=is_routine)
    try:
      yield work
    finally:
      self.end(work)

  def once(self, seconds: float) -> None:
    """Excludes the last `seconds` of this thread from estimates, because they will not recur."""
    with self._lock:
      for thread, work in self._works:
        if thread == threading.get_ident():
          work.once += seconds

  @contextlib.contextmanager
  def shown_by(self, display: Display) -> Iterator[None]:
    """Lets only `display` show the work until the block ends."""
    with self._lock:
      self._displays[-1].show(())
      self._displays.append(display)
    try:
      yield
    finally:
      with self._lock:
        display.show(())
        self._displays.remove(display)

  def show_now(self) -> None:
    """Shows the work in progress without waiting for the thread."""
    with self._lock:
      works = self._chain()
      if works:
        self._displays[-1].show(works)

  def _chain(self) -> list[Work]:
    """The nested works of the thread that began first. Work of other threads is not shown."""
    return [work for thread, work in self._works if thread == self._works[0][0]]


PROGRESS = Progress()
doing = PROGRESS.doing
os.register_at_fork(after_in_child=PROGRESS._forget)
