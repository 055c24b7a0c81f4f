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

from grpo_jax import masked
from grpo_jax.algo import controllers, kl, presets, selection
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.aggregation import AGGREGATIONS
from grpo_jax.algo.kl import KL
from grpo_jax.algo.objective import objective, whole
from grpo_jax.algo.ratios import RATIOS
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.config import Algo
from grpo_jax.run.checks import TOKEN_ONLY
from grpo_jax.types import Batch, Coefs, Rewards, TokenStats

GRPO = Algo(**presets.row("grpo"))


def algo(**change):
  return dataclasses.replace(GRPO, **change)


def rewards(values, T=4, **more):
  """Of one function; every completion has T tokens."""
  values = jnp.asarray(values, jnp.float32)
  return Rewards(values[None], jnp.ones(1), jnp.ones((*values.shape, T)), **more)


# Advantages.


@pytest.mark.parametrize(
  "values, ddof, expected",
  [
    ([1, 1, 0, 0], 0, [1, 1, -1, -1]),  # mean 1/2, std 1/2
    ([1, 0, 0, 0], 1, [1.5, -0.5, -0.5, -0.5]),  # mean 1/4, variance (9/16 + 3/16) / 3 = 1/4
    ([2, np.nan, 0, np.nan], 0, [1, 0, -1, 0]),  # the unscored stay out
    ([np.nan, np.nan, np.nan, 1], 1, [0, 0, 0, 0]),
  ],
)
def test_group_normalized(values, ddof, expected):
  out = ADVANTAGES["group_normalized"](rewards([values]), algo(std_ddof=ddof, std_eps=0.0))
  np.testing.assert_allclose(out, [expected], atol=1e-6)


@pytest.mark.parametrize(
  "name", [name for name in ADVANTAGES if name not in ("process", "greedy_baseline")]
)
def test_equal_rewards_have_advantage_exactly_zero(name):
  """0.7 twelve times: the float mean is not 0.7, and its float deviation is not 0."""
  out = ADVANTAGES[name](rewards(np.full((3, 12), 0.7)), algo(std_eps=0.0, batch_std_eps=0.0))
  assert (out == 0).all()


def test_equal_rewards_of_steps_have_advantage_exactly_zero():
  ends = jnp.ones((3, 12, 4)).at[0, :6, 1].set(0)
  r = rewards(np.zeros((3, 12)), step_rewards_PGT=ends * 0.7, step_ends_PGT=ends)
  assert (ADVANTAGES["process"](r, algo(std_eps=0.0)) == 0).all()


def test_greedy_baseline():
  """The greedy completions of the two prompts got 1 and nothing."""
  r = rewards([[1, 0], [1, 0]], greedy_P=jnp.array([1, np.nan]))
  np.testing.assert_array_equal(ADVANTAGES["greedy_baseline"](r, GRPO), [[0, -1], [0, 0]])


def test_the_kl_in_the_reward():
  """RLOO: completions lose the sum of their penalty. REINFORCE++: a token loses its own and that of those after it."""
  penalty = jnp.array([[[0.25, 0.25, 0, 0], [0, 0, 0.5, 0.5]]])
  r = rewards([[1, 1]], penalty_PGT=penalty)
  np.testing.assert_allclose(ADVANTAGES["leave_one_out"](r, GRPO), [[0.5, -0.5]])
  to_go = np.array([0.5, 0.75, 1, 1, 0, 0, 0, 0.5])
  expected = (to_go - to_go.mean()) / to_go.std(ddof=1)
  out = ADVANTAGES["batch_normalized"](r, algo(std_eps=0.0))
  np.testing.assert_allclose(out.ravel(), expected, rtol=1e-5)


@pytest.mark.parametrize(
  "name", [name for name in ADVANTAGES if name not in ("process", "greedy_baseline")]
)
def test_members_and_prompts_may_be_permuted(name):
  rng = np.random.default_rng(0)
  values, lengths = rng.integers(0, 2, (3, 8)).astype(np.float32), rng.integers(1, 5, (3, 8, 1))
  make = lambda p, g: ADVANTAGES[name](
    rewards(values[p][:, g]).replace(
      mask_PGT=jnp.asarray(np.arange(4) < lengths[p][:, g], jnp.float32)
    ),
    GRPO,
  )
  p, g = rng.permutation(3), rng.permutation(8)
  np.testing.assert_allclose(make(np.arange(3), np.arange(8))[p][:, g], make(p, g), atol=1e-6)


