"""Advantages that compare a completion with its group or with the prompt's greedy completion.

If all rewards of a group are equal, advantages that read only the group are exactly 0. `reward`
compares with nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_jax import masked
from grpo_jax.algo.advantages.advantage import Advantage, StdSettings
from grpo_jax.algo.variant import Example, Records
from grpo_jax.lazy import jax, jnp
from grpo_jax.settings import Settings

if TYPE_CHECKING:
  from grpo_jax.types import Rewards

ADVANTAGES = Records[Advantage]()


def group_normalized(rewards: Rewards, mask_PGT: jax.Array, algo: StdSettings) -> jax.Array:
  """A = (r - mean_g) / (std_g + eps) (GRPO, DeepSeekMath 2402.03300, section 4.1.2).

  Args:
    rewards: The rewards of P prompts with G completions each.
    mask_PGT: The loss mask. Not read.

  Returns:
    Advantages [P, G].
  """
  del mask_PGT
  centered_PG = masked.centered(rewards.total_PG, rewards.scored_PG, 1)
  std_P1 = masked.std(rewards.total_PG, rewards.scored_PG, algo.std_ddof, 1)
  return centered_PG / (std_P1 + algo.std_eps)


ADVANTAGES["group_normalized"] = Advantage(
  compute=group_normalized,
  settings=StdSettings,
  examples=(
    # mean 1/2, std 1/2
    Example(
      {"scores": [[1, 1, 0, 0]]},
      {"advantages": [[1, 1, -1, -1]]},
      {"std_ddof": 0, "std_eps": 0.0},
    ),
    # mean 1/4, variance (9/16 + 3/16) / 3 = 1/4
    Example(
      {"scores": [[1, 0, 0, 0]]},
      {"advantages": [[1.5, -0.5, -0.5, -0.5]]},
      {"std_ddof": 1, "std_eps": 0.0},
    ),
    # eps 1/2 doubles the divisor of the example before
    Example(
      {"scores": [[1, 0, 0, 0]]}, {"advantages": [[0.75, -0.25, -0.25, -0.25]]}, {"std_eps": 0.5}
    ),
    # Completions without a score stay out of the statistics. Groups do not mix.
    Example(
      {"scores": [[2, None, 0, None], [None, None, None, 1]]},
      {"advantages": [[1, 0, -1, 0], [0, 0, 0, 0]]},
      {"std_ddof": 0, "std_eps": 0.0},
    ),
  ),
)


def group_normalized_each(rewards: Rewards, mask_PGT: jax.Array, algo: StdSettings) -> jax.Array:
  """A = sum_j weight_j (r_j - mean_g r_j) / (std_g r_j + eps), over the reward functions j.

  The scores of each function are normalised before they are added, so that no function dominates by
  its scale. This is GDPO 2601.05242 without the last step, which whitens A over the batch.

  Args:
    rewards: The rewards of P prompts with G completions each.
    mask_PGT: The loss mask. Not read.

  Returns:
    Advantages [P, G].
  """
  del mask_PGT
  return sum_of_normalized(rewards, algo)


def sum_of_normalized(rewards: Rewards, algo: StdSettings) -> jax.Array:
  """The weighted sum of the functions' scores, each normalised within its group, [P, G]."""
  scored_PGJ = ~jnp.isnan(rewards.scores_PGJ)
  std_P1J = masked.std(rewards.scores_PGJ, scored_PGJ, algo.std_ddof, 1)
  z_PGJ = masked.centered(rewards.scores_PGJ, scored_PGJ, 1) / (std_P1J + algo.std_eps)
  weights_J = jnp.asarray(rewards.weights, z_PGJ.dtype)
  return (weights_J * z_PGJ).sum(-1)


ADVANTAGES["group_normalized_each"] = Advantage(
  compute=group_normalized_each,
  settings=StdSettings,
  equal_rewards_teach=True,
  takes_kl_penalty=False,
  examples=(
    # z of the first function (std 1, + 1) 1/2, -1/2 and of the second (std 2, + 1) -2/3, 2/3.
    # In the second group the first function scores alike and the second one completion alone.
    Example(
      {
        "scores": [[[2, 0], [0, 4], [None, None]], [[1, None], [1, 3], [1, None]]],
        "weights": (1.0, 2.0),
      },
      {"advantages": [[1 / 2 - 4 / 3, -1 / 2 + 4 / 3, 0], [0, 0, 0]]},
      {"std_ddof": 0, "std_eps": 1.0},
    ),
  ),
)


