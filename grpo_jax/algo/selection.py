"""Which tokens are treated otherwise. It takes the whole optimizer batch to say so, so it is said before the update is
split into micro-batches. No gradient."""

import jax
import jax.numpy as jnp

from grpo_jax import masked
from grpo_jax.algo.ratios import RATIOS
from grpo_jax.config import Algo
from grpo_jax.types import Selection


def is_needed(algo: Algo) -> bool:
  """Whether the selection depends on the policy's log-probs and entropies."""
  return algo.top_entropy_quantile < 1 or algo.surrogate in CHOICES


def trivial(mask_PGT: jax.Array) -> Selection:
  """All kept, none chosen."""
  return Selection(mask_PGT, jnp.zeros_like(mask_PGT))


def select(logprobs_PGT, old_PGT, entropies_PGT, advantages_PGT, mask_PGT, algo: Algo) -> Selection:
  """The selection of a whole batch, all arguments [P, G, T]."""
  selection = trivial(mask_PGT)
  if algo.top_entropy_quantile < 1:
    selection = selection.replace(
      kept_PGT=most_uncertain(entropies_PGT, mask_PGT, algo.top_entropy_quantile)
    )
  if algo.surrogate in CHOICES:
    # Covariance of a token: how much its log-prob and its advantage are high together (2505.22617, eq. 8).
    covariance_PGT = _deviation(advantages_PGT, mask_PGT) * _deviation(logprobs_PGT, mask_PGT)
    ratio_PGT = RATIOS[algo.ratio](logprobs_PGT, old_PGT, mask_PGT)
    chosen_PGT = CHOICES[algo.surrogate](covariance_PGT, ratio_PGT, advantages_PGT, mask_PGT, algo)
    selection = selection.replace(chosen_PGT=chosen_PGT.astype(mask_PGT.dtype))
  return jax.lax.stop_gradient(selection)


def most_uncertain(entropies_PGT: jax.Array, mask_PGT: jax.Array, share: float) -> jax.Array:
  """The mask of the `share` of tokens with the highest entropy: from its (1 - share) quantile on (2506.01939, eq. 5)."""
  entropies = jnp.where(mask_PGT != 0, entropies_PGT, jnp.nan)
  return mask_PGT * (entropies_PGT >= jnp.nanquantile(entropies, 1 - share))


def clip_cov(covariance_PGT, ratio_PGT, advantages_PGT, mask_PGT, algo: Algo) -> jax.Array:
  """Tokens with covariance in (cov_low, cov_high) that PPO does not clip: of them, at most cov_fraction of all tokens.
  The paper draws those at random; here they are the ones of highest covariance, whatever the seed."""
  clipped = (ratio_PGT > 1 + algo.clip_high) & (advantages_PGT > 0) | (
    ratio_PGT < 1 - algo.clip_low
  ) & (advantages_PGT < 0)
  band = (covariance_PGT > algo.cov_low) & (covariance_PGT < algo.cov_high) & ~clipped
  return _highest(covariance_PGT, mask_PGT * band, _budget(mask_PGT, algo))


def kl_cov(covariance_PGT, ratio_PGT, advantages_PGT, mask_PGT, algo: Algo) -> jax.Array:
  """The cov_fraction of all tokens that have the highest covariance."""
  del ratio_PGT, advantages_PGT
  return _highest(covariance_PGT, mask_PGT, _budget(mask_PGT, algo))


CHOICES = {"clip_cov": clip_cov, "kl_cov": kl_cov}


def _deviation(x_PGT, mask_PGT):
  return masked.masked(x_PGT - masked.mean(x_PGT, mask_PGT), mask_PGT)


def _budget(mask_PGT, algo):
  """max(1, floor(cov_fraction n)); a hair more than the product, as float32 has 0.1 * 30 below 3."""
  return jnp.maximum(1, jnp.floor(algo.cov_fraction * masked.count(mask_PGT) * (1 + 1e-6)))


def _highest(x_PGT, mask_PGT, count):
  """Mask of the `count` entries with the highest x; of equal ones, those that come first."""
  order = jnp.argsort(jnp.where(mask_PGT != 0, -x_PGT, jnp.inf).ravel(), stable=True)
  rank = jnp.zeros(order.size, jnp.int32).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
  return (rank.reshape(x_PGT.shape) < count) & (mask_PGT != 0)
