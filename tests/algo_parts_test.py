"""Masked reductions, metrics, KL estimates, coefficients, rejection and balance, by hand."""

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import masked
from grpo_jax.algo import controllers, metrics
from grpo_jax.algo.balance import balance_loss, balance_metrics
from grpo_jax.algo.kl import KL, full, k3
from grpo_jax.algo.rejections import without_rejected
from grpo_jax.algo.settings import Algo
from grpo_jax.types import Coefficients, Routing

X = jnp.array([[1.0, 3, jnp.nan], [5, jnp.nan, jnp.nan], [jnp.nan] * 3])
MASK = jnp.array([[1.0, 1, 0], [1, 0, 0], [0, 0, 0]])


# Masked reductions.


@pytest.mark.parametrize(
  "reduce, along_rows, of_all",
  [
    (lambda *axis: masked.total(X, MASK, *axis), [4, 5, 0], 9),
    (lambda *axis: masked.count(MASK, *axis), [2, 1, 0], 3),
    (lambda *axis: masked.mean(X, MASK, *axis), [2, 5, 0], 3),
    (lambda *axis: masked.largest(X, MASK, *axis), [3, 5, -np.inf], 5),
    (lambda *axis: masked.smallest(X, MASK, *axis), [1, 5, np.inf], 1),
  ],
  ids=["total", "count", "mean", "largest", "smallest"],
)
def test_masked_reductions(reduce, along_rows, of_all):
  np.testing.assert_array_equal(reduce(1), along_rows)
  np.testing.assert_array_equal(reduce(1, True), np.array(along_rows)[:, None])
  assert reduce() == of_all and reduce().shape == ()


def test_any_mask_but_zero_counts():
  mask = jnp.array([-1.0, 0.5, 2, 0])
  np.testing.assert_array_equal(masked.masked(jnp.array([1.0, 2, 3, jnp.inf]), mask), [1, 2, 3, 0])
  assert masked.count(mask) == 3


def test_divide():
  found = masked.divide(jnp.array([6.0, 1, 1]), jnp.array([4.0, 0, -1]))
  np.testing.assert_array_equal(found, [1.5, 0, 0])
  gradient = jax.grad(lambda weight: masked.divide(jnp.float32(1), weight))(jnp.float32(0))
  assert gradient == 0


