"""The objective: what must hold for every member of the family, and its metrics by hand.

tests/variants_test.py tests the records one by one, tests/golden_test.py has numbers of others.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import masked
from grpo_jax.algo import presets, token_selection
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.aggregation import AGGREGATIONS
from grpo_jax.algo.checks import settings_idle_at_ratio_one
from grpo_jax.algo.corrections import CORRECTIONS, LEVELS
from grpo_jax.algo.kl import KL
from grpo_jax.algo.metrics import reduced
from grpo_jax.algo.objective import objective, totals
from grpo_jax.algo.ratios import RATIOS
from grpo_jax.algo.settings import Algo
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.algo.token_selection import TOKEN_WEIGHTS, TokenWeight
from grpo_jax.algo.token_selection.select import select
from grpo_jax.settings import Settings, names_of
from grpo_jax.types import Batch, Coefficients, Rewards, TokenSelection, TokenStats

GRPO = presets.preset("grpo")
P, G, T = 8, 3, 6


def algo(**changes):
  return dataclasses.replace(GRPO, **changes)


# The family: every surrogate with each ratio that it can be combined with, and every aggregation.
# KLs, masks, corrections and their levels take turns. The slow tests have every KL.

PAIRS = [
  (surrogate, ratio)
  for surrogate, record in SURROGATES.items()
  for ratio in record.ratios or RATIOS
]
# The fast tests have each surrogate with its first ratio, and the first surrogate with all of them.
IS_FAST = [
  surrogate == "ppo_clip" or ratio == next(iter(SURROGATES[surrogate].ratios or RATIOS))
  for surrogate, ratio in PAIRS
]
FEW_KLS = itertools.cycle(KL)
FEW_AGGREGATIONS = itertools.cycle(AGGREGATIONS)
FEW = [[(next(FEW_AGGREGATIONS), next(FEW_KLS)) for _ in range(2)] for _ in PAIRS]
ALL = [list(itertools.product(AGGREGATIONS, KL)) for _ in PAIRS]


def members(surrogate, ratio, variants, quantile, correction, level):
  """The settings of the variants (aggregation, KL) of one combination."""
  shared = algo(
    surrogate=surrogate,
    ratio=ratio,
    kl_coef=0.1,
    length_norm=7,
    cov_fraction=0.2,
    cov_low=0.1,
    top_entropy_quantile=quantile,
    entropy_coef=0.02,
    correction=correction,
    correction_level=level,
    correction_high=1.5,
  )
  return tuple(dataclasses.replace(shared, aggregation=a, kl=kl) for a, kl in variants)


def family(variants_of_pairs, all_slow=False):
  turns = zip(
    PAIRS,
    IS_FAST,
    variants_of_pairs,
    itertools.cycle([1.0, 0.5]),
    itertools.cycle(CORRECTIONS),
    itertools.cycle(reversed(LEVELS)),
  )
  return [
    pytest.param(
      members(*pair, variants, quantile, correction, level),
      id=f"{'-'.join(pair)}-{quantile}-{correction}-{level}-{len(variants)}",
      marks=pytest.mark.slow if all_slow or not is_fast else (),
    )
    for pair, is_fast, variants, quantile, correction, level in turns
  ]


FAST_FAMILY = family(FEW)
FAMILY = FAST_FAMILY + family(ALL, all_slow=True)


@dataclasses.dataclass(frozen=True)
class Case:
  stats: TokenStats
  batch: Batch


def make_case(seed=0, mask=None):
  rng = np.random.default_rng(seed)

  def normal(mean, scale, shape=(P, G, T)):
    return jnp.asarray(rng.normal(mean, scale, shape), jnp.float32)

  lengths = rng.integers(1, T + 1, (P, G, 1))
  lp, A = normal(-2, 0.5), normal(0, 1, (P, G, 1))
  stats = TokenStats(
    logprobs_PGT=lp,
    entropies_PGT=jnp.abs(normal(1, 0.5)),
    full_kl_PGT=jnp.abs(normal(0.2, 0.1)),
  )
  batch = Batch(
    mask_PGT=jnp.asarray(np.arange(T) < lengths, jnp.float32) if mask is None else mask,
    advantages_PGT=jnp.broadcast_to(A, (P, G, T)),
    behavior_logprobs_PGT=lp + normal(0, 0.3),
    old_logprobs_PGT=lp + normal(0, 0.2),
    ref_logprobs_PGT=lp + normal(0, 0.3),
  )
  return Case(stats, batch)


def with_selection(stats, batch, settings):
  if not token_selection.is_needed(settings):
    return batch
  old = stats.logprobs_PGT if batch.old_logprobs_PGT is None else batch.old_logprobs_PGT
  selection = select(
    stats.logprobs_PGT,
    old,
    stats.entropies_PGT,
    batch.advantages_PGT,
    batch.mask_PGT,
    settings,
  )
  return batch.replace(selection=selection)


def losses(stats, batch, of_batch, algos):
  """[len(algos)]."""
  return jnp.stack([objective(stats, batch, of_batch[a.aggregation], a)[0] for a in algos])


@functools.partial(jax.jit, static_argnums=2)
def compute(stats, batch, algos):
  """Losses and gradients of the whole batch, and of its prompts one by one, stacked."""
  batch = with_selection(stats, batch, algos[0])
  coefs = Coefficients(kl=0.1, entropy=0.02)
  of_batch = {a.aggregation: totals(batch, coefs, a) for a in algos}

  def twice(*arguments):
    found = losses(*arguments)
    return found, found

  def losses_and_gradients(stats, batch):
    gradients, found = jax.jacrev(twice, has_aux=True)(stats, batch, of_batch, algos)
    return found, gradients

  def of_prompt(part):
    return losses_and_gradients(*jax.tree.map(lambda x: x[None], part))

  return losses_and_gradients(stats, batch), jax.lax.map(of_prompt, (stats, batch))


def computed(case, algos):
  return jax.device_get(compute(case.stats, case.batch, algos))


def assert_close(found, expected):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize("algos", FAMILY)
def test_split_order_and_padding_change_nothing(algos):
  """The losses of single prompts add up, permutations permute, and padding may hold anything."""
  case, rng = make_case(), np.random.default_rng(1)
  (loss, gradient), (part_losses, part_gradients) = computed(case, algos)
  assert_close(part_losses.sum(0), loss)
  assert_close(jax.tree.map(lambda x: np.moveaxis(x[:, :, 0], 0, 1), part_gradients), gradient)
  assert np.abs(gradient.logprobs_PGT).reshape(len(algos), -1).max(1).all()

  p, g = rng.permutation(P), rng.permutation(G)
  moved = jax.tree.map(lambda x: x[p][:, g], (case.stats, case.batch))
  (moved_loss, moved_gradient), _ = computed(Case(*moved), algos)
  assert_close(moved_loss, loss)
  assert_close(moved_gradient, jax.tree.map(lambda x: x[:, p][:, :, g], gradient))

  # Another shape is another compilation, so only the slow tests add positions.
  added = 3 if len(algos) > len(AGGREGATIONS) else 0

  def pad(x, value):
    x = jnp.where(case.batch.mask_PGT > 0, x, value)
    return jnp.pad(x, [(0, 0), (0, 0), (0, added)], constant_values=value)

  stats = jax.tree.map(lambda x: pad(x, -50.0), case.stats)
  batch = jax.tree.map(lambda x: pad(x, -7.0), case.batch)
  batch = batch.replace(mask_PGT=pad(case.batch.mask_PGT, 0.0))
  (padded_loss, padded_gradient), _ = computed(Case(stats, batch), algos)
  assert_close(padded_loss, loss)
  assert_close(jax.tree.map(lambda x: x[..., :T], padded_gradient), gradient)
  assert all((x[:, batch.mask_PGT == 0] == 0).all() for x in jax.tree.leaves(padded_gradient))


@pytest.mark.parametrize("algos", FAMILY)
def test_an_empty_mask_gives_zero_not_nan(algos):
  (loss, gradient), _ = computed(make_case(mask=jnp.zeros((P, G, T))), algos)
  assert (loss == 0).all() and all((x == 0).all() for x in jax.tree.leaves(gradient))


@pytest.mark.slow
@pytest.mark.parametrize("algos", FAST_FAMILY)
@pytest.mark.parametrize("devices", [2, 8])
def test_any_number_of_devices_gives_the_numbers_of_one(algos, devices):
  mesh = jax.make_mesh(
    (devices,), ("data",), devices=jax.devices()[:devices], axis_types=(jax.sharding.AxisType.Auto,)
  )
  case = make_case()
  sharding = jax.NamedSharding(mesh, jax.P("data"))
  split = Case(*jax.device_put((case.stats, case.batch), sharding))
  assert_close(computed(split, algos)[0], computed(case, algos)[0])


# One update per batch: old is the policy itself.


def at_ratio_one(case):
  return case.batch.replace(old_logprobs_PGT=None, behavior_logprobs_PGT=None)


@functools.partial(jax.jit, static_argnums=2)
def gradients_by_logprobs(stats, batch, algos):
  """The gradients by the log-probs under several settings, stacked."""

  def gradient(settings):
    selected = with_selection(stats, batch, settings)
    coefs = Coefficients(kl=settings.kl_coef, entropy=settings.entropy_coef)
    of_batch = totals(selected, coefs, settings)

    def loss(lp):
      return objective(stats.replace(logprobs_PGT=lp), selected, of_batch, settings)[0]

    return jax.grad(loss)(stats.logprobs_PGT)

  return jnp.stack([gradient(settings) for settings in algos])


@pytest.mark.parametrize(
  "surrogate, ratio",
  [
    pytest.param(*pair, marks=() if is_fast else pytest.mark.slow)
    for pair, is_fast in zip(PAIRS, IS_FAST)
  ],
)
def test_at_ratio_one_the_gradient_is_reinforce(surrogate, ratio):
  """d loss / d lp_t = -A times the token's weight in the aggregation."""
  plain = algo(
    surrogate=surrogate, ratio=ratio, kl_coef=0.0, length_norm=7, cov_low=98.0, cov_high=99.0
  )
  algos = tuple(dataclasses.replace(plain, aggregation=name) for name in AGGREGATIONS)
  case = make_case()
  batch = at_ratio_one(case)
  found = gradients_by_logprobs(case.stats, batch, algos)
  mask = batch.mask_PGT
  for settings, gradient in zip(algos, found, strict=True):
    aggregate = functools.partial(AGGREGATIONS[settings.aggregation].compute, algo=settings)
    weights = jax.grad(lambda x: aggregate(x, mask)[0])(jnp.ones((P, G, T)))  # noqa: B023
    expected = -batch.advantages_PGT * weights / aggregate(mask, mask)[1]
    if RATIOS[ratio].shared_by_row or SURROGATES[surrogate].weighs_tokens_itself:
      row_mean = expected.sum(-1, keepdims=True) / mask.sum(-1, keepdims=True)
      expected = jnp.where(mask > 0, row_mean, 0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)


