"""Surrogates: (ratio, advantage, algo) -> loss per token, never reduced here."""
import jax
import jax.numpy as jnp

from grpo_jax.config import Algo


def ppo_clip(ratio_PGT: jax.Array, advantages_PGT: jax.Array, algo: Algo) -> jax.Array:
  """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) (PPO 1707.06347, eq. 7).

  Worked at 0.2/0.2: w 1.5, A 1 -> -1.2; w 1.5, A -1 -> 1.5; w .5, A 1 -> -.5; w .5, A -1 -> .8.
  """
  clipped_PGT = jnp.clip(ratio_PGT, 1 - algo.clip_low, 1 + algo.clip_high)
  return -jnp.minimum(ratio_PGT * advantages_PGT, clipped_PGT * advantages_PGT)


SURROGATES = {"ppo_clip": ppo_clip}
