"""Attention and recurrence of groups in the layers, with completions packed or in rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.model.attention import dense
from grpo_jax.model.attention.choose import BEST, KERNELS, choose, completions, implementation
from grpo_jax.model.attention.context import AttendStream, across, recur_by_heads
from grpo_jax.model.attention.packing import Packing, pack, unpack
from grpo_jax.model.attention.view import AttendGroups, View
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.mixers.seen import Attend, Recur, Scan


class Groups(NamedTuple):
  """The layout of each group's tokens: S slots for its prompt, then those of its completions.

  Attributes:
    lengths_P: int32, how many tokens each prompt has. It is right-padded to S.
    prompt_slots: S.
    completions: G. 0 where there are only prompts.
    slots: T, the slots of each completion.
    packing: The packing of the completions in a stream of N slots. None means G rows of T.
  """

  lengths_P: jax.Array
  prompt_slots: int
  completions: int = 0
  slots: int = 0
  packing: Packing | None = None

  @property
  def positions(self) -> jax.Array:
    """int32 [P, S + N] or [P, S + G * T], the position of each token in its text."""
    return self.positions_from(None)

  def positions_from(self, next_P: jax.Array | None) -> jax.Array:
    """`positions`, but with completions that begin at position `next_P`, unless it is None."""
    first_P = self.lengths_P if next_P is None else next_P
    P = len(self.lengths_P)
    prompt_PS = jnp.broadcast_to(jnp.arange(self.prompt_slots), (P, self.prompt_slots))
    place_PC = jnp.broadcast_to(jnp.arange(self.slots), (P, self.completions, self.slots))
    place_PC = place_PC.reshape(P, self.completions * self.slots)
    if self.packing is not None:
      place_PC = pack(place_PC, self.packing)
    return jnp.concatenate([prompt_PS, first_P[:, None] + place_PC], 1)


def recur_in_groups(
  config: ModelConfig, groups: Groups, keep: bool = False
) -> Callable[[Any], Recur]:
  """Builds `Shared.recur` for groups: each completion starts from its prompt's final memory.

  With `keep`, the recurrence also returns the memory after the prompts.
  """

  def recur_of(lengths_P: jax.Array, packing: Packing | None) -> Recur:
    """The recurrence of groups: of all, or in a shard_map of those that a device computes."""
    return _recurrence(groups._replace(lengths_P=lengths_P, packing=packing), keep)

  layout = groups.lengths_P, groups.packing
  recur = recur_of(*layout)
  if config.context > 1:
    recur = recur_by_heads(config, recur_of, *layout)
  return lambda memory: recur  # without a cache, `memory` holds nothing to start from


def _recurrence(groups: Groups, keep: bool) -> Recur:
  """The recurrence of groups on a device that has all of their tokens."""
  P, S, G, T = len(groups.lengths_P), groups.prompt_slots, groups.completions, groups.slots

  def in_rows(x_PN: jax.Array) -> jax.Array:
    """[P * G, T, ...]: the completions of an array [P, N, ...] of groups, in rows."""
    rest_PN = x_PN[:, S:]
    if groups.packing is not None:
      rest_PN = unpack(rest_PN, groups.packing)
    return rest_PN.reshape(P * G, T, *x_PN.shape[2:])

  def in_stream(x_BT: jax.Array) -> jax.Array:
    """[P, N - S, ...]: the completions of an array [P * G, T, ...] of rows, as in the groups."""
    rest_PC = x_BT.reshape(P, G * T, *x_BT.shape[2:])
    return rest_PC if groups.packing is None else pack(rest_PC, groups.packing)

  def recur(scan: Scan, weights: Any, inputs_PN: Any, empty: Any) -> tuple[Any, Any]:
    empty_P = jax.tree.map(lambda x: jnp.broadcast_to(x, (P, *x.shape)), empty)
    is_token_PS = jnp.arange(S) < groups.lengths_P[:, None]
    prompts_PS = jax.tree.map(lambda x: x[:, :S], inputs_PN)
    out_PS, memory_P = scan(weights, prompts_PS, empty_P, is_token_PS)
    kept = memory_P if keep else None
    if not G:
      return out_PS, kept
    memory_B = jax.tree.map(lambda x: jnp.repeat(x, G, axis=0), memory_P)
    # Padding at the end of completions needs no mask, because their memory is not kept.
    out_BT, _ = scan(weights, jax.tree.map(in_rows, inputs_PN), memory_B, None)
    return jax.tree.map(lambda x, y: jnp.concatenate([x, in_stream(y)], 1), out_PS, out_BT), kept

  return recur


def _attention(config: ModelConfig, groups: Groups) -> AttendStream:
  """The attention of groups, whose tokens may be split over devices."""
  S, name = groups.prompt_slots, attention_of(config)[0]
  attend = implementation(name)
  # `dense` can attend within the stream. If that has N <= 2 T slots, a head has N^2 <= 4 T^2 scores
  # there, instead of G T^2 in rows.
  is_stream = (
    name == "dense"
    and groups.packing is not None
    and groups.packing.token_PN.shape[1] <= 2 * groups.slots
  )

  def rows_of(x_PNHE: jax.Array, packing: Packing | None) -> jax.Array:
    """Unpacks the completions of [P, N, ...] to [P, S + G * T, ...], unless `packing` is None."""
    if packing is None:
      return x_PNHE
    return jnp.concatenate([x_PNHE[:, :S], unpack(x_PNHE[:, S:], packing)], 1)

  def stream_of(x_PNHE: jax.Array, packing: Packing | None) -> jax.Array:
    """Packs the completions of [P, S + G * T, ...], unless `packing` is None."""
    if packing is None:
      return x_PNHE
    return jnp.concatenate([x_PNHE[:, :S], pack(x_PNHE[:, S:], packing)], 1)

  def attend_stream(
    q_PNHE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    lengths_P: jax.Array,
    packing: Packing | None,
    view: View,
  ) -> jax.Array:
    if is_stream:
      token_PN = packing.token_PN
      return dense.attend_packed(q_PNHE, k_PNKE, v_PNKE, lengths_P, token_PN, view)
    q, k, v = (rows_of(x, packing) for x in (q_PNHE, k_PNKE, v_PNKE))
    return stream_of(attend(q, k, v, lengths_P, view), packing)

  if config.context == 1:
    return attend_stream
  return across(attend_stream, has_kernel=name in KERNELS)


def in_groups(
  config: ModelConfig,
  groups: Groups,
  pictures_PS: jax.Array | None = None,
  keep: bool = False,
) -> Callable[[int, Any], Attend]:
  """Builds `Shared.attend` for groups. `pictures_PS` is as in `View`.

  With `keep`, the attention also returns keys and values for the caller to keep.
  """
  attend = _attention(config, groups)

  def attend_of(window: int, memory: Any) -> Attend:  # of a layer with this window and LayerMemory
    pictures = pictures_PS if config.sees_both_ways(window) else None
    settings = dict(window=window, cap=config.attention_cap, rows=config.rows)

    def attend_in_groups(
      q_PNHE: jax.Array,
      k_PNKE: jax.Array | None,
      v_PNKE: jax.Array | None,
      sinks_H: jax.Array | None = None,
      kept: Any = None,
    ) -> tuple[jax.Array, Any]:
      """A `seen.Attend`. Latent attention gives its latents as `kept`, to keep instead of keys."""
      arrays = dict(sinks_H=sinks_H, pictures_PS=pictures)
      view = View(groups.prompt_slots, groups.completions, groups.slots, **arrays, **settings)
      if k_PNKE is None:  # the layer borrows the keys and values of another layer
        k_PNKE, v_PNKE = memory.stack
      elif keep:
        kept = kept or (k_PNKE, v_PNKE)
      out_PNHE = attend(q_PNHE, k_PNKE, v_PNKE, groups.lengths_P, groups.packing, view)
      return out_PNHE, kept if keep else None

    return attend_in_groups

  return attend_of


def after_prompts(config: ModelConfig) -> AttendGroups | None:
  """The attention of completions after prompts whose keys and values are in a cache.

  None means that it holds all scores: attention is `dense`, or devices share the tokens.
  """
  if config.context > 1:
    return None
  name, _ = attention_of(config)
  # A token's latents are one key and value, of a size for which the kernels were not made.
  return completions("chunked" if config.latent and name in KERNELS else name)


def attention_of(config: ModelConfig) -> tuple[str, str]:
  """The implementation that computes a model's attention, and a remark, as in `choose`."""
  platform = config.platform or jax.default_backend()
  cap, sinks = config.attention_cap, config.attention_sinks
  head_dim = max(config.head_dim, config.global_head_dim)
  name = config.attention
  if name == "auto" and config.context > 1 and BEST.get(platform) == "dense":
    name = "chunked"  # only long texts are split, and dense scores are quadratic in the length
  chosen, remark = choose(name, platform, config.dtype, head_dim, cap, sinks)
  if chosen in KERNELS and config.vision and config.vision.both_ways:
    reason = f"with {chosen}, tokens of a picture could not see those after them"
    return "chunked", f"attention is computed in chunks, without a kernel: {reason}"
  return chosen, remark