def changed(setting, value):
  """Another value, inside the range of the setting."""
  return {"ratio_max": 1.7, "dual_clip": 1.7, "cov_fraction": 0.02}.get(setting, value * 1.5)


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_which_settings_of_a_surrogate_are_idle_at_ratio_one(surrogate):
  """Exactly those that its record names change no gradient, and the header of a run names them."""
  record = SURROGATES[surrogate]
  shared = algo(surrogate=surrogate, kl_coef=0.0, cov_fraction=0.5, cov_low=0.1, cov_high=1.0)
  algos = [
    dataclasses.replace(shared, **{name: changed(name, getattr(shared, name))})
    for name in names_of(record.settings)
  ]
  case = make_case()
  found = gradients_by_logprobs(case.stats, at_ratio_one(case), (shared, *algos))
  names = names_of(record.settings)
  for name, gradient, settings in zip(names, found[1:], algos, strict=True):
    is_idle = np.allclose(gradient, found[0], rtol=1e-5, atol=1e-9)
    assert is_idle == (name in record.idle_at_ratio_one), name
    if is_idle:
      assert name in settings_idle_at_ratio_one(settings)
      several = dataclasses.replace(settings, minibatches=2)
      assert settings_idle_at_ratio_one(several) == ()


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_which_surrogates_read_the_ratio(surrogate):
  """Old log-probs of another policy change the gradient, except where the record says so."""
  case = make_case()
  settings = (algo(surrogate=surrogate, kl_coef=0.0, cov_fraction=0.5),)
  moved, unmoved = (
    gradients_by_logprobs(case.stats, batch, settings)[0]
    for batch in (case.batch, at_ratio_one(case))
  )
  assert np.allclose(moved, unmoved, rtol=1e-5, atol=1e-9) != SURROGATES[surrogate].reads_ratio


