"""Advantages that divide by a standard deviation of the whole batch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from grpo_jax import masked
from grpo_jax.algo.advantages.advantage import Advantage, StdSettings
from grpo_jax.algo.advantages.group import sum_of_normalized
from grpo_jax.algo.variant import Example, Records
from grpo_jax.lazy import jax, jnp
from grpo_jax.settings import at_least, one_of, setting

if TYPE_CHECKING:
  from grpo_jax.types import Rewards

ADVANTAGES = Records[Advantage]()


@dataclasses.dataclass(frozen=True)
class BatchSettings(StdSettings):
  """How the statistics of a batch are computed."""

  batch_weighting: str = setting(
    "sequence",
    "in statistics of the batch a completion counts once ('sequence') or once per token ('token')."
    " batch_normalized with a KL penalty in the reward always counts tokens",
    one_of(("sequence", "token")),
  )


@dataclasses.dataclass(frozen=True)
class GdpoSettings(BatchSettings):
  """Settings of gdpo."""

  batch_std_eps: float = setting(
    1e-4, "gdpo: added to the standard deviation of the batch", at_least(0)
  )


def group_mean_batch_std(rewards: Rewards, mask_PGT: jax.Array, algo: BatchSettings) -> jax.Array:
  """A = (r - mean_g) / (std of the batch + eps) (LitePPO 2508.08221).

  Args:
    rewards: The rewards of P prompts with G completions each.
    mask_PGT: The loss mask, for the lengths that `batch_weighting` may read.

  Returns:
    Advantages [P, G].
  """
  centered_PG = masked.centered(rewards.total_PG, rewards.scored_PG, 1)
  weights_PG = _batch_weights(mask_PGT, algo)
  std = masked.std(rewards.total_PG, rewards.scored_PG, algo.std_ddof, None, weights_PG)
  return centered_PG / (std + algo.std_eps)


ADVANTAGES["group_mean_batch_std"] = Advantage(
  compute=group_mean_batch_std,
  settings=BatchSettings,
  examples=(
    # means of the groups 1 and 5, of the batch 3; variance (9 + 1 + 1 + 9) / 4 = 5
    Example(
      {"scores": [[0, 2, None], [4, 6, None]]},
      {"advantages": [[-(5**-0.5), 5**-0.5, 0], [-(5**-0.5), 5**-0.5, 0]]},
      {"std_ddof": 0, "std_eps": 0.0},
    ),
    # Per token: mean of the batch (0 + 3 * 4) / 4 = 3, variance (9 + 3) / (4 - 1) = 4
    Example(
      {"scores": [[0, 4]], "lengths": [[1, 3]]},
      {"advantages": [[-2 / 2.5, 2 / 2.5]]},
      {"std_ddof": 1, "std_eps": 0.5, "batch_weighting": "token"},
    ),
  ),
)


def batch_normalized(rewards: Rewards, mask_PGT: jax.Array, algo: BatchSettings) -> jax.Array:
  """A = (r - mean) / (std + eps) over the batch, without groups (REINFORCE++ 2501.03262).

  With a KL penalty in the reward, each token has its own reward, r_t = score - sum over u >= t of
  KL_u: the score minus the KL of this token and of later tokens. The mean and the standard
  deviation are then over all tokens.

  Args:
    rewards: The rewards of P prompts with G completions each.
    mask_PGT: The loss mask.

  Returns:
    Advantages [P, G], or [P, G, T] with a KL penalty in the reward.
  """
  if rewards.kl_penalty_PGT is None:
    return _batch_whitened(rewards.total_PG, rewards, mask_PGT, algo, algo.std_eps)
  later_kl_PGT = jnp.flip(jnp.cumsum(jnp.flip(rewards.kl_penalty_PGT, -1), -1), -1)
  reward_PGT = rewards.score_PG[..., None] - later_kl_PGT
  scored_PGT = mask_PGT * rewards.scored_PG[..., None]
  std = masked.std(reward_PGT, scored_PGT, algo.std_ddof)
  return masked.centered(reward_PGT, scored_PGT) / (std + algo.std_eps)


ADVANTAGES["batch_normalized"] = Advantage(
  compute=batch_normalized,
  settings=BatchSettings,
  equal_rewards_teach=True,
  examples=(
    # mean 3, variance (9 + 1 + 1 + 9) / (4 - 1) = 20/3
    Example(
      {"scores": [[0, 2, None], [4, 6, None]]},
      {"advantages": [[-1.161895, -0.387298, 0], [0.387298, 1.161895, 0]]},
      {"std_eps": 0.0},
    ),
    # Per token: mean (0 + 3 * 4) / 4 = 3, variance (9 + 3) / (4 - 1) = 4
    Example(
      {"scores": [[0, 4]], "lengths": [[1, 3]]},
      {"advantages": [[-3 / 2.5, 1 / 2.5]]},
      {"std_eps": 0.5, "batch_weighting": "token"},
    ),
    # Rewards of the tokens 1 - .5, 1 - .25, 1, and 1 - .25; mean 3/4, variance (1/16 + 1/16) / 4
    Example(
      {
        "scores": [[1, 1, None]],
        "lengths": [[3, 1, 2]],
        "kl_penalty": [[[0.25, 0.25, 0], [0.25, 0, 0], [0.1, 0.3, 0]]],
      },
      {"advantages": [[[-(2**0.5), 0, 2**0.5], [0, 0, 0], [0, 0, 0]]]},
      {"std_ddof": 0, "std_eps": 0.0},
    ),
  ),
)


def group_centered_batch_whitened(
  rewards: Rewards, mask_PGT: jax.Array, algo: BatchSettings
) -> jax.Array:
  """r - mean_g, then whitened over the batch (REINFORCE++-baseline 2501.03262).

  Args:
    rewards: The rewards of P prompts with G completions each.
    mask_PGT: The loss mask, for the lengths that `batch_weighting` may read.

  Returns:
    Advantages [P, G].
  """
  centered_PG = masked.centered(rewards.total_PG, rewards.scored_PG, 1)
  return _batch_whitened(centered_PG, rewards, mask_PGT, algo, algo.std_eps)


ADVANTAGES["group_centered_batch_whitened"] = Advantage(
  compute=group_centered_batch_whitened,
  settings=BatchSettings,
  examples=(
    # centered -1, 1, -3, 3; variance 20 / 4 = 5
    Example(
      {"scores": [[0, 2, None], [4, 10, None]]},
      {"advantages": [[-(5**-0.5), 5**-0.5, 0], [-3 * 5**-0.5, 3 * 5**-0.5, 0]]},
      {"std_ddof": 0, "std_eps": 0.0},
    ),
    # Centered -2, 2. Per token: mean (-2 + 3 * 2) / 4 = 1, variance (9 + 3) / (4 - 1) = 4
    Example(
      {"scores": [[0, 4]], "lengths": [[1, 3]]},
      {"advantages": [[-3 / 2.5, 1 / 2.5]]},
      {"std_eps": 0.5, "batch_weighting": "token"},
    ),
  ),
)


def gdpo(rewards: Rewards, mask_PGT: jax.Array, algo: GdpoSettings) -> jax.Array:
  """Normalises each reward in its group, sums them, then whitens over the batch (GDPO 2601.05242).

  z_j = (r_j - mean_g r_j) / (std_g r_j + std_eps) for each reward function j. Their sum is
  v = sum_j weight_j z_j, and A = (v - mean v) / (std v + batch_std_eps) over the batch.

  Args:
    rewards: The rewards of P prompts with G completions each.
    mask_PGT: The loss mask, for the lengths that `batch_weighting` may read.

  Returns:
    Advantages [P, G].
  """
  sum_PG = sum_of_normalized(rewards, algo)
  return _batch_whitened(sum_PG, rewards, mask_PGT, algo, algo.batch_std_eps)


ADVANTAGES["gdpo"] = Advantage(
  compute=gdpo,
  settings=GdpoSettings,
  equal_rewards_teach=True,
  takes_kl_penalty=False,
  examples=(
    # z of the first reward (std 1, + 1) 1/2, -1/2 and of the second (std 2, + 1) -2/3, 2/3.
    # v = 1/2 - 4/3 = -5/6 and 5/6, whose standard deviation is 5/6.
    Example(
      {"scores": [[[2, 0], [0, 4], [None, None]]], "weights": (1.0, 2.0)},
      {"advantages": [[-0.625, 0.625, 0]]},
      {"std_ddof": 0, "std_eps": 1.0, "batch_std_eps": 0.5},
    ),
  ),
)


def _batch_whitened(
  x_PG: jax.Array, rewards: Rewards, mask_PGT: jax.Array, algo: BatchSettings, eps: float
) -> jax.Array:
  """(x - mean) / (standard deviation + eps) over the scored completions of the batch, [P, G]."""
  weights_PG = _batch_weights(mask_PGT, algo)
  std = masked.std(x_PG, rewards.scored_PG, algo.std_ddof, None, weights_PG)
  return masked.centered(x_PG, rewards.scored_PG, None, weights_PG) / (std + eps)


def _batch_weights(mask_PGT: jax.Array, algo: BatchSettings) -> jax.Array:
  """The weight of each completion in statistics of the batch, [P, G]: 1 or its length."""
  lengths_PG = mask_PGT.sum(-1)
  return lengths_PG if algo.batch_weighting == "token" else jnp.ones_like(lengths_PG)
