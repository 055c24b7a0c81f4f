"""The objective that an update minimises, and its metrics.

J = agg(surrogate - kl_coef KL) + entropy_coef H, and the loss is -J. The divisors of the means
(`totals`) and the token selection are computed before a batch is split into micro-batches, so that
the losses of the micro-batches add up to the loss of the batch.
"""

import dataclasses

from flax import struct
import jax
import jax.numpy as jnp

from grpo_jax import masked
from grpo_jax.algo import metrics as metrics_lib
from grpo_jax.algo.aggregation import AGGREGATIONS
from grpo_jax.algo.corrections import LEVELS, correction_weights, importance
from grpo_jax.algo.kl import KL
from grpo_jax.algo.metrics import Metrics
from grpo_jax.algo.ratios import RATIOS
from grpo_jax.algo.settings import Algo
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.algo.surrogates.terms import Terms
from grpo_jax.algo.token_selection.select import trivial
from grpo_jax.types import Batch, Coefficients, TokenStats

sg = jax.lax.stop_gradient


class Totals(struct.PyTreeNode):
  """Numbers of a whole optimizer batch, which all of its micro-batches use.

  Attributes:
    loss_weight: float32 scalar, the divisor of the summed loss of the batch.
    entropy_weight: float32 scalar, the divisor of the summed entropy: the number of tokens that the
      token selection does not leave out.
    coefs: The coefficients of this update.
  """

  loss_weight: jax.Array
  entropy_weight: jax.Array
  coefs: Coefficients


def totals(batch: Batch, coefs: Coefficients, algo: Algo) -> Totals:
  """The divisors and coefficients of a whole optimizer batch, for `objective` on micro-batches.

  Args:
    batch: The whole batch. Its mask and its selection are read.
    coefs: The coefficients of this update.
    algo: Names the aggregation.

  Returns:
    The totals.
  """
  mask_PGT = batch.mask_PGT
  selection = batch.selection or trivial(mask_PGT)
  # The weight depends on the mask alone, so zeros stand for the values.
  _, loss_weight = AGGREGATIONS[algo.aggregation].compute(jnp.zeros_like(mask_PGT), mask_PGT, algo)
  return Totals(
    loss_weight=loss_weight, entropy_weight=masked.count(selection.weights_PGT), coefs=coefs
  )


def without_idle_groups(batch: Batch, algo: Algo) -> Batch:
  """Removes groups without a gradient from the loss mask, so that they need not be computed.

  A group whose completions all have the same reward has advantages of 0. If the surrogate is the
  only term of `objective`, such a group has no gradient. It still counts in the divisors, because
  `totals` is called first.

  Args:
    batch: The whole batch, with advantages.
    algo: Says whether groups can be idle.

  Returns:
    The batch, with a mask of 0 for the groups that are left out.
  """
  if not algo.has_idle_groups:
    return batch
  learns_P = (masked.masked(batch.advantages_PGT, batch.mask_PGT) != 0).any((1, 2))
  return batch.replace(mask_PGT=batch.mask_PGT * learns_P[:, None, None])


def objective(
  stats: TokenStats, batch: Batch, of_batch: Totals, algo: Algo
) -> tuple[jax.Array, Metrics]:
  """The loss of a batch or micro-batch (GRPO 2402.03300, eq. 3, and its family).

  The order of the computation is:

  1. The surrogate, such as `ppo_clip` in surrogates/clipped.py. If its record says so, it applies
     the weights of 3 or 4 itself.
  2. The loss becomes 0 where A < 0 in rows that are too far off-policy.
  3. The weights of the token selection.
  4. The weights of the correction.
  5. The KL term.
  6. The aggregation. It counts every token of the loss, even with weight 0.
  7. The entropy bonus.

  Args:
    stats: The learner's results for the tokens of `batch`, with gradients.
    batch: The batch or micro-batch, with advantages and token selection.
    of_batch: The totals of the whole batch.
    algo: The `Algo` of the run.

  Returns:
    The loss, a scalar to be summed over micro-batches, and the metrics.
  """
  terms = _terms(stats.logprobs_PGT, batch, algo)
  loss_PGT = _surrogate_loss(terms, batch, algo)
  metrics = _metrics(terms, stats.entropies_PGT, batch, algo)
  if algo.uses_reference:
    kl_PGT = _kl(terms, stats, batch, algo)
    metrics["kl"] = metrics_lib.mean(kl_PGT, terms.mask_PGT)
    if not algo.kl_in_reward:  # otherwise the advantages contain it
      if algo.kl_importance_weighted:
        # Keeps the KL unbiased when pi has moved away from old (DeepSeek-V3.2 2512.02556).
        kl_PGT = kl_PGT * jnp.exp(terms.d_PGT)
      loss_PGT = loss_PGT + of_batch.coefs.kl * kl_PGT
  loss_sum, _ = AGGREGATIONS[algo.aggregation].compute(loss_PGT, terms.mask_PGT, algo)
  loss = masked.divide(loss_sum, of_batch.loss_weight)
  if algo.has_entropy_bonus:
    entropy_sum = masked.total(stats.entropies_PGT, terms.weights_PGT)
    loss = loss - of_batch.coefs.entropy * masked.divide(entropy_sum, of_batch.entropy_weight)
  return loss, metrics