# The objective by hand, for one row of four tokens.


def row(*values):
  return jnp.array([[values]], jnp.float32)


OLD = row(-1, -1, -1, -1)
HAND = Case(
  TokenStats(logprobs_PGT=OLD + jnp.log(row(1.5, 0.5, 1.1, 9)), entropies_PGT=row(1, 2, 3, 9)),
  Batch(
    mask_PGT=row(1, 1, 1, 0),
    advantages_PGT=row(1, 1, 1, 5),
    behavior_logprobs_PGT=OLD - jnp.log(row(2, 0.5, 1, 7)),
    old_logprobs_PGT=OLD,
    ref_logprobs_PGT=OLD + jnp.log(row(1, 0.5, 1.1, 3)),
  ),
)
TOKEN_MEAN = dict(aggregation="token_mean", kl_coef=0.0)


def by_hand(settings, **changes):
  """Loss and reduced metrics of HAND with some fields of its batch replaced."""
  batch = HAND.batch.replace(**changes)
  coefs = Coefficients(kl=settings.kl_coef, entropy=settings.entropy_coef)
  loss, metrics = objective(HAND.stats, batch, totals(batch, coefs, settings), settings)
  return float(loss), reduced(metrics)


def test_the_objective_by_hand():
  """The ratios are 1.5, .5 and 1.1, clipped at 1.2: -(1.2 + .5 + 1.1) / 3."""
  loss, metrics = by_hand(algo(**TOKEN_MEAN))
  assert loss == pytest.approx(-2.8 / 3, rel=1e-5)
  assert metrics == pytest.approx(
    {
      "entropy": 2,
      "ratio/mean": 3.1 / 3,
      "ratio/max": 1.5,
      "ratio/min": 0.5,
      "ratio/ess": 3.1**2 / (1.5**2 + 0.5**2 + 1.1**2) / 3,
      "clip_ratio/low_mean": 0,
      "clip_ratio/high_mean": 1 / 3,
      "clip_ratio/region_mean": 1 / 3,
    },
    rel=1e-5,
  )


