"""Accuracy estimates from draws, each with its 95% interval. Plain numpy."""

import math
from typing import Hashable, Sequence

import numpy as np

Z95 = 1.959963984540054  # the normal distribution's 97.5% quantile

Estimate = tuple[float, float, float]  # value, lower end, upper end


def proportion(right: int, count: int) -> Estimate:
  """right / count with Wilson's score interval (1927), which stays inside [0, 1] and is not empty at 0 or 1."""
  return _wilson(right / count, count)


def mean(values_N: np.ndarray) -> Estimate:
  """Mean of independent values in [0, 1] with Wilson's interval, the same as `proportion` where all are 0 or 1.

  N values of variance s^2 count as N p (1 - p) / s^2 draws of 0 or 1. The normal interval would be empty at 0 and at 1.
  """
  value = float(values_N.mean())
  varies = values_N.min() < values_N.max()
  return _wilson(
    value, len(values_N) * (value * (1 - value) / float(values_N.var()) if varies else 1.0)
  )


def _wilson(p: float, count: float) -> Estimate:
  z2 = Z95**2
  center = (p + z2 / (2 * count)) / (1 + z2 / count)
  half = Z95 / (1 + z2 / count) * math.sqrt(p * (1 - p) / count + z2 / (4 * count**2))
  return (
    p,
    min(p, max(0.0, center - half)),
    max(p, min(1.0, center + half)),
  )  # p is inside, whatever the rounding


def pass_at_k(right_N: np.ndarray, samples: int, k: int) -> np.ndarray:
  """1 - C(n - c, k) / C(n, k) per problem: unbiased, c right of n draws (Chen 2107.03374, eq. 1).

  Worked: n 8, c 1, k 8 -> 1; k 1 -> 1/8; n 4, c 2, k 2 -> 1 - 1/6.
  """
  return np.array([1 - math.comb(samples - int(c), k) / math.comb(samples, k) for c in right_N])


def majority(answers: Sequence[Hashable | None], right: Sequence[bool]) -> float:
  """The chance that the most frequent answer is right, ties drawn evenly; None is no answer and has no vote.

  Worked: answers 3, 3, 5, 5 with 3 right -> 1/2.
  """
  votes: dict[Hashable, int] = {}
  for answer in answers:
    if answer is not None:
      votes[answer] = votes.get(answer, 0) + 1
  if not votes:
    return 0.0
  most = max(votes.values())
  leaders = [a for a, n in votes.items() if n == most]
  good = {a for a, r in zip(answers, right) if r}
  return sum(a in good for a in leaders) / len(leaders)
