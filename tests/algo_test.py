"""The algorithm: arithmetic by hand, and what must hold for every member of the family. tests/golden_test.py has the
numbers of others."""
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.algo import kl, presets, selection
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.aggregation import AGGREGATIONS
from grpo_jax.algo.kl import KL
from grpo_jax.algo.objective import objective, totals
from grpo_jax.algo.ratios import RATIOS
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.config import Algo
from grpo_jax.run_checks import TOKEN_ONLY
from grpo_jax.types import Batch, Rewards

GRPO = Algo(**presets.row("grpo"))


def algo(**change):
  return dataclasses.replace(GRPO, **change)


def rewards(values, T=4, **more):
  """Of one function; every completion has T tokens."""
  values = jnp.asarray(values, jnp.float32)
  return Rewards(values[None], jnp.ones(1), jnp.ones((*values.shape, T)), **more)


# Advantages.

@pytest.mark.parametrize("values, ddof, expected", [
    ([1, 1, 0, 0], 0, [1, 1, -1, -1]),  # mean 1/2, std 1/2
    ([1, 0, 0, 0], 1, [1.5, -.5, -.5, -.5]),  # mean 1/4, variance (9/16 + 3/16) / 3 = 1/4
    ([2, np.nan, 0, np.nan], 0, [1, 0, -1, 0]),  # the unscored stay out
    ([np.nan, np.nan, np.nan, 1], 1, [0, 0, 0, 0]),
])
def test_group_normalized(values, ddof, expected):
  out = ADVANTAGES["group_normalized"](rewards([values]), algo(std_ddof=ddof, std_eps=0.0))
  np.testing.assert_allclose(out, [expected], atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name not in ("process", "greedy_baseline")])
def test_equal_rewards_have_advantage_exactly_zero(name):
  """0.7 twelve times: the float mean is not 0.7, and its float deviation is not 0."""
  out = ADVANTAGES[name](rewards(np.full((3, 12), 0.7)), algo(std_eps=0.0, batch_std_eps=0.0))
  assert (out == 0).all()


def test_greedy_baseline():
  """The greedy completions of the two prompts got 1 and nothing."""
  r = rewards([[1, 0], [1, 0]], greedy_P=jnp.array([1, np.nan]))
  np.testing.assert_array_equal(ADVANTAGES["greedy_baseline"](r, GRPO), [[0, -1], [0, 0]])


def test_the_kl_in_the_reward():
  """RLOO: completions lose the sum of their penalty. REINFORCE++: a token loses its own and that of those after it."""
  penalty = jnp.array([[[.25, .25, 0, 0], [0, 0, .5, .5]]])
  r = rewards([[1, 1]], penalty_PGT=penalty)
  np.testing.assert_allclose(ADVANTAGES["leave_one_out"](r, GRPO), [[.5, -.5]])
  to_go = np.array([.5, .75, 1, 1, 0, 0, 0, .5])
  expected = (to_go - to_go.mean()) / to_go.std(ddof=1)
  out = ADVANTAGES["batch_normalized"](r, algo(std_eps=0.0))
  np.testing.assert_allclose(out.ravel(), expected, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name not in ("process", "greedy_baseline")])
def test_members_and_prompts_may_be_permuted(name):
  rng = np.random.default_rng(0)
  values, lengths = rng.integers(0, 2, (3, 8)).astype(np.float32), rng.integers(1, 5, (3, 8, 1))
  make = lambda p, g: ADVANTAGES[name](
      rewards(values[p][:, g]).replace(mask_PGT=jnp.asarray(np.arange(4) < lengths[p][:, g], jnp.float32)), GRPO)
  p, g = rng.permutation(3), rng.permutation(8)
  np.testing.assert_allclose(make(np.arange(3), np.arange(8))[p][:, g], make(p, g), atol=1e-6)


def test_groups_do_not_mix():
  values = jnp.array([[1., 0, 0, 0], [100, 100, 300, 100]])
  both = ADVANTAGES["group_normalized"](rewards(values), GRPO)
  alone = jnp.concatenate([ADVANTAGES["group_normalized"](rewards(row[None]), GRPO) for row in values])
  np.testing.assert_array_equal(both, alone)


# KL and aggregation.

