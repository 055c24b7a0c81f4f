"""Attention of groups as attention of rows: prompts, and completions that each follow a prompt.

A row has T queries and C >= T keys: first those of the prompt that it follows, then its own. Query
t and key C - T + t belong to the same token. Prompts are rows with C = T. Only their `view` has
`pictures_PS`.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax.model.attention.view import AttendGroups, View
from grpo_jax.model.on_devices import on_devices

# attend(q_BTHE, k_BCKE, v_BCKE, is_token_BC, view) -> out_BTHE. A query sees its own key and the
# earlier keys within the view's window, except those where is_token_BC is False. None excepts none.
# With `view.pictures_PS`, a query also sees the later keys of its picture.
AttendRows = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None, View], jax.Array]


def by_rows(attend_rows: AttendRows) -> AttendGroups:
  """Makes an attention of groups, split over the mesh, out of an attention of rows."""
  attend_completions = _of_completions(attend_rows)

  def attend(
    q_PNHE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    prompt_lengths_P: jax.Array,
    view: View,
  ) -> jax.Array:
    """Attends within the prompts, then from each completion's row to prompt and completion."""
    S = view.prompt_slots
    # A prompt's padding needs no mask. It comes after the tokens, and a token sees later keys only
    # within its picture.
    prompt_out = attend_rows(q_PNHE[:, :S], k_PNKE[:, :S], v_PNKE[:, :S], None, view)
    if view.completions == 0:
      return prompt_out
    out = attend_completions(q_PNHE[:, S:], k_PNKE, v_PNKE, prompt_lengths_P, view)
    return jnp.concatenate([prompt_out, out], axis=1)

  return on_mesh(attend)


def completions_by_rows(attend_rows: AttendRows) -> AttendGroups:
  """Like `by_rows`, but queries and outputs are those of the completions alone, [P, G * T, H, E].

  The prompts' keys and values were computed earlier.
  """
  return on_mesh(_of_completions(attend_rows))


def _of_completions(attend_rows: AttendRows) -> AttendGroups:
  """`completions_by_rows` on a device."""

  def attend_completions(
    q_PNHE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    prompt_lengths_P: jax.Array,
    view: View,
  ) -> jax.Array:
    P, _, H, E = q_PNHE.shape
    G, T = view.completions, view.slots
    k_BCKE = _after_prompts(k_PNKE, prompt_lengths_P, view)
    v_BCKE = _after_prompts(v_PNKE, prompt_lengths_P, view)
    is_token_BC = jnp.repeat(_is_token(prompt_lengths_P, view), G, axis=0)
    q_BTHE = q_PNHE.reshape(P * G, T, H, E)
    of_completions = dataclasses.replace(view, pictures_PS=None)
    out_BTHE = attend_rows(q_BTHE, k_BCKE, v_BCKE, is_token_BC, of_completions)
    return out_BTHE.reshape(P, G * T, H, E)

  return attend_completions


def _after_prompts(x_PNKE: jax.Array, lengths_P: jax.Array, view: View) -> jax.Array:
  """[P * G, S + T, K, E]: for each completion, the keys or values of its prompt and its own.

  With a window, the prompt moves to the right end of its S slots, next to the completion. Then the
  distance of two tokens is that of their slots, as masks that are fixed at compile time need.
  """
  P, _, K, E = x_PNKE.shape
  S, G, T = view.prompt_slots, view.completions, view.slots
  prompt_PSKE = x_PNKE[:, :S]
  if view.hiding_window:
    prompt_PSKE = jax.vmap(lambda x_SKE, shift: jnp.roll(x_SKE, shift, 0))(
      prompt_PSKE, S - lengths_P
    )
  prompt_PGSKE = jnp.broadcast_to(prompt_PSKE[:, None], (P, G, S, K, E))
  own_PGTKE = x_PNKE[:, S:].reshape(P, G, T, K, E)
  return jnp.concatenate([prompt_PGSKE, own_PGTKE], axis=2).reshape(P * G, S + T, K, E)


def _is_token(lengths_P: jax.Array, view: View) -> jax.Array:
  """[P, S + T]: True where the rows that `_after_prompts` builds hold a token."""
  S = view.prompt_slots
  slots_C = jnp.arange(S + view.slots)
  if view.hiding_window:
    return slots_C >= S - lengths_P[:, None]
  return (slots_C < lengths_P[:, None]) | (slots_C >= S)


def on_mesh(attend: AttendGroups) -> AttendGroups:
  """Runs `attend` on each device's groups and heads, if `view.rows` names a mesh.

  The heads are split over the mesh axis `tensor` if its size divides H. Otherwise each device along
  this axis computes all heads. If its size divides H but not K, keys and values are repeated.
  """

  def attend_on_mesh(
    q_PNHE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    prompt_lengths_P: jax.Array,
    view: View,
  ) -> jax.Array:
    if view.rows is None:
      return attend(q_PNHE, k_PNKE, v_PNKE, prompt_lengths_P, view)
    mesh, row_axes = view.rows.mesh, view.rows.spec[0]
    size = mesh.shape.get("tensor", 1)
    head_axis = "tensor" if q_PNHE.shape[2] % size == 0 else None
    if head_axis:  # a device that holds query heads must hold their key heads
      k_PNKE, v_PNKE = (divided(x, size) for x in (k_PNKE, v_PNKE))

    def attend_here(
      q: jax.Array, k: jax.Array, v: jax.Array, lengths_P: jax.Array, view_arrays: dict[str, Any]
    ) -> jax.Array:
      return attend(q, k, v, lengths_P, dataclasses.replace(view, **view_arrays))

    heads = PartitionSpec(row_axes, None, head_axis, None)
    # The view's arrays become arguments, too, because a shard_map splits only its arguments.
    view_arrays = dict(sinks_H=view.sinks_H, pictures_PS=view.pictures_PS)
    view_specs = dict(sinks_H=PartitionSpec(head_axis), pictures_PS=PartitionSpec(row_axes))
    in_specs = heads, heads, heads, PartitionSpec(row_axes), view_specs
    attend_apart = on_devices(attend_here, mesh, in_specs, heads)
    return attend_apart(q_PNHE, k_PNKE, v_PNKE, prompt_lengths_P, view_arrays)

  return attend_on_mesh


def divided(x_PNKE: jax.Array, devices: int) -> jax.Array:
  """Repeats each head of keys or values until the number of devices divides the heads."""
  heads = x_PNKE.shape[2]
  copies = math.lcm(heads, devices) // heads
  return x_PNKE if copies == 1 else jnp.repeat(x_PNKE, copies, axis=2)
