"""Aggregations: (values [P, G, T], mask, algo) -> (sum, weight). The mean is sum / weight over the whole optimizer batch.

Sums of any split of the batch add up, and so do weights, which depend on the mask alone. A sequence without a loss token
is not counted.
"""

import jax

from grpo_jax import masked
from grpo_jax.config import Algo

Mean = tuple[jax.Array, jax.Array]


def token_mean(x_PGT: jax.Array, mask_PGT: jax.Array, algo: Algo) -> Mean:
  """sum(x) / number of tokens (DAPO 2503.14476, eq. 12 over the batch)."""
  del algo
  return masked.total(x_PGT, mask_PGT), masked.count(mask_PGT)


def sequence_mean(x_PGT: jax.Array, mask_PGT: jax.Array, algo: Algo) -> Mean:
  """Mean over sequences of their token mean (GRPO 2402.03300, eq. 3)."""
  del algo
  return masked.mean(x_PGT, mask_PGT, -1).sum(), _sequences(mask_PGT)


def sequence_sum(x_PGT: jax.Array, mask_PGT: jax.Array, algo: Algo) -> Mean:
  """Mean over sequences of their token sum (RLOO 2402.14740; with ratio `sequence`, LUSPO 2602.05261)."""
  del algo
  return masked.total(x_PGT, mask_PGT), _sequences(mask_PGT)


def constant(x_PGT: jax.Array, mask_PGT: jax.Array, algo: Algo) -> Mean:
  """sum(x) / (sequences * length_norm): no length in the weight of a token (Dr. GRPO 2503.20783)."""
  return masked.total(x_PGT, mask_PGT), _sequences(mask_PGT) * algo.length_norm


def prompt_mean(x_PGT: jax.Array, mask_PGT: jax.Array, algo: Algo) -> Mean:
  """Mean over prompts of the token mean of their group (DAPO 2503.14476, eq. 8)."""
  del algo
  return masked.mean(x_PGT, mask_PGT, (1, 2)).sum(), (mask_PGT != 0).any((1, 2)).sum()


def _sequences(mask_PGT):
  return (mask_PGT != 0).any(-1).sum()


AGGREGATIONS = {
  "token_mean": token_mean,
  "sequence_mean": sequence_mean,
  "sequence_sum": sequence_sum,
  "constant": constant,
  "prompt_mean": prompt_mean,
}
