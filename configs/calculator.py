"""Trains a small model from random weights to call a calculator, on products such as 37*58=.

Command:  python -m grpo_jax.train --config=configs/calculator.py --workdir=/tmp/calculator
Hardware: two CPU cores of a laptop are enough.
Memory:   1 GB.
Time:     2 minutes, measured beside other work.
Result:   held-out greedy accuracy of seeds 0 to 2:
          after the warm start    7.6% to 9.6%
          at the end              93.9% to 98.4%

The warm start teaches a mixture of answers without a calculation, nine in ten, and of calls such as
`[37*58]`. The text `]` ends the turn, the calculator answers 2146, and the policy goes on behind
it. After the warm start, the model guesses most of the time. GRPO rewards right answers only, and
the model learns to call. The metric tools/call_frequency has the calls of a completion.
"""

from ml_collections import ConfigDict

from grpo_jax.configs import default


def get_config(preset: str = "grpo") -> ConfigDict:
  c = default.get_config(preset)
  c.steps = 100
  c.model.rope_theta = 100.0  # as in configs/arithmetic.py: texts are short
  c.data.task = "products"
  c.data.max_prompt_tokens = 6
  c.environment.tools = ("calculator",)
  c.environment.calls = r"\[(?P<arguments>[^\]]*)\]"
  c.environment.max_turns = 3
  c.sampling.stop = ("]",)
  c.sampling.max_tokens = 36
  c.batch.prompts = 32
  c.batch.group_size = 8
  c.warm_start.steps = 1000
  c.warm_start.batch = 128
  c.warm_start.learning_rate = 3e-3
  c.optimizer.learning_rate = 2e-4
  c.optimizer.schedule = "linear"
  c.optimizer.warmup_steps = 20
  c.eval.every = 10
  c.eval.examples = 512
  c.eval.batch = 512
  c.checkpoint.every = 100
  return c
