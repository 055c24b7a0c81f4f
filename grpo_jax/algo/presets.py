"""A preset is a row: one choice on each axis, and the settings of the paper. What a row does not name is in DEFAULTS.

Where a row's choice reads the ratio, it has several minibatches, 4 as in GSPO's and SAPO's papers: with one update per
batch the ratio is 1, and the choice would be dead.
"""

DEFAULTS = dict(
  # Advantage: a name of advantages.py.
  advantage="group_normalized",
  std_ddof=1,  # 1 as TRL and verl, 0 as in the textbook example
  std_eps=1e-4,  # added to a standard deviation
  batch_weighting="sequence",  # in statistics of the batch, a completion counts once, or per token: "token", as it
  # always does in those of batch_normalized with a KL in the reward
  batch_std_eps=1e-4,  # gdpo: added to the batch's standard deviation
  pass_k=4,  # pass_at_k
  # Ratio: a name of ratios.py.
  ratio="token",
  updates_per_batch=1,  # passes over a batch
  minibatches=1,  # optimizer steps in a pass. With one pass and one step the ratio is 1, and no bound on it matters
  old_logprobs="sampler",  # the ratio's denominator: as sampled, or recomputed by the learner before the first update
  # Surrogate: a name of surrogates.py.
  surrogate="ppo_clip",
  clip_low=0.2,  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
  clip_high=0.2,
  ratio_max=0.0,  # ppo_clip, dppo: cap of the ratio that is not clipped; 0 = off
  dual_clip=0.0,  # ppo_clip: bound of the loss at negative advantages; 0 = off
  tau_pos=1.0,  # sapo
  tau_neg=1.05,
  k_pos=2.0,  # vespo
  lambda_pos=3.0,
  k_neg=3.0,
  lambda_neg=2.0,
  cov_fraction=2e-4,  # clip_cov, kl_cov: share of the tokens
  cov_low=1.0,  # clip_cov: the band of covariances
  cov_high=5.0,
  cov_kl_coef=1.0,  # kl_cov
  dro_beta=0.05,  # dro
  # Aggregation: a name of aggregation.py.
  aggregation="sequence_mean",
  length_norm=0,  # constant; 0 = sampling.max_tokens
  # KL to the reference: a name of kl.py, or "full", over the whole vocabulary.
  kl="k3",
  kl_coef=0.0,  # 0 = no reference is kept and no forward pass spent on it
  kl_in="loss",  # or "reward": what is taken from a completion's reward
  kl_importance_weighted=False,  # times the token ratio
  kl_target=0.0,  # above 0, kl_coef is only where the coefficient starts: it follows the KL of a token, to meet this
  kl_horizon=10_000,  # completions in which it can change by a fifth
  ref_sync_steps=0,  # after every so many GRPO steps the reference moves; 0 = it is frozen
  ref_mixup=0.6,  # by this share of the way to the policy; 1 = it becomes the policy
  # Corrections and masks.
  correction="none",  # of the gap between sampler and learner: a name of corrections.py
  correction_level="token",  # or "sequence" (product of the tokens' weights) or "geometric" (their mean)
  correction_low=0.0,
  correction_high=0.0,  # 0 = no bound
  off_policy_threshold=0.0,  # leaves out completions with A < 0 that the policy has moved this far from; 0 = off
  mask_truncated=False,  # leaves completions that were cut off out of the loss
  top_entropy_quantile=1.0,  # the share of tokens, the most uncertain ones, that learn; 1 = all
  entropy_coef=0.0,  # bonus for entropy; 0 = off
  entropy_target=0.0,  # above 0, the coefficient follows the entropy of a token: up where that is below this, else down
  entropy_step=0.005,  # by this much an update
  # What is sampled and scored.
  dynamic_sampling=False,  # groups whose rewards are all equal give way to fresh ones
  max_resample_rounds=3,  # of at most so many batches more; what is missing then is left out of the loss
  overlong=0.0,  # the last share of sampling.max_tokens, over which a reward falls by up to 1; 0 = off
)

PRESETS = {
  # GRPO, DeepSeekMath 2402.03300, eq. 3 and 4.
  "grpo": dict(kl_coef=0.04),
  # Dr. GRPO 2503.20783: no division by the deviation, nor by the length.
  "dr_grpo": dict(advantage="group_centered", aggregation="constant"),
  # BNPO, as TRL has it.
  "bnpo": dict(aggregation="token_mean"),
  # DAPO 2503.14476 (there 16 minibatches; 4096 of 20480 tokens).
  "dapo": dict(
    clip_high=0.28, aggregation="token_mean", minibatches=4, dynamic_sampling=True, overlong=0.2
  ),
  # GSPO 2507.18071, with its four minibatches.
  "gspo": dict(ratio="sequence", clip_low=3e-4, clip_high=4e-4, minibatches=4),
  "gspo_token": dict(ratio="sequence_token", clip_low=3e-4, clip_high=4e-4, minibatches=4),
  # GMPO 2507.20673.
  "gmpo": dict(
    advantage="group_centered", surrogate="gmpo", clip_low=0.4, clip_high=0.4, minibatches=4
  ),
  # CISPO, MiniMax-M1 2506.13585: no lower bound.
  "cispo": dict(
    surrogate="cispo", clip_low=1.0, clip_high=4.0, aggregation="token_mean", minibatches=4
  ),
  # SAPO 2511.20347.
  "sapo": dict(surrogate="sapo", minibatches=4),
  # LUSPO 2602.05261.
  "luspo": dict(
    ratio="sequence", clip_low=2e-3, clip_high=2.5e-3, aggregation="sequence_sum", minibatches=4
  ),
  # VESPO 2602.10693.
  "vespo": dict(surrogate="vespo", aggregation="token_mean", minibatches=4),
  # RLOO 2402.14740.
  "rloo": dict(
    advantage="leave_one_out",
    surrogate="reinforce",
    aggregation="sequence_sum",
    kl="k1",
    kl_coef=0.03,
    kl_in="reward",
  ),
  # REINFORCE++ 2501.03262.
  "reinforce_pp": dict(
    advantage="batch_normalized", aggregation="token_mean", kl="k1", kl_coef=0.001, kl_in="reward"
  ),
  # LitePPO 2508.08221.
  "lite_ppo": dict(advantage="group_mean_batch_std", aggregation="token_mean"),
  # OPO 2505.23585.
  "opo": dict(advantage="opo", aggregation="token_mean"),
  # ReMax 2310.10505.
  "remax": dict(advantage="greedy_baseline", surrogate="reinforce", aggregation="sequence_sum"),
  # GPG 2504.02546.
  "gpg": dict(advantage="group_centered", surrogate="reinforce", aggregation="token_mean"),
  # Entropy mechanism 2505.22617.
  "clip_cov": dict(surrogate="clip_cov", aggregation="token_mean", minibatches=4),
  "kl_cov": dict(surrogate="kl_cov", aggregation="token_mean", minibatches=4),
  # Pass@k training 2508.10751.
  "pass_at_k": dict(advantage="pass_at_k", aggregation="token_mean"),
  # GRPO with process supervision, DeepSeekMath 2402.03300, section 4.1.3: for rewards of steps.
  "process": dict(advantage="process", kl_coef=0.04),
}


def row(name: str) -> dict:
  """Every setting of a preset. Raises KeyError for an unknown name."""
  return {**DEFAULTS, **PRESETS[name]}
