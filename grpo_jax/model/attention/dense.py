"""Attention with whole matrices of scores: the fastest on a CPU, and quadratic in memory."""

import dataclasses

import jax
import jax.numpy as jnp

from grpo_jax.model.attention.softmax import (
  Own,
  Scoring,
  own_mask,
  prompt_mask,
  same_picture,
  softmax_attention,
)
from grpo_jax.model.attention.view import View


def attend(
  q_PNHE: jax.Array,
  k_PNKE: jax.Array,
  v_PNKE: jax.Array,
  prompt_lengths_P: jax.Array,
  view: View,
) -> jax.Array:
  """Attention of groups, a `view.AttendGroups`. XLA splits it over a mesh by itself."""
  P, N, H, E = q_PNHE.shape
  K = k_PNKE.shape[2]
  S, G, T, window = view.prompt_slots, view.completions, view.slots, view.hiding_window

  def prompt(x: jax.Array) -> jax.Array:  # [P, N, K, E] -> [P, K, S, E]
    return x[:, :S].transpose(0, 2, 1, 3)

  def completions(x: jax.Array) -> jax.Array:  # [P, N, K, E] -> [P, K, G, T, E]
    return x[:, S:].reshape(P, G, T, K, E).transpose(0, 3, 1, 2, 4)

  scoring = Scoring(view.cap, view.sinks_H)
  q_PKRNE = q_PNHE.reshape(P, N, K, H // K, E).transpose(0, 2, 3, 1, 4)
  prefix = prompt(k_PNKE), prompt(v_PNKE)
  as_own = Own(prefix[0][:, :, None], prefix[1][:, :, None])  # the prompt as a single row
  q_PK1RSE = q_PKRNE[:, :, None, :, :S]
  same = same_picture(view.pictures_PS)
  sees_own = own_mask(jnp.arange(S)[:, None], S, window, same)
  out = softmax_attention(q_PK1RSE, as_own, sees_own, None, None, scoring)
  out_PSHE = out.transpose(0, 2, 4, 1, 3, 5).reshape(P, S, H, E)
  if G == 0:
    return out_PSHE

  q_PKRGTE = q_PKRNE[..., S:, :].reshape(P, K, H // K, G, T, E)
  own = Own(completions(k_PNKE), completions(v_PNKE))
  place_T1 = jnp.arange(T)[:, None]
  sees_own = own_mask(place_T1, T, window)
  sees_prompt = prompt_mask(prompt_lengths_P, S, place_T1, window)
  q_PKGRTE = q_PKRGTE.swapaxes(2, 3)
  out = softmax_attention(q_PKGRTE, own, sees_own, prefix, sees_prompt, scoring)
  rest_PNHE = out.transpose(0, 2, 4, 1, 3, 5).reshape(P, G * T, H, E)
  return jnp.concatenate([out_PSHE, rest_PNHE], axis=1)


def attend_packed(
  q_PNHE: jax.Array,
  k_PNKE: jax.Array,
  v_PNKE: jax.Array,
  prompt_lengths_P: jax.Array,
  token_PN: jax.Array,
  view: View,
) -> jax.Array:
  """Attention of groups whose completions follow each other in a stream of N - S slots.

  The scores of completions are [N - S, N - S] for each group, instead of [G, T, T] with rows.

  Args:
    q_PNHE: This and the next three parameters are as in `view.AttendGroups`.
    k_PNKE: Keys.
    v_PNKE: Values.
    prompt_lengths_P: int32.
    token_PN: int32 [P, N - S], the token g * T + t in each slot of the stream, or -1.
    view: Which tokens see each other, and how scores become weights.
  """
  P, N, H, E = q_PNHE.shape
  K, S, window = k_PNKE.shape[2], view.prompt_slots, view.hiding_window
  # A free slot, -1, gets row -1: it sees free slots, so that its softmax is finite.
  row_PN, place_PN = jnp.divmod(token_PN, view.slots)
  back_PNN = place_PN[:, :, None] - place_PN[:, None]
  # All completions share the stream, but a token sees only its own completion.
  sees = (row_PN[:, :, None] == row_PN[:, None]) & (back_PNN >= 0)
  if window:
    sees &= back_PNN < window
  sees_prompt = prompt_mask(prompt_lengths_P, S, place_PN[..., None], window)
  prompts = dataclasses.replace(view, completions=0)
  out_PSHE = attend(q_PNHE[:, :S], k_PNKE[:, :S], v_PNKE[:, :S], prompt_lengths_P, prompts)

  scoring = Scoring(view.cap, view.sinks_H)

  def as_row(x_PNKE: jax.Array) -> jax.Array:
    return x_PNKE.transpose(0, 2, 1, 3)[:, :, None]

  q_PK1RNE = q_PNHE[:, S:].reshape(P, N - S, K, H // K, E).transpose(0, 2, 3, 1, 4)[:, :, None]
  own = Own(as_row(k_PNKE[:, S:]), as_row(v_PNKE[:, S:]))
  prefix = as_row(k_PNKE[:, :S])[:, :, 0], as_row(v_PNKE[:, :S])[:, :, 0]
  sees = sees[:, None, None, None]
  out = softmax_attention(q_PK1RNE, own, sees, prefix, sees_prompt, scoring)
  rest_PNHE = out[:, :, 0].transpose(0, 3, 1, 2, 4).reshape(P, N - S, H, E)
  return jnp.concatenate([out_PSHE, rest_PNHE], axis=1)
