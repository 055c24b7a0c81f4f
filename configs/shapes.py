"""Teaches a small vision-language model from random weights to count coloured shapes in images.

Command:  python experiments/small_vlm.py /tmp/small_vlm
          python -m grpo_jax.train --config=configs/shapes.py --workdir=/tmp/shapes
"""

from ml_collections import ConfigDict

from grpo_jax.configs import default


def get_config(preset: str = "grpo") -> ConfigDict:
  c = default.get_config(preset)
  c.steps = 1200
  c.model.path = "/tmp/small_vlm"
  c.model.vision = "trained"
  c.data.task = "count_shapes"
  c.data.path = "48"  # pixels
  c.data.max_prompt_tokens = 48
  c.batch.prompts = 64
  c.batch.group_size = 8
  c.sampling.max_tokens = 8
  c.warm_start.steps = 150
  c.warm_start.batch = 128
  c.warm_start.learning_rate = 1e-3
  c.optimizer.learning_rate = 3e-4
  c.optimizer.schedule = "linear"
  c.optimizer.warmup_steps = 20
  c.algo.kl_coef = 0.0
  c.eval.every = 50
  c.eval.examples = 512
  c.eval.batch = 512
  c.checkpoint.every = 100
  return c
