"""Metrics that know how they are reduced: over micro-batches, over updates, and to a number.

The code that computes a value makes the metric, as in `metrics["kl"] = mean(kl_PGT, mask_PGT)`.
Code that passes the metric on need not know how it is reduced.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import masked
from grpo_jax.settings import RunFailed


class Metric(struct.PyTreeNode):
  """A value that is not reduced yet.

  Attributes:
    value: float32 scalar: for "mean" and "sum" the sum so far, for "max" and "min" the extreme so
      far. For "effective", float32 [2]: the sum of the weights and the sum of their squares.
    weight: float32 scalar: the divisor of a mean, or the number of weights for "effective". For
      "max" and "min", 0 means that there is no value yet.
    reduction: "mean", "sum", "max", "min" or "effective", the effective sample size.
    first_update_only: True for a metric of the policy that sampled. Later updates of the same batch
      begin with another policy, so their values are dropped.
  """

  value: jax.Array
  weight: jax.Array
  reduction: str = struct.field(pytree_node=False)
  first_update_only: bool = struct.field(pytree_node=False, default=False)


Metrics = dict[str, Metric]


def mean(x: jax.Array, mask: jax.Array) -> Metric:
  """The mean of the entries of x where the mask is not 0."""
  x = jax.lax.stop_gradient(x.astype(jnp.float32))
  return Metric(masked.total(x, mask), masked.count(mask).astype(jnp.float32), "mean")


def weighted(value: jax.Array, weight: jax.Array) -> Metric:
  """A scalar that counts `weight` times in the mean, and not at all where the weight is 0."""
  weight = jnp.asarray(weight, jnp.float32)
  return Metric(jnp.where(weight > 0, value * weight, 0), weight, "mean")


def largest(x: jax.Array, mask: jax.Array) -> Metric:
  """The largest entry of x where the mask is not 0."""
  return Metric(masked.largest(jax.lax.stop_gradient(x), mask), jnp.float32(1), "max")


def smallest(x: jax.Array, mask: jax.Array) -> Metric:
  """The smallest entry of x where the mask is not 0."""
  return Metric(masked.smallest(jax.lax.stop_gradient(x), mask), jnp.float32(1), "min")


def summed(value: jax.Array) -> Metric:
  """A scalar that is summed over micro-batches and updates."""
  return Metric(jnp.asarray(value, jnp.float32), jnp.float32(1), "sum")


def effective(weights: jax.Array, mask: jax.Array) -> Metric:
  """The effective sample size of importance weights, divided by their number.

  It is (sum w)^2 / (n sum w^2) over the n entries where the mask is not 0 (Kong 1992): 1 if all
  weights are equal, and 1 / n if one has all the weight. The sums add up over micro-batches.
  """
  # Keeps the squares finite. One weight of 1e15 suffices for an effective size of 1 / n.
  weights = jnp.minimum(jax.lax.stop_gradient(weights.astype(jnp.float32)), 1e15)
  sums = jnp.stack([masked.total(weights, mask), masked.total(weights**2, mask)])
  return Metric(sums, masked.count(mask).astype(jnp.float32), "effective")


_MERGE = {
  "mean": jnp.add,
  "sum": jnp.add,
  "max": jnp.maximum,
  "min": jnp.minimum,
  "effective": jnp.add,
}
_MERGE_ALL = {jnp.add: jnp.sum, jnp.maximum: jnp.max, jnp.minimum: jnp.min}
_NEUTRAL = {"mean": 0.0, "sum": 0.0, "max": -jnp.inf, "min": jnp.inf, "effective": 0.0}


def neutral(like: Metrics) -> Metrics:
  """Metrics with the names of `like` that leave other metrics unchanged when merged with them."""
  return {
    name: metric.replace(
      value=jnp.full(metric.value.shape, _NEUTRAL[metric.reduction], jnp.float32),
      weight=jnp.float32(0),
    )
    for name, metric in like.items()
  }


def merge(first: Metrics, second: Metrics) -> Metrics:
  """Combines the metrics of two micro-batches of one update."""
  return {name: _merge_two(first[name], second[name]) for name in first}


def merge_all(metrics: Metrics) -> Metrics:
  """Combines metrics with a first axis, of devices that computed different prompts."""

  def merged(metric: Metric) -> Metric:
    value = _MERGE_ALL[_MERGE[metric.reduction]](metric.value, axis=0)
    return metric.replace(value=value, weight=metric.weight.sum(0))

  return {name: merged(metric) for name, metric in metrics.items()}


def merge_updates(first: Metrics, second: Metrics) -> Metrics:
  """Combines the metrics of an update with the metrics of a later update of the same batch."""
  return {
    name: first[name] if first[name].first_update_only else _merge_two(first[name], second[name])
    for name in first
  }


def mean_value(metric: Metric) -> jax.Array:
  """The value of a mean inside a compiled function, 0 where it has no weight."""
  return masked.divide(metric.value, metric.weight)


def reduced(metrics: Mapping[str, Metric]) -> dict[str, float]:
  """Reduces metrics to numbers on the host. A metric without any value is NaN, a sum is 0."""
  return {name: _number(metric) for name, metric in jax.device_get(dict(metrics)).items()}


def _merge_two(first: Metric, second: Metric) -> Metric:
  value = _MERGE[first.reduction](first.value, second.value)
  return dataclasses.replace(first, value=value, weight=first.weight + second.weight)


def _number(metric: Metric) -> float:
  if metric.reduction == "sum":
    return float(metric.value)
  if metric.weight == 0:
    return float(np.nan)
  if metric.reduction == "effective":
    of_weights, of_squares = map(float, metric.value)
    return of_weights**2 / of_squares / float(metric.weight) if of_squares else 0.0
  return float(metric.value / metric.weight if metric.reduction == "mean" else metric.value)


def disjoint(first: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
  """Merges metrics by name. The names must all differ.

  Raises:
    RunFailed: A name occurs twice, because a reward function logs a metric under a name of the run.
  """
  metrics = dict(first)
  for other in others:
    for name in metrics.keys() & other.keys():
      raise RunFailed(
        f"a reward function calls log_metric({name!r}, ...), and the run has a metric of this name:"
        " choose another"
      )
    metrics |= other
  return metrics
