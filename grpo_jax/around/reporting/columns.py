"""The rows of a metrics.jsonl as columns, which take a tenth of the memory."""

from collections.abc import Iterable, Mapping
import dataclasses
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class MetricColumns:
  """Metrics by step.

  Attributes:
    steps: int64 [N], increasing.
    values: float64 [N] by the name of the metric, NaN in the rows that lack it.
    left_out: How many values of a metric are there and are not finite numbers. They are NaN in
      `values`, too.
  """

  steps: np.ndarray
  values: dict[str, np.ndarray]
  left_out: dict[str, int]

  def newest(self, metric: str, values: int = 1) -> float | None:
    """The mean of the last values of a metric, or None without one."""
    values_N = self.values.get(metric, np.empty(0))
    finite = values_N[np.isfinite(values_N)]
    return float(finite[-values:].mean()) if len(finite) else None

  @property
  def seconds_N(self) -> np.ndarray:
    """The time of the steps and evaluations up to each row.

    A row's time/step stands for the steps since the row before, which log.every leaves out.
    """
    zeros_N = np.zeros(len(self.steps))
    step_N, evaluate_N = (
      np.nan_to_num(self.values.get(name, zeros_N)) for name in ("time/step", "time/evaluate")
    )
    return np.cumsum(step_N * np.diff(self.steps, prepend=0) + evaluate_N)


def columns_of(rows: Iterable[Mapping[str, Any]]) -> MetricColumns:
  """The columns of rows that each have a `step`."""
  rows = list(rows)
  values: dict[str, np.ndarray] = {}
  left_out: dict[str, int] = {}
  for index, row in enumerate(rows):
    for name, value in row.items():
      if name == "step":
        continue
      is_usual = type(value) is float and math.isfinite(value)  # spares millions of calls
      number = value if is_usual else finite(value)
      if number is None:
        left_out[name] = left_out.get(name, 0) + 1
        continue
      if name not in values:
        values[name] = np.full(len(rows), np.nan)
      values[name][index] = number
  return MetricColumns(np.array([row["step"] for row in rows], np.int64), values, left_out)


def finite(value: Any) -> float | None:
  """A value as a finite number, or None for anything else."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return None
  try:
    number = float(value)
  except OverflowError:  # an int of more than 308 digits
    return None
  return number if math.isfinite(number) else None
