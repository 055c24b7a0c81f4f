"""Lets a user's program add metrics to each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import numbers
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from grpo_jax.registry import register
from grpo_jax.settings import RunFailed, shown

if TYPE_CHECKING:
  from grpo_jax.rollouts.rollout import Rollouts

# (rollouts, rewards_PG) -> a number, or numbers by name
OwnMetric: TypeAlias = "Callable[[Rollouts, np.ndarray], float | Mapping[str, float]]"
OWN_METRICS: dict[str, OwnMetric] = {}


def register_metric(compute: OwnMetric) -> OwnMetric:
  """Adds a metric to each GRPO step of this process's runs, as own/NAME with the function's name.

  It can be used as a decorator.

  Args:
    compute: (rollouts, rewards_PG) -> a number, or a dict of numbers by name. `rollouts.texts_PG`
      has the completions as texts, and `rollouts.completions` has tokens, lengths and log-probs.
      The rewards are NaN where no function scored. All are numpy arrays for the step's P groups of
      G completions. The function must not change them.

  Returns:
    The function.

  Raises:
    ConfigError: The function has no name.
  """
  register("metric", OWN_METRICS, compute, compute)
  return compute


def own_metrics(rollouts: Rollouts, rewards_PG: np.ndarray) -> dict[str, float]:
  """Computes the registered metrics of a step, by name with the prefix own/.

  Args:
    rollouts: The completions of the step.
    rewards_PG: The rewards of the completions, NaN where no function scored.

  Raises:
    RunFailed: A metric raised an exception, or returned something other than numbers.
  """
  found = dict[str, float]()
  for name, compute in OWN_METRICS.items():
    try:
      value = compute(rollouts, rewards_PG)
    except Exception as error:
      raise RunFailed(f"metric {name} raised {type(error).__name__}: {error}") from error
    values: dict[str, Any] = {name: value}
    if isinstance(value, Mapping):
      values = {f"{name}/{key}": x for key, x in value.items()}
    for key, x in values.items():
      found[f"own/{key}"] = _number(key, x)
  return found


def _number(name: str, value: Any) -> float:
  value = value.item() if isinstance(value, np.generic) else value
  if not isinstance(value, numbers.Real):
    raise RunFailed(f"metric {name} returned {shown(value)}: it must be a number")
  return float(value)
