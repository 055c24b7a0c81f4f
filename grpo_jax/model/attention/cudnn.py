"""Attention by cuDNN's flash kernel for NVIDIA GPUs: linear in memory.

Each completion is a separate row after a copy of its prompt, so that the causal mask is the only
one. The kernel thus computes the prompt G times. Completions cannot attend to a shared prompt: JAX
returns the log-sum-exps, which would combine both results, in bfloat16 and without a gradient.
"""

import jax
import jax.numpy as jnp

from grpo_jax.model.attention.by_rows import on_mesh
from grpo_jax.model.attention.packing import move
from grpo_jax.model.attention.view import AttendGroups, View


def make_attend(implementation: str = "cudnn") -> AttendGroups:
  """Makes the attention of groups, a `view.AttendGroups` that ignores `cap` and `sinks_H`.

  Args:
    implementation: For jax.nn.dot_product_attention: "cudnn", or in tests "xla".
  """

  def attend(
    q_PNHE: jax.Array,
    k_PNKE: jax.Array,
    v_PNKE: jax.Array,
    prompt_lengths_P: jax.Array,
    view: View,
  ) -> jax.Array:
    """Attends within prompts or, if there are completions, within rows of prompt and completion."""
    # (left, right): how many tokens a token sees on each side of itself.
    window = (view.hiding_window - 1, 0) if view.hiding_window else None

    def causal(q_BCHE: jax.Array, k_BCKE: jax.Array, v_BCKE: jax.Array) -> jax.Array:
      return jax.nn.dot_product_attention(
        q_BCHE,
        k_BCKE,
        v_BCKE,
        scale=1.0,  # the queries are already scaled
        is_causal=True,
        local_window_size=window,
        implementation=implementation,
      )

    if view.completions == 0:  # the mask hides a prompt's padding, which comes last
      return causal(q_PNHE, k_PNKE, v_PNKE)
    rows = (_rows(x, prompt_lengths_P, view) for x in (q_PNHE, k_PNKE, v_PNKE))
    return _groups(causal(*rows), prompt_lengths_P, view)

  return on_mesh(attend)


attend = make_attend()


def _rows(x_PNHE: jax.Array, lengths_P: jax.Array, view: View) -> jax.Array:
  """[P * G, C, H, E]: prompt, completion and the prompt's padding, for each completion."""
  P, _, H, E = x_PNHE.shape
  S, G, T = view.prompt_slots, view.completions, view.slots
  prompt_PGSHE = jnp.broadcast_to(x_PNHE[:, None, :S], (P, G, S, H, E))
  own_PGTHE = x_PNHE[:, S:].reshape(P, G, T, H, E)
  rows_BCHE = jnp.concatenate([prompt_PGSHE, own_PGTHE], axis=2).reshape(P * G, S + T, H, E)
  padding_last, padding_between = _orders(lengths_P, view)
  return move(rows_BCHE, padding_last, padding_between)


def _groups(x_BCHE: jax.Array, lengths_P: jax.Array, view: View) -> jax.Array:
  """[P, N, H, E]: the outputs of groups, from those of `_rows`: a prompt's from its first row."""
  P, (H, E) = lengths_P.shape[0], x_BCHE.shape[2:]
  S, G, T = view.prompt_slots, view.completions, view.slots
  padding_last, padding_between = _orders(lengths_P, view)
  rows_PGCHE = move(x_BCHE, padding_between, padding_last).reshape(P, G, S + T, H, E)
  own_PNHE = rows_PGCHE[:, :, S:].reshape(P, G * T, H, E)
  return jnp.concatenate([rows_PGCHE[:, 0, :S], own_PNHE], axis=1)


def _orders(lengths_P: jax.Array, view: View) -> tuple[jax.Array, jax.Array]:
  """Two permutations [P * G, S + T] of a row's slots, each the inverse of the other.

  The first moves the prompt's padding from before the completion to the end of the row, where the
  causal mask hides it from all tokens.
  """
  S, G, T = view.prompt_slots, view.completions, view.slots
  slots_C = jnp.arange(S + T)
  lengths_P1 = lengths_P[:, None]
  end_P1 = lengths_P1 + T
  # For each slot with padding last, the slot where its token is with padding between.
  after_prompt = jnp.where(slots_C < end_P1, slots_C - lengths_P1 + S, slots_C - T)
  padding_last = jnp.where(slots_C < lengths_P1, slots_C, after_prompt)
  # The reverse: the padding of slot c was moved T slots to the right.
  after_prompt = jnp.where(slots_C < S, slots_C + T, slots_C - S + lengths_P1)
  padding_between = jnp.where(slots_C < lengths_P1, slots_C, after_prompt)
  return jnp.repeat(padding_last, G, axis=0), jnp.repeat(padding_between, G, axis=0)