def test_groups_do_not_mix():
  values = jnp.array([[1.0, 0, 0, 0], [100, 100, 300, 100]])
  both = ADVANTAGES["group_normalized"](rewards(values), GRPO)
  alone = jnp.concatenate(
    [ADVANTAGES["group_normalized"](rewards(row[None]), GRPO) for row in values]
  )
  np.testing.assert_array_equal(both, alone)


# KL and aggregation.


def test_k3_by_hand():
  """d = ln 2: 1/2 + ln 2 - 1."""
  assert float(kl.k3(jnp.log(0.5), jnp.log(0.25))) == pytest.approx(0.5 + np.log(2) - 1, rel=1e-6)
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
  pi, ref = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.2, 0.2, 0.6])
  np.testing.assert_allclose(
    (pi * KL[name](jnp.log(pi), jnp.log(ref))).sum(), (pi * jnp.log(pi / ref)).sum(), rtol=1e-5
  )


def test_aggregations_by_hand():
  """Rows of 2 and 4 tokens with values 1 and -1; a row without tokens is not counted."""
  mask = jnp.array([[[1.0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]])
  values = jnp.array([[[1.0, 1, 9, 9], [-1, -1, -1, -1], [jnp.nan] * 4]])
  mean = lambda name: float(np.divide(*AGGREGATIONS[name](values, mask, algo(length_norm=8))))
  found = {name: mean(name) for name in AGGREGATIONS}
  assert found == pytest.approx(
    {
      "sequence_mean": 0,
      "token_mean": -2 / 6,
      "sequence_sum": -1,
      "constant": -2 / 16,
      "prompt_mean": -2 / 6,
    }
  )


def test_full_kl_by_hand_and_its_gradient():
  """pi = [3/4, 1/4], ref = [1/2, 1/2]: 3/4 ln(3/2) + 1/4 ln(1/2). d / d logits = pi (log pi - log ref - KL)."""
  pi, ref = np.array([0.75, 0.25]), np.array([0.5, 0.5])
  value, gradient = jax.value_and_grad(lambda x: kl.full(x, jnp.log(ref)))(
    jnp.log(pi) + 7
  )  # logits may be shifted
  expected = (pi * np.log(pi / ref)).sum()
  assert float(value) == pytest.approx(expected, rel=1e-5)
  np.testing.assert_allclose(gradient, pi * (np.log(pi / ref) - expected), rtol=1e-5)


# Coefficients that follow what is measured.


@pytest.mark.parametrize(
  "measured, coef", [(0.2, 0.105), (0.11, 0.1025), (0.1, 0.1), (0.09, 0.0975), (0, 0.095)]
)
def test_the_kl_coefficient_follows_the_kl(measured, coef):
  """Target .1, 256 completions of a horizon of 1024: .1 (1 + clip(kl / .1 - 1, -.2, .2) / 4)."""
  a = algo(kl_target=0.1, kl_horizon=1024)
  assert float(controllers.proportional(jnp.float32(0.1), measured, 256, a)) == pytest.approx(
    coef, rel=1e-5
  )


def test_the_entropy_coefficient_goes_up_and_down_and_not_below_zero():
  a = algo(entropy_target=0.5, entropy_step=0.01)
  found = [
    float(controllers.stepwise(jnp.float32(c), h, a))
    for c, h in ((0.02, 0.4), (0.02, 0.6), (0.02, 0.5), (0.005, 0.6))
  ]
  assert found == pytest.approx([0.03, 0.01, 0.02, 0])


# The objective, over the whole family: every surrogate with each ratio it reads and every aggregation, KLs going round
# among them; with the marker slow, every KL too. Masks and corrections go round.

PAIRS = [(s, r) for s in SURROGATES for r in RATIOS if r == "token" or s not in TOKEN_ONLY]
KINDS = [*KL, "full"]
_kinds = itertools.cycle(KINDS)
FEW = [[(a, next(_kinds)) for a in AGGREGATIONS] for _ in PAIRS]
ALL = [[*itertools.product(AGGREGATIONS, KINDS)] for _ in PAIRS]
FAMILY = [
  pytest.param(
    [
      algo(
        surrogate=s,
        ratio=r,
        aggregation=a,
        kl=k,
        kl_coef=0.1,
        length_norm=7,
        cov_fraction=0.2,
        cov_low=0.1,
        top_entropy_quantile=q,
        entropy_coef=0.02,
        correction=c,
        correction_high=1.5,
      )
      for a, k in variants
    ],
    id=f"{s}-{r}-{q}-{c}-{len(variants)}",
    marks=marks,
  )
  for variants_of_pairs, marks in ((FEW, ()), (ALL, pytest.mark.slow))
  for (s, r), variants, q, c in zip(
    PAIRS,
    variants_of_pairs,
    itertools.cycle([1.0, 0.5]),
    itertools.cycle(["none", "truncate", "mask"]),
  )
]
P, G, T = 8, 3, 6


@dataclasses.dataclass(frozen=True)
class Case:
  stats: TokenStats
  batch: Batch


def case(seed=0, mask=None):
  rng = np.random.default_rng(seed)
  normal = lambda low, scale: jnp.asarray(rng.normal(low, scale, (P, G, T)), jnp.float32)
  lengths = rng.integers(1, T + 1, (P, G, 1))
  mask = jnp.asarray(np.arange(T) < lengths, jnp.float32) if mask is None else mask
  lp = normal(-2, 0.5)
  A = jnp.broadcast_to(jnp.asarray(rng.normal(size=(P, G, 1)), jnp.float32), (P, G, T))
  stats = TokenStats(lp, jnp.abs(normal(1, 0.5)), jnp.abs(normal(0.2, 0.1)))
  return Case(
    stats,
    Batch(
      None, None, None, mask, A, None, lp + normal(0, 0.3), lp + normal(0, 0.2), lp + normal(0, 0.3)
    ),
  )


def losses(stats, batch, of_all, algos):
  """[len(algos)]."""
  asked = lambda a: stats if a.kl == "full" else stats.replace(full_kl_PGT=None)
  return jnp.stack([objective(asked(a), batch, of_all[a.aggregation], a)[0] for a in algos])


@functools.partial(jax.jit, static_argnums=1)
def parts(c, algos):
  """Losses [variants] and their gradients of the batch as a whole, and of its prompts one by one, stacked."""
  stats, batch, a = *c, algos[0]
  if selection.is_needed(a):
    batch = batch.replace(
      selection=selection.select(
        stats.logprobs_PGT,
        batch.old_logprobs_PGT,
        stats.entropies_PGT,
        batch.advantages_PGT,
        batch.mask_PGT,
        a,
      )
    )
  of_all = {x.aggregation: whole(batch, Coefs(0.1, 0.02), x) for x in algos}
  both = lambda stats, batch: (
    losses(stats, batch, of_all, algos),
    jax.jacrev(losses)(stats, batch, of_all, algos),
  )
  one = lambda x: x[:, None]  # a prompt with the axis of prompts
  return both(stats, batch), jax.lax.map(
    lambda part: both(*part), jax.tree.map(one, (stats, batch))
  )


def computed(c, algos):
  return jax.device_get(parts((c.stats, c.batch), tuple(algos)))


def assert_close(a, b, atol=1e-6):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol), a, b)


