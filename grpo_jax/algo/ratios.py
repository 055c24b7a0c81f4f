"""Ratios w = pi / pi_old: (logprobs, old_logprobs, mask) -> [P, G, T]."""
import jax
import jax.numpy as jnp


def token(logprobs_PGT: jax.Array, old_logprobs_PGT: jax.Array, mask_PGT: jax.Array) -> jax.Array:
  """w_t = exp(lp_t - old_t) (PPO 1707.06347; GRPO 2402.03300, eq. 3)."""
  del mask_PGT
  return jnp.exp(logprobs_PGT - old_logprobs_PGT)


RATIOS = {"token": token}
