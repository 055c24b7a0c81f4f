"""Defines what a launcher is, and functions that launchers share."""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
from pathlib import Path
import sys

from grpo_jax.around.launchers.options import Options
from grpo_jax.around.launchers.units import Unit
from grpo_jax.storage.workdir import LAUNCH_FOLDER


def nothing_queued(units: Sequence[Unit]) -> dict[str, str]:
  """`Launcher.queued` of a launcher without a queue: no unit is queued."""
  del units
  return {}


def nothing_to_settle(units: Sequence[Unit]) -> bool:
  """`Launcher.settle` of a launcher without a queue: there are no jobs to wait for."""
  del units
  return True


@dataclasses.dataclass(frozen=True)
class Launcher:
  """One way to start runs.

  Attributes:
    launch: Starts the units that it gets, or with options.dry_run prints their commands. Returns 0
      on success, 75 if it was stopped and the same command continues the runs, or 1 if a run
      failed.
    queued: Returns a description such as "job 12_3 pending", by unit title, for each unit that the
      cluster already has in its queue.
    waits: Whether `launch` returns only after the runs have ended.
    settle: Waits for jobs of the units that are ending, until it is known whether the cluster
      queues them again. Returns False if it gave up.
  """

  launch: Callable[[Sequence[Unit], Options], int]
  queued: Callable[[Sequence[Unit]], Mapping[str, str]] = nothing_queued
  waits: bool = True
  settle: Callable[[Sequence[Unit]], bool] = nothing_to_settle


def launch_folder(unit: Unit) -> Path:
  """The folder for logs and scripts, inside the folder of the sweep or of the single run."""
  workdir = Path(unit.workdir)
  return (workdir.parent if unit.name else workdir) / LAUNCH_FOLDER


def say(line: str) -> None:
  """Prints a line to stderr. Ignores errors, because a closed terminal must not end the runs."""
  with contextlib.suppress(OSError):
    print(line, file=sys.stderr, flush=True)
