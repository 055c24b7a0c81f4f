"""Curves: the metrics of a run, averaged down to what a screen can show, as dicts for JSON."""

from collections.abc import Sequence
import dataclasses
import statistics
from typing import Any

import numpy as np

from grpo_jax.around.reporting.columns import MetricColumns
from grpo_jax.around.reporting.runs import ShownRun

PARTS = ("sample", "reward", "reference", "update", "other")  # of the time of a GRPO step
MOST_POINTS = 600  # of a curve: a figure has fewer pixels
MOST_POINTS_OF_RUNS = 9_000  # of the curves of a metric, of all runs together
_HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class CurveLabel:
  """How the page labels the curve of a metric.

  Attributes:
    title: The title of the curve.
    unit: The unit of the vertical axis.
    percent: Whether the page shows values as percentages.
  """

  title: str
  unit: str
  percent: bool = False


USUAL = {
  "eval/accuracy": CurveLabel("Held-out accuracy (greedy)", "", percent=True),
  "reward": CurveLabel("Reward", ""),
  "completions/mean_length": CurveLabel("Completion length", "tokens"),
  "frac_reward_zero_std": CurveLabel("Groups of equal rewards", "of the groups", percent=True),
  "entropy": CurveLabel("Entropy", "nats per token"),
  "kl": CurveLabel("KL to the reference", "nats per token"),
  "clip_ratio/region_mean": CurveLabel("Clipped tokens", "of the tokens", percent=True),
  "completions/clipped_ratio": CurveLabel("Completions cut off", "", percent=True),
  "grad_norm": CurveLabel("Gradient norm", "before clipping"),
  "warm_start/loss": CurveLabel("Warm start: loss", "nats per token"),
}


def curves(run: ShownRun, most: int = MOST_POINTS) -> dict[str, Any]:
  """The curves of a run with at most `most` points each, as a dict for JSON.

  Returns:
    `warm`: how many steps the warm start has. `tables`: a dict for each set of metrics that are
    known in the same rows. It has the metrics by name in `values`, and for the horizontal axis the
    lists `step`, `tokens` (None before GRPO) and `hours`. `left_out`: how many values of each
    metric are not finite numbers. `seconds`: the result of `step_seconds`.
  """
  columns = run.columns
  tokens = _tokens(columns, run.config.warm_start.steps)
  by_rows: dict[bytes, list[str]] = {}
  for name, values_N in columns.values.items():
    by_rows.setdefault(np.isfinite(values_N).tobytes(), []).append(name)
  tables = []
  for names in by_rows.values():
    rows = np.flatnonzero(np.isfinite(columns.values[names[0]]))
    if not len(rows):
      continue
    axes = {"step": columns.steps, "tokens": tokens, "hours": columns.seconds_N / _HOUR}
    # An hour needs more decimals: a step may take a fraction of a second.
    table: dict[str, Any] = {
      axis: _axis(thinned(values_N[rows], most), decimals=6 if axis == "hours" else 1)
      for axis, values_N in axes.items()
    }
    table["values"] = {
      name: _five_digits(thinned(columns.values[name][rows], most)) for name in names
    }
    tables.append(table)
  return {
    "warm": run.config.warm_start.steps,
    "tables": tables,
    "left_out": columns.left_out,
    "seconds": step_seconds(columns),
  }


def points_of_each(runs: int) -> int:
  """The most points of each curve on a page of `runs` runs."""
  return min(MOST_POINTS, MOST_POINTS_OF_RUNS // max(1, runs))


def thinned(values_N: np.ndarray, most: int) -> np.ndarray:
  """Reduces values to at most `most` means of neighbours, of equally many values up to one."""
  count = len(values_N)
  if count <= most:
    return values_N
  starts = np.linspace(0, count, most, endpoint=False).astype(int)
  sizes = np.diff([*starts, count])
  # Divides before the sum, because the sum could overflow.
  return np.add.reduceat(values_N / np.repeat(sizes, sizes), starts)


def shown_metrics(runs: Sequence[ShownRun]) -> list[dict[str, Any]]:
  """The name and label of each metric of the page: metrics in USUAL first, then others by name.

  Omits NAME_low and NAME_high of a metric NAME: they are the ends of an interval, which the page
  draws as a band around NAME.
  """
  names = {name for run in runs for name in run.columns.values}
  names |= {name for run in runs for name in run.columns.left_out}
  # `removesuffix` returns a name without the suffix unchanged, hence `- {name}`.
  interval_ends = {name for name in names if name.removesuffix("_low") in names - {name}}
  interval_ends |= {name for name in names if name.removesuffix("_high") in names - {name}}
  names -= interval_ends
  usual = [name for name in USUAL if name in names]
  shown = []
  for name in [*usual, *sorted(names - set(usual))]:
    label = USUAL.get(name) or CurveLabel(name, "")
    shown.append({"name": name, "usual": name in USUAL, **dataclasses.asdict(label)})
  return shown


def step_seconds(columns: MetricColumns) -> dict[str, float]:
  """The median seconds of each of `PARTS` over the logged GRPO steps. Empty if there are none.

  The first steps compile, so the mean would be too large.
  """
  rows = np.isfinite(columns.values.get("time/sample", np.zeros(0)))
  if not rows.any():
    return {}

  def median(name: str) -> float:
    values_N = columns.values.get(name, np.zeros(len(rows)))[rows]
    # np.median would import numpy.ma, which takes a tenth of the time of a report.
    return statistics.median(np.nan_to_num(values_N).tolist())

  seconds = {part: median(f"time/{part}") for part in PARTS[:-1]}  # all but "other"
  return seconds | {"other": max(0.0, median("time/step") - sum(seconds.values()))}


def _tokens(columns: MetricColumns, warm_start_steps: int) -> np.ndarray:
  """Float64 [N], the newest num_tokens at each row. NaN in the warm start, or if no row has it."""
  if "num_tokens" not in columns.values:
    return np.full(len(columns.steps), np.nan)
  tokens_N = np.nan_to_num(np.fmax.accumulate(columns.values["num_tokens"]))
  return np.where(columns.steps >= warm_start_steps, tokens_N, np.nan)


def _axis(values_N: np.ndarray, decimals: int) -> list[float | None]:
  return [round(value, decimals) if np.isfinite(value) else None for value in values_N.tolist()]


def _five_digits(values_N: np.ndarray) -> list[float]:
  return [float(f"{value:.5g}") for value in values_N.tolist()]
