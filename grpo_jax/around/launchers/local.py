"""Launches runs on this machine: several runs at once, or runs of several processes."""

from collections.abc import Sequence
import shlex
import socket

from grpo_jax.around.launchers.launcher import say
from grpo_jax.around.launchers.options import Options
from grpo_jax.around.launchers.process_group import LocalProcess, ProcessGroup, found_by, make_logs
from grpo_jax.around.launchers.units import Unit
from grpo_jax.around.launchers.work import work
from grpo_jax.console.exit_codes import DONE


def launch(units: Sequence[Unit], options: Options) -> int:
  """Trains the units, and waits until they have ended, with `work`.

  Args:
    units: The runs to train.
    options: Uses hosts (processes of each run), at_once and dry_run (prints the commands instead).

  Returns:
    0 if all runs are finished, 1 if one failed, else 75.
  """
  if options.dry_run:
    for unit in units:
      for environment in environments(options.hosts):
        assignments = (f"{name}={value}" for name, value in environment.items())
        print(" ".join([*assignments, shlex.join(unit.command())]))
    return DONE

  def start(unit: Unit) -> ProcessGroup:
    started = _start(unit, options.hosts)
    say(f"started {unit.title}")
    return started

  # The runs share the devices of this machine, so by default one trains at a time.
  return work(units, start, options.at_once or 1)


def _start(unit: Unit, hosts: int) -> ProcessGroup:
  """Starts the processes of a run.

  Raises:
    OSError: A log cannot be written, or a process cannot be started.
  """
  processes: list[LocalProcess] = []
  try:
    for environment, log in zip(environments(hosts), make_logs(unit, hosts)):
      processes.append(LocalProcess(unit.command(), environment, log))
  except BaseException:  # the processes that have started would wait for the missing ones
    for process in processes:
      process.kill()
    raise
  return ProcessGroup(unit, processes)


def environments(hosts: int) -> list[dict[str, str]]:
  """The environment variables by which the `hosts` processes of a run find each other."""
  return found_by(f"localhost:{_free_port()}", hosts, JAX_PLATFORMS="cpu")


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]
