"""Coefficients that change during a run, by a controller or by a plan.

A controller follows a measured value, and changes its coefficient once per optimizer update. A plan
depends on the step alone, and changes its coefficient once per GRPO step. Checkpoints contain the
coefficients.
"""

import dataclasses

import jax
import jax.numpy as jnp

from grpo_jax.algo.settings import Algo
from grpo_jax.types import Coefficients


def initial(algo: Algo) -> Coefficients:
  """The coefficients of the first update, from the config."""
  return Coefficients(kl=jnp.float32(algo.kl_coef), entropy=jnp.float32(algo.entropy_coef))


def adapted(
  coefs: Coefficients, kl: jax.Array | None, entropy: jax.Array, completions: int, algo: Algo
) -> Coefficients:
  """The coefficients of the next update.

  Args:
    coefs: The coefficients of this update.
    kl: The mean KL of a token in this update, a scalar. Read only with `algo.kl_target`.
    entropy: The mean entropy of a token in this update, a scalar.
    completions: The number of completions in this update.
    algo: Reads `kl_target`, `kl_horizon`, `entropy_target` and `entropy_step`.

  Returns:
    The coefficients, unchanged where `algo` sets no target.
  """
  if algo.kl_target:
    coefs = dataclasses.replace(coefs, kl=proportional(coefs.kl, kl, completions, algo))
  if algo.entropy_target:
    coefs = dataclasses.replace(coefs, entropy=stepwise(coefs.entropy, entropy, algo))
  return coefs


def proportional(coef: jax.Array, kl: jax.Array, completions: int, algo: Algo) -> jax.Array:
  """coef (1 + clip(kl / kl_target - 1, -.2, .2) completions / kl_horizon).

  Ziegler et al. 1909.08593, section 2.2.
  Worked: coef .1, kl twice the target, 256 completions, horizon 1024: .1 (1 + .2 / 4) = .105.
  """
  error = jnp.clip(kl / algo.kl_target - 1, -0.2, 0.2)
  return coef * (1 + error * completions / algo.kl_horizon)


def stepwise(coef: jax.Array, entropy: jax.Array, algo: Algo) -> jax.Array:
  """max(0, coef + entropy_step sign(entropy_target - entropy)) (Skywork-OR1 2505.22312, section 5).

  The paper also leaves the bonus out of an update whose entropy is above the target.
  """
  return jnp.maximum(coef + algo.entropy_step * jnp.sign(algo.entropy_target - entropy), 0)


def planned(algo: Algo, index: int, steps: int) -> dict[str, float]:
  """The coefficients that follow a plan in a step, by their names in `Coefficients`.

  Args:
    algo: Reads `entropy_coef` and `entropy_coef_end`.
    index: The GRPO step, from 0.
    steps: The GRPO steps of the run.

  Returns:
    Values on a line from the value of the first step to the value of the last step. Empty without
    a plan.
  """
  share = index / max(1, steps - 1)  # a run of one step stays at the first value
  coefs = dict[str, float]()
  if algo.plans_entropy_coef:
    coefs["entropy"] = (1 - share) * algo.entropy_coef + share * algo.entropy_coef_end
  return coefs
