"""Advantages: what a completion is worth beside the others. Rewards -> [P, G], or [P, G, T] where its tokens differ.

A completion that no reward function scored (NaN) gets 0 and stays out of every mean and deviation. Where all rewards of
a group are equal, the advantages that only know the group are exactly 0.
"""

from typing import Callable

import jax
import jax.numpy as jnp

from grpo_jax import masked
from grpo_jax.config import Algo
from grpo_jax.types import Rewards


def group_normalized(r: Rewards, algo: Algo) -> jax.Array:
  """A = (r - mean_g) / (std_g + eps) (GRPO, DeepSeekMath 2402.03300, section 4.1.2).

  Worked, ddof 0: [1, 1, 0, 0] -> [1, 1, -1, -1]; ddof 1: [1, 0, 0, 0] -> [1.5, -.5, -.5, -.5].
  """
  x_PG, scored_PG = r.total_PG, r.scored_PG
  return masked.centered(x_PG, scored_PG, 1) / (
    masked.std(x_PG, scored_PG, algo.std_ddof, 1) + algo.std_eps
  )


def group_centered(r: Rewards, algo: Algo) -> jax.Array:
  """A = r - mean_g (Dr. GRPO 2503.20783)."""
  del algo
  return masked.centered(r.total_PG, r.scored_PG, 1)


def group_mean_batch_std(r: Rewards, algo: Algo) -> jax.Array:
  """A = (r - mean_g) / (std of the batch + eps) (LitePPO 2508.08221)."""
  std = masked.std(r.total_PG, r.scored_PG, algo.std_ddof, None, _batch_weights(r, algo))
  return masked.centered(r.total_PG, r.scored_PG, 1) / (std + algo.std_eps)


def leave_one_out(r: Rewards, algo: Algo) -> jax.Array:
  """A_i = r_i - mean of the others = G / (G - 1) (r_i - mean_g) (RLOO 2402.14740, eq. 6).

  Worked: [1, 0, 0, 0] -> [1, -1/3, -1/3, -1/3].
  """
  del algo
  count_P1 = masked.count(r.scored_PG, 1, keepdims=True)
  return masked.centered(r.total_PG, r.scored_PG, 1) * masked.divide(count_P1, count_P1 - 1)


def batch_normalized(r: Rewards, algo: Algo) -> jax.Array:
  """A = (r - mean) / (std + eps) over the batch, no group (REINFORCE++ 2501.03262).

  With a KL in the reward, [P, G, T]: r_t = score - the KL of token t and of those after it, over all tokens.
  """
  if r.penalty_PGT is None:
    return _batch_whitened(r.total_PG, r, algo)
  to_go_PGT = r.score_PG[..., None] - jnp.flip(jnp.cumsum(jnp.flip(r.penalty_PGT, -1), -1), -1)
  tokens_PGT = r.mask_PGT * r.scored_PG[..., None]
  return masked.centered(to_go_PGT, tokens_PGT) / (
    masked.std(to_go_PGT, tokens_PGT, algo.std_ddof) + algo.std_eps
  )


def group_centered_batch_whitened(r: Rewards, algo: Algo) -> jax.Array:
  """r - mean_g, then whitened over the batch (REINFORCE++-baseline 2501.03262)."""
  return _batch_whitened(masked.centered(r.total_PG, r.scored_PG, 1), r, algo)


def opo(r: Rewards, algo: Algo) -> jax.Array:
  """A = r - sum(length r) / sum(length) over the group: the baseline of least variance (OPO 2505.23585, eq. 5)."""
  del algo
  return masked.centered(r.total_PG, r.scored_PG, 1, r.lengths_PG)


def greedy_baseline(r: Rewards, algo: Algo) -> jax.Array:
  """A = r - reward of the prompt's greedy completion (ReMax 2310.10505, eq. 3)."""
  del algo
  return masked.masked(
    r.total_PG - r.greedy_P[:, None], r.scored_PG & ~jnp.isnan(r.greedy_P[:, None])
  )