def test_k3_by_hand():
  """d = ln 2: 1/2 + ln 2 - 1."""
  assert float(kl.k3(jnp.log(.5), jnp.log(.25))) == pytest.approx(.5 + np.log(2) - 1, rel=1e-6)
  assert float(kl.k3(jnp.float32(-3), jnp.float32(-3))) == 0


@given(st.floats(-200, 50, width=32).filter(lambda d: abs(d) > 1e-3))
@settings(deadline=None, max_examples=60)
def test_k3_is_finite_with_a_gradient_of_the_right_sign(d):
  """d k3 / d lp = 1 - e^-d: pulls back from both sides, however far."""
  value, gradient = jax.value_and_grad(lambda lp: kl.k3(lp, jnp.float32(0)))(jnp.float32(d))
  assert np.isfinite(value) and value >= 0 and abs(gradient) < 1e9
  assert np.sign(gradient) == np.sign(d)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_estimates_are_unbiased(name):
  """Their mean under pi over a whole distribution is KL(pi || ref)."""
  pi, ref = jnp.array([.5, .3, .2]), jnp.array([.2, .2, .6])
  np.testing.assert_allclose((pi * KL[name](jnp.log(pi), jnp.log(ref))).sum(), (pi * jnp.log(pi / ref)).sum(), rtol=1e-5)


def test_aggregations_by_hand():
  """Rows of 2 and 4 tokens with values 1 and -1; a row without tokens is not counted."""
  mask = jnp.array([[[1., 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]])
  values = jnp.array([[[1., 1, 9, 9], [-1, -1, -1, -1], [jnp.nan] * 4]])
  mean = lambda name: float(np.divide(*AGGREGATIONS[name](values, mask, algo(length_norm=8))))
  found = {name: mean(name) for name in AGGREGATIONS}
  assert found == pytest.approx({"sequence_mean": 0, "token_mean": -2 / 6, "sequence_sum": -1, "constant": -2 / 16,
                                 "prompt_mean": -2 / 6})


# The objective, over the family: every surrogate with each ratio it reads, and all aggregations and KLs among them.

FAMILY = [pytest.param(algo(surrogate=s, ratio=r, aggregation=a, kl=k, kl_coef=.1, length_norm=7, cov_fraction=.2,
                            cov_low=.1, top_entropy_quantile=q, entropy_coef=.02, correction=c, correction_high=1.5),
                       id=f"{s}-{r}-{a}-{k}-{q}-{c}")
          for (s, r), a, k, q, c in zip(
              [(s, r) for s in SURROGATES for r in RATIOS if r == "token" or s not in TOKEN_ONLY],
              itertools.cycle(AGGREGATIONS), itertools.cycle(KL), itertools.cycle([1.0, .5]),
              itertools.cycle(["none", "truncate", "mask"]))]
P, G, T = 4, 3, 6


@dataclasses.dataclass(frozen=True)
class Case:
  logprobs: jax.Array
  entropies: jax.Array
  batch: Batch


def case(seed=0, mask=None):
  rng = np.random.default_rng(seed)
  normal = lambda low, scale: jnp.asarray(rng.normal(low, scale, (P, G, T)), jnp.float32)
  lengths = rng.integers(1, T + 1, (P, G, 1))
  mask = jnp.asarray(np.arange(T) < lengths, jnp.float32) if mask is None else mask
  lp = normal(-2, .5)
  A = jnp.broadcast_to(jnp.asarray(rng.normal(size=(P, G, 1)), jnp.float32), (P, G, T))
  return Case(lp, jnp.abs(normal(1, .5)), Batch(None, None, None, mask, A, None, lp + normal(0, .3), lp + normal(0, .2),
                                                lp + normal(0, .3)))


def selected(c, a):
  b = c.batch
  if not selection.is_needed(a):
    return b
  return b.replace(selection=selection.select(c.logprobs, b.old_logprobs_PGT, c.entropies, b.advantages_PGT, b.mask_PGT, a))


@functools.partial(jax.jit, static_argnums=3)
def share(logprobs, entropies, batch_and_whole, a):
  value = lambda lp, h: objective(lp, h, *batch_and_whole, a)[0]
  return jax.value_and_grad(value, (0, 1))(logprobs, entropies)


def loss_and_gradients(c, a):
  b = selected(c, a)
  return share(c.logprobs, c.entropies, (b, totals(b, a)), a)


def assert_close(a, b, atol=1e-6):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol), a, b)