@pytest.mark.parametrize("algos", FAMILY)
def test_split_order_and_padding_change_nothing(algos):
  """Shares of the prompts one by one add up to the whole. Permuting prompts and members permutes the gradient. Other
  numbers at padding change nothing and have no gradient; nor, among all kinds, do three positions more of them."""
  c, rng = case(), np.random.default_rng(1)
  (loss, gradient), (of_parts, gradients) = computed(c, algos)
  np.testing.assert_allclose(of_parts.sum(0), loss, rtol=1e-5, atol=1e-6)
  assert_close(jax.tree.map(lambda x: np.moveaxis(x[:, :, 0], 0, 1), gradients), gradient)
  assert np.abs(gradient.logprobs_PGT).reshape(len(algos), -1).max(1).all()

  p, g = rng.permutation(P), rng.permutation(G)
  move = lambda tree: jax.tree.map(lambda x: x[p][:, g], tree)
  (other, others), _ = computed(Case(move(c.stats), move(c.batch)), algos)
  np.testing.assert_allclose(other, loss, rtol=1e-5, atol=1e-6)
  assert_close(others, jax.tree.map(lambda x: x[:, p][:, :, g], gradient))

  more = 3 * (len(algos) > len(AGGREGATIONS))  # another shape is another compilation
  wide = lambda x, value: jnp.pad(
    jnp.where(c.batch.mask_PGT > 0, x, value), [(0, 0), (0, 0), (0, more)], constant_values=value
  )
  padded = jax.tree.map(lambda x: wide(x, -7.0), c.batch).replace(
    mask_PGT=wide(c.batch.mask_PGT, 0.0)
  )
  (other, others), _ = computed(
    Case(jax.tree.map(lambda x: wide(x, -50.0), c.stats), padded), algos
  )
  np.testing.assert_allclose(other, loss, rtol=1e-5, atol=1e-6)
  assert_close(jax.tree.map(lambda x: x[..., :T], others), gradient)
  assert all((x[:, padded.mask_PGT == 0] == 0).all() for x in jax.tree.leaves(others))


