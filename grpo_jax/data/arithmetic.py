"""Sums of several steps, such as `7+15-6+9=`: made when asked for, no file needed.

The worked solution goes left to right, `7+15=22;22-6=16;16+9=25;#### 25`; the direct one is `#### 25`. A model that was
warm-started on both knows both ways; what reinforcement learning finds is that working the problem out pays.
"""

import random
import zlib
from typing import Sequence

OPERANDS = 4
MAX_OPERAND = 20  # operands are 1..MAX_OPERAND
MAX_TOTAL = 99  # running totals are 0..MAX_TOTAL
WORKED_SHARE = 0.4  # of the examples have the worked solution, the others the direct one
SIZES = {"train": 20_000, "test": 2_000}
ALPHABET = "0123456789+-=;# "


class Arithmetic(Sequence):
  """A split: item i is a pure function of (split, i)."""

  def __init__(self, split: str):
    self._split = split

  def __len__(self) -> int:
    return SIZES[self._split]

  def __getitem__(self, index):
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    if not -len(self) <= index < len(self):
      raise IndexError(f"{self._split} has {len(self)} examples, no number {index}")
    return _example(self._split, index % len(self))


def split_of(question: str) -> str:
  """The split a problem belongs to, by its text: about one in ten is a test problem, and none is in both."""
  return "test" if zlib.crc32(question.encode()) % 10 == 0 else "train"


def _example(split, index):
  rng = random.Random(
    f"{split}/{index}"
  )  # only its random(), whose numbers Python promises to keep
  while True:
    question, steps, total = _problem(rng)
    if split_of(question) == split:
      break
  direct = f"#### {total}"
  worked = rng.random() < WORKED_SHARE
  return {
    "question": question,
    "solution": f"{steps}{direct}" if worked else direct,
    "answer": str(total),
  }


def _problem(rng):
  total = _operand(rng)
  question, steps = str(total), ""
  for _ in range(OPERANDS - 1):
    operand, sign = _operand(rng), 1 if rng.random() < 0.5 else -1
    if not 0 <= total + sign * operand <= MAX_TOTAL:
      sign = -sign
    term = f"{'+' if sign > 0 else '-'}{operand}"
    question += term
    steps += f"{total}{term}={total + sign * operand};"
    total += sign * operand
  return f"{question}=", steps, total


def _operand(rng):
  return 1 + int(rng.random() * MAX_OPERAND)
