"""What a launcher is."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from pathlib import Path

from grpo_jax.launchers.options import Options
from grpo_jax.launchers.units import Unit
from grpo_jax.run.workdir import LAUNCH_FOLDER, make_folder

# Exit codes, those of grpo_jax/run/ends.py, which this room cannot import: it imports jax.
DONE, FAILED, STOPPED = 0, 1, 75


def log_folder(unit: Unit) -> Path:
  """The folder for what launchers write: logs and scripts. It is created if it is not there.

  It lies in the folder of the sweep, or in that of the only run.
  """
  folder = Path(unit.workdir)
  folder = (folder.parent if unit.name else folder) / LAUNCH_FOLDER
  make_folder(folder)
  return folder


def nothing_queued(units: Sequence[Unit]) -> dict[str, str]:
  """Of a launcher that has no queue."""
  del units
  return {}


@dataclasses.dataclass(frozen=True)
class Launcher:
  """One way to start runs.

  Attributes:
    launch: Starts these units, which are neither finished nor running nor queued, or prints what it
      would start. Returns 0 if its work is done, 75 if it was stopped and the same command goes
      on, and 1 for a failure.
    queued: What the engine already has of these units: their titles, with words for a table such
      as "queued as job 12_3".
  """

  launch: Callable[[Sequence[Unit], Options], int]
  queued: Callable[[Sequence[Unit]], Mapping[str, str]] = nothing_queued
