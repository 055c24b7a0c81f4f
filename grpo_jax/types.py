"""Structs that several packages share, and the meaning of the letters in the names of arrays.

docs/developing.md explains words such as row, seat and slot.

  P  prompts                   H  query heads              X  experts
  G  completions of a prompt   K  key and value heads      U  experts that a token uses
  S  prompt tokens             R  query heads per K        M  width of an expert
  T  completion tokens         E  size of a head           J  reward functions
  B  rows: P * G, grouped      D  width of the model       N  labels of a reward model, or a
     by prompt                 F  width of an MLP             count that the docstring explains
  V  vocabulary                L  layers                   C  slots of the KV cache
  W  slots of a group's targets, the tokens to predict
  Y  the experts of a token in all layers: U of the first sparse layer, U of the next, ...
  I  pictures that a prompt sees, of N patches with C numbers each
  A  alternatives to a token, the likeliest
  Q  seats for rows in each of the N places of the sampler, which has R = N * Q rows in flight

`logprobs_PGT[..., t]` is the log-prob of completion token t given all tokens before it. Prompts and
completions are right-padded. A completion includes the token that ended it: stopping is an action.

Structs are frozen. Build them by keyword, so that a new field with a default breaks no caller.
"""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp


class Completions(struct.PyTreeNode):
  """The completions of P prompts, G each, as a rollout returns them. On the devices or in numpy.

  A row holds tokens that the policy sampled and, in a conversation with an environment, tokens that
  the environment wrote between them. Padding follows. At padding, tokens and log-probs are 0.

  Attributes:
    tokens_PGT: int32, the tokens of the row.
    lengths_PG: int32, how many tokens the row has before its padding.
    sampled_PGT: bool, True where the policy sampled the token.
    logprobs_PGT: float32, log-probs under softmax(logits / temperature), which is the distribution
      that the learner computes.
    behavior_logprobs_PGT: float32, log-probs under the distribution that the token was drawn from:
      that softmax after the filters top-k, top-p and min-p.
    stopped_by_PG: int32, the stop id that ended the row, or -1 where the length limit cut it off.
    experts_PGTY: int8 or int16, the experts that the sampler chose for each token. -1 where it
      computed none: at a row's last token and at padding. None if the sampler does not keep them.
    prompt_experts_PSY: The same for the tokens of the prompts.
    versions_PGT: int32, the version of the weights that drew each token. None unless weights change
      while rows are in flight.
  """

  tokens_PGT: jax.Array
  lengths_PG: jax.Array
  sampled_PGT: jax.Array
  logprobs_PGT: jax.Array
  behavior_logprobs_PGT: jax.Array
  stopped_by_PG: jax.Array
  experts_PGTY: jax.Array | None = None
  prompt_experts_PSY: jax.Array | None = None
  versions_PGT: jax.Array | None = None


class Rewards(struct.PyTreeNode):
  """The rewards of a batch, for advantages. NaN means that a completion was not scored.

  Attributes:
    scores_PGJ: float32, the score of each completion by each of the J reward functions.
    weights: The J weights of the functions.
    greedy_scores_PJ: float32, the scores of each prompt's greedy completion, for the advantage
      `greedy_baseline`.
    step_rewards_PGT: float32, for process supervision: the reward of the step that ends at this
      token.
    step_ends_PGT: float32, 1 where a step ends.
    kl_penalty_PGT: float32, the KL term that each token subtracts from the reward, 0 at padding.
  """

  scores_PGJ: jax.Array
  weights: tuple[float, ...] = struct.field(pytree_node=False)
  greedy_scores_PJ: jax.Array | None = None
  step_rewards_PGT: jax.Array | None = None
  step_ends_PGT: jax.Array | None = None
  kl_penalty_PGT: jax.Array | None = None

  @property
  def scored_PG(self) -> jax.Array:
    """bool, True where at least one function scored the completion."""
    return ~jnp.isnan(self.scores_PGJ).all(-1)

  @property
  def score_PG(self) -> jax.Array:
    """Weighted sum over the functions that scored the completion, NaN where none did."""
    return self._weighted_sum(self.scores_PGJ)

  @property
  def total_PG(self) -> jax.Array:
    """The score minus the KL penalty of all the completion's tokens."""
    if self.kl_penalty_PGT is None:
      return self.score_PG
    return self.score_PG - self.kl_penalty_PGT.sum(-1)

  @property
  def greedy_score_P(self) -> jax.Array:
    """The score of each prompt's greedy completion, NaN where no function scored it."""
    return self._weighted_sum(self.greedy_scores_PJ)

  def _weighted_sum(self, scores: jax.Array) -> jax.Array:
    weights_J = jnp.asarray(self.weights, scores.dtype)
    scored = ~jnp.isnan(scores).all(-1)
    return jnp.where(scored, jnp.nansum(weights_J * scores, -1), jnp.nan)


