"""Progress of work that takes long: its name and how far it is.

  with doing("tokenising", 7473, "prompts") as work:
    for some in parts:
      ...
      work.advance(len(some))

Whoever works says so here and knows no terminal. A thread looks a few times a second and gives what
is going on to a `Display`. Without another one, that prints a line on stderr now and then.
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
_SECONDS_OF_A_PAUSE = 1.0  # after which what is done next counts as silence of its own
_EARLY_SECONDS = 120.0  # so that hours of one work do not fill a log


class Work:
  """Something that takes long.

  Attributes:
    what: The name of the work, such as "tokenising".
    total: How much there is to do. 0 if nobody knows.
    unit: The things that are counted, such as "prompts".
    done: How much is done.
    began: When it began, by the clock of `time.monotonic`.
    is_routine: Whether the like has been done before, such as a step of a run.
    is_once: Whether it does not come again in what it is a part of, such as a compilation.
    once: The seconds in it that do not come again, such as those of a compiler.
  """

  def __init__(
    self, what: str, total: int = 0, unit: str = "", *, is_routine: bool, is_once: bool = False
  ) -> None:
    self.what, self.total, self.unit = what, total, unit
    self.is_routine, self.is_once = is_routine, is_once
    self.done, self.began, self.once = 0, time.monotonic(), 0.0

  def advance(self, count: int = 1) -> None:
    """Counts what was done since the last time."""
    self.done += count

  def reach(self, done: int) -> None:
    """Says how much is done in all."""
    self.done = done

  @property
  def text(self) -> str:
    """The name of the work and how far it is, such as "tokenising 3,072 of 7,473 prompts"."""
    if self.total < 2:
      return self.what
    return f"{self.what} {min(self.done, self.total):,} of {self.total:,} {self.unit}"

  def seconds_left(self, now: float) -> float | None:
    """An estimate, by the time of what is done. None before the first part is."""
    if not 0 < self.done < self.total:
      return None
    return max(0.0, now - self.began - self.once) / self.done * (self.total - self.done)


class Display(Protocol):
  """Whoever shows what is going on."""

  def show(self, works: Sequence[Work]) -> None:
    """Shows works, of which each is a part of the one before it. Called a few times a second.

    Without works, nothing that takes long is going on any more.
    """


def describe(works: Sequence[Work], now: float) -> str:
  """One line about works, of which each is a part of the one before it.

  Args:
    works: At least one.
    now: The time.

  Returns:
    Such as "step 1: sampling 210 of 512 completions (12s, about 17s left)". The first time is that
    of the last work so far.
  """
  text = ": ".join(work.text for work in works)
  seconds = now - works[-1].began
  times = [duration(seconds)] if seconds >= 1 else []
  until = min((work.began for work in works if work.is_once), default=now)
  known = [left for work in works if (left := work.seconds_left(until)) is not None]
  times += [f"about {duration(known[-1])} left"] if known and known[-1] >= 1 else []
  return f"{text} ({', '.join(times)})" if times else text


def _print(text: str, works: Sequence[Work]) -> None:
  del works
  print(text, file=sys.stderr, flush=True)


class Lines:
  """Prints a line where a work takes long, first every few seconds and later every minute."""

  def __init__(self, write: Callable[[str, Sequence[Work]], None] = _print) -> None:
    """`write` gets a line and the works that it is about. Without it, stderr gets the line."""
    self._write = write
    self._silent_since = self._ended_at = -float("inf")

  def show(self, works: Sequence[Work]) -> None:
    """Prints a line about the works under way, if one is due."""
    now = time.monotonic()
    if not works:
      self._ended_at = now
      return
    whole = works[0]
    if whole.began > self._ended_at + _SECONDS_OF_A_PAUSE:
      self._silent_since = max(self._silent_since, whole.began)
    silent = now - self._silent_since
    if whole.is_routine or now - whole.began > _EARLY_SECONDS:
      is_due = min(silent, now - whole.began) >= _SECONDS_BETWEEN_LATE_LINES
    else:
      is_due = silent >= _SECONDS_BETWEEN_LINES
    if is_due:
      self._silent_since = now
      self._write(describe(works, now), works)


class _Looking:
  """A thread that calls something a few times a second, and lives no longer than it is needed.

  A process that forks, such as that of reward functions, must have no other threads.
  """

  def __init__(self, look: Callable[[], None]) -> None:
    self._look, self._is_over = look, threading.Event()
    self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
    self._thread.start()

  def stop(self) -> None:
    """Returns when the thread has ended."""
    self._is_over.set()
    self._thread.join()

  def _run(self) -> None:
    while not self._is_over.wait(_SECONDS_BETWEEN_LOOKS):
      self._look()


class Progress:
  """The work that goes on in this process."""

  def __init__(self) -> None:
    self._forget()

  def _forget(self) -> None:
    """Knows of nothing, like a process that was forked."""
    self._works: list[tuple[int, Work]] = []  # with their threads
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
    """Begins a work, which `end` ends. `Work` explains the arguments."""
    work = Work(what, total, unit, is_routine=is_routine, is_once=is_once)
    with self._lock:
      self._works.append((threading.get_ident(), work))
      if self._looking is None:
        self._looking = _Looking(self.show_now)
    return work

  def end(self, work: Work) -> None:
    """Ends a work."""
    with self._lock:
      self._works = [one for one in self._works if one[1] is not work]
      if self._works or self._looking is None:
        return
      self._displays[-1].show(())
      looking, self._looking = self._looking, None
    looking.stop()  # outside, because its thread may wait for the lock

  @contextlib.contextmanager
  def doing(
    self, what: str, total: int = 0, unit: str = "", *, is_routine: bool = False
  ) -> Iterator[Work]:
    """Names the work of the block, so that a display can show it.

    Args:
      what: The name of the work, such as "tokenising".
      total: How much there is to do. 0 if that is not known.
      unit: The things that `total` and `Work.advance` count, such as "prompts".
      is_routine: Whether the like has been done before, so that a log need not hear of it soon.
    """
    work = self.begin(what, total, unit, is_routine=is_routine)
    try:
      yield work
    finally:
      self.end(work)

  def once(self, seconds: float) -> None:
    """Says that so many of the last seconds of this thread do not come again."""
    with self._lock:
      for thread, work in self._works:
        if thread == threading.get_ident():
          work.once += seconds

  @contextlib.contextmanager
  def shown_by(self, display: Display) -> Iterator[None]:
    """Gives what is going on to `display` alone until the block ends."""
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
    """Shows what is going on without waiting for the thread that looks."""
    with self._lock:
      works = self._chain()
      if works:
        self._displays[-1].show(works)

  def _chain(self) -> list[Work]:
    """The works of the thread that began first. What others do beside it is not shown."""
    return [work for thread, work in self._works if thread == self._works[0][0]]


PROGRESS = Progress()
doing = PROGRESS.doing
os.register_at_fork(after_in_child=PROGRESS._forget)
