"""Runs on this machine: a number of runs at once, or several processes of one run."""

from collections.abc import Iterator, Sequence
import contextlib
from pathlib import Path
import shlex
import signal
import time
from types import FrameType

from grpo_jax.launchers.launcher import DONE, FAILED, STOPPED, launch_folder, say
from grpo_jax.launchers.options import Options
from grpo_jax.launchers.process_group import GRACE_SECONDS, ProcessGroup, environments
from grpo_jax.launchers.progress import progress
from grpo_jax.launchers.units import Unit
from grpo_jax.run import lock
from grpo_jax.run.workdir import make_folder

_SECONDS_BETWEEN_POLLS = 0.2
_SECONDS_BETWEEN_LINES = 60.0
# What runs get for the first, second and third signal to the launcher. A second SIGTERM soon after
# the first one would count as the same.
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
_ENDED_BY_SIGNAL = {code for number in _PASSED_ON for code in (-number, 128 + number)}


def launch(units: Sequence[Unit], options: Options) -> int:
  """Trains the units, and waits for their end.

  The first SIGTERM, Ctrl-C or SIGHUP makes all runs save and stop, and no other run starts. The
  second one makes them leave at once, and the third one kills them.

  Args:
    units: What to train.
    options: Reads hosts, at_once and dry_run.

  Returns:
    0 if all are finished, 1 if one failed, else 75.
  """
  if options.dry_run:
    for unit in units:
      for environment in environments(options.hosts):
        assignments = (f"{name}={value}" for name, value in environment.items())
        print(" ".join([*assignments, shlex.join(unit.command())]))
    return DONE
  with _received_signals() as signals:
    return _Work(units, options, signals).do()


class _Work:
  """The units that wait, those that run, and the exit codes of the others."""

  def __init__(self, units: Sequence[Unit], options: Options, signals: list[int]) -> None:
    self._waiting = list(units)
    self._running: list[ProcessGroup] = []
    self._codes: list[int] = []
    self._announced: set[str] = set()  # titles of runs with a process that failed
    self._hosts, self._at_once = options.hosts, options.at_once or 1
    self._signals, self._passed_on = signals, 0

  def do(self) -> int:
    """Trains all of them. Leaves no process behind, whatever happens."""
    shown_at = time.monotonic()
    try:
      while self._running or (self._waiting and not self._signals):
        self._start_some()
        self._pass_signals_on()
        self._collect()
        if time.monotonic() - shown_at > _SECONDS_BETWEEN_LINES:
          shown_at = time.monotonic()
          self._show()
        time.sleep(_SECONDS_BETWEEN_POLLS)
    finally:
      if self._running:  # the launcher itself has failed, for example to write a log
        self._signals.append(signal.SIGTERM)
        self._end_all()
    if FAILED in self._codes:
      return FAILED
    return STOPPED if self._waiting or STOPPED in self._codes else DONE

  def _end_all(self) -> None:
    while self._running:
      self._pass_signals_on()
      self._collect()
      time.sleep(_SECONDS_BETWEEN_POLLS)

  def _start_some(self) -> None:
    while self._waiting and len(self._running) < self._at_once and not self._signals:
      unit = self._waiting.pop(0)
      holder = lock.holder(Path(unit.workdir))
      if holder:  # somebody else has started it since the launcher began
        say(f"left alone {unit.title}: {holder} trains it")
        self._codes.append(STOPPED)
        continue
      folder = launch_folder(unit)
      make_folder(folder)
      self._running.append(ProcessGroup(unit, self._hosts, folder))
      say(f"started {unit.title}")

  def _pass_signals_on(self) -> None:
    for number in self._signals[self._passed_on :]:
      self._passed_on += 1
      name = signal.Signals(number).name
      if self._passed_on == 1:
        say(f"{name}: waiting until what runs has saved; a second signal makes it leave at once")
      for group in self._running:
        group.send(_PASSED_ON[min(self._passed_on, len(_PASSED_ON)) - 1])

  def _collect(self) -> None:
    """Takes out the runs that have ended, and says how."""
    for group in list(self._running):
      title, code = group.unit.title, group.poll()
      if code is not None:
        self._running.remove(group)
        self._codes.append(self._count(group, code))
      elif group.failed and title not in self._announced:
        self._announced.add(title)
        say(f"{title}: {group.how_it_failed()}, so the others end within {GRACE_SECONDS} seconds")

  def _count(self, group: ProcessGroup, code: int) -> int:
    """Says how a run ended. Returns which of the three ends it counts as."""
    title = group.unit.title
    # A run that has not begun to train does not handle the signal.
    by_signal = bool(self._signals) and code in _ENDED_BY_SIGNAL
    if code == STOPPED or by_signal:
      say(f"stopped {title}: {_how_far(group.unit)}")
      return STOPPED
    if code:
      say(f"failed {title}: {group.how_it_failed()}: {group.failed.tail()} ({group.failed.log})")
      return FAILED
    say(f"finished {title}")
    return DONE

  def _show(self) -> None:
    running = "; ".join(f"{group.unit.title}: {_how_far(group.unit)}" for group in self._running)
    waiting = f"; {len(self._waiting)} more to start" if self._waiting else ""
    say(f"{running}{waiting}")


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


def _how_far(unit: Unit) -> str:
  try:
    return str(progress(unit.workdir))
  except ValueError as error:  # a damaged config.json ends no other run
    return str(error)
