"""Surrogates that treat the tokens of highest covariance specially (Entropy mechanism 2505.22617).

The covariance of a token is (A - mean A)(lp - mean lp), with means over the tokens of the batch
(eq. 8). It is large if both the log-prob and the advantage are high, or both are low.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from grpo_jax import masked
from grpo_jax.algo.kl import absolute
from grpo_jax.algo.surrogates.clipped import PpoSettings, ppo_bounds, ppo_clip
from grpo_jax.algo.surrogates.surrogate import Surrogate
from grpo_jax.algo.variant import Example, Records, require
from grpo_jax.lazy import jax, jnp
from grpo_jax.settings import ANY, Settings, above, at_least, names_of, setting

if TYPE_CHECKING:
  from grpo_jax.algo.surrogates.terms import BatchTokens, Terms

SURROGATES = Records[Surrogate]()


@dataclasses.dataclass(frozen=True)
class CovarianceSettings(Settings):
  """How many tokens are treated specially."""

  cov_fraction: float = setting(
    2e-4, "clip_cov, kl_cov: the fraction of the tokens that is chosen", above(0)
  )


@dataclasses.dataclass(frozen=True)
class ClipCovSettings(CovarianceSettings, PpoSettings):
  """Settings of clip_cov."""

  cov_low: float = setting(1.0, "clip_cov: lower end of the band of covariances", ANY)
  cov_high: float = setting(5.0, "clip_cov: upper end of the band of covariances", ANY)


@dataclasses.dataclass(frozen=True)
class KlCovSettings(CovarianceSettings):
  """Settings of kl_cov."""

  cov_kl_coef: float = setting(
    1.0, "kl_cov: weight of the absolute log-ratio at the chosen tokens", at_least(0)
  )


def clip_cov(terms: Terms, algo: PpoSettings) -> jax.Array:
  """ppo_clip, but 0 at the chosen tokens (2505.22617, eq. 10-11).

  Args:
    terms: Arrays [P, G, T].

  Returns:
    The loss of each token, [P, G, T].
  """
  return jnp.where(terms.chosen_PGT != 0, 0, ppo_clip(terms, algo))


def clip_cov_select(tokens: BatchTokens, algo: ClipCovSettings) -> jax.Array:
  """Tokens with a covariance in (cov_low, cov_high) that PPO does not clip.

  At most `cov_fraction` of all tokens are chosen. The paper draws them at random. This function
  takes those of highest covariance, so that the choice does not depend on a seed.

  Args:
    tokens: The tokens of the whole batch, [P, G, T].

  Returns:
    bool [P, G, T]
  """
  covariance_PGT = _covariance(tokens)
  A_PGT, w_PGT = tokens.advantages_PGT, tokens.ratio_PGT
  clipped_up_PGT = (w_PGT > 1 + algo.clip_high) & (A_PGT > 0)
  clipped_down_PGT = (w_PGT < 1 - algo.clip_low) & (A_PGT < 0)
  in_band_PGT = (covariance_PGT > algo.cov_low) & (covariance_PGT < algo.cov_high)
  candidates_PGT = tokens.mask_PGT * (in_band_PGT & ~clipped_up_PGT & ~clipped_down_PGT)
  return _highest(covariance_PGT, candidates_PGT, _budget(tokens.mask_PGT, algo))


def _check(algo: ClipCovSettings) -> None:
  require(
    algo.cov_low < algo.cov_high,
    algo,
    "cov_low",
    f"it must be below algo.cov_high = {algo.cov_high}",
  )


# Means -3 and 0, so the covariances are 4, 1, 0 and 6. The last token is padding.
_TOKENS = {
  "lp": [-1, -2, -4, -5, -90],
  "A": [2, 1, 0, -3, 50],
  "w": [1, 1, 1, 1, 1],
  "mask": [1, 1, 1, 1, 0],
}

SURROGATES["clip_cov"] = Surrogate(
  loss=clip_cov,
  bounds=ppo_bounds,
  select=clip_cov_select,
  settings=ClipCovSettings,
  idle_at_ratio_one=names_of(PpoSettings),
  needs_lower_bound=True,
  check=_check,
  idle_without_advantage=True,
  examples=(
    Example(
      {
        "w": [1.1, 1.1, 0.9, 0.9, 1.5, 0.5],
        "A": [1, -1, 1, -1, 1, -1],
        "chosen": [1, 0, 0, 1, 0, 0],
      },
      {
        "loss": [0, 1.1, -0.9, 0, -1.2, 0.8],
        "gradient": [0, 1.1, -0.9, 0, 0, 0],
        "low": [0, 0, 0, 0, 0, 1],
        "high": [0, 0, 0, 0, 1, 0],
      },
    ),
    # Half of four tokens; 0 and 6 are outside the band.
    Example(
      _TOKENS, {"chosen": [1, 1, 0, 0, 0]}, {"cov_fraction": 0.5, "cov_low": 0.5, "cov_high": 5.0}
    ),
    # The ends of the band do not belong to it. A budget below one token is one token.
    Example(_TOKENS, {"chosen": [1, 0, 0, 0, 0]}, {"cov_low": 1.0, "cov_high": 6.0}),
    Example(_TOKENS, {"chosen": [0, 0, 0, 1, 0]}, {"cov_low": 4.0, "cov_high": 7.0}),
    # The first token is clipped at w 1.5; the fourth is clipped at w .5 and not at 1.5.
    Example(
      _TOKENS | {"w": [1.5, 1, 1, 0.5, 1]},
      {"chosen": [0, 1, 0, 0, 0]},
      {"cov_low": 0.5, "cov_high": 7.0},
    ),
    Example(
      _TOKENS | {"w": [0.5, 1, 1, 1.5, 1]},
      {"chosen": [1, 0, 0, 1, 0]},
      {"cov_fraction": 0.5, "cov_low": 0.5, "cov_high": 7.0},
    ),
    Example(
      _TOKENS | {"w": [1.15, 1, 1, 0.75, 1]},
      {"chosen": [0, 1, 0, 1, 0]},
      {"cov_fraction": 0.5, "cov_low": 0.5, "cov_high": 7.0, "clip_low": 0.3, "clip_high": 0.1},
    ),
  ),
)


def kl_cov(terms: Terms, algo: KlCovSettings) -> jax.Array:
  """-w A, plus cov_kl_coef |d| at the chosen tokens (2505.22617, eq. 12-13).

  The paper finds that the policy's entropy falls as fast as log-probs and advantages covary, and
  that few tokens cause most of this covariance. `kl_cov_select` chooses these tokens. `clip_cov`
  drops their gradient, while `kl_cov` keeps their log-probs near the old ones by the penalty
  |d| = |lp - old|. The penalty has no gradient where d is 0, as in the first update of a batch.

  Args:
    terms: Arrays [P, G, T].

  Returns:
    The loss of each token, [P, G, T].
  """
  loss_PGT = -terms.ratio_PGT * terms.advantages_PGT
  distance_PGT = absolute(terms.logprobs_PGT, terms.old_logprobs_PGT)
  penalty_PGT = algo.cov_kl_coef * distance_PGT
  return jnp.where(terms.chosen_PGT != 0, loss_PGT + penalty_PGT, loss_PGT)


def kl_cov_select(tokens: BatchTokens, algo: CovarianceSettings) -> jax.Array:
  """The `cov_fraction` of all tokens that have the highest covariance, bool [P, G, T]."""
  return _highest(_covariance(tokens), tokens.mask_PGT, _budget(tokens.mask_PGT, algo))


SURROGATES["kl_cov"] = Surrogate(
  loss=kl_cov,
  select=kl_cov_select,
  settings=KlCovSettings,
  idle_at_ratio_one=names_of(KlCovSettings),
  examples=(
    # 2 |d| = .8109302 and 1.3862944
    Example(
      {"w": [1.5, 0.5, 1.5, 0.5, 1], "A": [1, 1, -1, -1, 1], "chosen": [1, 0, 0, 1, 1]},
      {"loss": [-0.6890698, -0.5, 1.5, 1.8862944, -1], "gradient": [0.5, -0.5, 1.5, -1.5, -1]},
      {"cov_kl_coef": 2.0},
    ),
    Example(_TOKENS, {"chosen": [1, 0, 0, 1, 0]}, {"cov_fraction": 0.5}),
    Example(_TOKENS, {"chosen": [0, 0, 0, 1, 0]}),
    # Of equal covariances the first ones are chosen: a tenth of 30 tokens is 3.
    Example(
      {"lp": [-1] * 30, "A": [1] * 30, "w": [1] * 30, "mask": [1] * 30},
      {"chosen": [1] * 3 + [0] * 27},
      {"cov_fraction": 0.1},
    ),
  ),
)


def _covariance(tokens: BatchTokens) -> jax.Array:
  """The covariance of each token, 0 at padding."""
  return _deviation(tokens.advantages_PGT, tokens.mask_PGT) * _deviation(
    tokens.logprobs_PGT, tokens.mask_PGT
  )


def _deviation(x_PGT: jax.Array, mask_PGT: jax.Array) -> jax.Array:
  return masked.masked(x_PGT - masked.mean(x_PGT, mask_PGT), mask_PGT)


def _budget(mask_PGT: jax.Array, algo: CovarianceSettings) -> jax.Array:
  """The number of tokens to choose: max(1, floor(cov_fraction n)) of n tokens of the loss.

  The product is raised a little before it is rounded down, because in float32 0.1 * 30 is below 3.
  """
  return jnp.maximum(1, jnp.floor(algo.cov_fraction * masked.count(mask_PGT) * (1 + 1e-6)))


def _highest(x_PGT: jax.Array, mask_PGT: jax.Array, count: jax.Array) -> jax.Array:
  """True at the `count` entries with the highest x. Of equal ones, the first are taken."""
  # Padding sorts last, behind every token of the loss.
  order = jnp.argsort(jnp.where(mask_PGT != 0, -x_PGT, jnp.inf).ravel(), stable=True)
  rank = jnp.zeros(order.size, jnp.int32).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
  return (rank.reshape(x_PGT.shape) < count) & (mask_PGT != 0)
