"""`Algo`: the choices and settings of the algorithm. Its fields are collected from the records."""

from collections.abc import Iterator, Mapping
import dataclasses
from typing import TYPE_CHECKING, Any

from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.aggregation import AGGREGATIONS
from grpo_jax.algo.corrections import CORRECTIONS, LEVELS
from grpo_jax.algo.kl import KL
from grpo_jax.algo.ratios import RATIOS
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.algo.token_selection import TOKEN_WEIGHTS
from grpo_jax.settings import (
  Setting,
  Settings,
  above,
  at_least,
  below_one,
  field_of,
  fraction,
  one_of,
)


def settings_of(records: Mapping[str, Any]) -> dict[str, Setting]:
  """The settings that the records bring, each once, in the order in which they appear.

  Raises:
    ValueError: Two records mean different things by one name.
  """
  found: dict[str, Setting] = {}
  for record in records.values():
    for name, setting in record.settings.items():
      if found.setdefault(name, setting) is not setting:
        raise ValueError(f"the setting {name} has two meanings")
  return found


ADVANTAGE_SETTINGS = {
  "advantage": Setting("group_normalized", "a name in algo/advantages", one_of(ADVANTAGES)),
  **settings_of(ADVANTAGES),
}

RATIO_SETTINGS = {
  "ratio": Setting("token", "a name in algo/ratios.py", one_of(RATIOS)),
  "updates_per_batch": Setting(1, "passes over a batch", at_least(1, at_most=1000)),
  "minibatches": Setting(
    1,
    "optimizer steps in a pass. With one pass and one step the ratio is 1, and no bound on it"
    " matters",
    at_least(1),
  ),
  "old_logprobs": Setting(
    "sampler",
    "the ratio's denominator: the log-probs of the sampler ('sampler'), or those that the learner"
    " computes before the first update ('recomputed')",
    one_of(("sampler", "recomputed")),
  ),
}

SURROGATE_SETTINGS = {
  "surrogate": Setting(
    "ppo_clip",
    "a name in algo/surrogates",
    one_of(SURROGATES, "or call grpo_jax.register_surrogate first"),
  ),
  **settings_of(SURROGATES),
}

AGGREGATION_SETTINGS = {
  "aggregation": Setting("sequence_mean", "a name in algo/aggregation.py", one_of(AGGREGATIONS)),
  **settings_of(AGGREGATIONS),
}

KL_SETTINGS = {
  "kl": Setting("k3", "a name in algo/kl.py", one_of(KL)),
  "kl_coef": Setting(
    0.0,
    "weight of the KL to the reference; 0 = no reference is kept and no forward pass spent on it",
    at_least(0),
  ),
  "kl_in": Setting(
    "loss",
    "where the KL counts: in the loss, or in the reward of a completion",
    one_of(("loss", "reward")),
  ),
  "kl_importance_weighted": Setting(False, "multiply the KL by the ratio of the token"),
  "kl_target": Setting(
    0.0,
    "above 0, kl_coef is only the initial coefficient: it follows the mean KL of a token to reach"
    " this value",
    at_least(0),
  ),
  "kl_horizon": Setting(
    10_000, "completions in which the coefficient can change by a fifth", above(0)
  ),
  "ref_sync_steps": Setting(
    0, "the reference moves after every so many GRPO steps; 0 = it is frozen", at_least(0)
  ),
  "ref_mixup": Setting(
    0.6,
    "how far the reference moves towards the policy",
    fraction("1 makes the reference the policy"),
  ),
}

CORRECTION_SETTINGS = {
  "correction": Setting(
    "none",
    "what becomes of the weights for the gap between sampler and learner: a name in"
    " algo/corrections.py",
    one_of(CORRECTIONS),
  ),
  "correction_level": Setting(
    "token",
    "what a weight belongs to: the token, or the row with the product ('sequence') or the geometric"
    " mean ('geometric') of its tokens' weights",
    one_of(LEVELS),
  ),
  **settings_of(CORRECTIONS),
}

LOSS_SETTINGS = {
  "off_policy_threshold": Setting(
    0.0,
    "leaves out completions with A < 0 that the policy has moved this far from, in nats per token;"
    " 0 = off",
    at_least(0),
  ),
  "mask_truncated": Setting(False, "leaves completions that were cut off out of the loss"),
  **settings_of(TOKEN_WEIGHTS),
  "entropy_coef": Setting(0.0, "weight of the entropy bonus; 0 = off", at_least(0)),
  "entropy_target": Setting(
    0.0,
    "above 0, entropy_coef is only the initial coefficient: it goes up where the mean entropy of a"
    " token is below this value and down where it is above",
    at_least(0),
  ),
  "entropy_step": Setting(0.005, "by how much an update changes that coefficient", above(0)),
}

SAMPLING_SETTINGS = {
  "dynamic_sampling": Setting(False, "replaces groups whose rewards are all equal by fresh ones"),
  "max_resample_rounds": Setting(
    3,
    "at most so many more batches are sampled for that; what is still missing is left out of the"
    " loss",
    at_least(1, at_most=1000),
  ),
  "keep_surplus": Setting(
    False,
    "dynamic sampling keeps the groups that a batch has no place for, for the next step. They are"
    " then of the policy before the update: the ratio is to the log-probs that they were sampled"
    " with",
  ),
  "overlong": Setting(
    0.0,
    "the last fraction of sampling.max_tokens, over which a reward falls by up to 1",
    below_one("0 is off"),
  ),
}


class _Derived(Settings):
  """Facts that follow from several settings."""

  @property
  def updates_per_step(self) -> int:
    """Optimizer updates in a GRPO step."""
    return self.updates_per_batch * self.minibatches

  @property
  def old_is_policy(self) -> bool:
    """Whether the old log-probs are the policy's own.

    That is so with one update per batch, if all of it was sampled by the policy of the step.
    """
    return self.updates_per_step == 1 and not self.keep_surplus

  @property
  def has_entropy_bonus(self) -> bool:
    """Whether the entropy needs a gradient."""
    return self.entropy_coef > 0 or self.entropy_target > 0

  @property
  def has_correction(self) -> bool:
    """Whether the gap between sampler and learner is corrected."""
    return self.correction != "none"

  @property
  def uses_reference(self) -> bool:
    """Whether there is a KL term, so that a reference is kept."""
    return self.kl_coef > 0

  @property
  def kl_in_reward(self) -> bool:
    """Whether the KL is taken from the reward."""
    return self.uses_reference and self.kl_in == "reward"

  @property
  def needs_full_kl(self) -> bool:
    """Whether the learner has to compute the KL of whole distributions."""
    return self.uses_reference and KL[self.kl].reads_logits


def _fields() -> Iterator[tuple[str, type, Any]]:
  groups = (
    ADVANTAGE_SETTINGS,
    RATIO_SETTINGS,
    SURROGATE_SETTINGS,
    AGGREGATION_SETTINGS,
    KL_SETTINGS,
    CORRECTION_SETTINGS,
    LOSS_SETTINGS,
    SAMPLING_SETTINGS,
  )
  for group in groups:
    for name, setting in group.items():
      yield name, type(setting.default), field_of(setting)


if TYPE_CHECKING:

  @dataclasses.dataclass(frozen=True)
  class Algo(_Derived):
    """The fields are known only when the program runs."""

    def __init__(self, **settings: Any) -> None: ...

else:
  Algo = dataclasses.make_dataclass(
    "Algo",
    _fields(),
    bases=(_Derived,),
    frozen=True,
    namespace={
      "__module__": __name__,
      "__doc__": "The choices and settings of the algorithm, each with a default.",
    },
  )
