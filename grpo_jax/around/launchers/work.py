"""Starts runs, passes signals on to them, and says how they end, for launchers that wait."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
from pathlib import Path
import signal
import time
from types import FrameType
from typing import Protocol

from grpo_jax.around.launchers.launcher import say
from grpo_jax.around.launchers.progress import progress
from grpo_jax.around.launchers.units import Unit
from grpo_jax.console.exit_codes import BAD_INPUT, DONE, FAILED, STOPPED
from grpo_jax.storage import lock

_SECONDS_BETWEEN_POLLS = 0.2
_SECONDS_BETWEEN_LINES = 60.0
# The signals that runs get for the first, second and third signal to the launcher. A second SIGTERM
# soon after the first one would count as the same.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
_ENDED_BY_SIGNAL = {code for number in _PASSED_ON for code in (-number, 128 + number)}


class StartedRun(Protocol):
  """A run that waits for room, or that has processes.

  Attributes:
    unit: The run.
  """

  unit: Unit

  @property
  def waits(self) -> bool:
    """Whether it waits for room."""

  def poll(self) -> int | None:
    """The exit code of the run, or None while it goes on. Called a few times each second."""

  def send(self, number: int) -> None:
    """Sends a signal to each process."""

  def why_it_failed(self) -> str:
    """How the run failed, as `poll` has found it."""


def work(units: Sequence[Unit], start: Callable[[Unit], StartedRun], at_once: int) -> int:
  """Trains the units, and waits for their end.

  The first SIGTERM, Ctrl-C or SIGHUP makes all runs save and stop, and no other run starts. The
  second one makes them leave at once, and the third one kills them.

  Args:
    units: The runs to train.
    start: Starts a run. On a cluster it may first wait for room: `StartedRun.waits` says so.
    at_once: How many are started at once.

  Returns:
    0 if all are finished, 1 if one failed. Else 75, because one was stopped, left alone or not
    started: the same command goes on.
  """
  with _received_signals() as signals:
    return _Work(units, start, at_once, signals).do()


class _Work:
  """The units that wait, those that are started, and the exit codes of the others."""

  def __init__(
    self,
    units: Sequence[Unit],
    start: Callable[[Unit], StartedRun],
    at_once: int,
    signals: list[int],
  ) -> None:
    self._waiting = list(units)
    self._started: list[StartedRun] = []
    self._codes: list[int] = []
    self._start, self._at_once = start, at_once
    self._signals, self._passed_on = signals, 0

  def do(self) -> int:
    """Trains all runs, and leaves no process behind, whatever happens. Returns an exit code."""
    shown_at = time.monotonic()
    try:
      while self._started or (self._waiting and not self._signals):
        self._start_some()
        self._pass_signals_on()
        self._collect()
        if time.monotonic() - shown_at > _SECONDS_BETWEEN_LINES:
          shown_at = time.monotonic()
          self._show()
        time.sleep(_SECONDS_BETWEEN_POLLS)
    finally:
      if self._started:  # the launcher itself has failed, for example to write a log
        self._signals.append(signal.SIGTERM)
        self._end_all()
    if FAILED in self._codes:
      return FAILED
    return STOPPED if self._waiting or STOPPED in self._codes else DONE

  def _end_all(self) -> None:
    while self._started:
      self._pass_signals_on()
      self._collect()
      time.sleep(_SECONDS_BETWEEN_POLLS)

  def _start_some(self) -> None:
    while self._waiting and len(self._started) < self._at_once and not self._signals:
      unit = self._waiting.pop(0)
      holder = lock.holder(Path(unit.workdir))
      if holder:  # somebody else has started it since the launcher began
        say(f"left alone {unit.title}: {holder} trains it")
        self._codes.append(STOPPED)
        continue
      self._started.append(self._start(unit))

  def _pass_signals_on(self) -> None:
    for number in self._signals[self._passed_on :]:
      self._passed_on += 1
      name = signal.Signals(number).name
      if self._passed_on == 1:
        say(f"{name}: waiting until what runs has saved; a second signal makes it leave at once")
      for run in self._started:
        run.send(_PASSED_ON[min(self._passed_on, len(_PASSED_ON)) - 1])

  def _collect(self) -> None:
    """Takes out the runs that have ended, and says how."""
    for run in list(self._started):
      code = run.poll()
      if code is not None:
        self._started.remove(run)
        self._codes.append(self._count(run, code))

  def _count(self, run: StartedRun, code: int) -> int:
    """Says how a run ended. Returns which of the three ends it counts as."""
    title = run.unit.title
    # A run that has not begun to train does not handle the signal.
    by_signal = bool(self._signals) and code in _ENDED_BY_SIGNAL
    if code == STOPPED or by_signal:
      if not run.waits:
        say(f"stopped {title}: {_how_far(run.unit)}")
      return STOPPED
    if code == BAD_INPUT and (other := _elsewhere(run.unit)):
      say(f"left alone {title}: {other}")
      return STOPPED
    if code:
      say(f"failed {title}: {run.why_it_failed()}")
      return FAILED
    say(f"finished {title}")
    return DONE

  def _show(self) -> None:
    running = [run for run in self._started if not run.waits]
    parts = [f"{run.unit.title}: {_how_far(run.unit)}" for run in running]
    waiting = len(self._waiting) + len(self._started) - len(running)
    say("; ".join([*parts, *([f"{waiting} more to start"] if waiting else [])]))


@contextlib.contextmanager
def _received_signals() -> Iterator[list[int]]:
  """Yields a list to which signals that ask to stop are appended. They do nothing else."""
  signals: list[int] = []

  def append(number: int, frame: FrameType | None) -> None:
    del frame
    signals.append(number)

  numbers = [
    number
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if signal.getsignal(number) is not signal.SIG_IGN  # as nohup ignores SIGHUP
  ]
  before = {number: signal.signal(number, append) for number in numbers}
  try:
    yield signals
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _elsewhere(unit: Unit) -> str:
  """Who else trains a run, or has finished it, or "".

  Two launchers may start a run at the same time. Its folder refuses the second process.
  """
  try:
    found = progress(unit.workdir)
  except ValueError:  # a damaged config.json, of which the process has said more
    return ""
  if found.holder:
    return f"{found.holder} trains it"
  return "another launcher has finished it" if found.is_finished else ""


def _how_far(unit: Unit) -> str:
  try:
    return str(progress(unit.workdir))
  except ValueError as error:  # a damaged config.json ends no other run
    return str(error)
