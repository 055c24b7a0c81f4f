"""GRPO from scratch on a laptop: sums of several steps.

  python -m grpo_jax.train --config=configs/arithmetic.py --workdir=/tmp/arithmetic

Two CPU cores: about 7 minutes (experiments/LOG.md). Held-out greedy accuracy after the warm start and at the end, seeds
0, 1, 2: 18% to 99%, 24% to 95%, 45% to 99.6%, as the answers grow from 10 to 17 tokens to 32: GRPO finds that working a
sum out pays.
"""

from configs import default


def get_config(preset="grpo"):
  c = default.get_config(preset)
  c.steps = 400
  c.data.max_prompt_tokens = 12
  c.batch.prompts = 32
  c.batch.group_size = 8
  c.sampling.max_tokens = 40
  if preset == "process":
    c.reward.functions = (
      "worked_steps",
    )  # each step of the worked solution is judged, and the answer
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
