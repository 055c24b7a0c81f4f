"""The inputs of a surrogate, for a part of a batch, and of a token selection, for all of it."""

from flax import struct
import jax


class Terms(struct.PyTreeNode):
  """The inputs of a surrogate, float32 [P, G, T] each.

  Attributes:
    logprobs_PGT: lp, 0 at padding.
    old_logprobs_PGT: old, 0 at padding.
    ratio_PGT: w, computed as `algo.ratio` says.
    advantages_PGT: A, 0 at padding.
    mask_PGT: The loss mask.
    weights_PGT: The weight of each token, from the token selection. 0 leaves a token out.
    chosen_PGT: 1 at the tokens that `Surrogate.select` chose.
    corrections_PGT: The weights of the correction, 1 without a correction.
    corrections_of_row: Whether all tokens of a row have the same correction.
  """

  logprobs_PGT: jax.Array
  old_logprobs_PGT: jax.Array
  ratio_PGT: jax.Array
  advantages_PGT: jax.Array
  mask_PGT: jax.Array
  weights_PGT: jax.Array
  chosen_PGT: jax.Array
  corrections_PGT: jax.Array
  corrections_of_row: bool = struct.field(pytree_node=False, default=False)

  @property
  def d_PGT(self) -> jax.Array:
    """lp - old."""
    return self.logprobs_PGT - self.old_logprobs_PGT


class BatchTokens(struct.PyTreeNode):
  """The numbers of a whole optimizer batch's tokens before the update, [P, G, T] each.

  Attributes:
    logprobs_PGT: The policy's log-probs.
    ratio_PGT: w, computed as `algo.ratio` says.
    entropies_PGT: Entropy of softmax(logits / temperature), before any filter of the sampler.
    advantages_PGT: A.
    mask_PGT: The loss mask.
  """

  logprobs_PGT: jax.Array
  ratio_PGT: jax.Array
  entropies_PGT: jax.Array
  advantages_PGT: jax.Array
  mask_PGT: jax.Array
