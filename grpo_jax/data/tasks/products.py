"""Products such as `37*58=`, generated on the fly, for a policy that may call a calculator.

The solution of an example has one of two forms. The direct form is the answer alone, `#### 2146`.
The other form calls the calculator and reads its answer: `[37*58]2146;#### 2146`. A model that was
warm-started on both can produce both. A small model cannot multiply, so reinforcement learning
discovers that calls earn more reward.
"""

import functools
import random

from grpo_jax.data.tasks.arithmetic import split_of
from grpo_jax.data.tasks.generated import Generated

SMALLEST, LARGEST = 12, 99  # the range of factors
CALL_SHARE = 0.1  # the fraction of examples whose solution calls the calculator
SIZES = {"train": 20_000, "test": 2_000}
ALPHABET = "0123456789*=[];# "


class Products(Generated):
  """The examples of a split, "train" or "test". Example i depends only on the split and i."""

  def __init__(self, split: str) -> None:
    super().__init__(split, SIZES[split], functools.partial(_example, split))


def _example(split: str, index: int) -> dict[str, str]:
  """Example `index` of a split: a product, whose solution calls the calculator in some examples."""
  # Only random() is called, because Python promises that its sequence never changes.
  rng = random.Random(f"products/{split}/{index}")
  while True:
    product = f"{_factor(rng)}*{_factor(rng)}"
    if split_of(f"{product}=") == split:
      break
  left, right = map(int, product.split("*"))
  direct = f"#### {left * right}"
  calls = rng.random() < CALL_SHARE
  return {
    "question": f"{product}=",
    "solution": f"[{product}]{left * right};{direct}" if calls else direct,
    "answer": str(left * right),
  }


def _factor(rng: random.Random) -> int:
  return SMALLEST + int(rng.random() * (LARGEST - SMALLEST + 1))
