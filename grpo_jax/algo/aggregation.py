"""Aggregations: (loss [P, G, T], mask) -> (sum, weight). The mean is sum / weight over the whole optimizer batch, so
sums and weights of any split of it add up."""
import jax

from grpo_jax import masked


def sequence_mean(x_PGT: jax.Array, mask_PGT: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Mean over sequences of their token mean (GRPO 2402.03300, eq. 3). A sequence with no loss token is not counted."""
  return masked.mean(x_PGT, mask_PGT, -1).sum(), (mask_PGT != 0).any(-1).sum()


AGGREGATIONS = {"sequence_mean": sequence_mean}