def test_bounds_on_both_sides_by_hand():
  """cispo limits 1.5 and .5. sapo has no bounds to count."""
  _, metrics = by_hand(algo(surrogate="cispo", **TOKEN_MEAN))
  sides = ("low", "high", "region")
  found = [metrics[f"clip_ratio/{side}_mean"] for side in sides]
  assert found == pytest.approx([1 / 3, 1 / 3, 2 / 3])
  _, metrics = by_hand(algo(surrogate="sapo", **TOKEN_MEAN))
  assert not any(name.startswith("clip_ratio/") for name in metrics)


def test_the_kl_term_by_hand():
  """k1 is ln 1.5, 0 and 0, and weighted by the ratio it is 1.5 ln 1.5."""
  k1 = np.log(1.5)
  settings = algo(**TOKEN_MEAN | dict(kl="k1", kl_coef=0.1))
  loss, metrics = by_hand(settings)
  assert loss == pytest.approx((-2.8 + 0.1 * k1) / 3, rel=1e-5)
  assert metrics["kl"] == pytest.approx(k1 / 3, rel=1e-5)
  loss, metrics = by_hand(dataclasses.replace(settings, kl_importance_weighted=True))
  assert loss == pytest.approx((-2.8 + 0.1 * 1.5 * k1) / 3, rel=1e-5)
  assert metrics["kl"] == pytest.approx(k1 / 3, rel=1e-5)
  loss, metrics = by_hand(dataclasses.replace(settings, kl_in="reward"))
  assert loss == pytest.approx(-2.8 / 3, rel=1e-5)
  assert metrics["kl"] == pytest.approx(k1 / 3, rel=1e-5)


