"""Formats the table of a sweep: a row for each setting, best accuracy first, with its seeds."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import statistics

from grpo_jax.around.launchers.progress import RunProgress, progress
from grpo_jax.around.launchers.sweep import SEED, name_of
from grpo_jax.around.launchers.units import Unit

_NONE = "-"
_COVERED = 0.95
_LEGEND = (
  "accuracy: the mean over seeds of each run's newest held-out accuracy; interval: its 95%"
  " t-interval over seeds, within 0% to 100%"
)


@dataclasses.dataclass(frozen=True)
class _SettingRow:
  """A row of the table: the runs of one setting, which differ only in their seeds."""

  setting: str
  accuracies: list[float]
  runs: list[tuple[str, str]]  # (seed, progress in words)

  def cells(self) -> list[str]:
    """The texts of the row: setting, mean accuracy, interval, number of accuracies, progress."""
    mean = f"{statistics.fmean(self.accuracies):.1%}" if self.accuracies else _NONE
    ends = t_interval(self.accuracies)
    interval = f"{max(ends[0], 0):.1%} to {min(ends[1], 1):.1%}" if ends else _NONE
    return [self.setting, mean, interval, str(len(self.accuracies)), _how_far(self.runs)]


def table(units: Sequence[Unit], queued: Mapping[str, str]) -> list[str]:
  """Formats the runs as a table with a row for each setting, best mean accuracy first.

  Args:
    units: The runs.
    queued: Descriptions of queued runs by unit title, as `Launcher.queued` returns them.
  """
  by_setting: dict[str, list[tuple[Unit, RunProgress]]] = {}
  for unit in units:
    setting = {key: value for key, value in unit.overrides.items() if key != SEED}
    # A single run is named by its folder, and runs that only differ in seeds have no setting.
    name = name_of(setting) if setting else unit.workdir if not unit.name else "as configured"
    by_setting.setdefault(name, []).append((unit, progress(unit.workdir)))
  rows = [_row(name, runs, queued) for name, runs in by_setting.items()]
  rows.sort(key=lambda row: -statistics.fmean(row.accuracies) if row.accuracies else math.inf)
  header = ["setting", "accuracy", "interval", "seeds", "progress"]
  return [*_columns([header, *(row.cells() for row in rows)]), _LEGEND]


def t_interval(values: Sequence[float]) -> tuple[float, float] | None:
  """Student's 95% confidence interval of the mean: mean ± t(0.975, n - 1) * s / sqrt(n).

  Args:
    values: n independent values. s is their sample standard deviation, with divisor n - 1.

  Returns:
    The low and high end of the interval, or None for fewer than two values.
  """
  if len(values) < 2:
    return None
  from scipy.special import stdtrit  # takes a moment to import

  t = float(stdtrit(len(values) - 1, (1 + _COVERED) / 2))
  mean = statistics.fmean(values)
  half = t * statistics.stdev(values) / math.sqrt(len(values))
  return mean - half, mean + half


def _row(name: str, runs: list[tuple[Unit, RunProgress]], queued: Mapping[str, str]) -> _SettingRow:
  """The row of a setting `name`. The arguments are as in `table`."""
  accuracies = [found.accuracy for _, found in runs if found.accuracy is not None]
  seeds_and_words = []
  for unit, found in runs:
    words = str(found)
    if unit.title in queued and not found.holder:
      words = f"{queued[unit.title]}, {words}" if found.step else queued[unit.title]
    seeds_and_words.append((str(unit.overrides.get(SEED, "")), words))
  return _SettingRow(name, accuracies, seeds_and_words)


def _how_far(runs: list[tuple[str, str]]) -> str:
  """Describes the progress of runs, such as "seed 0, 1 finished; seed 2 at 40 of 250"."""
  by_words: dict[str, list[str]] = {}
  for seed, words in runs:
    by_words.setdefault(words, []).append(seed)
  if len(by_words) == 1:
    return next(iter(by_words))
  parts = []
  for words, seeds in by_words.items():
    parts.append(f"seed {', '.join(seeds)} {words}")
  return "; ".join(parts)


def _columns(rows: list[list[str]]) -> list[str]:
  widths = [max(map(len, column)) for column in zip(*rows)]
  return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
