"""The only place where a mask meets a reduction. Masked-out entries may hold anything, NaN included."""

import jax
import jax.numpy as jnp


def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
  """x where the mask is not 0, else exactly 0."""
  return jnp.where(mask != 0, x, 0)


def total(x: jax.Array, mask: jax.Array, axis=None, keepdims=False) -> jax.Array:
  """Sum over the entries that count."""
  return masked(x, mask).sum(axis, keepdims=keepdims)


def count(mask: jax.Array, axis=None, keepdims=False) -> jax.Array:
  """How many entries count."""
  return (mask != 0).sum(axis, keepdims=keepdims)


def mean(x: jax.Array, mask: jax.Array, axis=None, keepdims=False) -> jax.Array:
  """Mean over the entries that count; 0 where none does."""
  return divide(total(x, mask, axis, keepdims), count(mask, axis, keepdims))


def divide(sum_: jax.Array, weight: jax.Array) -> jax.Array:
  """sum / weight, 0 where the weight is 0: the one division of a mean carried as (sum, weight)."""
  return jnp.where(weight > 0, sum_ / jnp.where(weight > 0, weight, 1), 0)


def largest(x: jax.Array, mask: jax.Array, axis=None, keepdims=False) -> jax.Array:
  """Maximum over the entries that count; -inf where none does."""
  return jnp.where(mask != 0, x, -jnp.inf).max(axis, keepdims=keepdims)


def smallest(x: jax.Array, mask: jax.Array, axis=None, keepdims=False) -> jax.Array:
  """Minimum over the entries that count; inf where none does."""
  return jnp.where(mask != 0, x, jnp.inf).min(axis, keepdims=keepdims)


def differ(x: jax.Array, mask: jax.Array, axis=None) -> jax.Array:
  """Whether the entries that count are not all equal, axes kept. By max > min: the float std of 0.7 x 12 is not 0."""
  return largest(x, mask, axis, True) > smallest(x, mask, axis, True)


def centered(
  x: jax.Array, mask: jax.Array, axis=None, weights: jax.Array | float = 1.0
) -> jax.Array:
  """x minus its weighted mean over `axis`; exactly 0 where all are equal, and where the mask is 0."""
  weights = masked(jnp.broadcast_to(weights, x.shape), mask)
  mean_ = divide(
    (weights * masked(x, mask)).sum(axis, keepdims=True), weights.sum(axis, keepdims=True)
  )
  return jnp.where(differ(x, mask, axis), masked(x - mean_, mask), 0)


def std(
  x: jax.Array, mask: jax.Array, ddof: int, axis=None, weights: jax.Array | float = 1.0
) -> jax.Array:
  """Weighted standard deviation over `axis`, axes kept; `ddof` is taken from the sum of weights. 1 where all are equal."""
  deviations = centered(x, mask, axis, weights)
  weights = masked(jnp.broadcast_to(weights, x.shape), mask)
  variance = divide(
    (weights * deviations**2).sum(axis, keepdims=True), weights.sum(axis, keepdims=True) - ddof
  )
  return jnp.sqrt(jnp.where(differ(x, mask, axis), variance, 1))
