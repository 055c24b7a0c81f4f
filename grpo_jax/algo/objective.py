"""The objective: J = agg( min(w A, clip(w) A) ) - kl_coef KL, and what it tells of itself."""
import jax
import jax.numpy as jnp

from grpo_jax import masked
from grpo_jax.algo.aggregation import AGGREGATIONS
from grpo_jax.algo.kl import KL
from grpo_jax.algo.ratios import RATIOS
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.config import Algo
from grpo_jax.types import Batch

Means = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, weight)


def objective(logprobs_PGT: jax.Array, batch: Batch, algo: Algo) -> tuple[jax.Array, jax.Array, Means]:
  """The loss as (sum, weight), and metrics likewise, of a batch or of any part of it (GRPO 2402.03300, eq. 3).

  One update per batch: old is the policy itself, so the ratio is 1 and carries only the gradient.
  """
  mask_PGT, advantages_PGT = batch.mask_PGT, batch.advantages_PG[..., None]
  logprobs_PGT = masked.masked(logprobs_PGT, mask_PGT)
  ratio_PGT = RATIOS[algo.ratio](logprobs_PGT, jax.lax.stop_gradient(logprobs_PGT), mask_PGT)
  loss_PGT = SURROGATES[algo.surrogate](ratio_PGT, advantages_PGT, algo)
  count = (mask_PGT != 0).sum()
  means = {}
  if algo.kl_coef:
    kl_PGT = KL[algo.kl](logprobs_PGT, masked.masked(batch.ref_logprobs_PGT, mask_PGT))
    loss_PGT = loss_PGT + algo.kl_coef * kl_PGT
    means["kl"] = masked.total(kl_PGT, mask_PGT), count
  low_PGT = (ratio_PGT < 1 - algo.clip_low) & (advantages_PGT < 0)
  high_PGT = (ratio_PGT > 1 + algo.clip_high) & (advantages_PGT > 0)
  for name, region_PGT in (("low", low_PGT), ("high", high_PGT), ("region", low_PGT | high_PGT)):
    means[f"clip_ratio/{name}_mean"] = masked.total(region_PGT.astype(jnp.float32), mask_PGT), count
  return *AGGREGATIONS[algo.aggregation](loss_PGT, mask_PGT), means
