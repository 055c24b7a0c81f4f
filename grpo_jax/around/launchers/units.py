"""Defines the runs of `grpo_jax.train` that a launcher starts: their folders and flags."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from pathlib import Path
import re
import sys
from typing import Any

from grpo_jax.around.launchers.sweep import flag_value, name_of
from grpo_jax.settings import ConfigError

TRAIN = "grpo_jax.train"


@dataclasses.dataclass(frozen=True)
class Unit:
  """One run that a launcher starts.

  Attributes:
    name: The name of the run's folder in the folder of the sweep. "" for a run without a sweep.
    workdir: The run's folder, as an absolute path.
    overrides: The settings of this run in the sweep, by config key.
    flags: All flags of `grpo_jax.train` except --workdir.
  """

  name: str
  workdir: str
  overrides: Mapping[str, Any]
  flags: tuple[str, ...]

  @property
  def title(self) -> str:
    """The name of the run in messages."""
    return self.name or self.workdir

  def command(self, python: str = sys.executable) -> list[str]:
    """The command that starts the run, or resumes it. `python` is the interpreter."""
    return [python, "-m", TRAIN, *self.flags, f"--workdir={self.workdir}"]


def units(
  workdir: str, flags: Sequence[str], sweep: Iterable[Mapping[str, Any]] | None = None
) -> list[Unit]:
  """Makes the units of a sweep, or the unit of a single run.

  Args:
    workdir: The folder of the run, or the common folder of the sweep's runs.
    flags: The flags of `grpo_jax.train` that all runs share, without --workdir.
    sweep: The settings of each run by config key, as `load_sweep` returns them. None means a single
      run without a sweep.

  Raises:
    ConfigError: `flags` sets --workdir, or a key that the sweep sets too.
  """
  folder = Path(workdir).expanduser().absolute()
  if any(re.match(r"--?workdir(=|$)", flag) for flag in flags):
    raise ConfigError(
      "flag --workdir stands after --: write it before, because it is the launcher's"
    )
  if sweep is None:
    return [Unit("", str(folder), {}, tuple(flags))]
  keys_of_flags = _keys(flags)
  made = []
  for overrides in sweep:
    for key in overrides:
      if key in keys_of_flags:
        raise ConfigError(f"config key {key} is set by the sweep and by --config.{key}: remove one")
    own_flags = [f"--config.{key}={flag_value(value)}" for key, value in overrides.items()]
    name = name_of(overrides)
    made.append(Unit(name, str(folder / name), overrides, (*flags, *own_flags)))
  return made


def _keys(flags: Sequence[str]) -> set[str]:
  """The config keys that these flags set."""
  matches = (re.match(r"--?config\.([^=]+)", flag) for flag in flags)
  return {match[1] for match in matches if match}
