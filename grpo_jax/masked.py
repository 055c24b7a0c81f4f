"""The only place where a mask meets a reduction. Masked-out entries may hold anything, NaN included."""
import jax
import jax.numpy as jnp


def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
  """x where the mask is not 0, else exactly 0."""
  return jnp.where(mask != 0, x, 0)


def total(x: jax.Array, mask: jax.Array, axis=None) -> jax.Array:
  """Sum over the entries that count."""
  return masked(x, mask).sum(axis)


def mean(x: jax.Array, mask: jax.Array, axis=None) -> jax.Array:
  """Mean over the entries that count; 0 where none does."""
  return divide(total(x, mask, axis), (mask != 0).sum(axis))


def divide(sum_: jax.Array, weight: jax.Array) -> jax.Array:
  """sum / weight, 0 where the weight is 0: the one division of a mean carried as (sum, weight)."""
  return jnp.where(weight > 0, sum_ / jnp.where(weight > 0, weight, 1), 0)


def largest(x: jax.Array, mask: jax.Array, axis=None) -> jax.Array:
  """Maximum over the entries that count; -inf where none does."""
  return jnp.where(mask != 0, x, -jnp.inf).max(axis)


def smallest(x: jax.Array, mask: jax.Array, axis=None) -> jax.Array:
  """Minimum over the entries that count; inf where none does."""
  return jnp.where(mask != 0, x, jnp.inf).min(axis)