def _terms(logprobs_PGT: jax.Array, batch: Batch, algo: Algo) -> Terms:
  """Computes the inputs of the surrogate, such as the ratio of each token.

  Args:
    logprobs_PGT: The policy's log-probs, with gradients.
    batch: The batch or micro-batch.
    algo: The `Algo` of the run.
  """
  mask_PGT = batch.mask_PGT
  selection = batch.selection or trivial(mask_PGT)
  logprobs_PGT = masked.masked(logprobs_PGT, mask_PGT)
  if batch.old_logprobs_PGT is None:
    # The old policy is the current one: the ratio is 1 and carries only the gradient.
    old_logprobs_PGT = sg(logprobs_PGT)
  else:
    old_logprobs_PGT = masked.masked(batch.old_logprobs_PGT, mask_PGT)
  terms = Terms(
    logprobs_PGT=logprobs_PGT,
    old_logprobs_PGT=old_logprobs_PGT,
    ratio_PGT=RATIOS[algo.ratio].compute(logprobs_PGT, old_logprobs_PGT, mask_PGT),
    advantages_PGT=masked.masked(batch.advantages_PGT, mask_PGT),
    mask_PGT=mask_PGT,
    weights_PGT=selection.weights_PGT,
    chosen_PGT=selection.chosen_PGT,
    corrections_PGT=jnp.ones_like(mask_PGT),
  )
  if not algo.has_correction:
    return terms
  mu_PGT = _behavior_logprobs(terms, batch)  # the `terms` without corrections suffice for it
  corrections_PGT = correction_weights(old_logprobs_PGT, mu_PGT, mask_PGT, algo)
  of_row = LEVELS[algo.correction_level].shared_by_row
  return dataclasses.replace(terms, corrections_PGT=corrections_PGT, corrections_of_row=of_row)


def _surrogate_loss(terms: Terms, batch: Batch, algo: Algo) -> jax.Array:
  """The loss of each token before the KL term, [P, G, T]."""
  surrogate = SURROGATES[algo.surrogate]
  loss_PGT = surrogate.loss(terms, algo)
  if algo.off_policy_threshold:  # rows that became too unlikely are not pushed down any further
    gap_PGT = _behavior_logprobs(terms, batch) - sg(terms.logprobs_PGT)
    drift_PG1 = masked.mean(gap_PGT, terms.mask_PGT, -1, keepdims=True)
    dropped_PGT = (terms.advantages_PGT < 0) & (drift_PG1 > algo.off_policy_threshold)
    loss_PGT = jnp.where(dropped_PGT, 0, loss_PGT)
  if not surrogate.weighs_tokens_itself:
    # A loss that is not finite times a weight of 0 is NaN. `masked` makes it 0.
    loss_PGT = masked.masked(loss_PGT * terms.weights_PGT, terms.weights_PGT)
  if not surrogate.applies_correction_itself:
    loss_PGT = loss_PGT * terms.corrections_PGT
  return loss_PGT


def _kl(terms: Terms, stats: TokenStats, batch: Batch, algo: Algo) -> jax.Array:
  """The KL to the reference at each token, [P, G, T], 0 outside of the loss."""
  if algo.needs_full_kl:
    return masked.masked(stats.full_kl_PGT, terms.mask_PGT)
  ref_logprobs_PGT = masked.masked(batch.ref_logprobs_PGT, terms.mask_PGT)
  return KL[algo.kl].compute(terms.logprobs_PGT, ref_logprobs_PGT)


def _behavior_logprobs(terms: Terms, batch: Batch) -> jax.Array:
  """mu, the log-probs under the distribution that the tokens were drawn from."""
  if batch.behavior_logprobs_PGT is None:
    return terms.old_logprobs_PGT
  return masked.masked(batch.behavior_logprobs_PGT, terms.mask_PGT)


def _metrics(terms: Terms, entropies_PGT: jax.Array, batch: Batch, algo: Algo) -> Metrics:
  """Metrics over the tokens of the loss, in a form that can be merged over micro-batches."""
  mask_PGT = terms.mask_PGT
  metrics = {
    "entropy": metrics_lib.mean(entropies_PGT, mask_PGT),
    "ratio/mean": metrics_lib.mean(terms.ratio_PGT, mask_PGT),
    "ratio/max": metrics_lib.largest(terms.ratio_PGT, mask_PGT),
    "ratio/min": metrics_lib.smallest(terms.ratio_PGT, mask_PGT),
    "ratio/ess": metrics_lib.effective(terms.ratio_PGT, mask_PGT),
  }
  bounds = SURROGATES[algo.surrogate].bounds
  if bounds is not None:
    low_PGT, high_PGT = bounds(terms, algo)
    metrics |= {
      "clip_ratio/low_mean": metrics_lib.mean(low_PGT, mask_PGT),
      "clip_ratio/high_mean": metrics_lib.mean(high_PGT, mask_PGT),
      "clip_ratio/region_mean": metrics_lib.mean(low_PGT | high_PGT, mask_PGT),
    }
  if batch.selection is not None:
    metrics |= {
      "selection/kept": metrics_lib.mean(terms.weights_PGT != 0, mask_PGT),
      "selection/chosen": metrics_lib.mean(terms.chosen_PGT != 0, mask_PGT),
    }
  if algo.has_correction:
    mu_PGT = _behavior_logprobs(terms, batch)
    raw_PGT = importance(terms.old_logprobs_PGT, mu_PGT, mask_PGT, algo)
    metrics |= {
      "correction/weight_mean": metrics_lib.mean(terms.corrections_PGT, mask_PGT),
      "correction/changed": metrics_lib.mean(terms.corrections_PGT != raw_PGT, mask_PGT),
      "correction/raw_mean": metrics_lib.mean(raw_PGT, mask_PGT),
      "correction/raw_max": metrics_lib.largest(raw_PGT, mask_PGT),
      "correction/ess": metrics_lib.effective(raw_PGT, mask_PGT),
    }
  return metrics
