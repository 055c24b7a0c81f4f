"""Accuracy estimates from samples, each with its 95% interval."""

from collections.abc import Hashable, Sequence
import math

import numpy as np

Estimate = tuple[float, float, float]  # value, lower end, upper end
_NORMAL_97_5 = 1.959963984540054  # the 97.5% quantile of the normal distribution


def proportion(right: int, count: int) -> Estimate:
  """Estimates a rate as right / count, with Wilson's score interval (1927).

  The interval stays inside [0, 1], and is not empty if all answers are right or all are wrong.

  Args:
    right: How many answers are right.
    count: How many answers there are, at least 1.
  """
  return _wilson(right / count, count)


def mean(values_N: np.ndarray) -> Estimate:
  """Estimates the mean p of independent values in [0, 1], with Wilson's interval.

  N values of variance s^2 count as N p (1 - p) / s^2 draws of 0 or 1. If all values are 0 or 1,
  the result equals `proportion`. The normal interval would be empty for a mean of 0 or 1.

  Args:
    values_N: float [N].
  """
  value = float(values_N.mean())
  draws_per_value = 1.0
  if values_N.min() < values_N.max():
    draws_per_value = value * (1 - value) / float(values_N.var())
  return _wilson(value, len(values_N) * draws_per_value)


def _wilson(p: float, count: float) -> Estimate:
  """Returns p and the range of rates r with |p - r| <= z sqrt(r (1 - r) / count)."""
  square = _NORMAL_97_5**2 / count
  middle = (p + square / 2) / (1 + square)
  half = math.sqrt(square * (p * (1 - p) + square / 4)) / (1 + square)
  # Rounding must not put p outside its interval, nor move an end away from 0 or 1.
  low = min(p, max(0.0, middle - half)) if p > 0 else 0.0
  high = max(p, min(1.0, middle + half)) if p < 1 else 1.0
  return p, low, high


def unbiased_pass_at_k(right_N: np.ndarray, samples: int, k: int) -> np.ndarray:
  """Computes 1 - C(n - c, k) / C(n, k) for each problem, unbiased (Chen 2107.03374, eq. 1).

  Worked: n 8, c 1, k 8 -> 1; k 1 -> 1/8; n 4, c 2, k 2 -> 1 - 1/6.

  Args:
    right_N: int [N], c, how many samples of each problem are right.
    samples: n, how many samples each problem has.
    k: How many samples are drawn, at most `samples`.

  Returns:
    float [N], the chance that at least one of k samples is right.
  """
  subsets = math.comb(samples, k)
  return np.array([1 - math.comb(samples - int(right), k) / subsets for right in right_N])


def majority(answers: Sequence[Hashable | None], right: Sequence[bool]) -> float:
  """Returns the chance that the most frequent answer is right, if ties are broken at random.

  Worked: answers 3, 3, 5, 5 with 3 right -> 1/2.

  Args:
    answers: The answers to one problem. None is no answer and has no vote.
    right: Whether each answer is right. If equal answers differ in this, they count as right.

  Returns:
    A number from 0 to 1. 0 if there is no answer.
  """
  votes: dict[Hashable, int] = {}
  for answer in answers:
    if answer is not None:
      votes[answer] = votes.get(answer, 0) + 1
  if not votes:
    return 0.0
  most_votes = max(votes.values())
  leaders = [answer for answer, count in votes.items() if count == most_votes]
  right_answers = {answer for answer, is_right in zip(answers, right) if is_right}
  return sum(answer in right_answers for answer in leaders) / len(leaders)
