"""Presets: the settings of a paper that differ from the defaults of `Algo`.

A preset whose choices depend on the ratio has several minibatches: 4, as in the papers of GSPO and
SAPO. With one update per batch the ratio is 1, and these choices would change nothing.

The settings are those of the papers, even where experiments/stress.md shows that short texts need
others. Comments below name its results. Above all, `algo.kl_coef=0.04` keeps nearly every preset
from collapsing with many updates per batch.
"""

from dataclasses import fields
from typing import Any

from grpo_jax.algo.settings import Algo

# The method of each preset, and the number of its paper on arxiv.org.
PAPERS: dict[str, tuple[str, str]] = {
  "grpo": ("GRPO, DeepSeekMath", "2402.03300"),
  "dr_grpo": ("Dr. GRPO", "2503.20783"),
  "bnpo": ("BNPO, as in TRL", ""),
  "dapo": ("DAPO", "2503.14476"),
  "gspo": ("GSPO", "2507.18071"),
  "gspo_token": ("GSPO-token", "2507.18071"),
  "gmpo": ("GMPO", "2507.20673"),
  "cispo": ("CISPO, MiniMax-M1", "2506.13585"),
  "sapo": ("SAPO", "2511.20347"),
  "luspo": ("LUSPO", "2602.05261"),
  "vespo": ("VESPO", "2602.10693"),
  "rloo": ("RLOO", "2402.14740"),
  "reinforce_pp": ("REINFORCE++", "2501.03262"),
  "lite_ppo": ("LitePPO", "2508.08221"),
  "opo": ("OPO", "2505.23585"),
  "remax": ("ReMax", "2310.10505"),
  "gpg": ("GPG", "2504.02546"),
  "clip_cov": ("Clip-Cov, entropy mechanism", "2505.22617"),
  "kl_cov": ("KL-Cov, entropy mechanism", "2505.22617"),
  "pass_at_k": ("Pass@k training", "2508.10751"),
  "max_rl": ("MaxRL", "2602.02710"),
  "raft": ("RAFT, rejection sampling", "2304.06767"),
  "areal": ("decoupled PPO, AReaL", "2505.24298"),
  "aipo": ("AIPO, LlamaRL", "2505.24034"),
  "m2po": ("M2PO", "2510.01161"),
  "process": ("GRPO with process supervision, DeepSeekMath", "2402.03300"),
}

