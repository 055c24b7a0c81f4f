"""Advantages: rewards [P, G] -> advantages [P, G]. NaN marks a completion that no reward function scored."""
import jax
import jax.numpy as jnp

from grpo_jax import masked
from grpo_jax.config import Algo


def group_normalized(rewards_PG: jax.Array, algo: Algo) -> jax.Array:
  """A_i = (r_i - mean r) / (std r + eps), over the group (DeepSeekMath 2402.03300, section 4.1.2).

  std has `std_ddof` degrees of freedom removed. Where all scored rewards of a group are equal, and for a completion
  without a score, A is exactly 0.
  Worked, ddof 0: [1, 1, 0, 0] -> [1, 1, -1, -1]; ddof 1: [1, 0, 0, 0] -> [1.5, -.5, -.5, -.5].
  """
  scored_PG = ~jnp.isnan(rewards_PG)
  count_P1 = scored_PG.sum(1, keepdims=True)
  centered_PG = rewards_PG - masked.mean(rewards_PG, scored_PG, 1)[:, None]
  variance_P1 = masked.divide(masked.total(centered_PG**2, scored_PG, 1)[:, None], count_P1 - algo.std_ddof)
  # max == min, not std == 0: the float mean of 0.7 twelve times is not 0.7.
  live_P1 = (masked.largest(rewards_PG, scored_PG, 1) > masked.smallest(rewards_PG, scored_PG, 1))[:, None]
  std_P1 = jnp.sqrt(jnp.where(live_P1, variance_P1, 1))
  return masked.masked(centered_PG / (std_P1 + algo.std_eps), scored_PG & live_P1)


ADVANTAGES = {"group_normalized": group_normalized}
