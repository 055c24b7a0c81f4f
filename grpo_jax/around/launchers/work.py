"""Starts runs, forwards signals to them, and reports how they end, for launchers that wait."""

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
# The signals that runs receive for the first, second and third signal to the launcher. They differ,
# because a run takes two SIGTERMs in quick succession for one.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
_ENDED_BY_SIGNAL = {code for number in _PASSED_ON for code in (-number, 128 + number)}


class StartedRun(Protocol):
  """A started run of a `unit`, which either waits for room on the cluster or has processes."""

  unit: Unit

  @property
  def waits(self) -> bool:
    """Whether the run waits for room and has no processes."""

  def poll(self) -> int | None:
    """The exit code of the run, None before its end. `work` calls it a few times each second."""

  def send(self, number: int) -> None:
    """Sends the signal `number` to each process of the run."""

  def why_it_failed(self) -> str:
    """Describes the failure that `poll` found, for a message."""


def work(units: Sequence[Unit], start: Callable[[Unit], StartedRun], at_once: int) -> int:
  """Trains the units, and waits until all runs have ended.

  After the first SIGTERM, Ctrl-C or SIGHUP, all runs save and stop, and no other run starts. After
  the second, they exit at once. The third kills them.

  Args:
    units: The runs to train.
    start: Starts a run and returns it. While it waits for room, its `StartedRun.waits` is True.
    at_once: The most runs that are started at the same time.

  Returns:
    0 if all runs are finished, 1 if one failed. Else 75: a run was stopped or not started, or
    another process trains it. The same command then continues.
  """
  with _received_signals() as signals:
    return _Work(units, start, at_once, signals).do()


class _Work:
  """The state of `work`. A handler appends the signals that the launcher receives to `signals`."""

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
    """Trains all runs and returns an exit code as `work`. Ends all processes, even on an error."""
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
      if self._started:  # the launcher itself failed, for example because it cannot write a log
        self._signals.append(signal.SIGTERM)
        self._end_all()
    if FAILED in self._codes:
      return FAILED
    return STOPPED if self._waiting or STOPPED in self._codes else DONE

  def _end_all(self) -> None:
    """Forwards signals until all started runs have ended."""
    while self._started:
      self._pass_signals_on()
      self._collect()
      time.sleep(_SECONDS_BETWEEN_POLLS)

  def _start_some(self) -> None:
    """Starts waiting units up to `at_once`, except those that another process trains by now."""
    while self._waiting and len(self._started) < self._at_once and not self._signals:
      unit = self._waiting.pop(0)
      holder = lock.holder(Path(unit.workdir))
      if holder:  # another launcher has started the run in the meantime
        say(f"left alone {unit.title}: {holder} trains it")
        self._codes.append(STOPPED)
        continue
      self._started.append(self._start(unit))

  def _pass_signals_on(self) -> None:
    """Sends the matching signal of _PASSED_ON to all runs for each newly received signal."""
    for number in self._signals[self._passed_on :]:
      self._passed_on += 1
      name = signal.Signals(number).name
      if self._passed_on == 1:
        say(f"{name}: waiting until what runs has saved; a second signal makes it leave at once")
      for run in self._started:
        run.send(_PASSED_ON[min(self._passed_on, len(_PASSED_ON)) - 1])

  def _collect(self) -> None:
    """Removes the runs that have ended from the started ones, and reports how they ended."""
    for run in list(self._started):
      code = run.poll()
      if code is not None:
        self._started.remove(run)
        self._codes.append(self._report_end(run, code))

  def _report_end(self, run: StartedRun, code: int) -> int:
    """Reports how a run ended. Returns FAILED, STOPPED or DONE."""
    title = run.unit.title
    # A run that has not installed its signal handlers yet dies from the signal.
    by_signal = bool(self._signals) and code in _ENDED_BY_SIGNAL
    if code == STOPPED or by_signal:
      if not run.waits:
        say(f"stopped {title}: {_how_far(run.unit)}")
      return STOPPED
    # A run also exits with BAD_INPUT if another process trains it.
    if code == BAD_INPUT and (other := _elsewhere(run.unit)):
      say(f"left alone {title}: {other}")
      return STOPPED
    if code:
      say(f"failed {title}: {run.why_it_failed()}")
      return FAILED
    say(f"finished {title}")
    return DONE

  def _show(self) -> None:
    """Prints the progress of all running runs in one line."""
    running = [run for run in self._started if not run.waits]
    parts = [f"{run.unit.title}: {_how_far(run.unit)}" for run in running]
    waiting = len(self._waiting) + len(self._started) - len(running)
    say("; ".join([*parts, *([f"{waiting} more to start"] if waiting else [])]))


@contextlib.contextmanager
def _received_signals() -> Iterator[list[int]]:
  """Yields a list to which handlers append stop signals. Finally restores the former handlers."""
  signals: list[int] = []

  def append(number: int, frame: FrameType | None) -> None:
    del frame
    signals.append(number)

  numbers = [
    number
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if signal.getsignal(number) is not signal.SIG_IGN  # nohup, for example, ignores SIGHUP
  ]
  before = {number: signal.signal(number, append) for number in numbers}
  try:
    yield signals
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _elsewhere(unit: Unit) -> str:
  """Says who else trains the run or has finished it. "" if nobody does.

  If two launchers start a run at the same time, the second process finds the folder locked.
  """
  try:
    found = progress(unit.workdir)
  except ValueError:  # config.json is damaged, which the run's process has reported in detail
    return ""
  if found.holder:
    return f"{found.holder} trains it"
  return "another launcher has finished it" if found.is_finished else ""


def _how_far(unit: Unit) -> str:
  """Describes the progress of a run."""
  try:
    return str(progress(unit.workdir))
  except ValueError as error:  # a damaged config.json of one run must not end the others
    return str(error)
