"""The structs that cross rooms, and the legend of the shapes in names.

P prompts · G group · S prompt tokens · T completion tokens · V vocabulary · D model · F feed-forward · L layers ·
H query heads · K kv heads, or reward functions · R = H / K · E head dim · B rows (P * G, group-major) · C cache slots ·
X experts · A experts of a token · M feed-forward of an expert · N labels of a reward model.

One alignment: `logprobs_PGT[..., t]` is the log-prob of completion token t given all before it. Prompts and completions
are right-padded. A completion includes the token that stopped it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Completions:
  """What the sampler returns. At padding, tokens are 0 and log-probs 0."""

  tokens_PGT: jax.Array  # int32
  lengths_PG: jax.Array  # int32, tokens sampled, the stopping one included
  logprobs_PGT: jax.Array  # float32, of softmax(logits / temperature): what the learner recomputes
  sampling_logprobs_PGT: jax.Array  # float32, of the filtered distribution the token was drawn from
  stopped_by_PG: jax.Array  # int32, the stop id that ended the row; -1 = cut off at T tokens


@struct.dataclass
class Rewards:
  """What advantages are computed from. NaN: not scored."""

  scores_KPG: jax.Array  # float32, of each of the K reward functions
  weights_K: jax.Array  # float32
  mask_PGT: jax.Array  # 1 on the tokens of the loss
  greedy_P: jax.Array | None = (
    None  # total reward of each prompt's greedy completion, for `greedy_baseline`
  )
  penalty_PGT: jax.Array | None = (
    None  # what is taken from the reward at each token: a KL, 0 at padding
  )
  step_rewards_PGT: jax.Array | None = (
    None  # for `process`: the reward of the step that ends at this token
  )
  step_ends_PGT: jax.Array | None = None  # 1 where a step ends

  @property
  def scored_PG(self) -> jax.Array:
    """Completions that at least one function scored."""
    return ~jnp.isnan(self.scores_KPG).all(0)

  @property
  def score_PG(self) -> jax.Array:
    """Weighted sum over the functions that scored it. NaN where none did."""
    return jnp.where(
      self.scored_PG, jnp.nansum(self.weights_K[:, None, None] * self.scores_KPG, 0), jnp.nan
    )

  @property
  def total_PG(self) -> jax.Array:
    """The score, less the penalty of all its tokens."""
    return self.score_PG if self.penalty_PGT is None else self.score_PG - self.penalty_PGT.sum(-1)

  @property
  def lengths_PG(self) -> jax.Array:
    """Tokens of the loss."""
    return self.mask_PGT.sum(-1)


@struct.dataclass
class Scores:
  """What was scored on the host. NaN: not scored."""

  scores_PGK: jax.Array  # float32, of each of the K reward functions
  greedy_P1K: jax.Array | None = None  # of each prompt's greedy completion
  step_rewards_PGT: jax.Array | None = None  # as in `Rewards`
  step_ends_PGT: jax.Array | None = None


@struct.dataclass
class Routing:
  """What the routers of L sparse layers did with the tokens that count: sums over those of a row, or of a prompt's group."""

  tokens_BL: jax.Array  # float32, how many
  given_BLX: jax.Array  # float32, how many each expert was given
  probs_BLX: jax.Array  # float32, of the routers' probabilities
  entropy_BL: jax.Array  # float32, of their entropies; no gradient


@struct.dataclass
class TokenStats:
  """What the learner computes of a batch's completion tokens, float32, 0 at padding."""

  logprobs_PGT: jax.Array
  entropies_PGT: jax.Array  # of the distribution that the token is from
  full_kl_PGT: jax.Array | None = (
    None  # KL(pi || ref) of that distribution; None where not asked for
  )
  routing: Routing | None = None  # of each prompt's group; None where the model has no experts


@struct.dataclass
class Selection:
  """Masks [P, G, T], within the loss mask, of tokens that the objective treats otherwise."""

  kept_PGT: jax.Array  # those whose surrogate counts
  chosen_PGT: jax.Array  # those that clip_cov leaves out or kl_cov pulls back


@struct.dataclass
class Batch:
  """What one update learns from. Log-probs as in `Completions`."""

  prompts_PS: jax.Array  # int32
  prompt_lengths_P: jax.Array  # int32
  completions_PGT: jax.Array  # int32
  mask_PGT: jax.Array  # float32, 1 on the tokens of the loss: those the policy sampled
  advantages_PGT: jax.Array | None  # float32; None while not known, and in the warm start
  sampler_logprobs_PGT: (
    jax.Array | None
  )  # float32, the sampler's `logprobs_PGT`; None in the warm start
  sampling_logprobs_PGT: jax.Array | None = None  # float32, mu, the sampler's; None = as old
  old_logprobs_PGT: jax.Array | None = (
    None  # float32, of the policy before the batch's first update; None = of this one
  )
  ref_logprobs_PGT: jax.Array | None = (
    None  # float32, of the frozen reference; None where no KL asks for it
  )
  selection: Selection | None = None  # None = every token of the loss kept, none chosen
  routing: Routing | None = (
    None  # of each prompt's group before the update, where a part has to know that of all; else None
  )


@struct.dataclass
class Coefs:
  """Coefficients that may follow what is measured, float32 scalars."""

  kl: jax.Array
  entropy: jax.Array


@struct.dataclass
class TrainState:
  """All that training changes."""

  step: jax.Array  # int32 scalar, updates done (skipped ones count)
  params: Any
  opt_state: Any
  coefs: Coefs
  reference: Any = None  # parameters of the reference, where algo.ref_sync_steps moves it; else it is kept elsewhere
