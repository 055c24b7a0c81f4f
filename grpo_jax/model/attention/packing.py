"""Moves the tokens of a group's completions between rows of equal length and one packed stream.

A row [T] of a short completion is mostly padding. In a stream [N], the completions of a group
follow each other without padding, so that the layers compute N tokens instead of G * T.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Packing(NamedTuple):
  """The slots of a group's completion tokens in its stream. C = G * T.

  Attributes:
    slot_PC: int32, the slot of token g * T + t. Any slot for a token that is not in the stream.
    token_PN: int32, the token g * T + t in each slot, or -1.
  """

  slot_PC: jax.Array
  token_PN: jax.Array


def make_packing(counts_PG: jax.Array, slots_per_row: int, slots: int) -> Packing:
  """Packs the first `counts_PG` tokens of each row.

  Args:
    counts_PG: int32, how many tokens of each row to put into the stream.
    slots_per_row: T.
    slots: N, at least the sum of the counts of each group.
  """
  P, G = counts_PG.shape
  T, N = slots_per_row, slots
  ends_PG = jnp.cumsum(counts_PG, 1)
  starts_PG = ends_PG - counts_PG
  slot_N = jnp.arange(N)
  # The number of rows that end before a slot is that of its row, or G for a slot after all rows.
  row_PN = (slot_N >= ends_PG[:, :, None]).sum(1)
  start_PN = jnp.take_along_axis(starts_PG, jnp.minimum(row_PN, G - 1), 1)
  token_PN = jnp.where(row_PN < G, row_PN * T + slot_N - start_PN, -1)
  # A token that is not in the stream gets a slot that does not hold it: `_used` detects it by that.
  slot_PC = jnp.minimum(starts_PG[:, :, None] + jnp.arange(T), N - 1).reshape(P, G * T)
  return Packing(slot_PC, token_PN)


def pack(x_PC: jax.Array, packing: Packing) -> jax.Array:
  """[P, G * T, ...] -> [P, N, ...]. Slots without a token hold another token's value."""
  return move(x_PC, jnp.maximum(packing.token_PN, 0), _used(packing))


def unpack(x_PN: jax.Array, packing: Packing) -> jax.Array:
  """[P, N, ...] -> [P, G * T, ...]. Tokens that are not in the stream get another slot's value."""
  return move(x_PN, packing.slot_PC, packing.token_PN)


def _used(packing: Packing) -> jax.Array:
  """[P, G * T]: the slot of each token, or -1 where it is not in the stream."""
  slot_PC, token_PN = packing
  back_PC = jnp.take_along_axis(token_PN, slot_PC, 1)
  return jnp.where(back_PC == jnp.arange(slot_PC.shape[1]), slot_PC, -1)


@jax.custom_vjp
def move(x_PA: jax.Array, source_PB: jax.Array, target_PA: jax.Array) -> jax.Array:
  """Gathers x[p, source[p, b]], with the gradient dy[p, target[p, a]], or 0 where target is -1.

  JAX would compute the gradient by a slow scatter. This gradient is right only if, for each a, the
  output of at most one b is used: that of b = target[p, a].

  Args:
    x_PA: [P, A, ...].
    source_PB: int32, indices into A.
    target_PA: int32, indices into B, or -1.
  """
  return _take(x_PA, source_PB)


def _move_forward(
  x_PA: jax.Array, source_PB: jax.Array, target_PA: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return _take(x_PA, source_PB), target_PA


def _move_backward(target_PA: jax.Array, dy_PB: jax.Array) -> tuple[jax.Array, None, None]:
  dx_PA = _take(dy_PB, jnp.maximum(target_PA, 0))
  is_used = target_PA.reshape(*target_PA.shape, *[1] * (dx_PA.ndim - 2)) >= 0
  return jnp.where(is_used, dx_PA, 0), None, None


move.defvjp(_move_forward, _move_backward)


def _take(x_PA: jax.Array, index_PB: jax.Array) -> jax.Array:
  """x[p, index[p, b]] for x [P, A, ...]."""
  index = index_PB.reshape(*index_PB.shape, *[1] * (x_PA.ndim - 2))
  return jnp.take_along_axis(x_PA, index, axis=1)
