"""Holds the rows of metrics.jsonl as one array per metric, in a tenth of the memory of dicts."""

from collections.abc import Iterable, Mapping
import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class MetricColumns:
  """The metrics of a run, as one array per metric.

  Attributes:
    steps: int64 [N], the step of each row, increasing.
    values: float64 [N] by metric, NaN in rows without a finite number of this metric.
    left_out: By metric, how many rows have a value that is not a finite number.
  """

  steps: np.ndarray
  values: dict[str, np.ndarray]
  left_out: dict[str, int]

  def newest(self, metric: str, values: int = 1) -> float | None:
    """The mean of the last `values` finite values of a metric, or None if it has none."""
    values_N = self.values.get(metric, np.empty(0))
    finite = values_N[np.isfinite(values_N)]
    return float(finite[-values:].mean()) if len(finite) else None

  @property
  def seconds_N(self) -> np.ndarray:
    """Float64 [N], the seconds of all steps and evaluations up to each row.

    With log.every, not every step has a row. The time/step of a row then counts for all steps since
    the previous row.
    """
    zeros_N = np.zeros(len(self.steps))
    step_N, evaluate_N = (
      np.nan_to_num(self.values.get(name, zeros_N)) for name in ("time/step", "time/evaluate")
    )
    return np.cumsum(step_N * np.diff(self.steps, prepend=0) + evaluate_N)


def columns_of(rows: Iterable[Mapping[str, Any]]) -> MetricColumns:
  """Converts rows of metrics, which each have a `step`, into arrays."""
  rows = list(rows)
  values: dict[str, np.ndarray] = {}
  left_out: dict[str, int] = {}
  for index, row in enumerate(rows):
    for name, value in row.items():
      if name == "step":
        continue
      is_finite_float = type(value) is float and math.isfinite(value)  # saves millions of calls
      number = value if is_finite_float else finite(value)
      if number is None:
        left_out[name] = left_out.get(name, 0) + 1
        continue
      if name not in values:
        values[name] = np.full(len(rows), np.nan)
      values[name][index] = number
  return MetricColumns(np.array([row["step"] for row in rows], np.int64), values, left_out)


def finite(value: Any) -> float | None:
  """The value as a float, or None unless it is a finite number. A bool is not a number here."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return None
  try:
    number = float(value)
  except OverflowError:  # an int of more than 308 digits
    return None
  return number if math.isfinite(number) else None
