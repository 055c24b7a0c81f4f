"""Checks the algorithm's settings against each other, and finds settings without effect."""

from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.corrections import CORRECTIONS, LEVELS, BoundSettings
from grpo_jax.algo.kl import KL
from grpo_jax.algo.ratios import RATIOS
from grpo_jax.algo.settings import Algo
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.algo.token_selection import has_weights
from grpo_jax.algo.variant import require


def check_algo(
  algo: Algo, *, prompts: int, group_size: int, max_tokens: int, sampler_filters: bool
) -> None:
  """Raises ConfigError for the first setting that cannot be combined with the others.

  Each setting must already be in its own range, which is not checked here.

  Args:
    algo: The settings.
    prompts: Prompts of a batch.
    group_size: Completions of a prompt.
    max_tokens: The longest completion.
    sampler_filters: Whether top-k, top-p, min-p or a minimum length is on.
  """
  _check_batch(algo, prompts, group_size)
  _check_overlong(algo, max_tokens)
  _check_variants(algo, group_size)
  if algo.has_correction:
    _check_correction(algo, sampler_filters)
  require(
    not algo.plans_entropy_coef or not algo.entropy_target,
    algo,
    "entropy_coef_end",
    "algo.entropy_target moves the coefficient, too; set -1 here, or 0 there",
  )
  _check_kl(algo)


def settings_idle_at_ratio_one(algo: Algo) -> tuple[str, ...]:
  """The names of the settings that the user changed, but that do not change the gradient.

  The run names them in a remark. They act on the ratio or its old log-probs. With one update per
  batch, the old policy is the policy itself, and the ratio is 1, if the current policy drew the
  batch. The caller checks that with `Config.old_is_policy`. With several updates, the result is
  empty.
  """
  if not algo.old_is_policy:
    return ()
  surrogate = SURROGATES[algo.surrogate]
  idle = ["old_logprobs", *surrogate.idle_at_ratio_one]
  if surrogate.applies_correction_itself and algo.has_correction:
    idle = ["old_logprobs"]  # the surrogate's settings then affect the correction, too
  # At 1, ratios differ only in how they spread the gradient over the tokens of a row.
  if not RATIOS[algo.ratio].shared_by_row or _rows_are_uniform(algo):
    idle.insert(0, "ratio")
  defaults = Algo()
  return tuple(name for name in idle if getattr(algo, name) != getattr(defaults, name))


def moves_unseen(algo: Algo) -> bool:
  """Whether a step makes many updates with a loss that does not limit how far the policy moves.

  With neither a ratio nor a KL term in the loss, 4 updates per batch did no harm, 8 cost accuracy
  and 16 made every run collapse. A KL in the reward did not help (experiments/stress.md).
  """
  has_limit = SURROGATES[algo.surrogate].reads_ratio or (algo.kl_coef > 0 and not algo.kl_in_reward)
  return algo.updates_per_step >= 8 and not has_limit


def _rows_are_uniform(algo: Algo) -> bool:
  """Whether all tokens of a completion have the same advantage and the same weight."""
  token_advantages = ADVANTAGES[algo.advantage].per_token or algo.kl_in_reward
  token_corrections = algo.has_correction and not LEVELS[algo.correction_level].shared_by_row
  chosen = SURROGATES[algo.surrogate].select is not None
  return not (token_advantages or token_corrections or chosen or has_weights(algo))


def _check_batch(algo: Algo, prompts: int, group_size: int) -> None:
  """Raises ConfigError for settings that do not fit the size of an update or of a group."""
  require(
    prompts % algo.minibatches == 0,
    algo,
    "minibatches",
    f"it must divide batch.prompts = {prompts}",
  )
  completions = prompts * group_size // algo.minibatches
  # So an update changes the coefficient of the KL by a fifth at most.
  require(
    not algo.kl_target or algo.kl_horizon >= completions,
    algo,
    "kl_horizon",
    f"it must be at least the {completions} completions of an update",
  )
  # The variance is a sum divided by group_size - std_ddof.
  require(
    algo.std_ddof < group_size,
    algo,
    "std_ddof",
    f"it must be below batch.group_size = {group_size}",
  )


