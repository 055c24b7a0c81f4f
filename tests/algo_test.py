"""The objective's parts, against arithmetic done by hand."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax import masked
from grpo_jax.algo import advantages, aggregation, kl, ratios, surrogates
from grpo_jax.algo.objective import objective
from grpo_jax.algo.presets import PRESETS
from grpo_jax.config import Algo
from grpo_jax.types import Batch

GRPO = Algo(**PRESETS["grpo"])


def algo(**change):
  return dataclasses.replace(GRPO, **change)


def batch(mask_PGT, advantages_PG, ref_logprobs_PGT=None):
  P, G, T = mask_PGT.shape
  tokens = jnp.zeros((P, G, T), jnp.int32)
  return Batch(tokens[:, 0], jnp.ones(P, jnp.int32), tokens, mask_PGT, advantages_PG, jnp.zeros((P, G, T)), ref_logprobs_PGT)


@pytest.mark.parametrize("rewards, ddof, expected", [
    ([1, 1, 0, 0], 0, [1, 1, -1, -1]),  # mean 1/2, std 1/2
    ([1, 0, 0, 0], 1, [1.5, -.5, -.5, -.5]),  # mean 1/4, variance (9/16 + 3/16) / 3 = 1/4
    ([2, np.nan, 0, np.nan], 0, [1, 0, -1, 0]),  # the unscored stay out
    ([np.nan, np.nan, np.nan, 1], 1, [0, 0, 0, 0]),
])
def test_group_normalized(rewards, ddof, expected):
  out = advantages.group_normalized(jnp.array([rewards], jnp.float32), algo(std_ddof=ddof, std_eps=0.0))
  np.testing.assert_allclose(out, [expected], atol=1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_equal_rewards_have_advantage_exactly_zero(eps):
  """0.7 twelve times: the float mean is not 0.7, and its float deviation is not 0."""
  rewards = jnp.full((3, 12), 0.7, jnp.float32)
  assert (advantages.group_normalized(rewards, algo(std_eps=eps)) == 0).all()


def test_groups_do_not_mix():
  rewards = jnp.array([[1., 0, 0, 0], [100, 100, 300, 100]])
  both = advantages.group_normalized(rewards, GRPO)
  alone = jnp.concatenate([advantages.group_normalized(r[None], GRPO) for r in rewards])
  np.testing.assert_array_equal(both, alone)


@pytest.mark.parametrize("w, A, high, loss", [
    (1.5, 1, .2, -1.2), (1.5, 1, .28, -1.28), (1.5, -1, .2, 1.5), (.5, 1, .2, -.5), (.5, -1, .2, .8)])
def test_ppo_clip(w, A, high, loss):
  assert float(surrogates.ppo_clip(jnp.float32(w), jnp.float32(A), algo(clip_high=high))) == pytest.approx(loss, rel=1e-6)


def test_token_ratio():
  out = ratios.token(jnp.log(jnp.array([[[.3, .1]]])), jnp.log(jnp.array([[[.2, .2]]])), jnp.ones((1, 1, 2)))
  np.testing.assert_allclose(out, [[[1.5, .5]]], rtol=1e-6)


def test_k3_by_hand():
  """d = ln 2: 1/2 + ln 2 - 1."""
  assert float(kl.k3(jnp.log(.5), jnp.log(.25))) == pytest.approx(.5 + np.log(2) - 1, rel=1e-6)
  assert float(kl.k3(jnp.float32(-3), jnp.float32(-3))) == 0


@given(st.floats(-200, 50, width=32).filter(lambda d: abs(d) > 1e-3))
@settings(deadline=None, max_examples=60)
def test_k3_is_finite_with_a_gradient_of_the_right_sign(d):
  """d k3 / d lp = 1 - e^-d: pulls back from both sides, however far."""
  value, gradient = jax.value_and_grad(lambda lp: kl.k3(lp, jnp.float32(0)))(jnp.float32(d))
  assert np.isfinite(value) and value >= 0 and np.isfinite(gradient)
  assert np.sign(gradient) == np.sign(d)


def test_k3_is_unbiased():
  """Its mean under pi over a whole distribution is KL(pi || ref)."""
  pi, ref = jnp.array([.5, .3, .2]), jnp.array([.2, .2, .6])
  np.testing.assert_allclose((pi * kl.k3(jnp.log(pi), jnp.log(ref))).sum(), (pi * jnp.log(pi / ref)).sum(), rtol=1e-5)


def test_sequence_mean_by_hand():
  """Rows of 2 and 4 tokens with values 1 and -1: (1 - 1) / 2 = 0; a row without tokens is not counted."""
  mask = jnp.array([[[1., 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]])
  values = jnp.array([[[1., 1, 9, 9], [-1, -1, -1, -1], [jnp.nan] * 4]])
  total, weight = aggregation.sequence_mean(values, mask)
  assert (float(total), float(weight)) == (0, 2)


def test_an_empty_mask_gives_zero_not_nan():
  mask = jnp.zeros((2, 3, 4))
  b = batch(mask, jnp.ones((2, 3)), jnp.zeros((2, 3, 4)))
  value = lambda lp: masked.divide(*objective(lp, b, GRPO)[:2])
  loss, gradient = jax.value_and_grad(value)(jnp.full((2, 3, 4), -1.0))
  assert float(loss) == 0 and (gradient == 0).all()


def test_at_ratio_one_the_gradient_is_reinforce():
  """d loss / d lp_t = -A / (rows * tokens of the row)."""
  mask = jnp.array([[[1., 1, 0], [1, 1, 1]]])
  A = jnp.array([[2., -1]])
  b = batch(mask, A)
  value = lambda lp: masked.divide(*objective(lp, b, algo(kl_coef=0.0))[:2])
  gradient = jax.grad(value)(jnp.log(jnp.array([[[.5, .2, .9], [.1, .4, .3]]])))
  np.testing.assert_allclose(gradient, [[[-2 / 4, -2 / 4, 0], [1 / 6] * 3]], rtol=1e-6)


def test_kl_is_added_with_its_coefficient():
  mask, lp = jnp.ones((1, 2, 3)), jnp.full((1, 2, 3), -1.0)
  b = batch(mask, jnp.zeros((1, 2)), lp - np.log(2))
  total, weight, means = objective(lp, b, algo(kl_coef=.04))
  k3 = .5 + np.log(2) - 1
  np.testing.assert_allclose(total / weight, .04 * k3, rtol=1e-5)
  np.testing.assert_allclose(masked.divide(*means["kl"]), k3, rtol=1e-5)


@given(st.lists(st.integers(0, 5), min_size=6, max_size=6), st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_sums_and_weights_of_parts_add_up(lengths, seed):
  rng = np.random.default_rng(seed)
  mask = jnp.asarray((np.arange(5) < np.reshape(lengths, (3, 2, 1))).astype(np.float32))
  lp, ref = (jnp.asarray(rng.normal(-2, 1, (3, 2, 5)).astype(np.float32)) for _ in range(2))
  whole = batch(mask, jnp.asarray(rng.normal(size=(3, 2)).astype(np.float32)), ref)
  parts = [objective(lp[p:p + 1], jax.tree.map(lambda x: x[p:p + 1], whole), GRPO)[:2] for p in range(3)]
  np.testing.assert_allclose(np.sum(parts, 0), objective(lp, whole, GRPO)[:2], rtol=1e-5, atol=1e-6)