def test_differ():
  x = jnp.array([[1.0, 2, 9], [0.7, 0.7, 9], [4, 9, 9], [9, 9, 9]])
  mask = jnp.array([[1.0, 1, 0], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
  np.testing.assert_array_equal(masked.differ(x, mask, 1), [[True], [False], [False], [False]])
  assert masked.differ(x, mask).shape == (1, 1)


def test_centered_and_std():
  """1 and 3 with weights 1 and 3: mean 2.5, squares 2.25 and .25."""
  weights = jnp.array([[1.0, 3, 5], [2, 2, 2], [1, 1, 1]])
  np.testing.assert_array_equal(masked.centered(X, MASK, 1), [[-1, 1, 0], [0, 0, 0], [0, 0, 0]])
  np.testing.assert_array_equal(
    masked.centered(X, MASK, 1, weights), [[-1.5, 0.5, 0], [0, 0, 0], [0, 0, 0]]
  )
  np.testing.assert_array_equal(masked.std(X, MASK, 0, 1), [[1], [1], [1]])
  np.testing.assert_allclose(masked.std(X, MASK, 1, 1), [[2**0.5], [1], [1]], rtol=1e-6)
  np.testing.assert_allclose(
    masked.std(X, MASK, 1, 1, weights), [[(3 / 3) ** 0.5], [1], [1]], rtol=1e-6
  )
  np.testing.assert_allclose(
    masked.std(X, MASK, 0, 1, weights), [[(3 / 4) ** 0.5], [1], [1]], rtol=1e-6
  )
  np.testing.assert_allclose(masked.std(X, MASK, 0), [[(8 / 3) ** 0.5]], rtol=1e-6)
  np.testing.assert_array_equal(masked.centered(X, MASK), [[-2, 0, 0], [2, 0, 0], [0, 0, 0]])


# Metrics.


def test_metrics_of_masked_values():
  x, mask = jnp.array([1.0, 2, 6, 99]), jnp.array([1.0, 1, 1, 0])
  found = {
    "mean": metrics.mean(x, mask),
    "bools": metrics.mean(x > 1, mask),
    "empty": metrics.mean(x, 0 * mask),
    "largest": metrics.largest(x, mask),
    "smallest": metrics.smallest(x, mask),
    "weighted": metrics.weighted(jnp.float32(4), 3),
    "not counted": metrics.weighted(jnp.float32(jnp.nan), 0),
    "summed": metrics.summed(jnp.int32(5)),
  }
  assert all(x.value.dtype == x.weight.dtype == jnp.float32 for x in found.values())
  assert metrics.reduced(found) == pytest.approx(
    {
      "mean": 3,
      "bools": 2 / 3,
      "empty": np.nan,
      "largest": 6,
      "smallest": 1,
      "weighted": 4,
      "not counted": np.nan,
      "summed": 5,
    },
    nan_ok=True,
  )


def test_the_effective_sample_size_of_weights():
  """(1 + 2 + 3)^2 / (1 + 4 + 9) / 3, whole or of parts, and 1 / n where one weight has it all."""
  of = metrics.effective
  weights, mask = jnp.array([1.0, 9.0, 2.0, 3.0]), jnp.array([1.0, 0.0, 1.0, 1.0])
  whole = {"ess": of(weights, mask)}
  parts = {"ess": of(weights[:2], mask[:2])}, {"ess": of(weights[2:], mask[2:])}
  assert metrics.reduced(whole)["ess"] == pytest.approx(36 / 14 / 3)
  assert metrics.reduced(metrics.merge(*parts)) == pytest.approx(metrics.reduced(whole))
  nothing = metrics.neutral(whole)
  assert metrics.reduced(metrics.merge(nothing, whole)) == metrics.reduced(whole)
  assert np.isnan(metrics.reduced(nothing)["ess"])
  infinite = metrics.reduced({"ess": of(jnp.array([jnp.inf, 1.0]), jnp.ones(2))})
  assert infinite["ess"] == pytest.approx(1 / 2)
  assert metrics.reduced({"ess": of(jnp.zeros(2), jnp.ones(2))}) == {"ess": 0}


def test_metrics_have_no_gradient():
  def values(x):
    mask = jnp.ones(2)
    found = metrics.mean(x, mask), metrics.largest(x, mask), metrics.smallest(x, mask)
    return sum(metric.value for metric in found)

  np.testing.assert_array_equal(jax.grad(values)(jnp.array([1.0, 2])), [0, 0])


def test_merging_metrics():
  """Micro-batches merge by their reduction. Of later updates some metrics are dropped."""

  def of(value, weight):
    mask = jnp.arange(8) < weight
    x = jnp.full(8, float(value))
    first = metrics.mean(x, mask).replace(first_update_only=True)
    return {
      "mean": metrics.mean(x, mask),
      "first": first,
      "max": metrics.largest(x, mask),
      "min": metrics.smallest(x, mask),
      "sum": metrics.summed(jnp.float32(value)),
    }

  both = {"mean": 3.5, "max": 5, "min": 2, "sum": 7}
  for merge, first in ((metrics.merge, 3.5), (metrics.merge_updates, 2)):
    assert metrics.reduced(merge(of(2, 4), of(5, 4))) == both | {"first": first}
  unequal = metrics.reduced(metrics.merge(of(2, 1), of(5, 3)))
  assert unequal["mean"] == (2 + 3 * 5) / 4
  unequal = metrics.reduced(metrics.merge_updates(of(5, 3), of(2, 1)))
  assert (unequal["mean"], unequal["first"]) == ((2 + 3 * 5) / 4, 5)


# KL.


@given(st.floats(-200, 50, width=32).filter(lambda d: abs(d) > 1e-3))
@settings(max_examples=60)
def test_k3_is_finite_with_a_gradient_of_the_right_sign(d):
  """d k3 / d lp = 1 - e^-d pulls back from both sides, however far."""
  zero = jnp.zeros((1, 1, 1))
  value, gradient = jax.value_and_grad(lambda lp: k3(lp, zero).sum())(jnp.full((1, 1, 1), d))
  assert np.isfinite(value) and value >= 0 and abs(gradient) < 1e9
  assert np.sign(gradient) == np.sign(d)


def test_k3_is_zero_where_nothing_differs():
  logprobs = jnp.full((1, 1, 1), -3.0)
  assert float(k3(logprobs, logprobs)[0, 0, 0]) == 0


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+"])
def test_unbiased_estimates(name):
  """Their mean under pi over a whole distribution is KL(pi || ref)."""
  pi, ref = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.2, 0.2, 0.6])
  estimates = KL[name].compute(jnp.log(pi)[None, None], jnp.log(ref)[None, None])
  np.testing.assert_allclose((pi * estimates).sum(), (pi * jnp.log(pi / ref)).sum(), rtol=1e-5)


