"""Runs on this machine: a number of runs at once, or several processes of one run."""

from collections.abc import Iterator, Sequence
import contextlib
import shlex
import signal
import sys
import time
from types import FrameType

from grpo_jax.launchers.launcher import DONE, FAILED, STOPPED, log_folder
from grpo_jax.launchers.options import Options
from grpo_jax.launchers.process_group import ProcessGroup, environments
from grpo_jax.launchers.progress import progress
from grpo_jax.launchers.units import Unit

_POLL_SECONDS = 0.2
_STATUS_SECONDS = 60.0


def launch(units: Sequence[Unit], options: Options) -> int:
  """Runs the units, and waits for their end.

  SIGTERM, Ctrl-C and SIGHUP make all runs save and leave. A second one makes them leave at once.

  Args:
    units: What to run.
    options: Reads hosts, at_once and dry_run.

  Returns:
    0 if all are finished, 1 if one failed, else 75 if one was stopped.
  """
  if options.dry_run:
    for unit in units:
      for environment in environments(options.hosts):
        print(" ".join([*_assignments(environment), shlex.join(unit.command())]))
    return DONE
  return _Queue(units, options).work()


class _Queue:
  """The units that wait, those that run, and how the others ended."""

  def __init__(self, units: Sequence[Unit], options: Options) -> None:
    self._waiting = list(units)
    self._running: list[ProcessGroup] = []
    self._codes: list[int] = []
    self._hosts, self._at_once = options.hosts, options.at_once or 1

  def work(self) -> int:
    """Runs all of them. Leaves no process behind, whatever happens."""
    signals: list[int] = []
    shown_at = time.monotonic()
    try:
      with _received(signals):
        handled = 0
        while self._running or (self._waiting and not signals):
          if not signals:
            self._start_some()
          for number in signals[handled:]:
            self._pass_on(number, is_first=not handled)
            handled += 1
          self._collect(is_stopping=bool(signals))
          if time.monotonic() - shown_at > _STATUS_SECONDS:
            shown_at = time.monotonic()
            self._show()
          time.sleep(_POLL_SECONDS)
    finally:
      for group in self._running:
        group.kill()
    if FAILED in self._codes:
      return FAILED
    return STOPPED if self._waiting or STOPPED in self._codes else DONE

  def _start_some(self) -> None:
    while self._waiting and len(self._running) < self._at_once:
      unit = self._waiting.pop(0)
      holder = progress(unit.workdir).holder
      if holder:  # since the launcher began, somebody else has started it
        _say(f"left alone {unit.title}: {holder} trains it")
        continue
      self._running.append(ProcessGroup(unit, self._hosts, log_folder(unit)))
      _say(f"started {unit.title}")

  def _pass_on(self, number: int, is_first: bool) -> None:
    name = signal.Signals(number).name
    count = len(self._running)
    if is_first:
      _say(f"{name}: {count} runs save and stop; a second signal makes them leave at once")
    for group in self._running:
      group.send(signal.SIGTERM)

  def _collect(self, is_stopping: bool) -> None:
    for group in [group for group in self._running if group.has_ended()]:
      self._running.remove(group)
      code = group.exit_code
      title = group.unit.title
      was_stopped = code == STOPPED or (is_stopping and code in (-signal.SIGTERM, 143))
      self._codes.append(DONE if code == 0 else STOPPED if was_stopped else FAILED)
      if code == 0:
        _say(f"finished {title}")
      elif was_stopped:
        _say(f"stopped {title}, {progress(group.unit.workdir)}")
      else:
        _say(f"failed {title}: {group.failure()}")

  def _show(self) -> None:
    running = "; ".join(
      f"{group.unit.title} {progress(group.unit.workdir)}" for group in self._running
    )
    _say(f"{len(self._waiting)} wait; {running}")


@contextlib.contextmanager
def _received(signals: list[int]) -> Iterator[None]:
  """Until it is left, signals that ask to stop are appended to the list and do nothing else."""

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
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _assignments(environment: dict[str, str]) -> list[str]:
  return [f"{name}={shlex.quote(value)}" for name, value in environment.items()]


def _say(line: str) -> None:
  print(line, file=sys.stderr, flush=True)