def test_the_coefficients_of_the_batch_are_used():
  settings = algo(**TOKEN_MEAN | dict(kl="k1", kl_coef=0.1, entropy_coef=0.01))
  coefs = Coefficients(kl=0.5, entropy=0.25)
  of_batch = totals(HAND.batch, coefs, settings)
  loss, _ = objective(HAND.stats, HAND.batch, of_batch, settings)
  assert float(loss) == pytest.approx((-2.8 + 0.5 * np.log(1.5)) / 3 - 0.25 * 2, rel=1e-5)


@pytest.mark.parametrize("name", ["entropy_coef", "entropy_target"])
def test_the_entropy_bonus_has_a_gradient(name):
  settings = algo(**TOKEN_MEAN | {name: 0.5})
  of_batch = totals(HAND.batch, Coefficients(kl=0.0, entropy=0.3), settings)

  def loss(entropies):
    stats = HAND.stats.replace(entropies_PGT=entropies)
    return objective(stats, HAND.batch, of_batch, settings)[0]

  gradient = jax.grad(loss)(HAND.stats.entropies_PGT)
  np.testing.assert_allclose(gradient, row(-0.1, -0.1, -0.1, 0), rtol=1e-6)


def test_weights_of_tokens_by_hand():
  """A weight scales a token's surrogate. The mean still counts every token of the loss."""
  selection = TokenSelection(weights_PGT=row(0.5, 0, 2, 0), chosen_PGT=row(0, 1, 0, 0))
  settings = algo(**TOKEN_MEAN | dict(entropy_coef=0.1))
  loss, metrics = by_hand(settings, selection=selection)
  expected = -(0.5 * 1.2 + 2 * 1.1) / 3 - 0.1 * (1 + 3) / 2
  assert loss == pytest.approx(expected, rel=1e-5)
  assert metrics["selection/kept"] == pytest.approx(2 / 3)
  assert metrics["selection/chosen"] == pytest.approx(1 / 3)


def test_a_token_of_weight_zero_may_have_any_loss():
  selection = TokenSelection(weights_PGT=row(0, 1, 1, 0), chosen_PGT=row(0, 0, 0, 0))
  advantages = row(np.inf, 1, 1, 0)
  loss, _ = by_hand(algo(**TOKEN_MEAN), selection=selection, advantages_PGT=advantages)
  assert loss == pytest.approx(-1.6 / 3, rel=1e-5)


