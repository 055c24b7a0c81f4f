"""Countdown: combine numbers, each used once, so that they make a target. Generated on the fly.

The question `3 4 2 = 10:` asks for an expression such as `3*4-2`. Every problem has a solution that
uses the numbers in the given order, with one of + - * between them.

The solution of an example has one of two forms. The right form makes the target, `#### 3*4-2`. The
hasty form adds all numbers, `#### 3+4+2`, and is usually wrong. A model that was warm-started on
both adds most of the time. Reinforcement learning then discovers that the target matters.
"""

from collections.abc import Sequence
import functools
import random
from typing import Any
import zlib

from grpo_jax.data.tasks.generated import Generated

LARGEST = 12  # numbers are 1..LARGEST
LARGEST_TARGET = 99  # targets are 1..LARGEST_TARGET
HASTY_SHARE = 0.6  # the fraction of examples whose solution adds all numbers
SIZES = {"train": 20_000, "test": 2_000}
ALPHABET = "0123456789+-*=:# "
# The ways to combine three numbers in order.
_SIGNS = [(first, second) for first in "+-*" for second in "+-*"]


class Countdown(Generated):
  """The examples of a split, "train" or "test". Example i depends only on the split and i.

  An example has the fields question, numbers (three ints), target (an int), answer (an expression
  that makes the target) and solution.
  """

  def __init__(self, split: str) -> None:
    super().__init__(split, SIZES[split], functools.partial(_example, split))


def split_of(numbers: Sequence[int], target: int) -> str:
  """The split that a problem belongs to: "test" for about one problem in ten, else "train".

  The order of the numbers does not matter, so the splits share no problem.
  """
  key = f"{sorted(numbers)}={target}"
  return "test" if zlib.crc32(key.encode()) % 10 == 0 else "train"


def _example(split: str, index: int) -> dict[str, Any]:
  """Example `index` of a split: three numbers and a target. The solution may be hasty."""
  # Only random() is called, because Python promises that its sequence never changes.
  rng = random.Random(f"countdown/{split}/{index}")
  while True:
    numbers = [1 + int(rng.random() * LARGEST) for _ in range(3)]
    right = int(rng.random() * len(_SIGNS))  # the index of the signs that make the target
    target = _value(numbers, _SIGNS[right])
    if 1 <= target <= LARGEST_TARGET and split_of(numbers, target) == split:
      break
  answer = _expression(numbers, right)
  hasty = _expression(numbers, _SIGNS.index(("+", "+")))
  return {
    "question": f"{' '.join(map(str, numbers))} = {target}:",
    "numbers": numbers,
    "target": target,
    "answer": answer,
    "solution": f"#### {hasty if rng.random() < HASTY_SHARE else answer}",
  }


def _expression(numbers: Sequence[int], way: int) -> str:
  first, second = _SIGNS[way]
  return f"{numbers[0]}{first}{numbers[1]}{second}{numbers[2]}"


def _value(numbers: Sequence[int], signs: tuple[str, str]) -> int:
  a, b, c = numbers
  first, second = signs
  if first == "*":
    return _apply(second, a * b, c)
  if second == "*":
    return _apply(first, a, b * c)
  return _apply(second, _apply(first, a, b), c)


def _apply(sign: str, left: int, right: int) -> int:
  return {"+": left + right, "-": left - right, "*": left * right}[sign]
