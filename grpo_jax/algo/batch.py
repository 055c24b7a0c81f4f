"""The batch that an update learns from: which tokens are in the loss, and their advantages."""

import jax
import jax.numpy as jnp

from grpo_jax import masked
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.distillation import teacher_advantages
from grpo_jax.algo.kl import KL
from grpo_jax.algo.settings import Algo
from grpo_jax.types import Batch, Completions, Rewards


def to_batch(
  completions: Completions,
  prompts_PS: jax.Array,
  prompt_lengths_P: jax.Array,
  temperature_P: jax.Array,
  live_P: jax.Array,
  algo: Algo,
) -> Batch:
  """Builds a batch of completions, without advantages and reference log-probs.

  A token is in the loss if the policy drew it (tools write tokens, too), its group is live and
  `mask_truncated` does not leave out its completion. The old log-probs are the sampler's, under the
  whole softmax, until the learner computes its own. The behavior log-probs are under the
  distribution after top-k, top-p and min-p.

  Args:
    completions: G completions of each of P prompts.
    prompts_PS: int32, the prompts.
    prompt_lengths_P: int32, their lengths.
    temperature_P: float32, the temperature at which their completions were sampled.
    live_P: bool or a number for each group. 0 leaves the group out of the loss: it only fills the
      batch, because dynamic sampling found too few groups whose rewards differ.
    algo: Reads `mask_truncated`.
  """
  mask_PGT = completions.sampled_PGT & (live_P != 0)[:, None, None]
  if algo.mask_truncated:
    mask_PGT = mask_PGT & (completions.stopped_by_PG >= 0)[..., None]  # -1: cut off
  return Batch(
    prompts_PS=prompts_PS,
    prompt_lengths_P=prompt_lengths_P,
    completions_PGT=completions.tokens_PGT,
    mask_PGT=mask_PGT.astype(jnp.float32),
    temperature_P=temperature_P,
    sampler_logprobs_PGT=completions.logprobs_PGT,
    behavior_logprobs_PGT=completions.behavior_logprobs_PGT,
    old_logprobs_PGT=completions.logprobs_PGT,
    experts_PGTY=completions.experts_PGTY,
    prompt_experts_PSY=completions.prompt_experts_PSY,
  )


def with_advantages(
  batch: Batch, rewards: Rewards, kl_coef: jax.Array, algo: Algo, teacher_weight: float
) -> tuple[Batch, dict[str, jax.Array]]:
  """Adds the advantage of each token to a batch.

  Args:
    batch: The batch. It has reference log-probs if there is a KL in the reward, and the teacher's
      log-probs if there is a teacher.
    rewards: The rewards of the batch's rollouts.
    kl_coef: float32 scalar, the weight of a KL in the reward.
    algo: Names the advantage.
    teacher_weight: The weight of the teacher's advantages, if there is a teacher.

  Returns:
    The batch, without fields that only advantages need, and metrics as scalars by name.
  """
  mask_PGT, rollouts = batch.mask_PGT, rewards.scores_PGJ.shape[1]
  if algo.kl_in_reward:  # the checks of the config then refuse branches: each row is a rollout
    # The learner has not computed log-probs of its own yet.
    kl_PGT = KL[algo.kl].compute(batch.sampler_logprobs_PGT, batch.ref_logprobs_PGT)
    rewards = rewards.replace(kl_penalty_PGT=kl_coef * masked.masked(kl_PGT, mask_PGT))
  # The first rows of a group are its rollouts. Further rows are branches of rollouts, and share
  # their advantages.
  advantages = ADVANTAGES[algo.advantage].compute(rewards, mask_PGT[:, :rollouts], algo)
  if advantages.ndim == 2:  # one for all tokens of a completion
    advantages = advantages[..., None]
  if batch.rollout_PG is not None:
    advantages = jnp.take_along_axis(advantages, batch.rollout_PG[..., None], 1)
  advantages_PGT = mask_PGT * advantages
  teacher_metrics = {}
  if batch.teacher_logprobs_PGT is not None:
    gap_PGT = teacher_advantages(batch.teacher_logprobs_PGT, batch.sampler_logprobs_PGT, mask_PGT)
    advantages_PGT = advantages_PGT + teacher_weight * gap_PGT
    teacher_metrics["teacher/reverse_kl"] = -masked.mean(gap_PGT, mask_PGT)
  learns_PG = (advantages_PGT != 0).any(-1)
  deviations_PGT = advantages_PGT - masked.mean(advantages_PGT, mask_PGT)
  metrics = {
    "advantage/std": jnp.sqrt(masked.mean(deviations_PGT**2, mask_PGT)),
    "advantage/min": advantages_PGT.min(),
    "advantage/max": advantages_PGT.max(),
    "batch/completions": learns_PG.sum(),
    "batch/tokens": (learns_PG[..., None] * mask_PGT).sum(),
  }
  batch = batch.replace(advantages_PGT=advantages_PGT, teacher_logprobs_PGT=None, rollout_PG=None)
  return batch, metrics | teacher_metrics
