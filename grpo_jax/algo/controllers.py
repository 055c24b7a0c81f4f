"""Coefficients that follow what is measured. Once per optimizer update; their state is part of the checkpoint."""

import jax
import jax.numpy as jnp

from grpo_jax.config import Algo
from grpo_jax.types import Coefs


def initial(algo: Algo) -> Coefs:
  """As the config has them."""
  return Coefs(jnp.float32(algo.kl_coef), jnp.float32(algo.entropy_coef))


def adapted(coefs: Coefs, kl: jax.Array, entropy: jax.Array, sequences: int, algo: Algo) -> Coefs:
  """Those of the next update, from the mean KL and entropy of a token in this one, of `sequences` completions."""
  if algo.kl_target:
    coefs = coefs.replace(kl=proportional(coefs.kl, kl, sequences, algo))
  if algo.entropy_target:
    coefs = coefs.replace(entropy=stepwise(coefs.entropy, entropy, algo))
  return coefs


def proportional(coef: jax.Array, kl: jax.Array, sequences: int, algo: Algo) -> jax.Array:
  """coef (1 + clip(kl / kl_target - 1, -.2, .2) sequences / kl_horizon) (Ziegler et al. 1909.08593, section 2.2).

  Worked: coef .1, kl twice the target, 256 sequences, horizon 1024: .1 (1 + .2 / 4) = .105.
  """
  return coef * (1 + jnp.clip(kl / algo.kl_target - 1, -0.2, 0.2) * sequences / algo.kl_horizon)


def stepwise(coef: jax.Array, entropy: jax.Array, algo: Algo) -> jax.Array:
  """entropy_step up where the entropy is below entropy_target, down where it is above, never below 0 (Skywork-OR1
  2505.22312, section 5; there, the bonus is also left out of an update whose entropy is above the target)."""
  return jnp.maximum(coef + algo.entropy_step * jnp.sign(algo.entropy_target - entropy), 0)
