"""The processes of one run on this machine, which end together."""

from collections.abc import Sequence
import contextlib
import dataclasses
import os
from pathlib import Path
import signal
import socket
import subprocess
import time

from grpo_jax.launchers.launcher import STOPPED
from grpo_jax.launchers.units import Unit
from grpo_jax.run.terminal_text import shorten, visible

GRACE_SECONDS = 30  # what the others get to end by themselves when one process has ended
# Processes that end for the same reason do so together. The first of them says the reason.
_TOGETHER_SECONDS = 2.0
_LONGEST_TAIL = 300


@dataclasses.dataclass(frozen=True)
class Process:
  """One process of a run.

  Attributes:
    process: The process, the leader of a session of its own.
    log: The file that has what it prints.
    log_start: Where in the file it began. Earlier starts of the run wrote what is before.
  """

  process: subprocess.Popen
  log: Path
  log_start: int

  @property
  def code(self) -> int | None:
    """Its exit code, -N after signal N, or None while it runs."""
    return self.process.poll()

  @property
  def has_failed(self) -> bool:
    return self.code not in (None, 0, STOPPED)

  def kill(self) -> None:
    """Ends it, and what it started and left behind."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, signal.SIGKILL)
    self.process.wait()

  def tail(self) -> str:
    """The line of its log that says best why it ended: the last error, else the last line."""
    try:
      with open(self.log, "rb") as file:
        file.seek(self.log_start)
        lines = file.read().decode(errors="replace").split("\n")
    except OSError as error:
      return f"its log cannot be read ({error.strerror})"
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return shorten(visible((errors or lines or ["it printed nothing"])[-1]), _LONGEST_TAIL)


class ProcessGroup:
  """The processes of one run.

  Attributes:
    unit: The run.
    failed: The process that failed first, as far as `poll` has seen.
  """

  def __init__(self, unit: Unit, hosts: int, log_folder: Path) -> None:
    """Starts them.

    Raises:
      OSError: A log cannot be written, or a process cannot be started.
    """
    self.unit = unit
    self.failed: Process | None = None
    self._processes: list[Process] = []
    self._first_end: float | None = None
    try:
      for index, environment in enumerate(environments(hosts)):
        name = f"{unit.name or 'run'}{f'.{index}' if hosts > 1 else ''}.log"
        self._processes.append(_start(unit.command(), environment, log_folder / name))
    except BaseException:
      self.kill()
      raise

  def poll(self) -> int | None:
    """The exit code of the run, or None while one of its processes runs.

    Ends the processes that outlive another one for too long. They may wait for it for ever.

    Returns:
      The code of the process that failed first, else 75 if one was stopped, else 0.
    """
    ended = [one for one in self._processes if one.code is not None]
    if not ended:
      return None
    self._first_end = self._first_end or time.monotonic()
    waited = time.monotonic() - self._first_end
    all_ended = len(ended) == len(self._processes)
    if not self.failed and (all_ended or waited > _TOGETHER_SECONDS):
      self.failed = next((one for one in ended if one.has_failed), None)
    if not all_ended and waited < GRACE_SECONDS:
      return None
    self.kill()
    if self.failed:
      return self.failed.code
    return max((one.code for one in self._processes), key=abs)

  def send(self, number: int) -> None:
    """Sends a signal to each process that still runs. What it started hears from it."""
    for one in self._processes:
      if one.code is None:
        one.process.send_signal(number)

  def kill(self) -> None:
    """Ends all processes at once."""
    for one in self._processes:
      one.kill()

  def how_it_failed(self) -> str:
    """How the process that failed first has ended, such as "process 1 of 2 exited with 1"."""
    count = len(self._processes)
    which = f"process {self._processes.index(self.failed)} of {count} " if count > 1 else ""
    code = self.failed.code
    if code >= 0:
      return f"{which}exited with {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"{which}was killed by {names.get(-code, f'signal {-code}')}"


def environments(hosts: int) -> list[dict[str, str]]:
  """What each process of a run needs in its environment to find the others."""
  if hosts == 1:
    return [{}]
  common = {
    "JAX_COORDINATOR_ADDRESS": f"localhost:{_free_port()}",
    "JAX_NUM_PROCESSES": str(hosts),
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "JAX_PLATFORMS": "cpu",
  }
  return [common | {"JAX_PROCESS_ID": str(index)} for index in range(hosts)]


def _start(command: Sequence[str], environment: dict[str, str], log: Path) -> Process:
  with open(log, "ab") as file:
    start = os.fstat(file.fileno()).st_size
    process = subprocess.Popen(
      command,
      env=os.environ | environment,
      stdin=subprocess.DEVNULL,
      stdout=file,
      stderr=subprocess.STDOUT,
      # The terminal's Ctrl-C then reaches it through the launcher alone. A second signal would
      # make it leave without saving.
      start_new_session=True,
    )
  return Process(process, log, start)


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]
