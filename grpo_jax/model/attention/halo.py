"""Attention with a window, whose devices send each other only the tokens that the window reaches.

A device has N slots of a group, one after another. With a window of W, its queries see at most
W - 1 slots before their own. These are its halo, which the devices before it send. In addition, the
first tokens of each completion see the last W - 1 tokens of the prompt, which may lie far before
them. All devices get these.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.model.attention.ring import MAX_CHUNK, NO_TOKEN, Slots, chunk_size
from grpo_jax.model.attention.softmax import Own, Scoring, softmax_attention
from grpo_jax.model.attention.view import View


class _Seen(NamedTuple):
  """The slots that a device's queries see: the halo, then its own slots, then padding to chunks.

  The keys and values are in float32, because each chunk of queries adds to their gradients.

  Attributes:
    keys: [P, before + N + padding, K, E].
    values: As `keys`.
    row_PC: int32, the row of each of these slots, as in `Slots`.
    place_PC: int32, the place of its token, as in `Slots`.
    end_keys: [P, K, W, E], the keys of the last W tokens of the prompts.
    end_values: As `end_keys`.
    end_PW: int32, the places of these tokens. A short prompt has no token at negative places.
  """

  keys: jax.Array
  values: jax.Array
  row_PC: jax.Array
  place_PC: jax.Array
  end_keys: jax.Array
  end_values: jax.Array
  end_PW: jax.Array


def attend_halo(
  q_PNHE: jax.Array,
  k_PNKE: jax.Array,
  v_PNKE: jax.Array,
  lengths_P: jax.Array,
  slots: Slots,
  view: View,
  axis: str,
) -> jax.Array:
  """The outputs [P, N, H, E] of a device's queries, within a `shard_map` over `axis`.

  Args:
    q_PNHE: The device's queries.
    k_PNKE: The device's keys.
    v_PNKE: The device's values.
    lengths_P: int32, how many tokens each prompt has.
    slots: The slots of all devices.
    view: The window and the cap, and the sinks of the device's heads. The window is not 0.
    axis: The axis of the mesh along which the devices have different tokens.
  """
  P, N, H, E = q_PNHE.shape
  devices = jax.lax.axis_size(axis)
  # How many slots the window reaches before a device's own, and at the end of the prompt. At least
  # one each, because arrays without a slot have no largest score.
  before = max(1, min(view.window - 1, N * (devices - 1)))
  ending = max(1, min(view.window - 1, view.prompt_slots))
  # A chunk of queries sees its own slots, those before them, and the end of the prompt.
  chunk = chunk_size(N, P * H * (before + ending + MAX_CHUNK))
  padding = -N % chunk

  first = jax.lax.axis_index(axis) * N
  end_PW = lengths_P[:, None] - ending + jnp.arange(ending)

  def with_halo(x_PNKE: jax.Array) -> jax.Array:
    joined = jnp.concatenate([_halo(x_PNKE, before, axis), x_PNKE], 1)
    return jnp.pad(joined, ((0, 0), (0, padding), (0, 0), (0, 0))).astype(jnp.float32)

  def of_these_slots(x: jax.Array) -> jax.Array:
    padded = jnp.pad(x, ((0, 0), (before, padding)), constant_values=NO_TOKEN)
    return jax.lax.dynamic_slice_in_dim(padded, first, before + N + padding, 1)

  def of_ends(x_PNKE: jax.Array) -> jax.Array:
    return _of_all(x_PNKE, end_PW - first, axis).swapaxes(1, 2).astype(jnp.float32)

  seen = _Seen(
    keys=with_halo(k_PNKE),
    values=with_halo(v_PNKE),
    row_PC=of_these_slots(slots.row_PN),
    place_PC=of_these_slots(slots.place_PN),
    end_keys=of_ends(k_PNKE),
    end_values=of_ends(v_PNKE),
    end_PW=end_PW,
  )

  @jax.checkpoint
  def attend_chunk(of_chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
    q_PQHE, start = of_chunk
    return _attend_chunk(q_PQHE, start, seen, view, before)

  q = jnp.pad(q_PNHE, ((0, 0), (0, padding), (0, 0), (0, 0)))
  q = jnp.moveaxis(q.reshape(P, -1, chunk, H, E), 1, 0)
  # The barrier makes the starts depend on the queries. Otherwise JAX would compute the masks of all
  # chunks in the forward pass, and keep them for the backward pass.
  q, starts = jax.lax.optimization_barrier((q, jnp.arange(len(q)) * chunk))
  out = jax.lax.map(attend_chunk, (q, starts))
  return jnp.moveaxis(out, 0, 1).reshape(P, -1, H, E)[:, :N]


def _attend_chunk(
  q_PQHE: jax.Array, start: jax.Array, seen: _Seen, view: View, before: int
) -> jax.Array:
  """The outputs [P, Q, H, E] of the queries of a device's slots `start` to `start` + Q - 1.

  `seen` has `before` slots in front of the device's own.
  """
  P, chunk, H, E = q_PQHE.shape
  K = seen.keys.shape[2]

  def in_reach(x: jax.Array) -> jax.Array:
    """The slots that the window of a query of this chunk reaches, and those of the chunk."""
    return jax.lax.dynamic_slice_in_dim(x, start, before + chunk, 1)

  row_PC1, place_PC1 = in_reach(seen.row_PC)[:, None], in_reach(seen.place_PC)[:, None]
  row_PQ1, place_PQ1 = (x[:, 0, before:, None] for x in (row_PC1, place_PC1))
  back_PQC = place_PQ1 - place_PC1
  # A slot without a token sees itself, so that its sum is not 0. A completion's token sees its
  # prompt in `prefix` alone.
  mask_PQC = (row_PC1 == row_PQ1) & (back_PQC >= 0) & (back_PQC < view.window)
  of_prompt_PQW = (place_PQ1 - seen.end_PW[:, None] < view.window) & (seen.end_PW[:, None] >= 0)
  of_prompt_PQW &= row_PQ1 >= 0
  own = Own(
    *(in_reach(x).astype(q_PQHE.dtype).swapaxes(1, 2)[:, :, None] for x in (seen.keys, seen.values))
  )
  q = q_PQHE.reshape(P, chunk, K, 1, H // K, E).transpose(0, 2, 3, 4, 1, 5)
  scoring = Scoring(view.cap, view.sinks_H)

  def with_prompt() -> jax.Array:
    prefix = seen.end_keys.astype(q.dtype), seen.end_values.astype(q.dtype)
    mask = of_prompt_PQW[:, None, None, None]
    return softmax_attention(q, own, mask_PQC[:, None, None, None], prefix, mask, scoring)

  def without_prompt() -> jax.Array:
    return softmax_attention(q, own, mask_PQC[:, None, None, None], None, None, scoring)

  # In a long completion, most chunks are out of reach of the prompt.
  out = jax.lax.cond(of_prompt_PQW.any(), with_prompt, without_prompt)
  return out.transpose(0, 4, 1, 2, 3, 5).reshape(P, chunk, H, E)


def _halo(x_PNKE: jax.Array, before: int, axis: str) -> jax.Array:
  """The `before` slots in front of a device's own, [P, before, K, E]. Zeros before the first."""
  N, devices = x_PNKE.shape[1], jax.lax.axis_size(axis)
  parts: list[jax.Array] = []
  for hop in range(1, -(-before // N) + 1):  # a window may reach over several devices
    part = x_PNKE[:, -min(N, before - (hop - 1) * N) :]
    parts.insert(0, jax.lax.ppermute(part, axis, [(i, i + hop) for i in range(devices - hop)]))
  return jnp.concatenate(parts, 1)


def _of_all(x_PNKE: jax.Array, place_PW: jax.Array, axis: str) -> jax.Array:
  """Gathers slots of all devices, [P, W, K, E], and gives them to each device.

  Args:
    x_PNKE: The device's own slots.
    place_PW: int32, the slots to gather, relative to the first slot of this device. Slots that no
      device has are 0 in the result.
    axis: The axis of the mesh.
  """
  N = x_PNKE.shape[1]
  is_here_PW = (place_PW >= 0) & (place_PW < N)
  taken = jnp.take_along_axis(x_PNKE, jnp.clip(place_PW, 0, N - 1)[..., None, None], 1)
  return jax.lax.psum(jnp.where(is_here_PW[..., None, None], taken, 0), axis)