def test_corrections_by_hand():
  """old / mu is 2, .5 and 1, truncated at 1.5: -(1.5 1.2 + .5 .5 + 1.1) / 3."""
  settings = algo(**TOKEN_MEAN, correction="truncate", correction_high=1.5)
  loss, metrics = by_hand(settings)
  assert loss == pytest.approx(-(1.8 + 0.25 + 1.1) / 3, rel=1e-5)
  assert metrics["correction/weight_mean"] == pytest.approx(3 / 3, rel=1e-5)
  assert metrics["correction/changed"] == pytest.approx(1 / 3)
  assert metrics["correction/raw_mean"] == pytest.approx(3.5 / 3, rel=1e-5)
  assert metrics["correction/raw_max"] == pytest.approx(2, rel=1e-5)
  assert metrics["correction/ess"] == pytest.approx(3.5**2 / (4 + 0.25 + 1) / 3, rel=1e-5)
  _, metrics = by_hand(settings, behavior_logprobs_PGT=None)
  assert metrics["correction/weight_mean"] == 1


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_vespo_counts_the_correction_of_a_row_once(level):
  """W = 1.5 .5 1.1 * 2 = 1.65, phi = W^2 e^(3 (1 - W)), and the mean of lp is -1 + ln(.825) / 3."""
  settings = algo(**TOKEN_MEAN, surrogate="vespo", correction="truncate", correction_level=level)
  loss, _ = by_hand(settings, behavior_logprobs_PGT=OLD - jnp.log(row(2, 1, 1, 7)))
  assert loss == pytest.approx(0.3873412 * 1.0641240, rel=1e-5)


def test_rows_too_far_off_policy_are_left_out():
  """mean(mu - lp) = -ln(2 .5 1 * 1.5 .5 1.1) / 3 = .0641. Only rows with A < 0 are left out."""
  negative = row(-1, -1, -1, 0)
  far = algo(**TOKEN_MEAN, off_policy_threshold=0.06)
  near = algo(**TOKEN_MEAN, off_policy_threshold=0.07)
  assert by_hand(far, advantages_PGT=negative)[0] == 0
  assert by_hand(near, advantages_PGT=negative)[0] == pytest.approx((1.5 + 0.8 + 1.1) / 3, rel=1e-5)
  assert by_hand(far)[0] == pytest.approx(-2.8 / 3, rel=1e-5)


def test_the_worked_example_of_decoupled_ppo():
  """mu .2, old .25, pi .3, A 1: 1.25 min(1.2, 1.2) = 1.5."""
  one = jnp.ones((1, 1, 1))
  settings = algo(**TOKEN_MEAN, correction="truncate", correction_high=5.0)
  batch = Batch(
    mask_PGT=one,
    advantages_PGT=one,
    behavior_logprobs_PGT=jnp.log(0.2 * one),
    old_logprobs_PGT=jnp.log(0.25 * one),
  )
  of_batch = totals(batch, Coefficients(kl=0.0, entropy=0.0), settings)
  loss, _ = objective(TokenStats(jnp.log(0.3 * one), one), batch, of_batch, settings)
  assert float(loss) == pytest.approx(-1.5, rel=1e-5)


# Objectives for rollouts of an older policy.

MU = OLD - jnp.log(row(9, 0.5, 1, 1))  # pi / mu is 13.5, .25 and 1.1


def gradient_by_hand(settings, **changes):
  """The gradient of the loss by the log-probs of HAND, [3]."""
  batch = HAND.batch.replace(**changes)
  found = gradients_by_logprobs(HAND.stats, batch, (dataclasses.replace(settings, kl_coef=0.0),))
  return np.asarray(found[0, 0, 0, :3])


def test_aipo_weighs_the_log_prob_by_the_truncated_ratio_to_the_sampler():
  """d loss / d lp = -A min(pi / mu, 4), of one completion whose tokens are added up."""
  A = row(2, -1, 1, 0)
  of_sampler = dict(advantages_PGT=A, behavior_logprobs_PGT=MU)
  expected = [-2 * 4, 0.25, -1.1]
  aipo = presets.preset("aipo")
  assert aipo.old_is_policy
  found = gradient_by_hand(aipo, old_logprobs_PGT=None, **of_sampler)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  # With several updates the ratio to the sampler's own log-probs moves along.
  several = algo(surrogate="cispo", clip_low=1.0, clip_high=3.0, aggregation="sequence_sum")
  found = gradient_by_hand(several, advantages_PGT=A, old_logprobs_PGT=MU)
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_areal_by_hand():
  """pi / old is 1.5, .5 and 1.1, and old / mu is 9, .5 and 1. The first is above the cap of 5."""
  areal, A = presets.preset("areal"), row(1, 1, 1, 0)
  found = gradient_by_hand(areal, advantages_PGT=A, behavior_logprobs_PGT=MU)
  np.testing.assert_allclose(found, [0, -0.5 * 0.5 / 3, -1.1 / 3], rtol=1e-5)
  # Of row (9 .5)^(1/3) = 1.65: no token is above the cap, and the first ratio is clipped.
  of_row = dataclasses.replace(areal, correction_level="geometric")
  found = gradient_by_hand(of_row, advantages_PGT=A, behavior_logprobs_PGT=MU)
  np.testing.assert_allclose(found, [0, -1.6509636 * 0.5 / 3, -1.6509636 * 1.1 / 3], rtol=1e-5)