PRESETS: dict[str, dict[str, Any]] = {
  # Equations 3 and 4.
  "grpo": dict(kl_coef=0.04),
  # No division by the deviation, nor by the length.
  "dr_grpo": dict(advantage="group_centered", aggregation="constant"),
  "bnpo": dict(aggregation="token_mean"),
  # The paper has 16 minibatches, and its penalty covers the last 4096 of 20480 tokens.
  "dapo": dict(
    clip_high=0.28, aggregation="token_mean", minibatches=4, dynamic_sampling=True, overlong=0.2
  ),
  # Four minibatches, as in the paper. The bounds are for texts of thousands of tokens. With 24
  # tokens it hardly learns from noisy rewards, unless the bounds are 16 times as wide.
  "gspo": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4, minibatches=4),
  "gspo_token": dict(ratio="sequence_token", clip_low=3e-4, clip_high=4e-4, minibatches=4),
  "gmpo": dict(
    advantage="group_centered", surrogate="gmpo", clip_low=0.4, clip_high=0.4, minibatches=4
  ),
  # No lower bound. No token loses its gradient, so with 16 updates per batch it collapses.
  "cispo": dict(
    surrogate="cispo", clip_low=1.0, clip_high=4.0, aggregation="token_mean", minibatches=4
  ),
  # With 32 updates per batch it collapses.
  "sapo": dict(surrogate="sapo", minibatches=4),
  # Short texts need wider bounds, as with GSPO.
  "luspo": dict(
    ratio="sequence", clip_low=2e-3, clip_high=2.5e-3, aggregation="sequence_sum", minibatches=4
  ),
  "vespo": dict(surrogate="vespo", aggregation="token_mean", minibatches=4),
  # Like ReMax and GPG, it has no ratio: with 16 updates per batch it collapses.
  "rloo": dict(
    advantage="leave_one_out",
    surrogate="reinforce",
    aggregation="sequence_sum",
    kl="k1",
    kl_coef=0.03,
    kl_in="reward",
  ),
  # The baseline is the mean of the whole batch, not of a group.
  "reinforce_pp": dict(
    advantage="batch_normalized", aggregation="token_mean", kl="k1", kl_coef=0.001, kl_in="reward"
  ),
  "lite_ppo": dict(advantage="group_mean_batch_std", aggregation="token_mean"),
  "opo": dict(advantage="opo", aggregation="token_mean"),
  # The baseline is one reward. With flipped rewards the policy forgets what it has learned.
  "remax": dict(advantage="greedy_baseline", surrogate="reinforce", aggregation="sequence_sum"),
  "gpg": dict(advantage="group_centered", surrogate="reinforce", aggregation="token_mean"),
  "clip_cov": dict(surrogate="clip_cov", aggregation="token_mean", minibatches=4),
  # kl_cov has no bound at all: with 16 updates per batch it collapses.
  "kl_cov": dict(surrogate="kl_cov", aggregation="token_mean", minibatches=4),
  # Any reward above 0 counts as a right answer.
  "pass_at_k": dict(advantage="pass_at_k", aggregation="token_mean"),
  # Rewards are at least 0.
  "max_rl": dict(advantage="max_rl", aggregation="token_mean"),
  # Supervised steps on the completions that were right. Rewards are 0 or 1.
  "raft": dict(advantage="reward", surrogate="reinforce", aggregation="token_mean"),
  # For rollouts of older policies. The ratio compares with the policy before the first update, and
  # a weight corrects for the policy that sampled. In the paper, too, tokens with a weight above 5
  # are left out. A token may be 4 to 8 versions old there.
  "areal": dict(
    advantage="batch_normalized",
    batch_weighting="token",
    aggregation="token_mean",
    minibatches=4,
    old_logprobs="recomputed",
    correction="mask",
    correction_high=5.0,
  ),
  # min(pi / mu, 4) A grad lp, summed over a completion. The paper's bound is between 2 and 10.
  # The preset is exact with one update per batch. With several, pi stays the policy before the
  # first update. With the surrogate cispo, clip_low=1 and clip_high=3, pi is the current policy.
  "aipo": dict(
    advantage="group_centered",
    surrogate="reinforce",
    aggregation="sequence_sum",
    correction="truncate",
    correction_high=4.0,
  ),
  # No clip, but a bound on the second moment of the log-ratio.
  "m2po": dict(surrogate="unclipped", m2_bound=0.04, aggregation="token_mean", minibatches=4),
  # Section 4.1.3: for rewards of steps.
  "process": dict(advantage="process", kl_coef=0.04),
}

CHOICES = f"choose one of {', '.join(PRESETS)}"  # for error messages


def closest(algo: Algo) -> str:
  """The preset with the variants of `algo` that differs in the fewest settings, or ""."""
  fitting = {
    name: sum(getattr(algo, field.name) != getattr(settings, field.name) for field in fields(Algo))
    for name in PRESETS
    if _variants(settings := preset(name)) == _variants(algo)
  }
  return min(fitting, key=lambda name: fitting[name], default="")


def _variants(algo: Algo) -> tuple[Any, ...]:
  """The choices that make an algorithm what it is, whatever its numbers are."""
  choices = (algo.advantage, algo.ratio, algo.surrogate, algo.aggregation, algo.correction)
  return *choices, algo.m2_bound > 0


def preset(name: str) -> Algo:
  """The settings of a preset. Raises KeyError for an unknown name."""
  return Algo(**PRESETS[name])
