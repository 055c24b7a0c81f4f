"""The definition of attention, and who sees whom, for the rows of groups that share a prompt."""

import jax
import jax.numpy as jnp

from grpo_jax.model.layers import KeysAndValues, einsum


def softmax_attention(
  q_PKGRTE: jax.Array,
  own: KeysAndValues,
  own_mask: jax.Array,
  prefix: KeysAndValues | None,
  prefix_mask: jax.Array | None,
  cap: float = 0.0,
) -> jax.Array:
  """Softmax attention over [shared prompt | own tokens], with one normaliser for both parts.

  Args:
    q_PKGRTE: Queries that are already divided by the square root of E.
    own: Keys and values [P, K, G, C, E] of the rows' own tokens.
    own_mask: Broadcasts to the scores [P, K, G, R, T, C]. True where a query sees a slot.
    prefix: Keys and values [P, K, S, E] of the prompts, or None.
    prefix_mask: Broadcasts to the scores [P, K, G, R, T, S].
    cap: Scores become cap * tanh(score / cap). 0 leaves them as they are.

  Returns:
    [P, K, G, R, T, E] in the dtype of the queries.
  """

  def scores_of(equation: str, keys: jax.Array, mask: jax.Array) -> jax.Array:
    scores = einsum(equation, q_PKGRTE, keys)
    capped = cap * jnp.tanh(scores / cap) if cap else scores
    return jnp.where(mask, capped, -jnp.inf)

  scores = [scores_of("pkgrte,pkgce->pkgrtc", own[0], own_mask)]
  if prefix:
    scores.append(scores_of("pkgrte,pkse->pkgrts", prefix[0], prefix_mask))
  # Every query sees at least its own token, so the maximum is finite.
  largest = jnp.max(jnp.stack([s.max(-1) for s in scores]), 0)
  largest = jax.lax.stop_gradient(largest)[..., None]
  weights = [jnp.exp(s - largest) for s in scores]
  total = sum(w.sum(-1, keepdims=True) for w in weights)
  out = einsum("pkgrtc,pkgce->pkgrte", weights[0].astype(q_PKGRTE.dtype), own[1])
  if prefix:
    out = out + einsum("pkgrts,pkse->pkgrte", weights[1].astype(q_PKGRTE.dtype), prefix[1])
  return (out / total).astype(q_PKGRTE.dtype)


def own_mask(place_T1: jax.Array, slots: int, window: int) -> jax.Array:
  """[T, slots]: a token sees itself and the ones before it in its row, as the window allows.

  Args:
    place_T1: The slots of the tokens that look.
    slots: How many slots the row has.
    window: As in `View`.
  """
  back_TC = place_T1 - jnp.arange(slots)
  return (back_TC >= 0) & (back_TC < window) if window else back_TC >= 0


def prompt_mask(lengths_P: jax.Array, slots: int, place: jax.Array, window: int) -> jax.Array:
  """[P, 1, 1, 1, T or 1, S]: a completion's token sees the prompt's tokens that the window reaches.

  Args:
    lengths_P: int32, how many tokens each prompt has.
    slots: S.
    place: [T, 1] or [P, T, 1], the number of each token in its completion.
    window: As in `View`.
  """
  slots_S, lengths_P11 = jnp.arange(slots), lengths_P[:, None, None]
  mask = slots_S < lengths_P11
  if window:
    mask &= lengths_P11 + place - slots_S < window
  return mask[:, None, None, None]