def test_full_kl_does_not_depend_on_a_shift_of_the_logits():
  pi, ref = jnp.array([[0.75, 0.25]]), jnp.array([[0.5, 0.5]])
  shifted = full(jnp.log(pi) + 7, jnp.log(ref) - 3)
  assert shifted.shape == (1,)
  np.testing.assert_allclose(shifted, full(jnp.log(pi), jnp.log(ref)), rtol=1e-5)


# Coefficients that follow a measured value.


@pytest.mark.parametrize(
  "measured, coef", [(0.2, 0.105), (0.11, 0.1025), (0.1, 0.1), (0.09, 0.0975), (0, 0.095)]
)
def test_the_kl_coefficient_follows_the_kl(measured, coef):
  """Target .1, 256 completions of a horizon of 1024: .1 (1 + clip(kl / .1 - 1, -.2, .2) / 4)."""
  algo = Algo(kl_target=0.1, kl_horizon=1024)
  found = controllers.proportional(jnp.float32(0.1), measured, 256, algo)
  assert float(found) == pytest.approx(coef, rel=1e-5)


@pytest.mark.parametrize(
  "coef, entropy, expected",
  [(0.02, 0.4, 0.03), (0.02, 0.6, 0.01), (0.02, 0.5, 0.02), (0.005, 0.6, 0)],
)
def test_the_entropy_coefficient_follows_the_entropy_and_stays_above_zero(coef, entropy, expected):
  algo = Algo(entropy_target=0.5, entropy_step=0.01)
  found = controllers.stepwise(jnp.float32(coef), entropy, algo)
  assert float(found) == pytest.approx(expected, rel=1e-5)


def test_only_coefficients_with_a_target_change():
  coefs = controllers.initial(Algo(kl_coef=0.1, entropy_coef=0.2))
  assert (coefs.kl.dtype, coefs.entropy.dtype) == (jnp.float32, jnp.float32)

  def adapted(**changes):
    found = controllers.adapted(coefs, 1.0, 0.0, 100, Algo(**changes))
    return float(found.kl), float(found.entropy)

  targets = dict(kl_target=0.5, kl_horizon=1000), dict(entropy_target=0.5, entropy_step=0.1)
  assert adapted() == pytest.approx((0.1, 0.2))
  assert adapted(**targets[0]) == pytest.approx((0.1 * 1.02, 0.2))
  assert adapted(**targets[1]) == pytest.approx((0.1, 0.3))
  assert adapted(**targets[0], **targets[1]) == pytest.approx((0.1 * 1.02, 0.3))
  unused = controllers.adapted(Coefficients(kl=0.1, entropy=0.2), None, 0.0, 100, Algo())
  assert unused == Coefficients(kl=0.1, entropy=0.2)


@pytest.mark.parametrize(
  "steps, coefs",
  [
    (5, [0.1, 0.075, 0.05, 0.025, 0.0]),
    (2, [0.1, 0.0]),
    (1, [0.1]),
  ],
)
def test_the_planned_entropy_coefficient_goes_from_the_first_step_to_the_last(steps, coefs):
  algo = Algo(entropy_coef=0.1, entropy_coef_end=0.0)
  found = [controllers.planned(algo, index, steps)["entropy"] for index in range(len(coefs))]
  assert found == pytest.approx(coefs)
  rising = Algo(entropy_coef=0.0, entropy_coef_end=0.2)
  assert controllers.planned(rising, 1, 5) == {"entropy": pytest.approx(0.05)}
  assert controllers.planned(Algo(entropy_coef=0.1), 1, 5) == {}


# Rejection.