@pytest.mark.parametrize("a", FAMILY)
def test_shares_of_any_split_add_up(a):
  c = case()
  b = selected(c, a)
  whole = totals(b, a)
  loss, gradients = share(c.logprobs, c.entropies, (b, whole), a)
  parts = [share(c.logprobs[p:p + 1], c.entropies[p:p + 1], (jax.tree.map(lambda x: x[p:p + 1], b), whole), a)
           for p in range(P)]
  np.testing.assert_allclose(sum(part[0] for part in parts), loss, rtol=1e-5, atol=1e-6)
  assert_close(jax.tree.map(lambda *x: jnp.concatenate(x), *(part[1] for part in parts)), gradients)


@pytest.mark.parametrize("a", FAMILY)
def test_permuted_prompts_and_members_permute_the_gradient_and_nothing_else(a):
  c, rng = case(), np.random.default_rng(1)
  p, g = rng.permutation(P), rng.permutation(G)
  move = lambda tree: jax.tree.map(lambda x: x[p][:, g], tree)
  loss, gradients = loss_and_gradients(c, a)
  other = loss_and_gradients(Case(move(c.logprobs), move(c.entropies), move(c.batch)), a)
  np.testing.assert_allclose(other[0], loss, rtol=1e-5, atol=1e-6)
  assert_close(other[1], move(gradients))


@pytest.mark.parametrize("a", FAMILY)
def test_padding_changes_nothing_and_has_no_gradient(a):
  """Three positions more, full of numbers that must not matter."""
  c = case()
  longer = lambda x, value: jnp.pad(x, [(0, 0), (0, 0), (0, 3)], constant_values=value)
  padded = Case(longer(c.logprobs, -50.), longer(c.entropies, 9.), jax.tree.map(lambda x: longer(x, -7.), c.batch).replace(
      mask_PGT=longer(c.batch.mask_PGT, 0.)))
  loss, gradients = loss_and_gradients(c, a)
  other, others = loss_and_gradients(padded, a)
  np.testing.assert_allclose(other, loss, rtol=1e-5, atol=1e-6)
  assert_close(jax.tree.map(lambda x: x[..., :T], others), gradients)
  assert all((x[..., T:] == 0).all() for x in others)


@pytest.mark.parametrize("a", FAMILY)
def test_an_empty_mask_gives_zero_not_nan(a):
  loss, gradients = loss_and_gradients(case(mask=jnp.zeros((P, G, T))), a)
  assert float(loss) == 0 and all((x == 0).all() for x in gradients)


@pytest.mark.parametrize("a", FAMILY)
def test_at_ratio_one_the_gradient_is_reinforce(a):
  """d loss / d lp_t = -A times the token's weight in the aggregation, where old is the policy itself."""
  a = dataclasses.replace(a, kl_coef=0.0, entropy_coef=0.0, correction="none", top_entropy_quantile=1.0, cov_kl_coef=0.0,
                          cov_low=98.0, cov_high=99.0)
  c = case()
  c = dataclasses.replace(c, batch=c.batch.replace(old_logprobs_PGT=None, sampling_logprobs_PGT=None))
  b = c.batch.replace(selection=selection.trivial(c.batch.mask_PGT))
  _, (gradient, _) = share(c.logprobs, c.entropies, (b, totals(b, a)), a)
  weight = jax.grad(lambda x: AGGREGATIONS[a.aggregation](x, b.mask_PGT, a)[0])(jnp.ones((P, G, T))) / totals(b, a).loss
  expected = -b.advantages_PGT * weight
  if a.ratio == "sequence" or a.surrogate == "gmpo":  # a row's tokens share its gradient
    lengths = b.mask_PGT.sum(-1, keepdims=True)
    expected = jnp.where(b.mask_PGT > 0, (expected.sum(-1, keepdims=True) / lengths), 0)
  np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)


def test_every_preset_is_a_row_of_known_settings():
  for name, row in presets.PRESETS.items():
    assert row.keys() <= presets.DEFAULTS.keys(), name
    assert all(type(value) is type(presets.DEFAULTS[key]) for key, value in row.items()), name
    assert all(presets.DEFAULTS[key] != value for key, value in row.items()), f"{name} repeats a default"