def group_centered(rewards: Rewards, mask_PGT: jax.Array, algo: Settings) -> jax.Array:
  """A = r - mean_g (Dr. GRPO 2503.20783).

  Args:
    rewards: The rewards of P prompts with G completions each.
    mask_PGT: The loss mask. Not read.

  Returns:
    Advantages [P, G].
  """
  del mask_PGT
  return masked.centered(rewards.total_PG, rewards.scored_PG, 1)


ADVANTAGES["group_centered"] = Advantage(
  compute=group_centered,
  settings=Settings,
  examples=(
    Example(
      {"scores": [[1, 0, 0, 0], [5, None, 2, 5]]},
      {"advantages": [[0.75, -0.25, -0.25, -0.25], [1, 0, -2, 1]]},
    ),
  ),
)


def leave_one_out(rewards: Rewards, mask_PGT: jax.Array, algo: Settings) -> jax.Array:
  """A_i = r_i - mean of the others = G / (G - 1) (r_i - mean_g) (RLOO 2402.14740, eq. 6).

  Args:
    rewards: The rewards of P prompts with G completions each.
    mask_PGT: The loss mask. Not read.

  Returns:
    Advantages [P, G]. The only scored completion of a group gets 0.
  """
  del mask_PGT
  count_P1 = masked.count(rewards.scored_PG, 1, keepdims=True)
  centered_PG = masked.centered(rewards.total_PG, rewards.scored_PG, 1)
  return centered_PG * masked.divide(count_P1, count_P1 - 1)


ADVANTAGES["leave_one_out"] = Advantage(
  compute=leave_one_out,
  settings=Settings,
  examples=(
    Example({"scores": [[1, 0, 0, 0]]}, {"advantages": [[1, -1 / 3, -1 / 3, -1 / 3]]}),
    # 3 - (1 + 2) / 2, 1 - (3 + 2) / 2, 2 - (3 + 1) / 2, of the three that were scored
    Example(
      {"scores": [[3, 1, None, 2], [None, 7, None, None]]},
      {"advantages": [[1.5, -1.5, 0, 0], [0, 0, 0, 0]]},
    ),
    # The KL penalty of all tokens of a completion is taken from its reward: 1/2 and 0 remain.
    Example(
      {"scores": [[1, 1]], "kl_penalty": [[[0.25, 0.25, 0, 0], [0, 0, 0.5, 0.5]]]},
      {"advantages": [[0.5, -0.5]]},
    ),
  ),
)


def max_rl(rewards: Rewards, mask_PGT: jax.Array, algo: Settings) -> jax.Array:
  """A = (r - mean_g) / mean_g (MaxRL 2602.02710).

  With rewards of 0 and 1, the objective approaches the log-likelihood of a right answer as groups
  grow, and hard prompts weigh more. A group whose mean is not above 0 gets 0. A run stops at a
  negative reward: the mean is then no pass rate, and dividing by it may flip the sign.

  Args:
    rewards: The rewards of P prompts with G completions each.
    mask_PGT: The loss mask. Not read.

  Returns:
    Advantages [P, G].
  """
  del mask_PGT
  mean_P1 = masked.mean(rewards.total_PG, rewards.scored_PG, 1, keepdims=True)
  return masked.divide(masked.centered(rewards.total_PG, rewards.scored_PG, 1), mean_P1)


ADVANTAGES["max_rl"] = Advantage(
  compute=max_rl,
  settings=Settings,
  takes_kl_penalty=False,
  refuses_negative=True,
  examples=(
    # Means 1/4, 3/4 and 2/3 of the three that were scored. Without a right answer there is no mean.
    Example(
      {"scores": [[1, 0, 0, 0], [1, 1, 1, 0], [2, None, 0, 0], [0, 0, 0, 0]]},
      {
        "advantages": [
          [3, -1, -1, -1],
          [1 / 3, 1 / 3, 1 / 3, -1],
          [2, 0, -1, -1],
          [0, 0, 0, 0],
        ]
      },
    ),
    # A mean that is not above 0: no advantage.
    Example({"scores": [[-1, 1, 0], [-3, 1, 1]]}, {"advantages": [[0, 0, 0], [0, 0, 0]]}),
  ),
)