# Four rows: one token of a large weight, all of them a little above 1, nothing, and no token.
WEIGHTS = jnp.array([[[8.0, 0.5, 1, 7], [1.2, 1.2, 1.2, 7], [1, 1, 1, 1], [7, 7, 7, 7]]])
OF_ROWS = jnp.array([[[1.0, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]])


@pytest.mark.parametrize(
  "settings, kept, tokens, sequences",
  [
    ({}, OF_ROWS[0], 0, 0),
    # Only the tokens themselves leave.
    (dict(reject_token=(0.6, 2.0)), [[0, 0, 1, 0], *OF_ROWS[0, 1:]], 2 / 10, 1 / 3),
    (dict(reject_outlier=(0.1, 4.0)), [[0, 0, 0, 0], *OF_ROWS[0, 1:]], 3 / 10, 1 / 3),
    # The product of 8 and .5 is 4, its third root 1.59. The second row's are 1.728 and 1.2.
    (dict(reject_product=(0.5, 3.0)), [[0, 0, 0, 0], *OF_ROWS[0, 1:]], 3 / 10, 1 / 3),
    (dict(reject_geometric=(0.5, 1.5)), [[0, 0, 0, 0], *OF_ROWS[0, 1:]], 3 / 10, 1 / 3),
    # The means of (log w)^2 / 2 are .801 and .0166, those of w - 1 - log w 1.705 and .0177.
    (dict(reject_k2=0.8), [[0, 0, 0, 0], *OF_ROWS[0, 1:]], 3 / 10, 1 / 3),
    (dict(reject_k2=0.81), OF_ROWS[0], 0, 0),
    (dict(reject_k3=1.6), [[0, 0, 0, 0], *OF_ROWS[0, 1:]], 3 / 10, 1 / 3),
    (dict(reject_k3=1.8), OF_ROWS[0], 0, 0),
    # The sums of the same: 2.402 and .0499, 5.114 and .0530.
    (dict(reject_k2_sum=2.4), [[0, 0, 0, 0], *OF_ROWS[0, 1:]], 3 / 10, 1 / 3),
    (dict(reject_k2_sum=2.41), OF_ROWS[0], 0, 0),
    (dict(reject_k3_sum=5.11), [[0, 0, 0, 0], *OF_ROWS[0, 1:]], 3 / 10, 1 / 3),
    (dict(reject_k3_sum=5.12), OF_ROWS[0], 0, 0),
    (dict(reject_k3_sum=0.05), [[0] * 4, [0] * 4, *OF_ROWS[0, 2:]], 6 / 10, 2 / 3),
    # Padding is no outlier, whatever the bounds.
    (
      dict(reject_outlier=(1.1, 9.0)),
      [[0] * 4, OF_ROWS[0, 1], [0] * 4, [0] * 4],
      7 / 10,
      2 / 3,
    ),
    (
      dict(reject_token=(0.6, 2.0), reject_k2=2.0),
      [[0, 0, 1, 0], *OF_ROWS[0, 1:]],
      2 / 10,
      1 / 3,
    ),
    (dict(reject_k3=0.01), [[0] * 4, [0] * 4, *OF_ROWS[0, 2:]], 6 / 10, 2 / 3),
    # Both must accept. The geometric mean is of all tokens: without 8 and .5 it would be 1.
    (
      dict(reject_token=(0.6, 2.0), reject_geometric=(0.5, 1.5)),
      [[0, 0, 0, 0], *OF_ROWS[0, 1:]],
      3 / 10,
      1 / 3,
    ),
  ],
)
def test_rejection_takes_tokens_or_rows_out_of_the_mask(settings, kept, tokens, sequences):
  old_PGT = jnp.full(OF_ROWS.shape, -1.5)
  mu_PGT = jnp.where(OF_ROWS != 0, old_PGT - jnp.log(WEIGHTS), jnp.nan)
  mask_PGT, metrics = without_rejected(old_PGT, mu_PGT, OF_ROWS, Algo(**settings))
  np.testing.assert_array_equal(mask_PGT[0], np.array(kept))
  assert float(metrics["rejection/tokens"]) == pytest.approx(tokens)
  assert float(metrics["rejection/sequences"]) == pytest.approx(sequences)
  assert mask_PGT.dtype == OF_ROWS.dtype


@pytest.mark.parametrize("broken", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize(
  "settings, kept",
  [
    # Only the token itself stays: the one beside it has a gap.
    (dict(reject_token=(0.6, 2.0)), [1, 0, 1]),
    (dict(reject_outlier=(0.1, 4.0)), [1, 1, 1]),
    (dict(reject_product=(0.5, 3.0)), [1, 1, 1]),
    (dict(reject_geometric=(0.5, 1.5)), [1, 1, 1]),
    (dict(reject_k2=0.8), [1, 1, 1]),
    (dict(reject_k3=1.6), [1, 1, 1]),
    (dict(reject_k2_sum=0.8), [1, 1, 1]),
    (dict(reject_k3_sum=1.6), [1, 1, 1]),
  ],
)
def test_what_is_not_finite_is_not_rejected(settings, kept, broken):
  """Else an update of NaN would have no token, and nobody would count it as skipped."""
  old_PGT = jnp.array([[[broken, jnp.log(8.0), 0.0], [0.0, jnp.log(8.0), broken]]])
  given = old_PGT, jnp.zeros((1, 2, 3)), jnp.array([[[1.0, 1, 1], [1, 1, 0]]])
  mask_PGT, _ = without_rejected(*given, Algo(**settings))
  # The second row is broken in its padding alone, so it is rejected as ever.
  np.testing.assert_array_equal(mask_PGT[0], [kept, [float("reject_token" in settings), 0, 0]])


# The balance of routers.


@pytest.mark.parametrize(
  "assigned, probs, tokens, expected",
  [
    ([3.0, 1.0], [2.8, 1.2], 4, 2 * (0.75 * 0.7 + 0.25 * 0.3)),
    ([2.0, 2.0], [2.0, 2.0], 4, 1),
    ([0.0, 0.0], [0.0, 0.0], 4, 0),
    ([0.0, 0.0], [0.0, 0.0], 0, 0),
    ([2.0, 0.0, 2.0], [1.0, 0.5, 0.5], 2, 3 * (1 * 0.5 + 1 * 0.25)),
  ],
)
def test_balance_loss(assigned, probs, tokens, expected):
  found = balance_loss(jnp.array(assigned), jnp.array(probs), jnp.float32(tokens))
  assert float(found) == pytest.approx(expected)


def test_only_the_probabilities_have_a_gradient():
  arrays = jnp.array([3.0, 1.0]), jnp.array([2.8, 1.2])
  by_assigned, by_probs = jax.grad(lambda *x: balance_loss(*x, jnp.float32(4)), (0, 1))(*arrays)
  np.testing.assert_array_equal(by_assigned, [0, 0])
  np.testing.assert_allclose(by_probs, [2 * 3 / 16, 2 * 1 / 16])


def test_balance_metrics():
  """Two rows, two layers, three experts. The layers give their four tokens 4, 0, 0 and 1, 2, 1."""
  routing = Routing(
    tokens_BL=jnp.full((2, 2), 2.0),
    assigned_BLX=jnp.array([[[2.0, 0, 0], [1, 1, 0]], [[2, 0, 0], [0, 1, 1]]]),
    probs_BLX=jnp.array([[[1.0, 0.5, 0.5], [1, 0.5, 0.5]], [[2, 0, 0], [1, 0.5, 0.5]]]),
    entropy_BL=jnp.array([[1.0, 0.5], [0.25, 0.25]]),
  )
  found = {name: float(value) for name, value in balance_metrics(routing).items()}
  assert found == pytest.approx(
    {
      "router/aux_loss": 3 * (5 * 5 + 2 * 1.5 + 1 * 1.5) / 64,
      "router/load_max": 3,
      "router/load_min": 0,
      "router/dead": 2 / 6,
      "router/entropy": 2 / 8,
    }
  )


def test_a_scalar_of_weight_one_counts_and_one_of_weight_zero_does_not():
  """The loss of an update counts with the truth of "it has tokens"."""
  counted = metrics.weighted(jnp.float32(3.0), jnp.bool_(True))
  left_out = metrics.weighted(jnp.float32(np.nan), jnp.bool_(False))
  merged = metrics.merge_updates({"loss": counted}, {"loss": left_out})
  assert metrics.reduced(merged) == {"loss": 3.0}
