"""The inputs of a surrogate for a micro-batch, and of a token selection for a whole batch."""

from flax import struct
import jax


class Terms(struct.PyTreeNode):
  """The inputs of a surrogate, float32 [P, G, T] each.

  Attributes:
    logprobs_PGT: lp, the policy's log-probs, with gradients. 0 outside of the loss.
    old_logprobs_PGT: old, the log-probs before the update. 0 outside of the loss.
    ratio_PGT: w, the ratio that `algo.ratio` names.
    advantages_PGT: A, the advantages. 0 outside of the loss.
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
    """lp - old, the log-ratio of each token."""
    return self.logprobs_PGT - self.old_logprobs_PGT


class BatchTokens(struct.PyTreeNode):
  """The inputs of a token selection for a whole optimizer batch, [P, G, T] each.

  Attributes:
    logprobs_PGT: The policy's log-probs before the update.
    ratio_PGT: w, the ratio that `algo.ratio` names.
    entropies_PGT: Entropy of softmax(logits / temperature), before any filter of the sampler.
    advantages_PGT: A, the advantages.
    mask_PGT: The loss mask.
  """

  logprobs_PGT: jax.Array
  ratio_PGT: jax.Array
  entropies_PGT: jax.Array
  advantages_PGT: jax.Array
  mask_PGT: jax.Array
