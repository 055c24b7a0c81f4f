"""Attention of groups whose tokens are split over the devices along the mesh's axis `context`."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax.model.attention.packing import Packing
from grpo_jax.model.attention.view import View

# attend(q_PNHE, k_PNKE, v_PNKE, prompt_lengths_P, packing, view) -> out_PNHE: attention of groups
# whose completions lie in the stream of the packing, or in rows where that is None.
AttendStream = Callable[
  [jax.Array, jax.Array, jax.Array, jax.Array, Packing | None, View], jax.Array
]
_AXIS = "context"


def by_heads(attend: AttendStream) -> AttendStream:
  """Runs `attend` on all tokens of a few heads on each device (Jacobs et al. 2309.14509).

  The devices exchange the tokens of all heads for all tokens of their own heads, and exchange the
  outputs back. So each computes equally much, whatever the lengths, masks and windows are. Where
  the devices do not divide the key heads, these are repeated as often as is needed.
  """

  def attend_split(
    q_PNHE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    prompt_lengths_P: jax.Array,
    packing: Packing | None,
    view: View,
  ) -> jax.Array:
    mesh, row_axes = view.rows.mesh, view.rows.spec[0]
    head_axis = "tensor" if q_PNHE.shape[2] % mesh.shape["tensor"] == 0 else None
    if head_axis:
      k_PNKE, v_PNKE = (_divided(x, mesh.shape[head_axis]) for x in (k_PNKE, v_PNKE))

    def attend_here(
      q: jax.Array,
      k: jax.Array,
      v: jax.Array,
      lengths_P: jax.Array,
      packing: Packing | None,
      sinks_H: jax.Array | None,
    ) -> jax.Array:
      k, v = (_divided(x, mesh.shape[_AXIS]) for x in (k, v))
      q, k, v = (jax.lax.all_to_all(x, _AXIS, 2, 1, tiled=True) for x in (q, k, v))
      of_device = dataclasses.replace(view, rows=None, sinks_H=sinks_H)
      out = attend(q, k, v, lengths_P, packing, of_device)
      return jax.lax.all_to_all(out, _AXIS, 1, 2, tiled=True)

    tokens: Any = PartitionSpec(row_axes, _AXIS, head_axis, None)
    rows, heads = PartitionSpec(row_axes), (head_axis, _AXIS) if head_axis else _AXIS
    return jax.shard_map(
      attend_here,
      mesh=mesh,
      in_specs=(tokens, tokens, tokens, rows, rows, PartitionSpec(heads)),
      out_specs=tokens,
      check_vma=False,  # the outputs of kernels do not say over which axes they vary
    )(q_PNHE, k_PNKE, v_PNKE, prompt_lengths_P, packing, view.sinks_H)

  return attend_split


def _divided(x_PNKE: jax.Array, devices: int) -> jax.Array:
  """The keys or values with each head repeated so often that the devices divide them."""
  heads = x_PNKE.shape[2]
  copies = math.lcm(heads, devices) // heads
  return x_PNKE if copies == 1 else jnp.repeat(x_PNKE, copies, axis=2)