class Images(struct.PyTreeNode):
  """The images of P prompts as patches, on the host or on the devices.

  A picture is an image, or a tile of an image that the vision tower sees alone. Prompts are padded
  to I pictures, and pictures to N patches. A patch has C numbers.

  Attributes:
    patches_PINC: float32, the pixels of each patch, in the order in which the family's image
      processor writes patches and the numbers of a patch. 0 at padding.
    places_PIN2: int32, the row and the column of each patch in its picture. -1 at padding.
    seen_PS2: int32, for each token of the prompt the visual token that replaces it: the index of a
      picture, and the index of the visual token in this picture. -1 where the token is text.
    positions_PS3: int32, the positions of the prompt's tokens in time, height and width, for
      families that rotate by three axes. None means that a token's position is its index.
    next_P: int32, the position of the first token after the prompt. None without `positions_PS3`.
  """

  patches_PINC: jax.Array
  places_PIN2: jax.Array
  seen_PS2: jax.Array
  positions_PS3: jax.Array | None = None
  next_P: jax.Array | None = None

  @property
  def is_seen_PS(self) -> jax.Array:
    """bool, True where a visual token replaces a token of a prompt."""
    return (self.seen_PS2 >= 0).all(-1)


class Visual(struct.PyTreeNode):
  """The visual tokens that a vision tower computes from `Images`, for the decoder.

  Attributes:
    features_PKND: The features of each prompt's N visual tokens, one picture after another, in K
      levels. Level 0 replaces token embeddings. Level k > 0 is added to the residual stream after
      layer k - 1.
    seen_PS: int32, for each token of the prompt the visual token that replaces it, of N, or -1.
    picture_PS: int32, for each token of the prompt the index of its picture, or -1.
    positions_PS3: `Images.positions_PS3`.
    next_P: `Images.next_P`.
  """

  features_PKND: jax.Array
  seen_PS: jax.Array
  picture_PS: jax.Array
  positions_PS3: jax.Array | None = None
  next_P: jax.Array | None = None

  @property
  def is_seen_PS(self) -> jax.Array:
    """bool, True where a visual token replaces a token of a prompt."""
    return self.seen_PS >= 0

  def after(self, tokens: int) -> "Visual":
    """The same without the first `tokens` tokens of each prompt, which must be text."""
    axes_PS3 = self.positions_PS3
    return self.replace(
      seen_PS=self.seen_PS[:, tokens:],
      picture_PS=self.picture_PS[:, tokens:],
      positions_PS3=None if axes_PS3 is None else axes_PS3[:, tokens:],
    )


class Routing(struct.PyTreeNode):
  """Statistics of the routers of the L sparse layers, as sums over the counted tokens of a row.

  Attributes:
    tokens_BL: float32, how many tokens were counted.
    assigned_BLX: float32, how many of these tokens were sent to each expert.
    probs_BLX: float32, the sum of the routers' probabilities.
    entropy_BL: float32, the sum of the routers' entropies, without a gradient.
    compared_BL: float32, how many counted completion tokens have experts that the sampler chose.
      None if the batch has no experts of the sampler.
    differs_BL: float32, for how many of these the router would choose other experts, or None.
  """

  tokens_BL: jax.Array
  assigned_BLX: jax.Array
  probs_BLX: jax.Array
  entropy_BL: jax.Array
  compared_BL: jax.Array | None = None
  differs_BL: jax.Array | None = None


class TokenStats(struct.PyTreeNode):
  """The learner's results for the completion tokens of a batch, 0 at padding.

  Attributes:
    logprobs_PGT: float32, the log-probs of the tokens under the policy.
    entropies_PGT: float32, entropy of softmax(logits / temperature), before any filter.
    full_kl_PGT: float32, KL(policy || reference) over the whole vocabulary, or None if it was not
      requested.
    routing: Sums over each prompt's group, or None for a model without experts.
  """

  logprobs_PGT: jax.Array
  entropies_PGT: jax.Array
  full_kl_PGT: jax.Array | None = None
  routing: Routing | None = None