def test_m2po_by_hand():
  """Squared log-ratios of 1.5, .5 and 1.1 are .164, .480 and .009. The second comes back: A > 0."""
  m2po, A = presets.preset("m2po"), row(1, 1, 1, 0)
  found = gradient_by_hand(m2po, advantages_PGT=A)
  np.testing.assert_allclose(found, [0, -0.5 / 3, -1.1 / 3], rtol=1e-5)
  # The mean of .164 and .009 is .087.
  found = gradient_by_hand(dataclasses.replace(m2po, m2_bound=0.09), advantages_PGT=A)
  np.testing.assert_allclose(found, [-1.5 / 3, -0.5 / 3, -1.1 / 3], rtol=1e-5)


def test_m2po_holds_its_bound_and_leaves_out_no_more_than_it_must():
  """For tokens and for rows. One more token, or row, would break the bound."""
  case = make_case()
  lp = case.stats.logprobs_PGT
  batch = case.batch.replace(old_logprobs_PGT=lp + 2 * (case.batch.behavior_logprobs_PGT - lp))
  for ratio in ("token", "sequence"):
    settings = dataclasses.replace(presets.preset("m2po"), ratio=ratio)
    weights = np.asarray(with_selection(case.stats, batch, settings).selection.weights_PGT)
    log_w = np.log(RATIOS[ratio].compute(lp, batch.old_logprobs_PGT, batch.mask_PGT))
    away = (np.asarray(batch.mask_PGT) > 0) & (np.asarray(batch.advantages_PGT) * log_w > 0)
    kept, left_out = away & (weights > 0), away & (weights == 0)
    assert kept.any() and left_out.any()
    assert (weights[~away] == np.asarray(batch.mask_PGT)[~away]).all()
    assert (log_w[kept] ** 2).mean() <= 0.04 < (log_w[left_out] ** 2).min()
    smallest = (log_w[left_out] ** 2).min()
    more = kept | (left_out & (log_w**2 <= smallest * (1 + 1e-5)))
    assert (log_w[more] ** 2).mean() > 0.04
    if ratio == "sequence":  # whole rows
      assert (left_out.any(-1) == (left_out | (np.asarray(batch.mask_PGT) == 0)).all(-1)).all()


# Token selection.


def test_weights_of_several_records_multiply(monkeypatch):
  """A new weight needs a record and nothing else."""
  by_entropy = TokenWeight(
    compute=lambda tokens, settings: tokens.entropies_PGT,
    is_on=lambda settings: settings.minibatches == 2,
    settings=Settings,
    examples=(),
  )
  monkeypatch.setitem(TOKEN_WEIGHTS, "by_entropy", by_entropy)
  args = [HAND.stats.logprobs_PGT, OLD, HAND.stats.entropies_PGT]
  args += [HAND.batch.advantages_PGT, HAND.batch.mask_PGT]
  on = algo(top_entropy_quantile=0.5, minibatches=2)
  np.testing.assert_array_equal(select(*args, on).weights_PGT, row(0, 2, 3, 0))
  assert token_selection.is_needed(algo(minibatches=2))
  assert not token_selection.is_needed(algo())
  off = select(*args, algo())
  np.testing.assert_array_equal(off.weights_PGT, HAND.batch.mask_PGT)
  np.testing.assert_array_equal(off.chosen_PGT, row(0, 0, 0, 0))


