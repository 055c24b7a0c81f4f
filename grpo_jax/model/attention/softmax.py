"""The definition of attention and its masks, for the rows of groups that share a prompt."""

from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp

from grpo_jax.model.layers import einsum
from grpo_jax.model.mixers.seen import KeysAndValues


class Int8(struct.PyTreeNode):
  """Vectors rounded to int8, with one scale for each vector.

  Attributes:
    values: int8 [..., E].
    scales: float32 [..., 1]. The vector is values * scales.
  """

  values: jax.Array
  scales: jax.Array


def as_int8(x: jax.Array) -> Int8:
  """Rounds vectors [..., E]: the largest number of each becomes 127 or -127."""
  scales = jnp.abs(x.astype(jnp.float32)).max(-1, keepdims=True) / 127
  values = jnp.round(x / jnp.where(scales > 0, scales, 1)).astype(jnp.int8)
  return Int8(values, scales)


class Own(NamedTuple):
  """The keys and values of the rows' own tokens.

  Attributes:
    keys: [P, K, G, C, E], without the axes that are not in `axes`, whose length is 1. An array or
      `Int8`.
    values: The values, in the form of the keys.
    axes: Which of the axes P, K and G the keys and values have, as lower-case letters in order.
  """

  keys: Any
  values: Any
  axes: str = "pkg"


class Scoring(NamedTuple):
  """How scores become weights.

  Attributes:
    cap: Scores become cap * tanh(score / cap). 0 leaves them as they are.
    sinks_H: As in `View`.
  """

  cap: float = 0.0
  sinks_H: jax.Array | None = None


def softmax_attention(
  q_PKGRTE: jax.Array,
  own: Own,
  own_mask: jax.Array,
  prefix: KeysAndValues | None,
  prefix_mask: jax.Array | None,
  scoring: Scoring,
) -> jax.Array:
  """Softmax attention over [shared prompt | own tokens], with one softmax sum for both.

  Args:
    q_PKGRTE: Queries that are already divided by the square root of E.
    own: Keys and values of the rows' own tokens.
    own_mask: Broadcasts to the scores [P, K, G, R, T, C]. True where a query sees a slot.
    prefix: Keys and values [P, K, S, E] of the prompts, or None.
    prefix_mask: The same for the prompts: broadcasts to the scores [P, K, G, R, T, S].
    scoring: How scores become weights.

  Returns:
    [P, K, G, R, T, E] in the dtype of the queries.
  """
  # `a` are the axes of own tokens as letters of an einsum, and `outer` their lengths.
  (*PKG, R, T, E), C, a = q_PKGRTE.shape, own_mask.shape[-1], own.axes
  outer = tuple(size for axis, size in zip("pkg", PKG) if axis in a)
  own_keys, key_scales = _factors(own.keys, q_PKGRTE.dtype)
  own_values, value_scales = _factors(own.values, q_PKGRTE.dtype)

  cap = scoring.cap

  def masked(scores: jax.Array, mask: jax.Array) -> jax.Array:
    capped = cap * jnp.tanh(scores / cap) if cap else scores
    return jnp.where(mask, capped, -jnp.inf)

  q_of_own = q_PKGRTE.reshape(*outer, R, T, E)
  of_own = einsum(f"{a}rte,{a}ce->{a}rtc", q_of_own, own_keys) * key_scales
  scores = [masked(of_own.reshape(*PKG, R, T, C), own_mask)]
  if prefix:
    scores.append(masked(einsum("pkgrte,pkse->pkgrts", q_PKGRTE, prefix[0]), prefix_mask))
  # Every query sees at least its own token, so the maximum is finite.
  largest = jnp.max(jnp.stack([s.max(-1) for s in scores]), 0)[..., None]
  if scoring.sinks_H is not None:
    sinks_K1R11 = scoring.sinks_H.astype(jnp.float32).reshape(PKG[1], 1, R, 1, 1)
    largest = jnp.maximum(largest, sinks_K1R11)
  # The maximum cancels out of the softmax, so it needs no gradient.
  largest = jax.lax.stop_gradient(largest)
  weights = [jnp.exp(s - largest) for s in scores]
  total = sum(w.sum(-1, keepdims=True) for w in weights)
  if scoring.sinks_H is not None:
    total = total + jnp.exp(sinks_K1R11 - largest)
  own_weights = (weights[0].reshape(*outer, R, T, C) * value_scales).astype(q_PKGRTE.dtype)
  out = einsum(f"{a}rtc,{a}ce->{a}rte", own_weights, own_values)
  out = out.reshape(q_PKGRTE.shape)
  if prefix:
    out = out + einsum("pkgrts,pkse->pkgrte", weights[1].astype(q_PKGRTE.dtype), prefix[1])
  return (out / total).astype(q_PKGRTE.dtype)


def _factors(x: Any, dtype: Any) -> tuple[jax.Array, jax.Array | float]:
  """Vectors [..., C, E] in a dtype, and a factor [..., 1, 1, C] of the products with them.

  The factor is the scale of an `Int8` vector. While a token is decoded, a vector has fewer scores
  than numbers, so fewer products scale the scores.
  """
  if not isinstance(x, Int8):
    return x, 1.0
  return x.values.astype(dtype), x.scales[..., 0][..., None, None, :]


def own_mask(
  place_T1: jax.Array, slots: int, window: int, same: jax.Array | None = None
) -> jax.Array:
  """[..., T, slots]: True where a token sees a slot of its row: itself and earlier tokens.

  Args:
    place_T1: int32, the slots of the T tokens.
    slots: How many slots the row has.
    window: As in `View`.
    same: bool [..., T, slots], the slots that a token sees even if they come later, or None.
  """
  back_TC = place_T1 - jnp.arange(slots)
  # Causal, but the tokens of a picture also see its later tokens.
  sees = back_TC >= 0 if same is None else (back_TC >= 0) | same
  return sees & (back_TC < window) if window else sees


def same_picture(pictures_PS: jax.Array | None) -> jax.Array | None:
  """[P, 1, 1, 1, S, S]: True where two tokens belong to one picture. None without pictures."""
  if pictures_PS is None:
    return None
  # Tokens outside of pictures have the number -1. They do not form one picture.
  is_picture_PS1 = (pictures_PS >= 0)[..., None]
  same_PSS = is_picture_PS1 & (pictures_PS[..., None] == pictures_PS[:, None])
  return same_PSS[:, None, None, None]


def prompt_mask(lengths_P: jax.Array, slots: int, place: jax.Array, window: int) -> jax.Array:
  """[P, 1, 1, 1, T or 1, S]: True where a completion's token sees a prompt's token.

  Args:
    lengths_P: int32, how many tokens each prompt has.
    slots: S.
    place: [T, 1] or [P, T, 1], the number of each token in its completion.
    window: As in `View`.
  """
  slots_S, lengths_P11 = jnp.arange(slots), lengths_P[:, None, None]
  mask = slots_S < lengths_P11
  if window:
    # The token's position is its prompt's length plus `place`: padding between them has none.
    mask &= lengths_P11 + place - slots_S < window
  return mask[:, None, None, None]
