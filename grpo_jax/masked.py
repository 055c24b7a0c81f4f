"""Reductions under a mask. An entry counts where the mask is not 0.

All reductions under a mask are in this module. Entries that do not count may be anything, even NaN.
"""

from __future__ import annotations

from grpo_jax.lazy import jax, jnp

Axis = int | tuple[int, ...] | None


def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
  """x where the mask is not 0, else exactly 0."""
  return jnp.where(mask != 0, x, 0)


def total(x: jax.Array, mask: jax.Array, axis: Axis = None, keepdims: bool = False) -> jax.Array:
  """The sum of the entries that count."""
  return masked(x, mask).sum(axis, keepdims=keepdims)


def count(mask: jax.Array, axis: Axis = None, keepdims: bool = False) -> jax.Array:
  """How many entries count."""
  return (mask != 0).sum(axis, keepdims=keepdims)


def mean(x: jax.Array, mask: jax.Array, axis: Axis = None, keepdims: bool = False) -> jax.Array:
  """The mean of the entries that count, 0 if there are none."""
  return divide(total(x, mask, axis, keepdims), count(mask, axis, keepdims))


def divide(sum_: jax.Array, weight: jax.Array) -> jax.Array:
  """sum / weight, 0 where the weight is not above 0.

  Every mean that is carried as (sum, weight) is divided here.
  """
  # The inner `where` keeps the gradient of 0 / 0 from being NaN.
  return jnp.where(weight > 0, sum_ / jnp.where(weight > 0, weight, 1), 0)


def largest(x: jax.Array, mask: jax.Array, axis: Axis = None, keepdims: bool = False) -> jax.Array:
  """The maximum of the entries that count, -inf if there are none."""
  return jnp.where(mask != 0, x, -jnp.inf).max(axis, keepdims=keepdims)


def smallest(x: jax.Array, mask: jax.Array, axis: Axis = None, keepdims: bool = False) -> jax.Array:
  """The minimum of the entries that count, inf if there are none."""
  return jnp.where(mask != 0, x, jnp.inf).min(axis, keepdims=keepdims)


def differ(x: jax.Array, mask: jax.Array, axis: Axis = None) -> jax.Array:
  """bool, True where the entries that count are not all equal. Reduced axes are kept.

  It compares maximum and minimum, because rounding gives twelve times 0.7 a deviation above 0.
  """
  return largest(x, mask, axis, True) > smallest(x, mask, axis, True)


def centered(
  x: jax.Array, mask: jax.Array, axis: Axis = None, weights: jax.Array | float = 1.0
) -> jax.Array:
  """x minus its weighted mean over `axis`.

  The result is exactly 0 where the entries that count are all equal, and where the mask is 0.
  """
  weights = masked(jnp.broadcast_to(weights, x.shape), mask)
  weighted_sum = (weights * masked(x, mask)).sum(axis, keepdims=True)
  center = divide(weighted_sum, weights.sum(axis, keepdims=True))
  return jnp.where(differ(x, mask, axis), masked(x - center, mask), 0)


def std(
  x: jax.Array, mask: jax.Array, ddof: int, axis: Axis = None, weights: jax.Array | float = 1.0
) -> jax.Array:
  """Weighted standard deviation over `axis`, 1 where the entries that count are all equal.

  The 1 makes a division by the result safe. Reduced axes are kept. `ddof` is subtracted from the
  sum of the weights.
  """
  deviations = centered(x, mask, axis, weights)
  weights = masked(jnp.broadcast_to(weights, x.shape), mask)
  squares = (weights * deviations**2).sum(axis, keepdims=True)
  variance = divide(squares, weights.sum(axis, keepdims=True) - ddof)
  return jnp.sqrt(jnp.where(differ(x, mask, axis), variance, 1))
