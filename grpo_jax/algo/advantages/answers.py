"""Advantages that count right answers instead of averaging rewards."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from grpo_jax import masked
from grpo_jax.algo.advantages.advantage import Advantage, EpsSettings
from grpo_jax.algo.variant import Example, Records, require
from grpo_jax.lazy import jax, jnp
from grpo_jax.settings import at_least, setting

if TYPE_CHECKING:
  from grpo_jax.types import Rewards

ADVANTAGES = Records[Advantage]()


@dataclasses.dataclass(frozen=True)
class PassAtKSettings(EpsSettings):
  """Settings of pass_at_k."""

  pass_k: int = setting(
    4, "pass_at_k: the number of answers of which one must be right", at_least(1)
  )


def pass_at_k(rewards: Rewards, mask_PGT: jax.Array, algo: PassAtKSettings) -> jax.Array:
  """Advantages whose objective is pass@k (Pass@k training 2508.10751, eq. 12-15).

  A reward above 0 is a right answer, and c of the n answers of a group are right. A draw of k
  answers has the reward 1 if one of them is right. The mean of this reward over draws is
  R = 1 - C(n-c, k) / C(n, k), and its deviation is s = sqrt(R (1 - R)).
    A of a right answer: (1 - R) / (s + eps)
    A of a wrong answer: (1 - R - C(n-c-1, k-1) / C(n-1, k-1)) / (s + eps)
  All advantages of a group are 0 where s is 0.

  Args:
    rewards: The rewards of P prompts with G completions each.
    mask_PGT: The loss mask. Not read.

  Returns:
    Advantages [P, G].
  """
  del mask_PGT
  right_PG = rewards.scored_PG & (rewards.total_PG > 0)
  answers_P1 = masked.count(rewards.scored_PG, 1, keepdims=True)
  wrong_P1 = answers_P1 - masked.count(right_PG, 1, keepdims=True)
  mean_P1 = 1 - _chance_of_all_wrong(answers_P1, wrong_P1, algo.pass_k)
  variance_P1 = mean_P1 * (1 - mean_P1)
  # For a wrong answer: the chance that the k - 1 answers drawn with it are wrong, too.
  others_wrong_P1 = _chance_of_all_wrong(answers_P1 - 1, wrong_P1 - 1, algo.pass_k - 1)
  gain_PG = 1 - mean_P1 - jnp.where(right_PG, 0, others_wrong_P1)
  varies_PG = rewards.scored_PG & (variance_P1 > 0)
  return masked.masked(gain_PG / (jnp.sqrt(variance_P1) + algo.std_eps), varies_PG)


def _chance_of_all_wrong(answers: jax.Array, wrong: jax.Array, k: int) -> jax.Array:
  """C(wrong, k) / C(answers, k): the chance that k of the answers are all wrong."""
  chance = jnp.ones(answers.shape)
  for i in range(k):
    # A factor is 0 once all wrong answers are drawn. The 1 avoids 0 / 0 with fewer than k answers.
    chance = chance * (jnp.maximum(wrong - i, 0) / jnp.maximum(answers - i, 1))
  return chance


def _check(algo: PassAtKSettings, group_size: int) -> None:
  require(
    algo.pass_k < group_size,
    algo,
    "pass_k",
    f"it must be below batch.group_size = {group_size}: else all answers of a group weigh the same",
  )


ADVANTAGES["pass_at_k"] = Advantage(
  compute=pass_at_k,
  settings=PassAtKSettings,
  takes_kl_penalty=False,
  counts_right_answers=True,
  check=_check,
  examples=(
    # n 8, k 4 and 1, 2 or 4 right answers, from the paper. The size of a reward does not matter.
    Example(
      {"scores": [[1, 0, 0, 0, 0, 0, 0, 0], [3, 0.5, 0, 0, -1, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]]},
      {
        "advantages": [
          [1] + [-0.1428571] * 7,
          [0.5222330] * 2 + [-0.1740777] * 6,
          [0.1203859] * 4 + [-0.1203859] * 4,
        ]
      },
      {"std_eps": 0.0},
    ),
    # n 3 scored, k 2, 1 right: R = 1 - 1/3, s = sqrt(2)/3; right 1/3, wrong 1/3 - 1/2.
    # Groups where no answer or every answer is right get 0.
    Example(
      {"scores": [[0, 1, None, 0], [0, 0, 0, 0], [1, 1, 1, 1]]},
      {
        "advantages": [
          [-1 / 6 / (2**0.5 / 3 + 0.5), 1 / 3 / (2**0.5 / 3 + 0.5), 0, -1 / 6 / (2**0.5 / 3 + 0.5)],
          [0, 0, 0, 0],
          [0, 0, 0, 0],
        ]
      },
      {"std_eps": 0.5, "pass_k": 2},
    ),
  ),
)
