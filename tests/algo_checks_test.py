"""What must hold between settings of the algorithm, and the facts that follow from them."""

import dataclasses
import pickle

import pytest

from grpo_jax.algo import checks, presets
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.kl import KL
from grpo_jax.algo.ratios import RatioSettings
from grpo_jax.algo.settings import Algo
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.settings import ConfigError, at_least, check_ranges, names_of, setting


def check(settings=None, prompts=32, group_size=8, max_tokens=40, sampler_filters=False, **changes):
  settings = dataclasses.replace(settings or Algo(), **changes)
  checks.check_algo(
    settings,
    prompts=prompts,
    group_size=group_size,
    max_tokens=max_tokens,
    sampler_filters=sampler_filters,
  )


CORRECTED = dict(correction="truncate", correction_high=2.0)
REWARD_KL = dict(kl_coef=0.1, kl_in="reward", kl="k1", advantage="leave_one_out")

REFUSED = [
  (dict(minibatches=5), "minibatches is 5: it must divide batch.prompts = 32"),
  (
    dict(kl_coef=0.1, kl_target=0.1, kl_horizon=255),
    "kl_horizon is 255: it must be at least the 256 completions of an update",
  ),
  (
    dict(kl_coef=0.1, kl_target=0.1, kl_horizon=63, minibatches=4),
    "kl_horizon is 63: it must be at least the 64 completions of an update",
  ),
  (dict(std_ddof=8), "std_ddof is 8: it must be below batch.group_size = 8"),
  (
    dict(overlong=0.01),
    "overlong is 0.01: of sampling.max_tokens = 40 that is not one token",
  ),
  (
    dict(overlong=0.2, advantage="pass_at_k"),
    "overlong is 0.2: pass_at_k counts right answers, which a penalty would make wrong; set 0",
  ),
  (
    dict(advantage="pass_at_k", pass_k=8),
    "pass_k is 8: it must be below batch.group_size = 8: else all answers of a group weigh the"
    " same",
  ),
  (
    dict(surrogate="vespo", ratio="sequence"),
    "ratio is 'sequence': the surrogate vespo has its own ratio; leave this at 'token'",
  ),
  (
    dict(surrogate="clip_cov", cov_low=5.0),
    "cov_low is 5.0: it must be below algo.cov_high = 5.0",
  ),
  (
    dict(ratio="sequence", **CORRECTED),
    "correction_level is 'token': a weight per token undoes the sequence ratio;"
    " choose 'sequence' or 'geometric'",
  ),
  (
    dict(correction="mask"),
    "correction is 'mask': set algo.correction_low or algo.correction_high, or it changes nothing",
  ),
  (
    dict(minibatches=2, **CORRECTED),
    "correction is 'truncate': the old log-probs are the sampler's own, so every weight is 1;"
    " set algo.old_logprobs='recomputed'",
  ),
  (
    dict(correction_low=2.0, **CORRECTED),
    "correction_low is 2.0: it must be below algo.correction_high = 2.0",
  ),
  (
    REWARD_KL | dict(kl="k3+"),
    "kl is 'k3+': in a reward it has no gradient to replace; leave out the +",
  ),
  (
    REWARD_KL | dict(kl_importance_weighted=True),
    "kl_importance_weighted is True: in a reward it has no ratio; choose False",
  ),
  (
    REWARD_KL | dict(kl="full"),
    "kl is 'full': a reward is of the token that was sampled; choose k1, abs, k2 or k3",
  ),
  (
    dict(kl="full", kl_importance_weighted=True),
    "kl_importance_weighted is True: the full KL is of a whole distribution, not of the token that"
    " was sampled; choose False",
  ),
  (
    dict(kl_target=0.1),
    "kl_target is 0.1: with algo.kl_coef = 0 there is no reference; set algo.kl_coef",
  ),
  (
    dict(overlong=0.2, advantage="max_rl"),
    "overlong is 0.2: a penalty makes rewards negative, which max_rl does not take; set 0",
  ),
  (
    dict(entropy_coef_end=0.0, entropy_target=0.1),
    "entropy_coef_end is 0.0: algo.entropy_target moves the coefficient, too; set -1 here, or 0"
    " there",
  ),
  (
    dict(ref_sync_steps=5),
    "ref_sync_steps is 5: with algo.kl_coef = 0 there is no reference; set algo.kl_coef",
  ),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_what_is_refused(changes, message):
  with pytest.raises(ConfigError) as error:
    check(**changes)
  assert str(error.value) == f"config key algo.{message}"


@pytest.mark.parametrize(
  "changes",
  [
    dict(minibatches=8),
    dict(kl_coef=0.1, kl_target=0.1, kl_horizon=256),
    dict(kl_coef=0.1, kl_target=0.1, kl_horizon=64, minibatches=4),
    dict(std_ddof=7),
    dict(overlong=0.02),
    dict(overlong=0.013),  # half a token is rounded to one
    dict(advantage="pass_at_k", pass_k=7),
    dict(surrogate="ppo_clip", ratio="sequence"),
    dict(surrogate="clip_cov", cov_low=4.9),
    dict(surrogate="kl_cov", cov_low=5.0),
    dict(ratio="sequence", correction_level="geometric", **CORRECTED),
    dict(ratio="sequence_token", **CORRECTED),
    dict(correction="mask", correction_low=0.5),
    CORRECTED,
    dict(minibatches=2, old_logprobs="recomputed", **CORRECTED),
    dict(minibatches=2, sampler_filters=True, **CORRECTED),
    dict(correction_low=1.9, **CORRECTED),
    dict(correction_low=2.0),
    dict(reject_k3=0.1, reject_token=(0.5, 2.0)),
    dict(reject_k3=0.1, minibatches=2, old_logprobs="recomputed"),
    dict(reject_k3=0.1, minibatches=2, old_logprobs="sampler"),
    dict(reject_outlier=(0.0, 9.0), ratio="sequence", minibatches=2, sampler_filters=True),
    dict(reject_geometric=(0.9, 1.1), **CORRECTED),
    dict(entropy_coef_end=0.1),
    REWARD_KL,
    dict(kl_coef=0.1, kl="k3+", kl_importance_weighted=True),
    dict(kl_coef=0.1, kl="full"),
    dict(kl="k3+", kl_in="reward"),
    dict(kl_coef=0.1, kl_target=0.1, ref_sync_steps=5),
  ],
)
def test_what_is_accepted(changes):
  check(**changes)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_are_accepted_and_their_values_are_in_range(name):
  settings = presets.preset(name)
  check(settings)
  check_ranges(settings, "algo.")


# The table of the papers: advantage, ratio, surrogate, aggregation, and other settings.
TABLE = {
  "grpo": ("group_normalized", "token", "ppo_clip", "sequence_mean", dict(kl_coef=0.04)),
  "dr_grpo": ("group_centered", "token", "ppo_clip", "constant", {}),
  "bnpo": ("group_normalized", "token", "ppo_clip", "token_mean", {}),
  "dapo": (
    "group_normalized",
    "token",
    "ppo_clip",
    "token_mean",
    dict(clip_high=0.28, minibatches=4, dynamic_sampling=True, overlong=0.2),
  ),
  "gspo": (
    "group_normalized",
    "sequence",
    "ppo_clip",
    "sequence_mean",
    dict(clip_low=3e-4, clip_high=4e-4, minibatches=4),
  ),
  "gspo_token": (
    "group_normalized",
    "sequence_token",
    "ppo_clip",
    "sequence_mean",
    dict(clip_low=3e-4, clip_high=4e-4, minibatches=4),
  ),
  "gmpo": (
    "group_centered",
    "token",
    "gmpo",
    "sequence_mean",
    dict(clip_low=0.4, clip_high=0.4, minibatches=4),
  ),
  "cispo": (
    "group_normalized",
    "token",
    "cispo",
    "token_mean",
    dict(clip_low=1.0, clip_high=4.0, minibatches=4),
  ),
  "sapo": ("group_normalized", "token", "sapo", "sequence_mean", dict(minibatches=4)),
  "luspo": (
    "group_normalized",
    "sequence",
    "ppo_clip",
    "sequence_sum",
    dict(clip_low=2e-3, clip_high=2.5e-3, minibatches=4),
  ),
  "vespo": ("group_normalized", "token", "vespo", "token_mean", dict(minibatches=4)),
  "rloo": (
    "leave_one_out",
    "token",
    "reinforce",
    "sequence_sum",
    dict(kl="k1", kl_coef=0.03, kl_in="reward"),
  ),
  "reinforce_pp": (
    "batch_normalized",
    "token",
    "ppo_clip",
    "token_mean",
    dict(kl="k1", kl_coef=0.001, kl_in="reward"),
  ),
  "lite_ppo": ("group_mean_batch_std", "token", "ppo_clip", "token_mean", {}),
  "opo": ("opo", "token", "ppo_clip", "token_mean", {}),
  "remax": ("greedy_baseline", "token", "reinforce", "sequence_sum", {}),
  "gpg": ("group_centered", "token", "reinforce", "token_mean", {}),
  "clip_cov": ("group_normalized", "token", "clip_cov", "token_mean", dict(minibatches=4)),
  "kl_cov": ("group_normalized", "token", "kl_cov", "token_mean", dict(minibatches=4)),
  "pass_at_k": ("pass_at_k", "token", "ppo_clip", "token_mean", {}),
  "max_rl": ("max_rl", "token", "ppo_clip", "token_mean", {}),
  "raft": ("reward", "token", "reinforce", "token_mean", {}),
  "process": ("process", "token", "ppo_clip", "sequence_mean", dict(kl_coef=0.04)),
  "areal": (
    "batch_normalized",
    "token",
    "ppo_clip",
    "token_mean",
    dict(
      batch_weighting="token",
      minibatches=4,
      old_logprobs="recomputed",
      correction="mask",
      correction_high=5.0,
    ),
  ),
  "aipo": (
    "group_centered",
    "token",
    "reinforce",
    "sequence_sum",
    dict(correction="truncate", correction_high=4.0),
  ),
  "m2po": (
    "group_normalized",
    "token",
    "unclipped",
    "token_mean",
    dict(m2_bound=0.04, minibatches=4),
  ),
}


@pytest.mark.parametrize("name", TABLE)
def test_presets_are_those_of_the_papers(name):
  *choices, others = TABLE[name]
  axes = ("advantage", "ratio", "surrogate", "aggregation")
  assert presets.preset(name) == Algo(**dict(zip(axes, choices)), **others)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_properties_of_advantages_are_enforced(name):
  record = ADVANTAGES[name]
  if record.equal_rewards_teach:
    message = f"with the advantage {name} a group of equal rewards teaches, too; set False"
    with pytest.raises(ConfigError, match=message):
      check(advantage=name, dynamic_sampling=True)
  else:
    check(advantage=name, dynamic_sampling=True)
  if record.takes_kl_penalty:
    check(**REWARD_KL | dict(advantage=name))
  else:
    message = f"kl_in is 'reward': the advantage {name} is of the rewards alone; choose 'loss'"
    with pytest.raises(ConfigError, match=message):
      check(**REWARD_KL | dict(advantage=name))


# Ranges of single settings.


@pytest.mark.parametrize(
  "name, refused, accepted",
  [
    ("std_ddof", -1, 0),
    ("std_eps", -1e-9, 0.0),
    ("batch_std_eps", -1e-9, 0.0),
    ("pass_k", 0, 1),
    ("updates_per_batch", 0, 1),
    ("minibatches", 0, 1),
    ("clip_low", 0.0, 1e-9),
    ("clip_high", 0.0, 1e-9),
    ("ratio_max", 1.0, 1.1),
    ("ratio_max", -1.0, 0.0),
    ("dual_clip", 1.0, 1.1),
    ("dual_clip", -1.0, 0.0),
    ("tau_pos", 0.0, 0.1),
    ("tau_neg", 0.0, 0.1),
    ("k_pos", 0.0, 0.1),
    ("lambda_pos", 0.0, 0.1),
    ("k_neg", 0.0, 0.1),
    ("lambda_neg", 0.0, 0.1),
    ("cov_fraction", 0.0, 0.1),
    ("cov_kl_coef", -0.1, 0.0),
    ("dro_beta", -0.1, 0.0),
    ("length_norm", -1, 0),
    ("kl_coef", -0.1, 0.0),
    ("kl_target", -0.1, 0.0),
    ("kl_horizon", 0, 1),
    ("ref_sync_steps", -1, 0),
    ("ref_mixup", 0.0, 1.0),
    ("ref_mixup", 1.1, 0.1),
    ("correction_low", -0.1, 0.0),
    ("correction_high", -0.1, 0.0),
    ("reject_token", (2.0, 0.5), ()),
    ("reject_outlier", (0.5,), (0.0, 0.5)),
    ("reject_product", (-0.1, 0.5), (0.1, 0.5)),
    ("reject_geometric", (0.5, 1.0, 2.0), (0.9, 1.1)),
    ("reject_k2", -0.1, 0.1),
    ("reject_k3", -0.1, 0.1),
    ("reject_k2_sum", -0.1, 0.1),
    ("reject_k3_sum", -0.1, 0.1),
    ("off_policy_threshold", -0.1, 0.0),
    ("top_entropy_quantile", 0.0, 1.0),
    ("entropy_coef", -0.1, 0.0),
    ("entropy_target", -0.1, 0.0),
    ("entropy_step", 0.0, 0.1),
    ("entropy_coef_end", -0.5, -1.0),
    ("entropy_coef_end", -2.0, 0.0),
    ("max_resample_rounds", 0, 1),
    ("overlong", 1.0, 0.0),
    ("batch_weighting", "prompt", "token"),
    ("old_logprobs", "policy", "recomputed"),
    ("kl_in", "advantage", "reward"),
    ("kl", "k4", "full"),
  ],
)
def test_ranges(name, refused, accepted):
  check_ranges(dataclasses.replace(Algo(), **{name: accepted}), "algo.")
  with pytest.raises(ConfigError, match=f"config key algo.{name} is"):
    check_ranges(dataclasses.replace(Algo(), **{name: refused}), "algo.")


# Facts that follow.


# A default that changes, or a setting that goes, makes other runs of the configs that people wrote.
# A new setting need not be listed here.
DEFAULTS = dict(
  advantage="group_normalized",
  std_ddof=1,
  std_eps=1e-4,
  batch_weighting="sequence",
  batch_std_eps=1e-4,
  pass_k=4,
  ratio="token",
  updates_per_batch=1,
  minibatches=1,
  old_logprobs="sampler",
  surrogate="ppo_clip",
  clip_low=0.2,
  clip_high=0.2,
  ratio_max=0.0,
  dual_clip=0.0,
  tau_pos=1.0,
  tau_neg=1.05,
  k_pos=2.0,
  lambda_pos=3.0,
  k_neg=3.0,
  lambda_neg=2.0,
  cov_fraction=2e-4,
  cov_low=1.0,
  cov_high=5.0,
  cov_kl_coef=1.0,
  dro_beta=0.05,
  aggregation="sequence_mean",
  length_norm=0,
  kl="k3",
  kl_coef=0.0,
  kl_in="loss",
  kl_importance_weighted=False,
  kl_target=0.0,
  kl_horizon=10_000,
  ref_sync_steps=0,
  ref_mixup=0.6,
  correction="none",
  correction_level="token",
  correction_low=0.0,
  correction_high=0.0,
  reject_token=(),
  reject_outlier=(),
  reject_product=(),
  reject_geometric=(),
  reject_k2=0.0,
  reject_k3=0.0,
  reject_k2_sum=0.0,
  reject_k3_sum=0.0,
  off_policy_threshold=0.0,
  mask_truncated=False,
  top_entropy_quantile=1.0,
  entropy_coef=0.0,
  entropy_target=0.0,
  entropy_step=0.005,
  entropy_coef_end=-1.0,
  dynamic_sampling=False,
  max_resample_rounds=3,
  overlong=0.0,
)


def changed_defaults(kind):
  """The names in DEFAULTS that have another default in a class of settings, or are not in it."""
  found = dataclasses.asdict(kind())
  return [name for name, value in DEFAULTS.items() if name not in found or found[name] != value]


def test_the_defaults():
  assert changed_defaults(Algo) == []


def test_a_new_setting_changes_no_default_and_a_changed_one_is_named():
  @dataclasses.dataclass(frozen=True)
  class Later(Algo):
    """Algo with one more setting."""

    slope: float = setting(0.5, "a new setting", at_least(0))

  @dataclasses.dataclass(frozen=True)
  class Changed(Algo):
    """Algo with another default."""

    kl_coef: float = setting(0.04, "weight of the KL", at_least(0))

  assert changed_defaults(Later) == []
  assert changed_defaults(Changed) == ["kl_coef"]
  assert changed_defaults(RatioSettings)[0] == "advantage"


def test_algo_is_a_frozen_value():
  settings = presets.preset("dapo")
  assert pickle.loads(pickle.dumps(settings)) == settings
  assert hash(settings) == hash(presets.preset("dapo")) and settings != Algo()
  with pytest.raises(dataclasses.FrozenInstanceError):
    settings.clip_low = 0.5


def test_derived_facts():
  assert Algo().old_is_policy and Algo().updates_per_step == 1
  several = Algo(updates_per_batch=2, minibatches=3)
  assert several.updates_per_step == 6 and not several.old_is_policy
  assert [
    Algo(**changes).has_entropy_bonus
    for changes in (
      {},
      dict(entropy_coef=0.1),
      dict(entropy_target=0.1),
      dict(entropy_coef_end=0.1),
      dict(entropy_coef_end=0.0),
    )
  ] == [False, True, True, True, False]
  assert Algo(reject_k2=0.1).has_rejection and not Algo(correction="mask").has_rejection
  assert Algo(reject_k2=0.1).compares_with_sampler and not Algo().compares_with_sampler
  assert Algo(correction="mask").has_correction and not Algo().has_correction
  assert Algo(kl_coef=0.1).uses_reference and not Algo().uses_reference
  in_reward = [
    Algo(kl_coef=coef, kl_in=place).kl_in_reward
    for coef in (0.0, 0.1)
    for place in ("loss", "reward")
  ]
  assert in_reward == [False, False, False, True]
  full = [Algo(kl_coef=coef, kl=kl).needs_full_kl for coef in (0.0, 0.1) for kl in ("k3", "full")]
  assert full == [False, False, False, True]
  assert {name for name, record in KL.items() if record.replaces_gradient} == {
    name for name in KL if name.endswith("+")
  }


@pytest.mark.parametrize(
  "changes, idle",
  [
    ({}, ()),
    (dict(clip_low=0.1, clip_high=0.3), ("clip_low", "clip_high")),
    (dict(clip_low=0.1, minibatches=2), ()),
    (dict(clip_low=0.1, updates_per_batch=2), ()),
    (dict(surrogate="reinforce", clip_low=0.1), ()),
    (dict(ratio="sequence", old_logprobs="recomputed"), ("ratio", "old_logprobs")),
    (dict(surrogate="vespo", k_pos=1.0), ("k_pos",)),
    (dict(surrogate="vespo", k_pos=1.0, **CORRECTED), ()),
    (dict(surrogate="ppo_clip", clip_low=0.1, **CORRECTED), ("clip_low",)),
    # Where the tokens of a row differ, a ratio of the row spreads their gradient over it.
    (dict(ratio="sequence", advantage="process"), ()),
    (dict(ratio="sequence", **REWARD_KL), ()),
    (dict(ratio="sequence", **CORRECTED), ()),
    (dict(ratio="sequence", correction_level="sequence", **CORRECTED), ("ratio",)),
    (dict(ratio="sequence", top_entropy_quantile=0.5), ()),
    (dict(ratio="sequence", surrogate="kl_cov"), ()),
    (dict(ratio="sequence_token", advantage="process"), ("ratio",)),
  ],
)
def test_settings_idle_at_ratio_one(changes, idle):
  assert checks.settings_idle_at_ratio_one(Algo(**changes)) == idle


@pytest.mark.parametrize(
  "changes, moves",
  [
    (dict(surrogate="reinforce", minibatches=4, updates_per_batch=2), True),
    (dict(surrogate="reinforce", minibatches=4, updates_per_batch=2, **REWARD_KL), True),
    (dict(surrogate="reinforce", minibatches=4, updates_per_batch=2, kl_coef=0.04), False),
    (dict(surrogate="reinforce", minibatches=4), False),
    (dict(surrogate="ppo_clip", minibatches=4, updates_per_batch=2), False),
  ],
)
def test_many_updates_with_neither_a_ratio_nor_a_kl_move_unseen(changes, moves):
  assert checks.moves_unseen(Algo(**changes)) == moves


def test_idle_settings_are_settings_of_their_record():
  for record in SURROGATES.values():
    assert set(record.idle_at_ratio_one) <= set(names_of(record.settings))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_of_the_rewards_alone_refuse_a_kl_in_the_reward(name):
  """A KL penalty would make a right answer wrong, or meet a greedy completion that has none."""
  refused = {"gdpo", "group_normalized_each", "max_rl", "pass_at_k", "greedy_baseline", "process"}
  settings = dict(advantage=name, kl="k1", kl_coef=0.1, kl_in="reward")
  if name not in refused:
    check(**settings)
    return
  with pytest.raises(ConfigError, match=r"config key algo\.kl_in is 'reward'"):
    check(**settings)
