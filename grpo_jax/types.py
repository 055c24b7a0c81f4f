"""The structs that several packages share, and the legend of the letters in names of arrays.

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
  Q  seats of a place in the sampler, whose rows in flight are R, and N its places

`logprobs_PGT[..., t]` is the log-prob of completion token t given all tokens before it. Prompts and
completions are right-padded. A completion includes the token that ended it: stopping is an action.

Structs are frozen. Build them by keyword, so that a new field with a default breaks no caller.
"""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp


class Completions(struct.PyTreeNode):
  """The completions of P prompts, G each, as a rollout returns them: on the devices or in numpy.

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
    experts_PGTY: int8 or int16, the experts of each token, where the sampler keeps them. -1 where
      it computed none: at a row's last token and at padding.
    prompt_experts_PSY: The same for the tokens of the prompts.
    versions_PGT: int32, the version of the weights that drew each token, where weights change while
      rows are in flight. Otherwise None.
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
    kl_penalty_PGT: float32, the KL term that is taken from the reward at each token, 0 at padding.
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
    places_PIN2: int32, row and column of each patch in its picture. -1 at padding.
    seen_PS2: int32, which visual token takes the place of a token of the prompt: the number of its
      picture, and its own number among the visual tokens of that picture. -1 where the token is
      text.
    positions_PS3: int32, the positions of the prompt's tokens in time, height and width, for
      families that rotate by three axes. None: a token's position is its number.
    next_P: int32, beside `positions_PS3`: the position of the first token after the prompt.
  """

  patches_PINC: jax.Array
  places_PIN2: jax.Array
  seen_PS2: jax.Array
  positions_PS3: jax.Array | None = None
  next_P: jax.Array | None = None

  @property
  def is_seen_PS(self) -> jax.Array:
    """bool, True where a token of a prompt is one of an image."""
    return (self.seen_PS2 >= 0).all(-1)


class Visual(struct.PyTreeNode):
  """The visual tokens that a vision tower makes of `Images`. The decoder reads them as tokens.

  Attributes:
    features_PKND: The visual tokens of each prompt's pictures, one picture after another, N in all.
      Number 0 of the K levels takes the place of embeddings. Number k > 0 is added to the residual
      stream after layer k - 1.
    seen_PS: int32, which of the N takes the place of a token of the prompt, or -1.
    picture_PS: int32, to which picture a token of the prompt belongs, or -1.
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
    """bool, True where a token of a prompt is one of an image."""
    return self.seen_PS >= 0

  def after(self, tokens: int) -> "Visual":
    """The visual tokens of prompts that lack their first `tokens` tokens, which see no image."""
    axes_PS3 = self.positions_PS3
    return self.replace(
      seen_PS=self.seen_PS[:, tokens:],
      picture_PS=self.picture_PS[:, tokens:],
      positions_PS3=None if axes_PS3 is None else axes_PS3[:, tokens:],
    )


class Routing(struct.PyTreeNode):
  """The statistics of the L sparse layers' routers, as sums over the counted tokens of a row.

  Attributes:
    tokens_BL: float32, how many tokens were counted.
    assigned_BLX: float32, how many of them were sent to each expert.
    probs_BLX: float32, the sum of the routers' probabilities.
    entropy_BL: float32, the sum of the routers' entropies, without a gradient.
    compared_BL: float32, how many completion tokens of them have experts of the sampler, where the
      batch has these. Otherwise None.
    differs_BL: float32, for how many of those the router would choose other experts. Or None.
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
    logprobs_PGT: float32.
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
    chosen_PGT: float32, 1 at the tokens that the surrogate treats in its own special way, such as
      those of highest covariance for `clip_cov` and `kl_cov`.
  """

  weights_PGT: jax.Array
  chosen_PGT: jax.Array


class Batch(struct.PyTreeNode):
  """The batch that an update learns from, with the prompts on the first axis of every array.

  Attributes:
    prompts_PS: int32.
    prompt_lengths_P: int32.
    completions_PGT: int32.
    mask_PGT: float32, the loss mask: 1 on the tokens that the policy sampled and learns from.
    temperature_P: float32, the sampling temperature of each prompt's completions.
    advantages_PGT: float32, or None before they are computed and in the warm start.
    sampler_logprobs_PGT: float32, `Completions.logprobs_PGT`, or None in the warm start.
    behavior_logprobs_PGT: float32, `Completions.behavior_logprobs_PGT`. None means that they equal
      the old log-probs.
    old_logprobs_PGT: float32, log-probs of the policy before the batch's first update. None means
      that they are the current policy's own, so that the ratio is 1.
    ref_logprobs_PGT: float32, log-probs of the reference, or None where no KL term needs them.
    teacher_logprobs_PGT: float32, log-probs of the teacher, until the advantages have them. None
      without a teacher.
    selection: How tokens are treated. None means weight 1 for every token of the loss.
    routing: The routing of each prompt's group before the update, where a loss over the whole batch
      needs it.
    experts_PGTY: `Completions.experts_PGTY`. The policy's passes use them instead of those that
      its routers choose. None means that the routers choose.
    prompt_experts_PSY: `Completions.prompt_experts_PSY`, beside them.
    rollout_PG: int32, the rollout in the group whose reward each row has, until the advantages have
      them. None means that each row is a rollout of its own.
    images: The images of the prompts, where updates train the vision tower. None without images.
    visual: The visual tokens that a frozen tower made of them, once for all updates. None without
      images.
    slots: How many slots the tokens of a group's completions are computed in, one completion after
      another. 0 means in rows of T.
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
    """The batch for a model that did not sample it."""
    return self.replace(experts_PGTY=None, prompt_experts_PSY=None)


class Coefficients(struct.PyTreeNode):
  """Coefficients of the objective that controllers may change, float32 scalars."""

  kl: jax.Array
  entropy: jax.Array


class TrainState(struct.PyTreeNode):
  """All that an update changes.

  Attributes:
    step: int32 scalar, the number of updates so far. Skipped updates count.
    params: The trained parameters: all parameters, those beside a frozen vision tower, or with LoRA
      the adapters.
    opt_state: The state of the optax optimizer.
    coefs: The coefficients of the next update.
  """

  step: jax.Array
  params: Any
  opt_state: Any
  coefs: Coefficients
