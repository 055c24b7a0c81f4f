"""`Algo`: the choices and settings of the algorithm, which the axes declare."""

import dataclasses

from grpo_jax.algo.advantages import ADVANTAGES, AdvantageSettings
from grpo_jax.algo.aggregation import AGGREGATIONS, AggregationSettings
from grpo_jax.algo.corrections import CORRECTIONS, CorrectionSettings
from grpo_jax.algo.kl import KL, KLSettings
from grpo_jax.algo.ratios import RatioSettings
from grpo_jax.algo.rejections import REJECTIONS, RejectionSettings, rejects
from grpo_jax.algo.surrogates import SURROGATES, SurrogateSettings
from grpo_jax.algo.token_selection import TOKEN_WEIGHTS, SelectionSettings
from grpo_jax.algo.variant import check_settings
from grpo_jax.settings import Range, above, at_least, below_one, setting


@dataclasses.dataclass(frozen=True)
class Algo(  # the fields of the last class come first
  SelectionSettings,
  RejectionSettings,
  CorrectionSettings,
  KLSettings,
  AggregationSettings,
  SurrogateSettings,
  RatioSettings,
  AdvantageSettings,
):
  """The choices and settings of the algorithm, each with a default."""

  off_policy_threshold: float = setting(
    0.0,
    "leaves out completions with a negative advantage from which the policy has moved this far, in"
    " nats per token; 0 = off",
    at_least(0),
  )
  mask_truncated: bool = setting(False, "leaves completions that were cut off out of the loss")
  entropy_coef: float = setting(
    0.0,
    "weight of the entropy bonus; 0 = off, unless entropy_target or entropy_coef_end moves it",
    at_least(0),
  )
  entropy_target: float = setting(
    0.0,
    "above 0, entropy_coef is only the initial coefficient: it goes up where the mean entropy of a"
    " token is below this value and down where it is above",
    at_least(0),
  )
  entropy_step: float = setting(0.005, "by how much an update changes that coefficient", above(0))
  entropy_coef_end: float = setting(
    -1.0,
    "the coefficient of the last step, to which it goes linearly from entropy_coef, the same for"
    " all updates of a step; -1 = it stays",
    Range(lambda value: value >= 0 or value == -1, "it must be at least 0, or -1"),
  )
  dynamic_sampling: bool = setting(
    False, "leaves out groups whose rewards are all equal, and draws others in their place"
  )
  max_resample_rounds: int = setting(
    3,
    "at most so many times batch.prompts more groups are drawn for that; what is still missing is"
    " left out of the loss",
    at_least(1, at_most=1000),
  )
  overlong: float = setting(
    0.0,
    "the last fraction of sampling.max_tokens, over which a reward falls by up to 1; 0 = off",
    below_one("0 is off"),
  )

  @property
  def updates_per_step(self) -> int:
    """Optimizer updates in a GRPO step."""
    return self.updates_per_batch * self.minibatches

  @property
  def old_is_policy(self) -> bool:
    """Whether the old log-probs are the current policy's own, if this policy drew the batch.

    They are with one update per step. `Config.old_is_policy` also considers batches that older
    policies drew.
    """
    return self.updates_per_step == 1

  @property
  def has_entropy_bonus(self) -> bool:
    """Whether the loss may have an entropy bonus, so that the entropy needs a gradient."""
    return self.entropy_coef > 0 or self.entropy_target > 0 or self.entropy_coef_end > 0

  @property
  def plans_entropy_coef(self) -> bool:
    """Whether the coefficient of the entropy bonus changes linearly to entropy_coef_end."""
    return self.entropy_coef_end >= 0

  @property
  def moves_entropy_coef(self) -> bool:
    """Whether the coefficient of the entropy bonus changes during the run."""
    return self.entropy_target > 0 or self.plans_entropy_coef

  @property
  def has_idle_groups(self) -> bool:
    """Whether an update can leave out groups whose advantages are all 0.

    It can if the surrogate is the only term of the loss, and there is no KL in the reward either:
    the metric of that KL, which may control its coefficient, needs all groups.
    """
    surrogate = SURROGATES[self.surrogate]
    terms_of_all_groups = self.uses_reference or self.has_entropy_bonus
    return surrogate.idle_without_advantage and not terms_of_all_groups

  @property
  def has_correction(self) -> bool:
    """Whether weights correct the gap between sampler and learner."""
    return self.correction != "none"

  @property
  def has_rejection(self) -> bool:
    """Whether tokens may be rejected because sampler and learner disagree about them."""
    return rejects(self)

  @property
  def compares_with_sampler(self) -> bool:
    """Whether the update needs the gap between the sampler and the policy that it starts from."""
    return self.has_correction or self.has_rejection

  @property
  def uses_reference(self) -> bool:
    """Whether there is a KL term, so that a reference is kept."""
    return self.kl_coef > 0

  @property
  def kl_in_reward(self) -> bool:
    """Whether the KL is subtracted from the reward."""
    return self.uses_reference and self.kl_in == "reward"

  @property
  def needs_full_kl(self) -> bool:
    """Whether the learner has to compute the KL of whole distributions."""
    return self.uses_reference and KL[self.kl].reads_logits


for _of_axis, _records in (
  (AdvantageSettings, ADVANTAGES),
  (SurrogateSettings, SURROGATES),
  (AggregationSettings, AGGREGATIONS),
  (CorrectionSettings, CORRECTIONS),
  (RejectionSettings, REJECTIONS),
  (SelectionSettings, TOKEN_WEIGHTS),
  (Algo, {}),
):
  check_settings(_of_axis, _records)