@pytest.mark.parametrize("algos", FAMILY)
def test_an_empty_mask_gives_zero_not_nan(algos):
  (loss, gradient), _ = computed(case(mask=jnp.zeros((P, G, T))), algos)
  assert (loss == 0).all() and all((x == 0).all() for x in jax.tree.leaves(gradient))


@pytest.mark.slow
@pytest.mark.parametrize(
  "algos",
  [param.values[0] for param in FAMILY[: len(PAIRS)]],
  ids=[p.id for p in FAMILY[: len(PAIRS)]],
)
@pytest.mark.parametrize("devices", [2, 8])
def test_any_number_of_devices_gives_the_numbers_of_one(algos, devices):
  mesh = jax.make_mesh(
    (devices,), ("data",), devices=jax.devices()[:devices], axis_types=(jax.sharding.AxisType.Auto,)
  )
  put = lambda tree: jax.device_put(tree, jax.NamedSharding(mesh, jax.P("data")))
  c = case()
  alone, split = computed(c, algos)[0], computed(Case(put(c.stats), put(c.batch)), algos)[0]
  np.testing.assert_allclose(split[0], alone[0], rtol=1e-5, atol=1e-6)
  assert_close(split[1], alone[1])


@pytest.mark.parametrize("algos", FAMILY[: len(PAIRS)])
def test_at_ratio_one_the_gradient_is_reinforce(algos):
  """d loss / d lp_t = -A times the token's weight in the aggregation, where old is the policy itself."""
  plain = dict(
    kl_coef=0.0,
    entropy_coef=0.0,
    correction="none",
    top_entropy_quantile=1.0,
    cov_kl_coef=0.0,
    cov_low=98.0,
    cov_high=99.0,
  )
  algos = {a.aggregation: dataclasses.replace(a, **plain) for a in algos}.values()
  c = case()
  b = c.batch.replace(
    old_logprobs_PGT=None, sampling_logprobs_PGT=None, selection=selection.trivial(c.batch.mask_PGT)
  )
  for a in algos:
    of_all = whole(b, Coefs(0.0, 0.0), a)
    gradient = jax.grad(
      lambda lp: objective(TokenStats(lp, c.stats.entropies_PGT), b, of_all, a)[0]
    )(c.stats.logprobs_PGT)
    weight = (
      jax.grad(lambda x: AGGREGATIONS[a.aggregation](x, b.mask_PGT, a)[0])(jnp.ones((P, G, T)))
      / of_all.loss_weight
    )
    expected = -b.advantages_PGT * weight
    if a.ratio == "sequence" or a.surrogate == "gmpo":  # a row's tokens share its gradient
      lengths = b.mask_PGT.sum(-1, keepdims=True)
      expected = jnp.where(b.mask_PGT > 0, (expected.sum(-1, keepdims=True) / lengths), 0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
  "name, w, A, low, high",
  [
    ("ppo_clip", 0.5, -1, 1, 0),
    ("ppo_clip", 0.5, 1, 0, 0),
    ("ppo_clip", 1.5, 1, 0, 1),
    ("ppo_clip", 1.5, -1, 0, 0),
    ("cispo", 1.5, -1, 0, 1),
    ("cispo", 0.5, 1, 1, 0),
    ("gmpo", 1.45, 1, 0, 0),
    ("gmpo", 1.5, 1, 0, 1),
    ("gmpo", 0.66, -1, 1, 0),  # e^.4 = 1.49, e^-.4 = .67
    ("dppo_tv", 1.5, 1, 0, 1),
    ("dppo_tv", 1.3, 1, 0, 0),  # old .5: p - q is .25, .15
    ("reinforce", 2.0, 1, None, None),
    ("sapo", 2.0, 1, None, None),
  ],
)
def test_what_is_clipped_is_told(name, w, A, low, high):
  """Bounds .2, gmpo .4."""
  a = algo(
    surrogate=name,
    kl_coef=0.0,
    clip_low=0.4 if name == "gmpo" else 0.2,
    clip_high=0.4 if name == "gmpo" else 0.2,
  )
  old, one = jnp.log(jnp.full((1, 1, 1), 0.5)), jnp.ones((1, 1, 1))
  b = Batch(None, None, None, one, A * one, None, old_logprobs_PGT=old)
  _, told = objective(TokenStats(old + jnp.log(w), one), b, whole(b, Coefs(0.0, 0.0), a), a)
  found = [told.means.get(f"clip_ratio/{side}_mean", (None,))[0] for side in ("low", "high")]
  assert found == [low, high]


