"""Advantages from the rewards of single steps of a completion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_jax import masked
from grpo_jax.algo.advantages.advantage import Advantage, StdSettings
from grpo_jax.algo.variant import Example, Records
from grpo_jax.lazy import jax, jnp

if TYPE_CHECKING:
  from grpo_jax.types import Rewards

ADVANTAGES = Records[Advantage]()


def process(rewards: Rewards, mask_PGT: jax.Array, algo: StdSettings) -> jax.Array:
  """Process supervision (DeepSeekMath 2402.03300, section 4.1.3).

  z = (r - mean_g) / (std_g + eps) over the rewards of all steps of the group, and A_t is the sum of
  z over the steps of the completion that end at or after t.

  Args:
    rewards: The rewards of the steps of P prompts with G completions each.
    mask_PGT: The loss mask.

  Returns:
    Advantages [P, G, T].
  """
  ends_PGT = rewards.step_ends_PGT * rewards.scored_PG[..., None]
  std_P11 = masked.std(rewards.step_rewards_PGT, ends_PGT, algo.std_ddof, (1, 2))
  z_PGT = masked.centered(rewards.step_rewards_PGT, ends_PGT, (1, 2)) / (std_P11 + algo.std_eps)
  # z is 0 where no step ends, so the sum from a token to the last one has each step once.
  to_come_PGT = jnp.flip(jnp.cumsum(jnp.flip(z_PGT, -1), -1), -1)
  return masked.masked(to_come_PGT, mask_PGT)


ADVANTAGES["process"] = Advantage(
  compute=process,
  settings=StdSettings,
  equal_rewards_teach=True,
  takes_kl_penalty=False,
  needs_steps=True,
  per_token=True,
  examples=(
    # Steps [1, 0] and [0, 1, 1]: mean .6, std .489898. Steps end at different tokens.
    Example(
      {
        "scores": [[1, 2]],
        "lengths": [[3, 4]],
        "step_rewards": [[[None, 1, 0, None], [0, 1, None, 1]]],
      },
      {
        "advantages": [
          [[-0.4082483, -0.4082483, -1.2247449, 0], [0.4082483, 1.6329932, 0.8164966, 0.8164966]]
        ]
      },
      {"std_ddof": 0, "std_eps": 0.0},
    ),
    # Steps 2 and 0: mean 1, variance 2 / (2 - 1) = 2. The other completion has no score.
    Example(
      {
        "scores": [[1, 1, None]],
        "lengths": [[1, 2, 2]],
        "step_rewards": [[[2, None], [None, 0], [5, 5]]],
      },
      {
        "advantages": [
          [[1 / (2**0.5 + 0.5), 0], [-1 / (2**0.5 + 0.5), -1 / (2**0.5 + 0.5)], [0, 0]]
        ]
      },
      {"std_eps": 0.5},
    ),
  ),
)