def reward(rewards: Rewards, mask_PGT: jax.Array, algo: Settings) -> jax.Array:
  """A = r, without a baseline: REINFORCE.

  With rewards of 0 and 1 and the surrogate `reinforce`, the gradient is that of supervised training
  on the right completions: rejection sampling, or expert iteration (RAFT 2304.06767; compared with
  GRPO in 2504.11343). So a group of right completions alone teaches, too.

  Args:
    rewards: The rewards of P prompts with G completions each.
    mask_PGT: The loss mask. Not read.

  Returns:
    Advantages [P, G].
  """
  del mask_PGT
  return masked.masked(rewards.total_PG, rewards.scored_PG)


ADVANTAGES["reward"] = Advantage(
  compute=reward,
  settings=Settings,
  equal_rewards_teach=True,
  examples=(
    # No group is compared with itself, and a completion without a score gets 0.
    Example(
      {"scores": [[1, 1, 1], [1, 0, None], [0, 0, -2]]},
      {"advantages": [[1, 1, 1], [1, 0, 0], [0, 0, -2]]},
    ),
    # The KL penalty of all tokens of a completion is taken from its reward.
    Example(
      {"scores": [[1, 1]], "kl_penalty": [[[0.25, 0.25, 0, 0], [0, 0, 0.5, 0.5]]]},
      {"advantages": [[0.5, 0]]},
    ),
  ),
)


def opo(rewards: Rewards, mask_PGT: jax.Array, algo: Settings) -> jax.Array:
  """A = r - sum(length r) / sum(length) over the group (OPO 2505.23585, eq. 5).

  The mean weighted by length is the baseline that makes the variance of the gradient smallest.

  Args:
    rewards: The rewards of P prompts with G completions each.
    mask_PGT: The loss mask, which gives the lengths.

  Returns:
    Advantages [P, G].
  """
  lengths_PG = mask_PGT.sum(-1)
  return masked.centered(rewards.total_PG, rewards.scored_PG, 1, lengths_PG)


ADVANTAGES["opo"] = Advantage(
  compute=opo,
  settings=Settings,
  examples=(
    # Baselines (1 + 0) / (1 + 3) = 1/4 and (3 + 0) / 4 = 3/4. The third completion has no score.
    Example(
      {"scores": [[1, 0, None], [0, 1, None]], "lengths": [[1, 3, 9], [1, 3, 9]]},
      {"advantages": [[0.75, -0.25, 0], [-0.75, 0.25, 0]]},
    ),
  ),
)


def greedy_baseline(rewards: Rewards, mask_PGT: jax.Array, algo: Settings) -> jax.Array:
  """A = r - reward of the prompt's greedy completion (ReMax 2310.10505, eq. 3).

  Args:
    rewards: The rewards of P prompts with G completions each, and of the greedy completions.
    mask_PGT: The loss mask. Not read.

  Returns:
    Advantages [P, G]. A prompt whose greedy completion has no score gets 0.
  """
  del mask_PGT
  baseline_P1 = rewards.greedy_score_P[:, None]
  both_scored_PG = rewards.scored_PG & ~jnp.isnan(baseline_P1)
  return masked.masked(rewards.total_PG - baseline_P1, both_scored_PG)


ADVANTAGES["greedy_baseline"] = Advantage(
  compute=greedy_baseline,
  settings=Settings,
  equal_rewards_teach=True,
  takes_kl_penalty=False,
  needs_greedy=True,
  examples=(
    Example(
      {"scores": [[1, 0, None], [1, 0, 0], [2, 2, 2]], "greedy_scores": [1, None, 0.5]},
      {"advantages": [[0, -1, 0], [0, 0, 0], [1.5, 1.5, 1.5]]},
    ),
  ),
)
