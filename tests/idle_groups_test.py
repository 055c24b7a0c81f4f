"""Groups without a gradient are left out of an update, and the update stays what it was."""

import dataclasses
import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import learner, model
from grpo_jax.algo import presets
from grpo_jax.algo.metrics import reduced
from grpo_jax.algo.objective import without_idle_groups
from grpo_jax.algo.settings import Algo
from grpo_jax.algo.surrogates import SURROGATES
from grpo_jax.algo.surrogates.terms import Terms
from grpo_jax.config import Learner
from grpo_jax.types import Batch

CONFIG = model.ModelConfig(
  vocab_size=13, embed_dim=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, mlp_dim=8
)
P, G, S, T = 6, 3, 4, 5
WITHOUT_KL = [
  name
  for name in presets.PRESETS
  if dataclasses.replace(presets.preset(name), kl_coef=0.0).has_idle_groups
]


PARAMS = jax.jit(model.init, static_argnums=1)(jax.random.key(0), CONFIG)
SGD = optax.sgd(1.0)


def make_batch(seed, learns):
  """Random groups. Those without a 1 in `learns` have advantages of 0."""
  rng = np.random.default_rng(seed)

  def integers(low, high, *shape):
    return jnp.asarray(rng.integers(low, high, shape), jnp.int32)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  mask_PGT = (jnp.arange(T) < integers(1, T + 1, P, G)[..., None]).astype(jnp.float32)
  learns_P11 = jnp.asarray(learns, jnp.float32)[:, None, None]
  old_PGT = -2.5 + 0.3 * normal(P, G, T)
  return Batch(
    prompts_PS=integers(0, 13, P, S),
    prompt_lengths_P=integers(1, S + 1, P),
    completions_PGT=integers(0, 13, P, G, T),
    mask_PGT=mask_PGT,
    temperature_P=jnp.ones(P),
    advantages_PGT=normal(P, G, 1) * learns_P11 * mask_PGT,
    sampler_logprobs_PGT=old_PGT,
    behavior_logprobs_PGT=old_PGT + 0.1 * normal(P, G, T),
    old_logprobs_PGT=old_PGT,
  )


def whole(objective):
  """The same objective, which leaves no group out."""
  return dataclasses.replace(objective, drop=lambda batch: batch)


@functools.cache
def update(algo, micro_batch, leaves_out, optimizer=SGD, watch=None):
  objective = learner.grpo(CONFIG, algo, Learner(logprob_chunk=20))
  if watch is not None:
    part_loss = objective.part_loss

    def watched(params, reference, part, of_batch):
      jax.debug.callback(watch, part.mask_PGT)
      return part_loss(params, reference, part, of_batch)

    objective = dataclasses.replace(objective, part_loss=watched)
  objective = objective if leaves_out else whole(objective)
  rule = learner.UpdateRule(objective, optimizer, micro_batch)

  def run(batch):
    state = learner.init_state(PARAMS, optimizer, algo)
    return learner.train_step(state, None, None, batch, rule)

  return jax.jit(run)


def algo_of(preset, **changes):
  return dataclasses.replace(
    presets.preset(preset), kl_coef=0.0, minibatches=2, length_norm=T, **changes
  )


def test_most_presets_can_leave_groups_out_and_those_that_cannot_are_known():
  assert {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "gmpo"} <= set(WITHOUT_KL)
  assert not Algo(kl_coef=0.04).has_idle_groups
  assert not Algo(kl_coef=0.04, kl_in="reward").has_idle_groups
  assert not Algo(kl_coef=0.0, entropy_coef=0.01).has_idle_groups
  assert not Algo(kl_coef=0.0, entropy_target=0.3).has_idle_groups
  assert not Algo(kl_coef=0.0, surrogate="kl_cov").has_idle_groups
  assert Algo(kl_coef=0.0).has_idle_groups


@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_says_whether_advantages_of_zero_have_no_gradient(name):
  """Every token is chosen, half of them are far from old, and all have weights."""
  rng = np.random.default_rng(0)
  shape = (3, 4, 6)
  record = SURROGATES[name]
  mask_PGT = jnp.ones(shape)
  old_PGT = jnp.asarray(-1 - rng.random(shape), jnp.float32)
  moved_PGT = jnp.asarray(rng.normal(0, 0.5, shape), jnp.float32)

  def loss(logprobs_PGT):
    terms = Terms(
      logprobs_PGT=logprobs_PGT,
      old_logprobs_PGT=old_PGT,
      ratio_PGT=jnp.exp(logprobs_PGT - old_PGT),
      advantages_PGT=jnp.zeros(shape),
      mask_PGT=mask_PGT,
      weights_PGT=mask_PGT,
      chosen_PGT=mask_PGT,
      corrections_PGT=mask_PGT,
    )
    return record.loss(terms, Algo(surrogate=name)).sum()

  value, gradient = jax.value_and_grad(loss)(old_PGT + moved_PGT)
  is_idle = value == 0 and (gradient == 0).all()
  assert is_idle == record.idle_without_advantage