def _check_overlong(algo: Algo, max_tokens: int) -> None:
  """Raises ConfigError for a length penalty that max_tokens or the advantage does not allow."""
  require(
    not algo.overlong or round(algo.overlong * max_tokens) >= 1,
    algo,
    "overlong",
    f"of sampling.max_tokens = {max_tokens} that is not one token",
  )
  require(
    not algo.overlong or not ADVANTAGES[algo.advantage].counts_right_answers,
    algo,
    "overlong",
    f"{algo.advantage} counts right answers, which a penalty would make wrong; set 0",
  )
  require(
    not algo.overlong or not ADVANTAGES[algo.advantage].refuses_negative,
    algo,
    "overlong",
    f"a penalty makes rewards negative, which {algo.advantage} does not take; set 0",
  )


def _check_variants(algo: Algo, group_size: int) -> None:
  """Raises ConfigError for settings that the advantage or the surrogate does not allow."""
  advantage, surrogate = ADVANTAGES[algo.advantage], SURROGATES[algo.surrogate]
  require(
    not algo.dynamic_sampling or not advantage.equal_rewards_teach,
    algo,
    "dynamic_sampling",
    f"with the advantage {algo.advantage} a group of equal rewards teaches, too; set False",
  )
  if advantage.check is not None:
    advantage.check(algo, group_size)
  if surrogate.ratios is not None:
    names = " or ".join(repr(name) for name in surrogate.ratios)
    require(
      algo.ratio in surrogate.ratios,
      algo,
      "ratio",
      f"the surrogate {algo.surrogate} has its own ratio; leave this at {names}",
    )
  require(
    not surrogate.needs_lower_bound or algo.clip_low < 1,
    algo,
    "clip_low",
    f"neither a ratio nor a probability falls by 1, so {algo.surrogate} would have no lower bound;"
    " choose less than 1, or the surrogate cispo, which is meant to have none",
  )
  if surrogate.check is not None:
    surrogate.check(algo)


def _check_correction(algo: Algo, sampler_filters: bool) -> None:
  """Raises ConfigError for a correction that would change nothing, or undo the ratio."""
  row_levels = " or ".join(repr(name) for name, level in LEVELS.items() if level.shared_by_row)
  require(
    not RATIOS[algo.ratio].shared_by_row or LEVELS[algo.correction_level].shared_by_row,
    algo,
    "correction_level",
    f"a weight per token undoes the {algo.ratio} ratio; choose {row_levels}",
  )
  has_bounds = issubclass(CORRECTIONS[algo.correction].settings, BoundSettings)
  require(
    not has_bounds or bool(algo.correction_low or algo.correction_high),
    algo,
    "correction",
    "set algo.correction_low or algo.correction_high, or it changes nothing",
  )
  require(
    not algo.correction_high or algo.correction_low < algo.correction_high,
    algo,
    "correction_low",
    f"it must be below algo.correction_high = {algo.correction_high}",
  )
  # With one update per batch, the learner computes the old log-probs itself. Filters change the
  # distribution of the draws, so that it differs from the sampler's softmax.
  require(
    algo.old_is_policy or algo.old_logprobs == "recomputed" or sampler_filters,
    algo,
    "correction",
    "the old log-probs are the sampler's own, so every weight is 1;"
    " set algo.old_logprobs='recomputed'",
  )


def _check_kl(algo: Algo) -> None:
  """Raises ConfigError for KL settings that do not fit together, such as k3+ in the reward."""
  kl = KL[algo.kl]
  if algo.kl_in_reward:
    require(
      not kl.replaces_gradient,
      algo,
      "kl",
      "in a reward it has no gradient to replace; leave out the +",
    )
    require(
      not algo.kl_importance_weighted,
      algo,
      "kl_importance_weighted",
      "in a reward it has no ratio; choose False",
    )
    of_tokens = [name for name, x in KL.items() if not (x.reads_logits or x.replaces_gradient)]
    require(
      not kl.reads_logits,
      algo,
      "kl",
      "a reward is of the token that was sampled;"
      f" choose {', '.join(of_tokens[:-1])} or {of_tokens[-1]}",
    )
    require(
      ADVANTAGES[algo.advantage].takes_kl_penalty,
      algo,
      "kl_in",
      f"the advantage {algo.advantage} is of the rewards alone; choose 'loss'",
    )
  require(
    not kl.reads_logits or not algo.kl_importance_weighted,
    algo,
    "kl_importance_weighted",
    "the full KL is of a whole distribution, not of the token that was sampled; choose False",
  )
  for name in ("kl_target", "ref_sync_steps"):
    require(
      algo.uses_reference or not getattr(algo, name),
      algo,
      name,
      "with algo.kl_coef = 0 there is no reference; set algo.kl_coef",
    )