class TokenSelection(struct.PyTreeNode):
  """How the objective treats each token, computed from the whole batch before it is split.

  Attributes:
    weights_PGT: float32, the weight of the token's surrogate. 0 leaves the token out.
    chosen_PGT: float32, 1 at the tokens that the surrogate treats specially, such as the tokens of
      highest covariance in `clip_cov` and `kl_cov`.
  """

  weights_PGT: jax.Array
  chosen_PGT: jax.Array


class Batch(struct.PyTreeNode):
  """The batch that an update learns from, with the prompts on the first axis of every array.

  Attributes:
    prompts_PS: int32, the tokens of the prompts.
    prompt_lengths_P: int32, the number of tokens of each prompt.
    completions_PGT: int32, the tokens of the completions.
    mask_PGT: float32, the loss mask: 1 on the tokens that the policy sampled and learns from.
    temperature_P: float32, the sampling temperature of each prompt's completions.
    advantages_PGT: float32, or None before they are computed and in the warm start.
    sampler_logprobs_PGT: float32, `Completions.logprobs_PGT`, or None in the warm start.
    behavior_logprobs_PGT: float32, `Completions.behavior_logprobs_PGT`. None means that they equal
      the old log-probs.
    old_logprobs_PGT: float32, log-probs of the policy before the batch's first update. None means
      that they are the current policy's own, so that the ratio is 1.
    ref_logprobs_PGT: float32, log-probs of the reference, or None where no KL term needs them.
    teacher_logprobs_PGT: float32, log-probs of the teacher. None without a teacher, and once the
      advantages are computed.
    selection: How tokens are treated. None means weight 1 for every token of the loss.
    routing: The routing of each prompt's group before the update, where a loss over the whole batch
      needs it.
    experts_PGTY: `Completions.experts_PGTY`. The policy's passes use them instead of those that
      its routers choose. None means that the routers choose.
    prompt_experts_PSY: `Completions.prompt_experts_PSY`, beside them.
    rollout_PG: int32, the index in the group of the rollout to which each row belongs, and whose
      reward it gets. None if each row is a rollout itself, and once the advantages are computed.
    images: The images of the prompts, if updates train the vision tower. Otherwise None.
    visual: The visual tokens of the prompts, computed once for all updates by a frozen vision
      tower. None without images or such a tower.
    slots: The number of slots in which the tokens of a group's completions are packed, one
      completion after another. 0 means that they are not packed: each completion has its own row.
  """

  prompts_PS: jax.Array | None = None
  prompt_lengths_P: jax.Array | None = None
  completions_PGT: jax.Array | None = None
  mask_PGT: jax.Array | None = None
  temperature_P: jax.Array | None = None
  advantages_PGT: jax.Array | None = None
  sampler_logprobs_PGT: jax.Array | None = None
  behavior_logprobs_PGT: jax.Array | None = None
  old_logprobs_PGT: jax.Array | None = None
  ref_logprobs_PGT: jax.Array | None = None
  teacher_logprobs_PGT: jax.Array | None = None
  selection: TokenSelection | None = None
  routing: Routing | None = None
  experts_PGTY: jax.Array | None = None
  prompt_experts_PSY: jax.Array | None = None
  rollout_PG: jax.Array | None = None
  images: Images | None = None
  visual: Visual | None = None
  slots: int = struct.field(pytree_node=False, default=0)

  def without_experts(self) -> "Batch":
    """The batch without the sampler's experts, for a model other than the sampler's."""
    return self.replace(experts_PGTY=None, prompt_experts_PSY=None)


class Coefficients(struct.PyTreeNode):
  """Coefficients of the objective that may change during a run, float32 scalars.

  Attributes:
    kl: The weight of the KL to the reference.
    entropy: The weight of the entropy bonus.
  """

  kl: jax.Array
  entropy: jax.Array


class TrainState(struct.PyTreeNode):
  """The state that an update changes.

  Attributes:
    step: int32 scalar, the number of updates so far. Skipped updates count.
    params: The trained parameters: all parameters, all but those of a frozen vision tower, or with
      LoRA only the adapters.
    opt_state: The state of the optax optimizer.
    coefs: The coefficients of the next update.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  coefs: Coefficients
