"""Ratios w = pi / pi_old: (logprobs, old_logprobs, mask) -> [P, G, T]."""

import jax
import jax.numpy as jnp

from grpo_jax import masked


def token(logprobs_PGT: jax.Array, old_logprobs_PGT: jax.Array, mask_PGT: jax.Array) -> jax.Array:
  """w_t = exp(lp_t - old_t) (PPO 1707.06347; GRPO 2402.03300, eq. 3)."""
  del mask_PGT
  return jnp.exp(logprobs_PGT - old_logprobs_PGT)


def sequence(
  logprobs_PGT: jax.Array, old_logprobs_PGT: jax.Array, mask_PGT: jax.Array
) -> jax.Array:
  """s = exp(mean over the row's tokens of lp - old), for every token (GSPO 2507.18071, eq. 7).

  Worked: w = [1.2, .9, 1.1] -> 1.059105.
  """
  s_PG1 = jnp.exp(masked.mean(logprobs_PGT - old_logprobs_PGT, mask_PGT, -1, keepdims=True))
  return jnp.broadcast_to(s_PG1, logprobs_PGT.shape)


def sequence_token(
  logprobs_PGT: jax.Array, old_logprobs_PGT: jax.Array, mask_PGT: jax.Array
) -> jax.Array:
  """sg[s] pi / sg[pi]: the value of `sequence`, each token's gradient on itself alone (GSPO-token 2507.18071, eq. 14)."""
  s_PGT = jax.lax.stop_gradient(sequence(logprobs_PGT, old_logprobs_PGT, mask_PGT))
  return s_PGT * jnp.exp(logprobs_PGT - jax.lax.stop_gradient(logprobs_PGT))


RATIOS = {"token": token, "sequence": sequence, "sequence_token": sequence_token}
