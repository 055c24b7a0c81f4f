"""GRPO from scratch on a laptop: sums of several steps.

  python -m grpo_jax.train --config=configs/arithmetic.py --workdir=/tmp/arithmetic
"""
from configs import default


def get_config(preset="grpo"):
  c = default.get_config(preset)
  c.steps = 400
  c.data.max_prompt_tokens = 12
  c.batch.prompts = 32
  c.batch.group_size = 8
  c.sampling.max_tokens = 40
  c.warm_start.steps = 1000
  c.warm_start.batch = 128
  c.warm_start.learning_rate = 3e-3
  c.optimizer.learning_rate = 5e-4
  c.optimizer.schedule = "linear"
  c.optimizer.warmup_steps = 60
  c.eval.every = 10
  c.eval.examples = 512
  c.eval.batch = 512
  c.checkpoint.every = 100
  return c
