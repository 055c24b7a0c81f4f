"""Trains a small model from random weights on Countdown: combine numbers to make a target.

Command:  python -m grpo_jax.train --config=configs/countdown.py --workdir=/tmp/countdown
Hardware: two CPU cores of a laptop are enough.
Memory:   1 GB.
Time:     3 to 5 minutes, measured beside other work; 2 minutes of CPU time.
Result:   held-out greedy accuracy of seeds 0 to 2:
          after the warm start    14.3% to 15.8%
          after 50 GRPO steps     44.1% to 55.1%
          at the end              52.9% to 57.6%

A prompt such as `10 8 1 = 17:` asks for `#### 10+8-1`. The warm start teaches a mixture of right
expressions and of hasty ones, which add all numbers. After it, the model adds most of the time.
GRPO rewards expressions that make the target, and the model learns to look at the target.
"""

from ml_collections import ConfigDict

from grpo_jax.configs import default


def get_config(preset: str = "grpo") -> ConfigDict:
  c = default.get_config(preset)
  c.steps = 200
  c.model.rope_theta = 100.0  # as in configs/arithmetic.py: texts are short
  c.data.task = "countdown"
  c.data.max_prompt_tokens = 14
  c.batch.prompts = 32
  c.batch.group_size = 8
  c.sampling.max_tokens = 14
  c.reward.functions = ("countdown",)
  c.warm_start.steps = 1000
  c.warm_start.batch = 128
  c.warm_start.learning_rate = 3e-3
  c.optimizer.learning_rate = 2e-4
  c.optimizer.schedule = "linear"
  c.optimizer.warmup_steps = 50
  c.eval.function = "countdown"
  c.eval.every = 10
  c.eval.examples = 512
  c.eval.batch = 512
  c.checkpoint.every = 100
  return c
