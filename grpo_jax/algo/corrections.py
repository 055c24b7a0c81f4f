"""Weights for the gap between the sampler (mu) and the policy that the update starts from (old). No gradient.

w = exp(old - mu): of the token; or of the row, the product (`sequence`) or geometric mean (`geometric`) of its tokens'.
"""

import jax
import jax.numpy as jnp

from grpo_jax import masked
from grpo_jax.config import Algo

LEVELS = {  # (log w [P, G, T], mask) -> log w, broadcast
  "token": lambda x_PGT, mask_PGT: x_PGT,
  "sequence": lambda x_PGT, mask_PGT: masked.total(x_PGT, mask_PGT, -1, keepdims=True),
  "geometric": lambda x_PGT, mask_PGT: masked.mean(x_PGT, mask_PGT, -1, keepdims=True),
}


def none(w_PGT: jax.Array, algo: Algo) -> jax.Array:
  """1."""
  del algo
  return jnp.ones_like(w_PGT)


def truncate(w_PGT: jax.Array, algo: Algo) -> jax.Array:
  """w limited to [correction_low, correction_high] (truncated importance sampling, TIS: Yao et al. 2025; decoupled PPO,
  AReaL 2505.24298). Worked: mu .2, old .25, pi .3, A 1, clip .2: 1.25 min(1.2, 1.2) = 1.5."""
  return jnp.clip(w_PGT, algo.correction_low, algo.correction_high or jnp.inf)


def mask(w_PGT: jax.Array, algo: Algo) -> jax.Array:
  """w inside [correction_low, correction_high], 0 outside (MIS; IcePop with .5 and 5)."""
  inside_PGT = (w_PGT >= algo.correction_low) & (w_PGT <= (algo.correction_high or jnp.inf))
  return jnp.where(inside_PGT, w_PGT, 0)


CORRECTIONS = {"none": none, "truncate": truncate, "mask": mask}


def importance(old_PGT: jax.Array, mu_PGT: jax.Array, mask_PGT: jax.Array, algo: Algo) -> jax.Array:
  """w [P, G, T] at the level of algo.correction_level, before any bound."""
  log_w_PGT = LEVELS[algo.correction_level](masked.masked(old_PGT - mu_PGT, mask_PGT), mask_PGT)
  return jnp.exp(jnp.broadcast_to(log_w_PGT, mask_PGT.shape))


def correction_weights(
  old_PGT: jax.Array, mu_PGT: jax.Array, mask_PGT: jax.Array, algo: Algo
) -> jax.Array:
  """Weights [P, G, T] of the surrogate, 0 where the mask is."""
  weights_PGT = CORRECTIONS[algo.correction](importance(old_PGT, mu_PGT, mask_PGT, algo), algo)
  return jax.lax.stop_gradient(masked.masked(weights_PGT, mask_PGT))
