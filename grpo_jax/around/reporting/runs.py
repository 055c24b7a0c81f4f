"""Reads the runs of a page from their folders, and finds the settings in which they differ."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
from pathlib import Path
from typing import Any

from grpo_jax.around.reporting.columns import MetricColumns, columns_of
from grpo_jax.config import Config, to_dict
from grpo_jax.settings import ConfigError
from grpo_jax.storage import starts
from grpo_jax.storage.reading import completion_steps, read_config, read_metrics
from grpo_jax.storage.saved_config import flat

SEED = "seed"
_SAME = {SEED, "compilation_cache"}  # runs of a series may differ in these


@dataclasses.dataclass(frozen=True)
class ShownRun:
  """A run, read from its folder.

  Attributes:
    name: The name of the run on the page.
    folder: The folder of the run.
    config: The config of the run.
    columns: The metrics in metrics.jsonl.
    starts: Where and when the run was started, as `storage/starts.py` writes it.
    completion_steps: The steps with saved completions.
  """

  name: str
  folder: Path
  config: Config
  columns: MetricColumns
  starts: list[dict[str, Any]]
  completion_steps: list[int]

  @property
  def settings(self) -> dict[str, Any]:
    """The settings by config key."""
    return flat(to_dict(self.config))

  @property
  def last_step(self) -> int:
    """The number of steps of the finished run, warm start included."""
    return self.config.warm_start.steps + self.config.steps

  @property
  def step(self) -> int:
    """The last step in metrics.jsonl, 0 without any."""
    return int(self.columns.steps[-1]) if len(self.columns.steps) else 0

  @property
  def state(self) -> str:
    """How far the run is, in words."""
    if self.step >= self.last_step:
      return f"finished, {self.last_step:,} steps"
    return f"step {self.step:,} of {self.last_step:,}"


@dataclasses.dataclass(frozen=True)
class Series:
  """Runs that differ only in their seeds. A page draws them as one curve with a band.

  Attributes:
    label: The settings in which the series differs from the others, or the name of its first run.
    runs: The runs.
  """

  label: str
  runs: tuple[ShownRun, ...]


def read_run(folder: str) -> ShownRun:
  """Reads a run from its folder.

  Raises:
    ConfigError: The folder does not hold a run, or a file in it is damaged.
  """
  path = Path(folder).expanduser()
  config = read_config(path)
  # A run has no metrics before its first step.
  rows = read_metrics(path) if (path / "metrics.jsonl").exists() else []
  return ShownRun(
    name=path.resolve().name,
    folder=path,
    config=config,
    columns=columns_of(rows),
    starts=starts.read(path),
    completion_steps=completion_steps(path),
  )


def with_unique_names(runs: Sequence[ShownRun]) -> list[ShownRun]:
  """Renames runs that share a name to their folders.

  Raises:
    ConfigError: Two runs have the same folder.
  """
  folders = [run.folder.resolve() for run in runs]
  for folder in folders:
    if folders.count(folder) > 1:
      raise ConfigError(f"{folder} is given twice: name each run's folder once")
  names = [run.name for run in runs]
  return [
    dataclasses.replace(run, name=str(run.folder)) if names.count(run.name) > 1 else run
    for run in runs
  ]


def group(runs: Sequence[ShownRun]) -> list[Series]:
  """Groups runs that differ only in their seeds, in the order of their first runs."""
  by_settings: dict[str, list[ShownRun]] = {}
  for run in runs:
    settings = {key: value for key, value in run.settings.items() if key not in _SAME}
    by_settings.setdefault(json.dumps(settings, sort_keys=True), []).append(run)
  groups = list(by_settings.values())
  differing = differences([members[0].settings for members in groups])
  return [Series(_label(members, differing), tuple(members)) for members in groups]


def differences(settings: Sequence[Mapping[str, Any]]) -> list[str]:
  """The config keys whose values differ between these settings, except those in _SAME."""
  keys = dict.fromkeys(key for one in settings for key in one if key not in _SAME)
  return [key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)]


def changed(run: ShownRun) -> dict[str, tuple[Any, Any]]:
  """The run's settings that differ from their defaults: (value, default) by config key."""
  defaults = flat(to_dict(Config()))
  return {
    key: (value, defaults.get(key))
    for key, value in run.settings.items()
    if value != defaults.get(key)
  }


def short_names(keys: Sequence[str]) -> dict[str, str]:
  """The last component of each config key, or the whole key if another key ends the same."""
  lasts = [key.rpartition(".")[2] for key in keys]
  return {key: key if lasts.count(last) > 1 else last for key, last in zip(keys, lasts)}


def written(value: Any) -> str:
  """A setting as people write it: 0.0003 even if the value is 0.00030000000000000003."""
  if isinstance(value, float):
    mantissa, e, exponent = f"{value:.12g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa
  if isinstance(value, list | tuple):
    return ", ".join(map(written, value)) if value else "none"
  return str(value) if value != "" else "none"


def _label(members: Sequence[ShownRun], differing: Sequence[str]) -> str:
  """The label of a series: its `differing` settings, or a run's name if these are none or long."""
  settings, names = members[0].settings, short_names(differing)
  parts = [f"{names[key]} {written(settings.get(key))}" for key in differing]
  name = ", ".join(parts) if 0 < len(", ".join(parts)) <= 80 else members[0].name
  return f"{name} ({len(members)} seeds)" if len(members) > 1 else name
