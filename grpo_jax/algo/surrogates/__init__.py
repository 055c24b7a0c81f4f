"""Surrogates: the loss of a token.

To add one, write its function and its record into one of the files of this folder.
"""

from grpo_jax.algo.surrogates import averaged, clipped, covariance, divergence, weighted
from grpo_jax.algo.surrogates.record import BatchTokens, Surrogate, Terms

__all__ = ["SURROGATES", "BatchTokens", "Surrogate", "Terms"]

SURROGATES: dict[str, Surrogate] = (
  clipped.SURROGATES
  | weighted.SURROGATES
  | averaged.SURROGATES
  | covariance.SURROGATES
  | divergence.SURROGATES
)
