"""Curves: one line for each series, with a band, thinned to what a screen can show."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from grpo_jax.reporting.runs import Series, ShownRun

PARTS = ("sample", "reward", "reference", "update", "other")  # of the time of a GRPO step
MOST_POINTS = 600  # of a curve: a figure has fewer pixels


@dataclasses.dataclass(frozen=True)
class Curve:
  """A line over steps.

  Attributes:
    steps: float64 [N], of several steps that are drawn as one point: their mean.
    values: float64 [N].
    low, high: float64 [N], the band around it, or None without one.
  """

  steps: np.ndarray
  values: np.ndarray
  low: np.ndarray | None = None
  high: np.ndarray | None = None


def curve(series: Series, metric: str) -> Curve | None:
  """The curve of a metric.

  One run: its values. The band is the metric's own interval (NAME_low and NAME_high) where it has
  one. Several runs: the mean over the runs at each step that all of them have, with the lowest and
  the highest run as the band.

  Returns:
    The curve, or None if no step has the metric.
  """
  points = [_points(run, metric) for run in series.runs]
  common = set.intersection(*(set(of_run) for of_run in points))
  if not common:
    return None
  steps = np.array(sorted(common), float)
  values_RN = np.array([[of_run[step] for step in steps] for of_run in points], float)
  if len(series.runs) > 1:
    return thinned(Curve(steps, values_RN.mean(0), values_RN.min(0), values_RN.max(0)))
  low, high = (_points(series.runs[0], f"{metric}_{end}") for end in ("low", "high"))
  if low.keys() >= common and high.keys() >= common:
    low_N, high_N = (np.array([end[step] for step in steps], float) for end in (low, high))
    return thinned(Curve(steps, values_RN[0], low_N, high_N))
  return thinned(Curve(steps, values_RN[0]))


def thinned(full: Curve, most: int = MOST_POINTS) -> Curve:
  """The curve with at most `most` points. Each is the mean of neighbours; the band holds theirs."""
  count = len(full.steps)
  if count <= most:
    return full
  starts = np.linspace(0, count, most, endpoint=False).astype(int)
  sizes = np.diff([*starts, count])
  band = full.low is not None and full.high is not None
  return Curve(
    steps=np.add.reduceat(full.steps, starts) / sizes,
    values=np.add.reduceat(full.values, starts) / sizes,
    low=np.minimum.reduceat(full.low, starts) if band else None,
    high=np.maximum.reduceat(full.high, starts) if band else None,
  )


def metrics_of(series: Sequence[Series]) -> set[str]:
  """The metrics that any run has."""
  return {name for one in series for run in one.runs for row in run.rows for name in row}


def step_seconds(series: Series) -> dict[str, float]:
  """The seconds of each of `PARTS`: the median over the GRPO steps of all runs.

  The median, because the first steps compile.
  """
  rows = [row for run in series.runs for row in run.rows if row.get("time/sample") is not None]
  seconds = {}
  for part in PARTS[:-1]:
    values = [row.get(f"time/{part}") or 0.0 for row in rows]
    seconds[part] = float(np.median(values)) if values else 0.0
  whole = [row.get("time/step") or 0.0 for row in rows]
  total = float(np.median(whole)) if whole else 0.0
  return seconds | {"other": max(0.0, total - sum(seconds.values()))}


def _points(run: ShownRun, metric: str) -> dict[float, Any]:
  """The values of a metric by step. Values that are not finite are left out."""
  return {row["step"]: row[metric] for row in run.rows if row.get(metric) is not None}
