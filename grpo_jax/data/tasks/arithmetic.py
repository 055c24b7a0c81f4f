"""Sums of several steps, such as `7+15-6+9=`, generated on the fly.

The solution of an example has one of two forms. The worked form goes from left to right,
`7+15=22;22-6=16;16+9=25;#### 25`. The direct form is the answer alone, `#### 25`. A model that was
warm-started on both can produce both. Reinforcement learning then discovers that the worked form is
right more often.
"""

import functools
import random
import zlib

from grpo_jax.data.tasks.generated import Generated

OPERANDS = 4  # the default number of operands in a sum
MAX_OPERAND = 20  # operands are 1..MAX_OPERAND
MAX_TOTAL = 99  # running totals are 0..MAX_TOTAL
WORKED_SHARE = 0.4  # the fraction of examples whose solution is worked
SIZES = {"train": 20_000, "test": 2_000}
ALPHABET = "0123456789+-=;# "


class Arithmetic(Generated):
  """The examples of a split, "train" or "test".

  Example i depends only on the split, the number of operands and i.
  """

  def __init__(self, split: str, operands: int = OPERANDS) -> None:
    super().__init__(split, SIZES[split], functools.partial(_example, split, operands))


def split_of(question: str) -> str:
  """The split that a question belongs to: "test" for about one question in ten, else "train".

  The split depends on the text alone, so that no question is in both splits.
  """
  return "test" if zlib.crc32(question.encode()) % 10 == 0 else "train"


def _example(split: str, operands: int, index: int) -> dict[str, str]:
  """Example `index` of a split: a sum, whose solution shows the steps in some examples."""
  # Only random() is called, because Python promises that its sequence never changes.
  # The default keeps the examples that it had before `operands` became a parameter.
  name = f"{split}/{index}" if operands == OPERANDS else f"{split}/{operands}/{index}"
  rng = random.Random(name)
  while True:
    question, steps, total = _problem(rng, operands)
    if split_of(question) == split:
      break
  direct = f"#### {total}"
  is_worked = rng.random() < WORKED_SHARE
  return {
    "question": question,
    "solution": f"{steps}{direct}" if is_worked else direct,
    "answer": str(total),
  }


def _problem(rng: random.Random, operands: int) -> tuple[str, str, int]:
  """Draws a sum. Returns (question, steps of the worked solution, answer)."""
  total = _operand(rng)
  question, steps = str(total), ""
  for _ in range(operands - 1):
    operand = _operand(rng)
    sign = 1 if rng.random() < 0.5 else -1
    if not 0 <= total + sign * operand <= MAX_TOTAL:
      sign = -sign
    term = f"{'+' if sign > 0 else '-'}{operand}"
    question += term
    steps += f"{total}{term}={total + sign * operand};"
    total += sign * operand
  return f"{question}=", steps, total


def _operand(rng: random.Random) -> int:
  return 1 + int(rng.random() * MAX_OPERAND)
