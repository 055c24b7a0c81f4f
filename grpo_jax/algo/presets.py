"""A preset is a row: one choice on each axis, and the settings of the paper."""

PRESETS = {
    # GRPO, DeepSeekMath 2402.03300, eq. 3 and 4.
    "grpo": dict(
        advantage="group_normalized",
        std_ddof=1,  # 1 as TRL and verl, 0 as in the textbook example
        std_eps=1e-4,  # added to the standard deviation
        ratio="token",
        surrogate="ppo_clip",
        clip_low=0.2,  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
        clip_high=0.2,
        aggregation="sequence_mean",
        kl="k3",
        kl_coef=0.04,  # 0 = no reference is kept and no forward pass spent on it
    ),
}