# Presets.


@pytest.mark.parametrize("name", presets.PRESETS)
def test_no_choice_of_a_preset_makes_another_of_its_choices_dead(name):
  """Each of its choices, put back to the default, changes advantages or the gradient, under all the others."""
  c, rng = case(), np.random.default_rng(2)
  steps = dict(
    step_rewards_PGT=jnp.asarray(rng.random((P, G, T)), jnp.float32),
    step_ends_PGT=c.batch.mask_PGT,
    greedy_P=jnp.zeros(P),
  )
  lengths = c.batch.mask_PGT
  scores = jnp.asarray(rng.integers(0, 2, (1, P, G)), jnp.float32)

  def result(row, spread):
    a = Algo(**{**row, "length_norm": 7, "pass_k": 2})
    penalty = (
      a.kl_coef
      * (a.kl_in == "reward")
      * masked.masked(
        KL[a.kl](c.batch.old_logprobs_PGT, c.batch.ref_logprobs_PGT), c.batch.mask_PGT
      )
    )
    A = ADVANTAGES[a.advantage](
      Rewards(
        scores, jnp.ones(1), lengths, penalty_PGT=penalty if a.kl_in == "reward" else None, **steps
      ),
      a,
    )
    b = c.batch.replace(
      advantages_PGT=jnp.broadcast_to(A if A.ndim == 3 else A[..., None], (P, G, T))
    )
    b = b.replace(
      old_logprobs_PGT=c.stats.logprobs_PGT + spread * (b.old_logprobs_PGT - c.stats.logprobs_PGT)
    )
    if a.updates_per_batch * a.minibatches == 1:
      b = b.replace(old_logprobs_PGT=None)
    if selection.is_needed(a):
      old = c.stats.logprobs_PGT if b.old_logprobs_PGT is None else b.old_logprobs_PGT
      b = b.replace(
        selection=selection.select(
          c.stats.logprobs_PGT, old, c.stats.entropies_PGT, b.advantages_PGT, b.mask_PGT, a
        )
      )
    of_all = whole(b, Coefs(a.kl_coef, a.entropy_coef), a)
    return jax.grad(lambda lp: objective(TokenStats(lp, c.stats.entropies_PGT), b, of_all, a)[0])(
      c.stats.logprobs_PGT
    )

  results = lambda row: np.stack(
    [result(row, spread) for spread in (1, 8)]
  )  # ratios at the bounds, and far beyond
  row = presets.row(name)
  gradients = results(row)
  elsewhere = {"dynamic_sampling", "overlong"}  # in what is sampled and scored
  if presets.row(name)["surrogate"] == "reinforce" and presets.row(name)["minibatches"] == 1:
    elsewhere.add("surrogate")  # at ratio 1 PPO's gradient is REINFORCE's
  for key in presets.PRESETS[name].keys() - elsewhere:
    assert np.abs(results({**row, key: presets.DEFAULTS[key]}) - gradients).max() > 1e-6, key


def test_every_preset_is_a_row_of_known_settings():
  for name, row in presets.PRESETS.items():
    assert row.keys() <= presets.DEFAULTS.keys(), name
    assert all(type(value) is type(presets.DEFAULTS[key]) for key, value in row.items()), name
    assert all(presets.DEFAULTS[key] != value for key, value in row.items()), (
      f"{name} repeats a default"
    )
