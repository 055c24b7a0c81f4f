"""One run on this machine: its processes, their logs, and how it ends."""

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

# The others wait for a process that is gone. What they still have to say, they say within this.
_GRACE_SECONDS = 30.0
_LONGEST_TAIL = 300


@dataclasses.dataclass
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

  def send(self, number: int) -> None:
    """Sends a signal to this process alone. What it started hears from it."""
    if self.process.poll() is None:
      self.process.send_signal(number)

  def kill(self) -> None:
    """Ends it and everything that it started and left behind."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, signal.SIGKILL)
    self.process.wait()

  def tail(self) -> str:
    """The line of its log that says best why it ended: the last error, else the last line."""
    with open(self.log, "rb") as file:
      file.seek(self.log_start)
      lines = file.read().decode(errors="replace").split("\n")
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    return shorten(visible((errors or lines or ["it printed nothing"])[-1]), _LONGEST_TAIL)


class ProcessGroup:
  """The processes of one run, which end together."""

  def __init__(self, unit: Unit, hosts: int, log_folder: Path) -> None:
    """Starts them."""
    self.unit = unit
    self.processes: list[Process] = []
    self._first_end = 0.0
    self._cause: Process | None = None
    try:
      for index, environment in enumerate(environments(hosts)):
        log = log_folder / log_name(unit, index, hosts)
        self.processes.append(_start(unit.command(), environment, log))
    except BaseException:
      self.kill()
      raise

  def send(self, number: int) -> None:
    """Sends a signal to each process that still runs."""
    for process in self.processes:
      process.send(number)

  def has_ended(self) -> bool:
    """Whether all processes have ended. Ends those that outlive another one for too long."""
    ended = [one for one in self.processes if one.process.poll() is not None]
    failed = [one for one in ended if one.process.returncode not in (0, STOPPED)]
    self._cause = self._cause or next(iter(failed), None)
    if ended and not self._first_end:
      self._first_end = time.monotonic()
    if ended and time.monotonic() - self._first_end > _GRACE_SECONDS:
      self.kill()
    elif len(ended) == len(self.processes):
      self.kill()  # what they started and left behind
    return all(one.process.poll() is not None for one in self.processes)

  def kill(self) -> None:
    """Ends all processes at once."""
    for process in self.processes:
      process.kill()

  @property
  def exit_code(self) -> int:
    """That of the process that failed first, else the largest one. After the end of all."""
    codes = [one.process.returncode for one in self.processes]
    return self._cause.process.returncode if self._cause else max(codes, key=abs)

  def failure(self) -> str:
    """What went wrong, in one line."""
    one = self._cause or max(self.processes, key=lambda one: abs(one.process.returncode))
    number = self.processes.index(one)
    count = len(self.processes)
    which = f"process {number} of {count} " if count > 1 else ""
    others = ", and the others were ended" if count > 1 else ""
    return f"{which}{how_it_ended(self.exit_code)}{others}: {one.tail()} ({one.log})"


def how_it_ended(code: int) -> str:
  """An exit code of subprocess in words."""
  if code >= 0:
    return f"exited with {code}"
  with contextlib.suppress(ValueError):
    return f"was killed by {signal.Signals(-code).name}"
  return f"was killed by signal {-code}"


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


def log_name(unit: Unit, index: int, hosts: int) -> str:
  """The name of the log of a process of a run."""
  return f"{unit.name or 'run'}{f'.{index}' if hosts > 1 else ''}.log"


def _start(command: Sequence[str], environment: dict[str, str], log: Path) -> Process:
  with open(log, "ab") as file:
    process = subprocess.Popen(
      command,
      env=os.environ | environment,
      stdin=subprocess.DEVNULL,
      stdout=file,
      stderr=subprocess.STDOUT,
      # Ctrl-C on the terminal shall reach it through the launcher only, because a second signal
      # makes it leave at once.
      start_new_session=True,
    )
    return Process(process, log, os.fstat(file.fileno()).st_size)


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]
