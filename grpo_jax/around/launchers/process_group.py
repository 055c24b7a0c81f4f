"""Manages the processes of one run, which end together."""

import abc
from collections.abc import Mapping, Sequence
import contextlib
import os
from pathlib import Path
import signal
import subprocess
import time

from grpo_jax.around.launchers.launcher import launch_folder, say
from grpo_jax.around.launchers.units import Unit
from grpo_jax.console.exit_codes import STOPPED
from grpo_jax.console.text import shorten, visible
from grpo_jax.storage.workdir import make_folder

GRACE_SECONDS = 30  # how long the others may still run after one process has ended
# How long to wait after the first end before `_first_failure` chooses: processes that fail for the
# same reason, or because one of them was killed, end within this time.
_TOGETHER_SECONDS = 2.0
_LONGEST_TAIL = 300


class Process(abc.ABC):
  """One process of a run.

  Attributes:
    log: The file with the output of the process.
    place: Where the process runs, such as "on HOST", for messages. "" means on this machine.
  """

  def __init__(self, log: Path, place: str = "") -> None:
    self.log, self.place = log, place
    # Earlier starts of the run have written the log up to here.
    self._log_start = log.stat().st_size if log.exists() else 0

  @property
  @abc.abstractmethod
  def code(self) -> int | None:
    """The exit code, -N after signal N, or None while the process runs."""

  @abc.abstractmethod
  def send(self, number: int) -> None:
    """Sends the signal `number` to the process if it still runs, but not to its children."""

  @abc.abstractmethod
  def kill(self) -> None:
    """Kills the process and its children. `LocalProcess` also kills children that outlived it."""

  @property
  def has_failed(self) -> bool:
    """Whether the process has ended with another code than 0 and 75."""
    return self.code not in (None, 0, STOPPED)

  def how_it_ended(self) -> str:
    """Describes the end of the process, such as "exited with 1"."""
    if self.code >= 0:
      return f"exited with {self.code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-self.code, f'signal {-self.code}')}"

  def tail(self) -> str:
    """The line of the log that best explains the end: the last error, or else the last line."""
    try:
      with open(self.log, "rb") as file:
        file.seek(self._log_start)
        lines = file.read().decode(errors="replace").split("\n")
    except OSError as error:
      return f"its log cannot be read ({error.strerror})"
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return shorten(visible((errors or lines or ["it printed nothing"])[-1]), _LONGEST_TAIL)


class LocalProcess(Process):
  """A process on this machine, which leads a new session."""

  def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    super().__init__(log)
    self._process = start_process(command, environment, log)

  @property
  def code(self) -> int | None:
    return self._process.poll()

  def send(self, number: int) -> None:
    self._process.send_signal(number)  # does nothing after its end

  def kill(self) -> None:
    kill_session(self._process)


class ProcessGroup:
  """The processes of one run.

  Attributes:
    unit: The unit of the run.
    failed: The process that failed first, None as long as `poll` has found no failure.
  """

  waits = False  # for room

  def __init__(self, unit: Unit, processes: Sequence[Process]) -> None:
    self.unit = unit
    self.failed: Process | None = None
    self._processes = processes
    self._first_end: float | None = None

  def poll(self) -> int | None:
    """Returns None while processes run, then the exit code of the run.

    This is the code of the process that failed first, else 75 if one was stopped, else 0. Processes
    that still run GRACE_SECONDS after another one has ended may wait for it forever, so it kills
    them.
    """
    ended = [process for process in self._processes if process.code is not None]
    if not ended:
      return None
    self._first_end = self._first_end or time.monotonic()
    waited = time.monotonic() - self._first_end
    all_ended = len(ended) == len(self._processes)
    if not self.failed and (all_ended or waited > _TOGETHER_SECONDS):
      self.failed = _first_failure(ended)
      if self.failed and not all_ended:
        end = f"so the others end within {GRACE_SECONDS} seconds"
        say(f"{self.unit.title}: {self._how_it_failed()}, {end}")
    if not all_ended and waited < GRACE_SECONDS:
      return None
    self.kill()  # also the children of processes that have ended
    if self.failed:
      return self.failed.code
    # 75, else -N, else 0: if a process saved and stopped, the run can be resumed, even if another
    # one had to be killed.
    code = max((process.code for process in self._processes), key=abs)
    if code not in (0, STOPPED):  # none failed by itself, but one had to be killed just now
      self.failed = _first_failure(self._processes)
    return code

  def send(self, number: int) -> None:
    """Sends the signal `number` to each process that still runs."""
    for one in self._processes:
      one.send(number)

  def kill(self) -> None:
    """Kills all processes."""
    for one in self._processes:
      one.kill()

  def why_it_failed(self) -> str:
    """Describes the failure, such as "process 1 of 2 exited with 1: error: ... (LOG)"."""
    return f"{self._how_it_failed()}: {self.failed.tail()} ({self.failed.log})"

  def _how_it_failed(self) -> str:
    """Describes the end of the first failed process, such as "process 1 of 2 exited with 1"."""
    count = len(self._processes)
    name = "the process" if self.failed.place else ""
    if count > 1:
      name = f"process {self._processes.index(self.failed)} of {count}"
    return " ".join(filter(None, [name, self.failed.place, self.failed.how_it_ended()]))


def make_logs(unit: Unit, count: int) -> list[Path]:
  """Makes the folder for logs, and returns the path of the log of each of a run's processes."""
  folder = launch_folder(unit)
  make_folder(folder)
  suffixes = [f".{index}.log" for index in range(count)] if count > 1 else [".log"]
  return [folder / f"{unit.name or 'run'}{suffix}" for suffix in suffixes]


def found_by(address: str, count: int, **more: str) -> list[dict[str, str]]:
  """The environment variables of `count` processes, of which the first listens at `address`.

  They also have the variables in `more`. A single process needs none.
  """
  if count == 1:
    return [{}]
  common = {
    "JAX_COORDINATOR_ADDRESS": address,
    "JAX_NUM_PROCESSES": str(count),
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    **more,
  }
  return [common | {"JAX_PROCESS_ID": str(index)} for index in range(count)]


def start_process(
  command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen:
  """Starts a process as the leader of a new session, and appends its output to its log.

  In a separate session, the process does not receive the terminal's Ctrl-C. It receives only the
  launcher's signal. With two signals, it would exit without saving.
  """
  with open(log, "ab") as file:
    return subprocess.Popen(
      command,
      env=os.environ | dict(environment),
      stdin=subprocess.DEVNULL,
      stdout=file,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )


def kill_session(process: subprocess.Popen) -> None:
  """Kills a process of `start_process` and all processes in its session, and waits for its end."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()


def _first_failure(ended: Sequence[Process]) -> Process | None:
  """The first process that a signal killed, else the first that failed by itself, or None.

  The others may have failed because the killed one does not answer any more.
  """
  failed = [one for one in ended if one.has_failed]
  return min(failed, key=lambda one: one.code >= 0, default=None)
