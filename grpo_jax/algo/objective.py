"""The objective, J = agg( surrogate - kl_coef KL ) + entropy_coef H, and what it tells of itself.

A batch may come in parts. What takes all of it to know, the weights of the means (`whole`) and the selection of tokens,
is given, so that the parts' shares of the loss add up to the whole's.
"""

import jax
import jax.numpy as jnp
from flax import struct

from grpo_jax import masked
from grpo_jax.algo import selection as selection_lib
from grpo_jax.algo.aggregation import AGGREGATIONS
from grpo_jax.algo.corrections import correction_weights, importance
from grpo_jax.algo.kl import KL
from grpo_jax.algo.ratios import RATIOS
from grpo_jax.algo.surrogates import BOUNDS, SURROGATES, Terms
from grpo_jax.config import Algo
from grpo_jax.types import Batch, Coefs, Routing, TokenStats

sg = jax.lax.stop_gradient


@struct.dataclass
class Whole:
  """What the parts of an optimizer batch have in common."""

  loss_weight: jax.Array  # of the aggregation
  entropy_weight: jax.Array  # tokens kept
  coefs: Coefs


@struct.dataclass
class Told:
  """Metrics of a part of a batch."""

  means: dict[str, tuple[jax.Array, jax.Array]]  # (sum, weight)
  maxima: dict[str, jax.Array]
  minima: dict[str, jax.Array]
  routing: Routing | None = None  # of each prompt's group, with its gradient


def has_entropy_bonus(algo: Algo) -> bool:
  """Whether the entropy needs a gradient."""
  return bool(algo.entropy_coef or algo.entropy_target)


def whole(batch: Batch, coefs: Coefs, algo: Algo) -> Whole:
  """Of a whole optimizer batch."""
  kept_PGT = batch.mask_PGT if batch.selection is None else batch.selection.kept_PGT
  weight = AGGREGATIONS[algo.aggregation](jnp.zeros_like(batch.mask_PGT), batch.mask_PGT, algo)[1]
  return Whole(weight, masked.count(kept_PGT), coefs)


def objective(stats: TokenStats, batch: Batch, of_all: Whole, algo: Algo) -> tuple[jax.Array, Told]:
  """A part's share of the loss of the whole batch, to be minimised (GRPO 2402.03300, eq. 3, and its family).

  The order: surrogate; rows too far off-policy and tokens of low entropy count 0; weights of the correction; KL;
  aggregation, whose weight counts every token of the loss; entropy bonus.
  """
  x = _terms(stats.logprobs_PGT, batch, algo)
  loss_PGT = SURROGATES[algo.surrogate](x, algo)
  if algo.off_policy_threshold:
    drift_PG1 = masked.mean(_mu(x, batch) - sg(x.logprobs_PGT), x.mask_PGT, -1, keepdims=True)
    loss_PGT = jnp.where(
      (x.advantages_PGT < 0) & (drift_PG1 > algo.off_policy_threshold), 0, loss_PGT
    )
  if algo.surrogate != "gmpo":  # there, the kept tokens are those of the geometric mean
    loss_PGT = masked.masked(loss_PGT, x.kept_PGT)
  if algo.surrogate != "vespo":  # there, the weights are in the sequence's weight
    loss_PGT = loss_PGT * x.weights_PGT
  told = _told(x, stats.entropies_PGT, batch, algo)
  if algo.kl_coef:
    kl_PGT = _kl(x, stats, batch, algo)
    told.means["kl"] = masked.total(sg(kl_PGT), x.mask_PGT), masked.count(x.mask_PGT)
    if algo.kl_importance_weighted:  # DeepSeek-V3.2 2512.02556: unbiased where pi is no longer old
      kl_PGT = kl_PGT * jnp.exp(x.d_PGT)
    if algo.kl_in == "loss":  # else the rewards have it
      loss_PGT = loss_PGT + of_all.coefs.kl * kl_PGT
  loss = masked.divide(
    AGGREGATIONS[algo.aggregation](loss_PGT, x.mask_PGT, algo)[0], of_all.loss_weight
  )
  if has_entropy_bonus(algo):
    entropy = masked.divide(masked.total(stats.entropies_PGT, x.kept_PGT), of_all.entropy_weight)
    loss = loss - of_all.coefs.entropy * entropy
  return loss, told


def _terms(logprobs_PGT, batch, algo):
  mask_PGT = batch.mask_PGT
  selection = batch.selection or selection_lib.trivial(mask_PGT)
  logprobs_PGT = masked.masked(logprobs_PGT, mask_PGT)
  # One update per batch: old is the policy itself, so that the ratio is 1 and carries only the gradient.
  old_PGT = (
    sg(logprobs_PGT)
    if batch.old_logprobs_PGT is None
    else masked.masked(batch.old_logprobs_PGT, mask_PGT)
  )
  ratio_PGT = RATIOS[algo.ratio](logprobs_PGT, old_PGT, mask_PGT)
  x = Terms(
    logprobs_PGT,
    old_PGT,
    ratio_PGT,
    masked.masked(batch.advantages_PGT, mask_PGT),
    mask_PGT,
    selection.kept_PGT,
    selection.chosen_PGT,
    jnp.ones_like(mask_PGT),
  )
  if algo.correction == "none":
    return x
  return x.replace(weights_PGT=correction_weights(old_PGT, _mu(x, batch), mask_PGT, algo))


def _kl(x, stats, batch, algo):
  if stats.full_kl_PGT is not None:
    return masked.masked(stats.full_kl_PGT, x.mask_PGT)
  return KL[algo.kl](x.logprobs_PGT, masked.masked(batch.ref_logprobs_PGT, x.mask_PGT))


def _mu(x, batch):
  given = batch.sampling_logprobs_PGT
  return x.old_logprobs_PGT if given is None else masked.masked(given, x.mask_PGT)


def _told(x, entropies_PGT, batch, algo):
  mask_PGT, ratio_PGT, count = x.mask_PGT, sg(x.ratio_PGT), masked.count(x.mask_PGT)
  mean = lambda x_PGT: (masked.total(x_PGT.astype(mask_PGT.dtype), mask_PGT), count)
  means = {"entropy": mean(sg(entropies_PGT)), "ratio/mean": mean(ratio_PGT)}
  if algo.surrogate in BOUNDS:
    low_PGT, high_PGT = sg(BOUNDS[algo.surrogate](x, algo))
    means |= {
      "clip_ratio/low_mean": mean(low_PGT),
      "clip_ratio/high_mean": mean(high_PGT),
      "clip_ratio/region_mean": mean(low_PGT | high_PGT),
    }
  if batch.selection is not None:
    means |= {"selection/kept": mean(x.kept_PGT != 0), "selection/chosen": mean(x.chosen_PGT != 0)}
  if algo.correction != "none":
    raw_PGT = importance(x.old_logprobs_PGT, _mu(x, batch), mask_PGT, algo)
    means |= {
      "correction/weight_mean": mean(x.weights_PGT),
      "correction/changed": mean(x.weights_PGT != raw_PGT),
    }
  return Told(
    means,
    {"ratio/max": masked.largest(ratio_PGT, mask_PGT)},
    {"ratio/min": masked.smallest(ratio_PGT, mask_PGT)},
  )
