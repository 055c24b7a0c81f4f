"""Accuracy estimates against enumeration, simulation and published intervals."""

import itertools
import math
import sys

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from grpo_jax.evaluation import estimators

# Intervals.

Z95 = 1.959963984540054  # the 97.5% quantile of the normal distribution


@pytest.mark.parametrize(
  "right, count, low, high",
  [
    (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3, with the next three
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0000, 0.1611),
    (1, 29, 0.0061, 0.1718),
    (29, 29, 0.8830, 1.0000),
  ],
)
def test_wilson_interval_of_known_cases(right, count, low, high):
  assert estimators.proportion(right, count) == pytest.approx((right / count, low, high), abs=5e-5)


def test_an_interval_needs_no_private_part_of_scipy(monkeypatch):
  """Its class of such results has another constructor in 1.18."""
  monkeypatch.setitem(sys.modules, "scipy.stats._result_classes", None)
  assert estimators.proportion(0, 20)[1] == 0.0 and estimators.proportion(29, 29)[2] == 1.0


@given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_ends_are_the_rates_that_would_just_be_rejected(case):
  right, count = case
  p, low, high = estimators.proportion(right, count)
  assert 0 <= low <= p <= high <= 1 and low < high
  for end in {low, high} - {0.0, 1.0}:  # |p - end| = z sqrt(end (1 - end) / n)
    assert abs(p - end) == pytest.approx(
      Z95 * math.sqrt(end * (1 - end) / count), rel=1e-6, abs=1e-9
    )
  mirrored = estimators.proportion(count - right, count)
  assert mirrored == pytest.approx((1 - p, 1 - high, 1 - low))


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_mean_of_zeros_and_ones_is_a_proportion(right):
  assert estimators.mean(np.array(right, float)) == pytest.approx(
    estimators.proportion(sum(right), len(right))
  )


def test_mean_by_hand():
  """Variance 1/6, so three values count as 3 * 1/4 / (1/6) = 4.5 draws.

  Half of the interval is z / (1 + z^2 / 4.5) sqrt(...) = 0.3393.
  """
  assert estimators.mean(np.array([0.0, 0.5, 1.0])) == pytest.approx(
    (0.5, 0.1607, 0.8393), abs=5e-5
  )


@pytest.mark.parametrize("values", [[0.3] * 7, [0.0], [1.0] * 50, [0.1, 0.1, 0.1]])
def test_interval_of_equal_values_is_not_empty(values):
  value, low, high = estimators.mean(np.array(values))
  assert value == pytest.approx(values[0]) and 0 <= low <= value <= high <= 1 and high - low > 0.03


DRAWS = 8
# How often each problem is solved: distributions over problems.
RATES = {
  "any": lambda rng, n: rng.beta(1, 1, n),
  "mostly never": lambda rng, n: rng.beta(0.1, 2, n),
  "mostly always": lambda rng, n: rng.beta(20, 0.5, n),
  "all alike": lambda rng, n: np.full(n, 0.5),
  "one in a hundred, always": lambda rng, n: rng.random(n) < 0.01,
  "all hardly ever": lambda rng, n: np.full(n, 0.01),
}


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("rates", RATES)
def test_interval_of_a_mean_over_problems_covers_the_truth(rates, k):
  rng = np.random.default_rng(1)
  truth = np.mean(1 - (1 - RATES[rates](rng, 1_000_000)) ** k)
  inside, widths, least = [], [], []
  for _ in range(400):
    right_N = rng.binomial(DRAWS, RATES[rates](rng, 256))
    values_N = estimators.unbiased_pass_at_k(right_N, DRAWS, k)
    _, low, high = estimators.mean(values_N)
    inside.append(low <= truth <= high)
    widths.append(high - low)
    least.append(2 * Z95 * values_N.std() / 16)
  # The coverage is 0.95 where there are many different values, and less near 0 and 1.
  assert np.mean(inside) > 0.88
  # The interval is no wider than it must be.
  assert np.mean(widths) < 1.1 * np.mean(least) + 2 * Z95**2 / 256


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.97])
def test_interval_of_a_proportion_covers_the_rate(rate):
  """Exact, by summing the binomial distribution.

  The coverage goes up and down with the rate. The smallest here is about 0.93.
  """
  n = 256
  ends = [estimators.proportion(c, n)[1:] for c in range(n + 1)]
  chance = [math.comb(n, c) * rate**c * (1 - rate) ** (n - c) for c in range(n + 1)]
  assert 0.925 < sum(p for p, (low, high) in zip(chance, ends) if low <= rate <= high) < 0.975


# pass@k and maj@k.


def test_pass_at_k_is_the_fraction_of_subsets_with_a_right_answer():
  n = 6
  for c, k in itertools.product(range(n + 1), range(1, n + 1)):
    draws = [True] * c + [False] * (n - c)
    fraction = np.mean([any(subset) for subset in itertools.combinations(draws, k)])
    assert estimators.unbiased_pass_at_k(np.array([c]), n, k) == pytest.approx(fraction)


@given(
  st.floats(0, 1), st.integers(1, 24).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
)
def test_pass_at_k_is_unbiased(rate, sizes):
  n, k = sizes
  chance_C = np.array([math.comb(n, c) * rate**c * (1 - rate) ** (n - c) for c in range(n + 1)])
  assert chance_C @ estimators.unbiased_pass_at_k(np.arange(n + 1), n, k) == pytest.approx(
    1 - (1 - rate) ** k
  )


def test_pass_at_k_of_all_draws_is_whether_any_is_right_and_at_1_the_mean():
  right_N = np.array([0, 1, 5, 8])
  np.testing.assert_array_equal(estimators.unbiased_pass_at_k(right_N, 8, 8), [0, 1, 1, 1])
  np.testing.assert_allclose(estimators.unbiased_pass_at_k(right_N, 8, 1), right_N / 8)


@pytest.mark.parametrize(
  "answers, right, expected",
  [
    ([3, 3, 5], [1, 1, 0], 1),
    ([3, 5, 5], [1, 0, 0], 0),
    ([3, 3, 5, 5], [1, 1, 0, 0], 1 / 2),
    ([3, 5, 7], [0, 1, 0], 1 / 3),
    ([None, None, 3], [0, 0, 1], 1),
    ([None, None], [0, 0], 0),
    ([], [], 0),
    ([3, 3, 5], [0, 1, 0], 1),  # the reward function missed one 3
  ],
)
def test_majority_by_hand(answers, right, expected):
  assert estimators.majority(answers, right) == pytest.approx(expected)


@given(st.lists(st.sampled_from([1, 2, 3, None]), max_size=8), st.permutations(range(8)))
def test_majority_does_not_depend_on_the_order(answers, order):
  shuffled = [answers[i] for i in order if i < len(answers)]
  both = [estimators.majority(a, [x == 2 for x in a]) for a in (answers, shuffled)]
  assert both[0] == both[1]
