"""The record of a launcher, and the functions that launchers share."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
from pathlib import Path
import sys

from grpo_jax.around.launchers.options import Options
from grpo_jax.around.launchers.units import Unit
from grpo_jax.storage.workdir import LAUNCH_FOLDER


def nothing_queued(units: Sequence[Unit]) -> dict[str, str]:
  """The queue of a launcher that has none."""
  del units
  return {}


def nothing_to_settle(units: Sequence[Unit]) -> bool:
  """Waits for nothing, as a launcher without a queue has no jobs to ask about."""
  del units
  return True


@dataclasses.dataclass(frozen=True)
class Launcher:
  """One way to start runs.

  Attributes:
    launch: Starts units that are neither finished nor running nor queued, or prints what it would
      start. Returns 0 if it did its work, 75 if it was stopped and the same command goes on, and
      1 if a run failed.
    queued: The units that the engine of the cluster has already: the title of each, with words for
      a reader such as "job 12_3 pending".
    waits: Whether `launch` returns at the end of the runs only.
    settle: Waits for jobs of the units of which the engine does not know yet whether they go on.
      Returns whether it knows now.
  """

  launch: Callable[[Sequence[Unit], Options], int]
  queued: Callable[[Sequence[Unit]], Mapping[str, str]] = nothing_queued
  waits: bool = True
  settle: Callable[[Sequence[Unit]], bool] = nothing_to_settle


def launch_folder(unit: Unit) -> Path:
  """The folder for logs and scripts: in the folder of the sweep, or in that of the only run."""
  workdir = Path(unit.workdir)
  return (workdir.parent if unit.name else workdir) / LAUNCH_FOLDER


def say(line: str) -> None:
  """Prints a line to stderr. A terminal that is gone must not end the runs."""
  with contextlib.suppress(OSError):
    print(line, file=sys.stderr, flush=True)