def test_the_selection_reads_the_ratio_of_the_config_and_has_no_gradient():
  """Of ratios 1.5, .9 and .9, only the token ratio is clipped. Their geometric mean is 1.067."""
  lp = OLD + jnp.log(row(1.5, 0.9, 0.9, 1))
  A = row(3, 0, 0, 0)
  args = [OLD, HAND.stats.entropies_PGT, A, row(1, 1, 1, 0)]
  settings = dict(surrogate="clip_cov", cov_low=0.1)
  of_token = select(lp, *args, algo(**settings))
  of_row = select(lp, *args, algo(**settings, ratio="sequence"))
  np.testing.assert_array_equal(of_token.chosen_PGT, row(0, 1, 0, 0))
  np.testing.assert_array_equal(of_row.chosen_PGT, row(1, 0, 0, 0))


# Presets.


FAST_PRESETS = "grpo", "dapo", "gspo"


def preset_batch(case, settings, spread):
  """A batch with the advantages of the preset, and with log-ratios `spread` times as far from 0."""
  rng = np.random.default_rng(3)
  mask, batch = case.batch.mask_PGT, case.batch
  rewards = Rewards(
    scores_PGJ=jnp.asarray(rng.integers(0, 2, (P, G, 1)), jnp.float32),
    weights=(1.0,),
    greedy_scores_PJ=jnp.zeros((P, 1)),
    step_rewards_PGT=jnp.asarray(rng.random((P, G, T)), jnp.float32),
    step_ends_PGT=mask,
  )
  if settings.kl_in_reward:
    kl_PGT = KL[settings.kl].compute(batch.old_logprobs_PGT, batch.ref_logprobs_PGT)
    rewards = rewards.replace(kl_penalty_PGT=settings.kl_coef * masked.masked(kl_PGT, mask))
  A = ADVANTAGES[settings.advantage].compute(rewards, mask, settings)
  A_PGT = jnp.broadcast_to(A if A.ndim == 3 else A[..., None], (P, G, T))
  lp = case.stats.logprobs_PGT
  old = None if settings.old_is_policy else lp + spread * (batch.old_logprobs_PGT - lp)
  mu = lp + spread * (batch.behavior_logprobs_PGT - lp)
  return batch.replace(advantages_PGT=A_PGT, old_logprobs_PGT=old, behavior_logprobs_PGT=mu)


@pytest.mark.parametrize(
  "name",
  [pytest.param(x, marks=() if x in FAST_PRESETS else pytest.mark.slow) for x in presets.PRESETS],
)
def test_every_choice_of_a_preset_matters(name):
  """Each choice, set back to its default, changes the gradient under all the others."""
  case, defaults = make_case(), Algo()
  chosen = dataclasses.replace(presets.preset(name), length_norm=7, pass_k=2)

  def gradients(settings):
    found = [
      gradients_by_logprobs(case.stats, preset_batch(case, settings, spread), (settings,))
      for spread in (1, 8)  # ratios near the bounds, and far beyond them
    ]
    return np.stack(found)

  expected = gradients(chosen)
  # They change what is sampled and scored, and which log-probs a batch has.
  elsewhere = {"dynamic_sampling", "overlong", "old_logprobs"}
  if chosen.surrogate == "reinforce" and chosen.old_is_policy:
    elsewhere.add("surrogate")  # at ratio 1 PPO's gradient is REINFORCE's
  for key in presets.PRESETS[name].keys() - elsewhere:
    plain = dataclasses.replace(chosen, **{key: getattr(defaults, key)})
    assert np.abs(gradients(plain) - expected).max() > 1e-6, key


def test_presets_name_known_settings_and_no_defaults():
  defaults = vars(Algo())
  for name, changes in presets.PRESETS.items():
    assert changes.keys() <= defaults.keys(), name
    assert all(type(value) is type(defaults[key]) for key, value in changes.items()), name
    assert all(defaults[key] != value for key, value in changes.items()), f"{name}: a default"