def gdpo(r: Rewards, algo: Algo) -> jax.Array:
  """Each reward z-scored in its group, their weighted sum, then normalised over the batch (GDPO 2601.05242)."""
  x_KPG, scored_KPG = r.scores_KPG, ~jnp.isnan(r.scores_KPG)
  z_KPG = masked.centered(x_KPG, scored_KPG, 2) / (
    masked.std(x_KPG, scored_KPG, algo.std_ddof, 2) + algo.std_eps
  )
  v_PG = (r.weights_K[:, None, None] * z_KPG).sum(0)
  return _batch_whitened(v_PG, r, algo, algo.batch_std_eps)


def pass_at_k(r: Rewards, algo: Algo) -> jax.Array:
  """Advantages whose objective is pass@k (Pass@k training 2508.10751, eq. 12-15). A reward above 0 is a right answer.

  Of n answers, c are right: R = 1 - C(n-c, k) / C(n, k), s = sqrt(R (1 - R)); right: (1 - R) / (s + eps); wrong:
  (1 - R - C(n-c-1, k-1) / C(n-1, k-1)) / (s + eps); 0 where s is 0.
  Worked, n 8, k 4: c = 1 -> 1, -.14286; c = 2 -> .52223, -.17408; c = 4 -> .12039, -.12039.
  """
  right_PG = r.scored_PG & (r.total_PG > 0)
  n_P1, c_P1 = masked.count(r.scored_PG, 1, keepdims=True), masked.count(right_PG, 1, keepdims=True)
  none_right = lambda n, wrong, k: jnp.prod(
    jnp.stack(  # C(wrong, k) / C(n, k)
      [jnp.maximum(wrong - i, 0) / jnp.maximum(n - i, 1) for i in range(k)] or [jnp.ones(n.shape)]
    ),
    0,
  )
  reward_P1 = 1 - none_right(n_P1, n_P1 - c_P1, algo.pass_k)
  variance_P1 = reward_P1 * (1 - reward_P1)
  a_PG = (
    1 - reward_P1 - jnp.where(right_PG, 0, none_right(n_P1 - 1, n_P1 - c_P1 - 1, algo.pass_k - 1))
  )
  std_P1 = jnp.sqrt(jnp.where(variance_P1 > 0, variance_P1, 1)) + algo.std_eps
  return masked.masked(a_PG / std_P1, r.scored_PG & (variance_P1 > 0))


def process(r: Rewards, algo: Algo) -> jax.Array:
  """[P, G, T]: step rewards z-scored over all steps of the group; A_t = sum over the steps that end at or after t
  (DeepSeekMath 2402.03300, section 4.1.3).

  Worked, ddof 0: steps [1, 0] and [0, 1, 1] (mean .6, std .489898) -> [-.4082, -1.2247] and [.4082, 1.6330, .8165].
  """
  x_PGT, ends_PGT, group = r.step_rewards_PGT, r.step_ends_PGT, (1, 2)
  z_PGT = masked.centered(x_PGT, ends_PGT, group) / (
    masked.std(x_PGT, ends_PGT, algo.std_ddof, group) + algo.std_eps
  )
  return masked.masked(jnp.flip(jnp.cumsum(jnp.flip(z_PGT, -1), -1), -1), r.mask_PGT)


def _batch_whitened(x_PG, r, algo, eps=None):
  weights = _batch_weights(r, algo)
  std = masked.std(x_PG, r.scored_PG, algo.std_ddof, None, weights)
  return masked.centered(x_PG, r.scored_PG, None, weights) / (
    std + (algo.std_eps if eps is None else eps)
  )


def _batch_weights(r, algo):
  """In statistics of the batch a completion counts once, or once per token."""
  return {"sequence": jnp.ones_like(r.total_PG), "token": r.lengths_PG}[algo.batch_weighting]


ADVANTAGES: dict[str, Callable[[Rewards, Algo], jax.Array]] = {
  "group_normalized": group_normalized,
  "group_centered": group_centered,
  "group_mean_batch_std": group_mean_batch_std,
  "leave_one_out": leave_one_out,
  "batch_normalized": batch_normalized,
  "group_centered_batch_whitened": group_centered_batch_whitened,
  "opo": opo,
  "greedy_baseline": greedy_baseline,
  "gdpo": gdpo,
  "pass_at_k": pass_at_k,
  "process": process,
}