CASES = [
  ("grpo", 2),
  *[pytest.param("grpo", micro_batch, marks=pytest.mark.slow) for micro_batch in (0, 1, 3)],
  *[
    pytest.param(x, 2, marks=pytest.mark.slow)
    for x in ("dr_grpo", "gspo", "dapo", "cispo", "rloo", "gmpo")
  ],
]


@pytest.mark.slow
@pytest.mark.parametrize("preset, micro_batch", CASES)
@given(st.integers(0, 2**16), st.lists(st.booleans(), min_size=P, max_size=P))
@settings(max_examples=12)
def test_the_update_is_the_same(preset, micro_batch, seed, learns):
  algo, batch = algo_of(preset), make_batch(seed, learns)
  ours, metrics = update(algo, micro_batch, True)(batch)
  theirs, expected = update(algo, 0, False)(batch)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), ours.params, theirs.params
  )
  metrics, expected = reduced(metrics), reduced(expected)
  for name in ("loss", "grad_norm", "skipped_updates"):
    assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
  tokens = np.asarray(batch.mask_PGT).sum((1, 2))
  share = tokens[np.array(learns)].sum() / tokens.sum()
  assert metrics["update/token_share"] == pytest.approx(share, abs=1e-6)
  assert expected["update/token_share"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
  "change",
  [
    {"top_entropy_quantile": 0.3},
    {"surrogate": "clip_cov"},
  ],
)
def test_tokens_are_selected_among_all_groups(change):
  """The idle groups are in the quantile and in the covariance, although they have no gradient."""
  algo, batch = algo_of("grpo", **change), make_batch(3, [1, 0, 0, 1, 0, 1])
  ours, _ = update(algo, 2, True)(batch)
  theirs, _ = update(algo, 0, False)(batch)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), ours.params, theirs.params
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "micro_batch, computed",
  [(1, 2), (2, 1), (3, 1)],
)
def test_micro_batches_of_idle_groups_are_not_computed(micro_batch, computed):
  seen = []
  step = update(algo_of("grpo"), micro_batch, True, watch=lambda mask: seen.append(np.array(mask)))
  step(make_batch(0, [0, 1, 0, 0, 1, 0]))
  jax.effects_barrier()
  assert len(seen) == computed
  assert all((mask != 0).any((1, 2)).any() for mask in seen)


def test_the_metrics_are_of_the_groups_that_learn():
  batch, algo = make_batch(1, [1, 1, 0, 0, 0, 1]), algo_of("grpo")
  alone = jax.tree.map(lambda x: x[np.array([0, 1, 5])], batch)
  metrics = reduced(update(algo, 2, True)(batch)[1])
  expected = reduced(update(algo, 3, False)(alone)[1])
  for name in ("entropy", "ratio/mean", "ratio/max", "ratio/min", "sampler/logprob_gap_max"):
    assert metrics[name] == pytest.approx(expected[name], rel=1e-5), name


@pytest.mark.slow
def test_where_all_groups_are_idle_the_optimizer_still_steps():
  """Its momentum moves the parameters, as it did when idle groups were computed."""
  algo, optimizer = algo_of("grpo"), optax.adam(0.1)
  batch = make_batch(0, [0] * P)

  def second_step(leaves_out):
    objective = learner.grpo(CONFIG, algo, Learner())
    objective = objective if leaves_out else whole(objective)
    rule = learner.UpdateRule(objective, optimizer, 2)
    state = learner.init_state(PARAMS, optimizer, algo)
    state, _ = learner.train_step(state, None, None, make_batch(0, [1] * P), rule)
    return learner.train_step(state, None, None, batch, rule)

  ours, metrics = jax.jit(second_step, static_argnums=0)(True)
  theirs, _ = jax.jit(second_step, static_argnums=0)(False)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), ours, theirs)
  moved = optax.tree.norm(jax.tree.map(jnp.subtract, ours.params, PARAMS))
  assert moved > 0.1
  metrics = reduced(metrics)
  assert metrics["loss"] == metrics["grad_norm"] == metrics["update/token_share"] == 0
  assert all(np.isnan(metrics[name]) for name in ("entropy", "ratio/max", "ratio/min"))


def test_a_balance_loss_keeps_every_group():
  algo = algo_of("grpo")
  objective = learner.grpo(CONFIG, algo, Learner(router_aux_coef=0.1))
  batch = make_batch(0, [0] * P)
  np.testing.assert_array_equal(objective.drop(batch).mask_PGT, batch.mask_PGT)
  assert without_idle_groups(batch, algo).mask_PGT.sum() == 0
