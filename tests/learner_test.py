"""The learner against a plain computation that shares nothing, and what it promises about splits.

It also promises that a bad gradient changes nothing.
"""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import learner, model
from grpo_jax.algo import metrics as metrics_lib
from grpo_jax.algo import presets
from grpo_jax.algo.token_selection.select import select
from grpo_jax.config import LEARNING_RATE_SCHEDULES, Learner, Optimizer
from grpo_jax.learner import optimizer as optim
from grpo_jax.learner.train_step import prepared
from grpo_jax.model.config import AdapterShape
from grpo_jax.model.rope import RopeScaling
from grpo_jax.settings import ConfigError
from grpo_jax.types import Batch, Coefficients

CONFIG = model.ModelConfig(
  vocab_size=31, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24
)
ALGO = presets.preset("grpo")
LEARNER, TEMPERATURE = Learner(logprob_chunk=20), 0.7
OPTIONS = learner.StatsOptions(CONFIG, LEARNER)
P, G, S, T = 4, 3, 6, 5


@pytest.fixture(scope="module")
def params():
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), CONFIG))
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.2, 0.3, x.shape), jnp.float32), shapes)


def make_batch(seed=0, lengths=None):
  rng = np.random.default_rng(seed)

  def integers(low, high, *shape):
    return jnp.asarray(rng.integers(low, high, shape), jnp.int32)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  lengths_PG = integers(1, T + 1, P, G) if lengths is None else lengths
  mask = (jnp.arange(T) < lengths_PG[..., None]).astype(jnp.float32)
  advantages = jnp.broadcast_to(normal(P, G, 1), (P, G, T))
  return Batch(
    prompts_PS=integers(0, 31, P, S),
    prompt_lengths_P=integers(1, S + 1, P),
    completions_PGT=integers(0, 31, P, G, T),
    mask_PGT=mask,
    temperature_P=jnp.full(P, TEMPERATURE),
    advantages_PGT=advantages,
    sampler_logprobs_PGT=normal(P, G, T),
    ref_logprobs_PGT=-3 + normal(P, G, T),
  )


@jax.jit
def plain_table(params, batch):
  """log pi of every token [P, G, T, V].

  Prompt and completion of each row are one sequence. Nothing is shared or chunked.
  """
  lengths = jnp.repeat(batch.prompt_lengths_P, G)
  own = batch.completions_PGT.reshape(P * G, T)
  prompts = jnp.repeat(batch.prompts_PS, G, axis=0)
  place = jnp.arange(S + T) - lengths[:, None]  # of each slot within the completion
  joined = jnp.where(
    place < 0,
    jnp.pad(prompts, ((0, 0), (0, T))),
    jnp.take_along_axis(own, jnp.clip(place, 0, T - 1), axis=1),
  )
  logits, _ = model.forward(
    params, CONFIG, joined, jnp.broadcast_to(jnp.arange(S + T), joined.shape)
  )
  before = (lengths - 1)[:, None] + jnp.arange(T)
  logprobs = jax.nn.log_softmax(logits / jnp.repeat(batch.temperature_P, G)[:, None, None])
  table = jnp.take_along_axis(logprobs, before[..., None], axis=1)
  return table.reshape(P, G, T, -1)


def plain_logprobs(params, batch):
  return jnp.take_along_axis(plain_table(params, batch), batch.completions_PGT[..., None], axis=-1)[
    ..., 0
  ]


def plain_loss(params, batch):
  """GRPO's loss as the paper writes it, for one update per batch."""
  lp = plain_logprobs(params, batch)
  ratio = jnp.exp(lp - jax.lax.stop_gradient(lp))
  A = batch.advantages_PGT
  surrogate = jnp.minimum(ratio * A, jnp.clip(ratio, 0.8, 1.2) * A)
  d = batch.ref_logprobs_PGT - lp
  per_token = -(surrogate - 0.04 * (jnp.exp(d) - d - 1))
  return ((per_token * batch.mask_PGT).sum(-1) / batch.mask_PGT.sum(-1)).mean()


grpo = functools.partial(learner.grpo, config=CONFIG, algo=ALGO, learner=LEARNER)
SGD = optax.sgd(1.0)


@jax.jit
def jitted_stats(params, batch):
  return learner.batch_stats(params, None, batch, OPTIONS)


def jitted_logprobs(params, batch):
  return jitted_stats(params, batch).logprobs_PGT


@functools.lru_cache
def jitted_step(objective, optimizer, micro_batch):
  rule = learner.UpdateRule(objective, optimizer, micro_batch)
  return jax.jit(functools.partial(learner.train_step, rule=rule))


def step(params, batch, objective=None, micro=0, optimizer=SGD, algo=ALGO, reference=None):
  """The state after one update, and its metrics as numbers."""
  objective = GRPO if objective is None else objective
  state = learner.init_state(params, optimizer, algo)
  state, metrics = jitted_step(objective, optimizer, micro)(state, None, reference, batch)
  return state, metrics_lib.reduced(metrics)


GRPO = grpo()


def lowered_gradient(objective, batch, params):
  """The gradient of a whole batch's loss, lowered and not compiled."""
  of_batch = objective.totals(batch, Coefficients(kl=0.04, entropy=0.0))

  def loss(params):
    return objective.part_loss(params, None, batch, of_batch)[0]

  return jax.jit(jax.grad(loss)).lower(params)


def assert_close(a, b, atol=1e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol), a, b)


def test_shared_prefix_logprobs_equal_the_plain_ones(params):
  batch = make_batch()
  ours = jitted_logprobs(params, batch)
  np.testing.assert_allclose(
    ours, jnp.where(batch.mask_PGT > 0, plain_logprobs(params, batch), 0), atol=1e-5
  )


def test_loss_and_gradient_equal_the_plain_ones(params):
  """With learning rate 1 and plain SGD, the change of the parameters is minus the gradient."""
  batch = make_batch()
  loss, gradient = jax.jit(jax.value_and_grad(plain_loss))(params, batch)
  state, metrics = step(params, batch)
  np.testing.assert_allclose(metrics["loss"], loss, atol=1e-5)
  assert_close(jax.tree.map(lambda old, new: old - new, params, state.params), gradient)


@pytest.mark.parametrize(
  "chunk",
  [
    pytest.param(1, marks=pytest.mark.slow),
    pytest.param(12, marks=pytest.mark.slow),
    24,
    pytest.param(10**6, marks=pytest.mark.slow),
  ],
)
def test_chunks_change_nothing(params, chunk):
  batch = make_batch()

  def loss(params, chunk):
    options = learner.StatsOptions(CONFIG, Learner(logprob_chunk=chunk))
    return learner.batch_stats(params, None, batch, options).logprobs_PGT.sum()

  gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
  assert_close(gradient(params, chunk), gradient(params, 7))


@pytest.mark.slow
def test_whole_logits_never_exist(params):
  """No array of [tokens, V] or more in the compiled update, forward or backward."""
  batch = jax.tree.map(lambda x: jnp.concatenate([x] * 16), make_batch())  # 192 rows x 5 tokens
  config = dataclasses.replace(CONFIG, vocab_size=997)
  big = jax.jit(model.init, static_argnums=1)(jax.random.key(0), config)
  objective = grpo(config=config, learner=Learner(logprob_chunk=192))
  text = lowered_gradient(objective, batch, big).as_text()
  assert "64x3x997xf32" in text  # a chunk: three tokens of each group
  assert "64x15x997" not in text and "960x997" not in text and "5x64x3x997" not in text


@pytest.mark.slow
def test_the_backward_pass_of_a_chunk_looks_for_no_maximum(params):
  """Maxima and sums over the vocabulary are those of the forward pass: logits are read once."""
  options = learner.StatsOptions(CONFIG, Learner(logprob_chunk=24))
  batch = make_batch()

  def logprobs(params):
    return learner.batch_stats(params, None, batch, options).logprobs_PGT

  found, backward = jax.vjp(logprobs, params)
  text = str(jax.make_jaxpr(backward)(found))
  assert "dot_general" in text
  assert not re.search(r"reduce_max\[\s*axes=\(2,\)", text)


@pytest.mark.slow
def test_in_bfloat16_every_product_is_one_forward_and_backward(params):
  """Sums of products may be float32. A float32 operand would slow an accelerator several times."""
  config = dataclasses.replace(CONFIG, dtype="bfloat16")
  text = lowered_gradient(grpo(config=config), make_batch(), params).as_text()
  operands = re.findall(r"stablehlo\.dot_general .* : \((.*)\) ->", text)
  # A loop over the layers shows the products of one layer.
  assert len(operands) > 30 and not [line for line in operands if "f32" in line.replace("bf16", "")]


@pytest.mark.slow
def test_a_token_far_from_the_reference_does_not_stop_the_run(params):
  """k3 at d = -100: its gradient, and the norm that clips it, are finite; the update is made."""
  batch = make_batch()
  far = batch.replace(ref_logprobs_PGT=jitted_logprobs(params, batch) + 100)
  state, metrics = step(params, far, optimizer=optax.chain(optax.clip_by_global_norm(1.0), SGD))
  assert metrics["skipped_updates"] == 0 and 1e6 < metrics["grad_norm"] < np.inf
  assert jitted_logprobs(state.params, batch).sum() > jitted_logprobs(params, batch).sum()


@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_micro_batches_change_nothing(params, micro):
  batch = make_batch()
  whole, split = step(params, batch), step(params, batch, micro=micro)
  assert_close(whole[0].params, split[0].params, atol=1e-6)
  assert_close(whole[1], split[1], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  "policy",
  [
    "nothing_saveable",
    "offload",
    "dots_with_no_batch_dims_saveable",
  ],
)
def test_rematerialisation_changes_nothing(params, policy):
  batch = make_batch()
  recomputing = Learner(remat=True, remat_policy=policy, logprob_chunk=20)
  other = step(params, batch, grpo(learner=recomputing))
  assert_close(step(params, batch)[0].params, other[0].params, atol=1e-6)


def test_padding_changes_nothing(params):
  """Longer arrays with other tokens behind the end: the same update."""
  batch = make_batch(lengths=jnp.full((P, G), 3))

  def wide(x, value):
    other = x.at[..., 3:].set(value)
    return jnp.pad(other, ((0, 0), (0, 0), (0, 4)), constant_values=value)

  padded = batch.replace(
    completions_PGT=wide(batch.completions_PGT, 7),
    mask_PGT=wide(batch.mask_PGT, 0),
    sampler_logprobs_PGT=wide(batch.sampler_logprobs_PGT, 5),
    advantages_PGT=wide(batch.advantages_PGT, 3),
    ref_logprobs_PGT=wide(batch.ref_logprobs_PGT, -99.0),
    prompts_PS=jnp.pad(batch.prompts_PS, ((0, 0), (0, 3)), constant_values=9),
  )
  (state, metrics), (padded_state, padded_metrics) = step(params, batch), step(params, padded)
  assert padded_metrics.pop("perf/padding") > metrics.pop("perf/padding") >= 1
  assert_close((state, metrics), (padded_state, padded_metrics), atol=1e-5)


def test_prompts_and_members_can_be_permuted(params):
  batch, members = make_batch(), jnp.array([2, 0, 1])
  permuted = jax.tree.map(lambda x: x[jnp.array([3, 1, 0, 2])], batch)
  permuted = permuted.replace(
    **{
      name: getattr(permuted, name)[:, members]
      for name in (
        "completions_PGT",
        "mask_PGT",
        "advantages_PGT",
        "sampler_logprobs_PGT",
        "ref_logprobs_PGT",
      )
    }
  )
  assert_close(step(params, batch)[0].params, step(params, permuted)[0].params, atol=1e-5)


def test_reference_logprobs_are_those_of_the_learner(params):
  batch = make_batch()
  ours = learner.logprobs_pass(OPTIONS, 2)(params, batch)
  np.testing.assert_allclose(ours, jitted_logprobs(params, batch), atol=1e-5)


def test_entropy_by_hand(params):
  batch = make_batch()
  entropy = jitted_stats(params, batch).entropies_PGT
  n = int(batch.prompt_lengths_P[0])
  logits, _ = jax.jit(
    lambda p: model.forward(p, CONFIG, batch.prompts_PS[:1, :n], jnp.arange(n)[None])
  )(params)
  p = jax.nn.softmax(logits[0, -1] / TEMPERATURE)
  np.testing.assert_allclose(entropy[0, 0, 0], -(p * jnp.log(p)).sum(), rtol=1e-5)


def test_prompts_have_temperatures_of_their_own(params):
  """The plain computation divides each prompt's logits by its own temperature."""
  batch = make_batch().replace(temperature_P=jnp.array([0.5, 1.0, 1.5, 2.0]))
  expected = jnp.where(batch.mask_PGT > 0, plain_logprobs(params, batch), 0)
  np.testing.assert_allclose(jitted_logprobs(params, batch), expected, atol=1e-5)


def plain_full_kl(params, reference, batch):
  """KL(pi || ref) [P, G, T] at each completion token."""
  pi, ref = plain_table(params, batch), plain_table(reference, batch)
  return (jnp.exp(pi) * (pi - ref)).sum(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
  "change",
  [
    dict(surrogate="kl_cov", cov_fraction=0.3),
    dict(top_entropy_quantile=0.4),
  ],
  ids=str,
)
def test_tokens_are_selected_among_the_whole_batch_however_it_is_split(params, change):
  """By the plain log-probs and entropies of all prompts."""
  batch = make_batch().replace(ref_logprobs_PGT=None)
  algo = dataclasses.replace(ALGO, kl_coef=0.0, **change)
  table = plain_table(params, batch)
  lp, entropies = (
    jnp.where(batch.mask_PGT > 0, x, 0)
    for x in (plain_logprobs(params, batch), -(jnp.exp(table) * table).sum(-1))
  )
  expected = select(lp, lp, entropies, batch.advantages_PGT, batch.mask_PGT, algo)
  assert 0 < expected.weights_PGT.sum()
  objective = grpo(algo=algo)
  for micro in (0, 2):
    prepare = jax.jit(functools.partial(prepared, objective, micro_batch=micro))
    found = prepare(policy=params, batch=batch).selection
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_full_kl_equals_the_plain_one_with_its_gradient(params, micro=2):
  """With advantages of 0, the loss is the mean over rows of kl_coef times their mean KL."""
  batch = make_batch().replace(ref_logprobs_PGT=None)
  batch = batch.replace(advantages_PGT=jnp.zeros((P, G, T)))
  reference = jax.tree.map(lambda x: 0.5 * x + 0.1, params)
  algo = dataclasses.replace(ALGO, kl="full", kl_coef=0.5)

  def plain(p):
    kl = plain_full_kl(p, reference, batch)
    return 0.5 * ((kl * batch.mask_PGT).sum(-1) / batch.mask_PGT.sum(-1)).mean()

  loss, expected = jax.jit(jax.value_and_grad(plain))(params)
  state, metrics = step(params, batch, grpo(algo=algo), micro, algo=algo, reference=reference)
  assert float(loss) > 0.01
  np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
  mean = (plain_full_kl(params, reference, batch) * batch.mask_PGT).sum() / batch.mask_PGT.sum()
  np.testing.assert_allclose(metrics["kl"], mean, rtol=1e-5)
  assert_close(jax.tree.map(lambda old, new: old - new, params, state.params), expected)


@pytest.mark.slow
def test_full_kl_costs_one_forward_pass_of_the_reference(params):
  """By the multiplications that the compiler counts, also where layers are computed twice."""
  batch = make_batch()
  options = dataclasses.replace(LEARNER, remat=True, logprob_chunk=1000)

  def flops(function, *arguments):
    return jax.jit(function).lower(*arguments).compile().cost_analysis()["flops"]

  def update(kl, reference):
    algo = dataclasses.replace(ALGO, kl=kl, kl_coef=0.5)
    rule = learner.UpdateRule(grpo(algo=algo, learner=options), SGD)
    state = learner.init_state(params, SGD, algo)
    return flops(functools.partial(learner.train_step, rule=rule), state, None, reference, batch)

  stats = learner.StatsOptions(CONFIG, options)
  forward = flops(lambda p, b: learner.batch_stats(p, None, b, stats), params, batch)
  # The logits of the reference are computed again in the backward pass, as those of the policy are.
  assert 0.9 < (update("full", params) - update("k3", None)) / forward < 1.3


@pytest.mark.slow
def test_the_coefficients_follow_what_is_measured_and_count_in_the_next_update(params):
  """The KL is above its target by more than a fifth: .5 (1 + .2 * 12 / 24) = .55.

  The entropy is below its target: .1 + .05. The next loss is that of a run that starts with these
  coefficients. A skipped update leaves them.
  """
  algo = dataclasses.replace(
    ALGO,
    kl_coef=0.5,
    kl_target=1e-3,
    kl_horizon=24,
    entropy_coef=0.1,
    entropy_target=99.0,
    entropy_step=0.05,
  )
  batch = make_batch()
  objective = grpo(algo=algo)
  state, _ = step(params, batch, objective, algo=algo)
  np.testing.assert_allclose((state.coefs.kl, state.coefs.entropy), (0.55, 0.15), rtol=1e-6)
  fixed = dataclasses.replace(ALGO, kl_coef=0.55, entropy_coef=0.15)
  _, expected = step(state.params, batch, grpo(algo=fixed), algo=fixed)
  _, metrics = jitted_step(objective, SGD, 0)(state, None, None, batch)
  loss = metrics_lib.reduced(metrics)["loss"]
  np.testing.assert_allclose(loss, expected["loss"], rtol=1e-5)
  bad = batch.replace(advantages_PGT=batch.advantages_PGT.at[0, 0].set(jnp.inf))
  state, metrics = step(params, bad, objective, algo=algo)
  assert metrics["skipped_updates"] == 1
  assert float(state.coefs.kl) == 0.5 and float(state.coefs.entropy) == np.float32(0.1)


@pytest.mark.parametrize("mixup", [0.25, 1.0])
def test_the_reference_moves_by_the_mixup(params, mixup):
  state, _ = step(params, make_batch())
  moved = learner.sync_reference(params, state.params, mixup)
  expected = jax.tree.map(lambda a, b: (1 - mixup) * a + mixup * b, params, state.params)
  assert_close(moved, expected, atol=1e-6)


def test_a_bad_gradient_skips_the_update_and_is_counted(params):
  batch = make_batch()
  bad = batch.replace(advantages_PGT=batch.advantages_PGT.at[0, 0].set(jnp.inf))
  optimizer = optim.make_optimizer(Optimizer(learning_rate=1e-2, weight_decay=0.1), 10)
  state, metrics = step(params, bad, optimizer=optimizer)
  assert float(metrics["skipped_updates"]) == 1 and int(state.step) == 1
  jax.tree.map(np.testing.assert_array_equal, state.params, params)
  begun, is_schedule = optimizer.init(params), lambda x: isinstance(x, optax.ScaleByScheduleState)
  for kept, first in zip(
    *(jax.tree.leaves(x, is_leaf=is_schedule) for x in (state.opt_state, begun)), strict=True
  ):
    if is_schedule(kept):  # the learning rate depends on the number of the update
      assert (int(kept.count), int(first.count)) == (1, 0)
    else:
      np.testing.assert_array_equal(kept, first)
  state, metrics = step(params, batch, optimizer=optimizer)
  assert float(metrics["skipped_updates"]) == 0
  assert any((a != b).any() for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(params)))


def test_an_update_without_tokens_still_moves_the_schedule(params):
  """The rate of an update depends on its number, which the log goes by, and not on those before."""
  config = Optimizer(name="sgd", learning_rate=1.0, b1=0.0, schedule="linear", max_grad_norm=0.0)
  optimizer = optim.make_optimizer(dataclasses.replace(config, weight_decay=0.0), 4)
  empty = make_batch()
  empty = empty.replace(mask_PGT=jnp.zeros_like(empty.mask_PGT))
  state = learner.init_state(params, optimizer, ALGO)
  rule = learner.UpdateRule(learner.grpo(CONFIG, ALGO, Learner()), optimizer)
  update = jax.jit(functools.partial(learner.train_step, rule=rule))
  state, _ = update(state, None, None, empty)
  assert_close(state.params, params, atol=0)
  after, metrics = update(state, None, None, make_batch())
  norm = optax.tree.norm(jax.tree.map(jnp.subtract, after.params, params))
  rate = float(optim.learning_rate(config, 4)(1))
  assert float(norm) == pytest.approx(rate * metrics_lib.reduced(metrics)["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("scaling", ["longrope", "dynamic"])
def test_a_batch_that_is_cut_has_the_angles_of_the_longest_text(scaling):
  factors = dict(short_factors=(1.0,) * 4, long_factors=(1.0, 2.0, 4.0, 8.0))
  rope = RopeScaling(scaling, 4.0, 16, **factors)
  config = dataclasses.replace(CONFIG, rope_scaling=rope, completion_tokens=24)
  weights = model.init(jax.random.key(0), config)
  batch = make_batch().replace(advantages_PGT=None, sampler_logprobs_PGT=None)
  batch = batch.replace(old_logprobs_PGT=None, ref_logprobs_PGT=None, behavior_logprobs_PGT=None)
  options = learner.StatsOptions(config, Learner())
  names = "completions_PGT", "mask_PGT"
  padding = (0, 0), (0, 0), (0, 24 - T)
  long = batch.replace(**{name: jnp.pad(getattr(batch, name), padding) for name in names})
  cut = learner.batch_stats(weights, None, batch, options).logprobs_PGT
  whole = learner.batch_stats(weights, None, long, options).logprobs_PGT
  assert_close(cut, whole[..., :T])
  # The same where the run says how long texts count as, as with the endpoint of a harness.
  tokens = batch.prompts_PS.shape[1] + 24
  fixed = dataclasses.replace(config, completion_tokens=T, text_tokens=tokens)
  options = learner.StatsOptions(fixed, Learner())
  assert_close(learner.batch_stats(weights, None, batch, options).logprobs_PGT, cut)


def test_supervised_loss_is_the_mean_over_tokens(params):
  batch = make_batch()
  batch = batch.replace(temperature_P=jnp.ones(P))
  _, metrics = step(params, batch, learner.supervised(CONFIG, LEARNER))
  expected = -jitted_logprobs(params, batch).sum() / batch.mask_PGT.sum()
  np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


def test_completions_of_one_token(params):
  batch = make_batch()
  one = jax.tree.map(lambda x: x[..., :1] if x.ndim == 3 else x, batch)
  whole, short = (jitted_logprobs(params, b) for b in (batch, one))
  np.testing.assert_allclose(short[..., 0], whole[..., 0], atol=1e-6)


@pytest.mark.parametrize(
  "schedule, rates",
  [
    ("constant", [0.5, 1, 1, 1, 1]),
    ("linear", [0.5, 1, 0.75, 0.5, 0.25]),
    ("cosine", [0.5, 1, 0.853553, 0.5, 0.146447]),
  ],
)
def test_schedules(schedule, rates):
  """One warmup update, then four. Cosine is (1 + cos(pi n / 4)) / 2."""
  rate = optim.learning_rate(Optimizer(learning_rate=1.0, schedule=schedule, warmup_steps=1), 5)
  np.testing.assert_allclose([rate(n) for n in range(5)], rates, atol=1e-6)


def test_muon_takes_the_matrices_of_adapters_for_what_they_are():
  config = dataclasses.replace(CONFIG, lora=AdapterShape(2, 4.0, False, ("o", "q", "up")))
  base = jax.eval_shape(lambda: model.init(jax.random.key(0), CONFIG))
  adapters = jax.eval_shape(lambda: model.init_adapters(jax.random.key(0), config, base))
  axes = optim._matrix_axes(adapters)["layers_0"]["attention"]
  heads_last = optax.contrib.MuonDimensionNumbers(-3, (-2, -1))
  heads_first = optax.contrib.MuonDimensionNumbers((-3, -2), -1)
  plain = optax.contrib.MuonDimensionNumbers(-2, -1)
  assert (axes["q"]["lora_a"], axes["q"]["lora_b"]) == (plain, heads_last)
  assert (axes["o"]["lora_a"], axes["o"]["lora_b"]) == (heads_first, plain)


def test_every_schedule_of_the_config_has_a_function():
  assert set(optim.LEARNING_RATES) == set(LEARNING_RATE_SCHEDULES)


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_matrices_shrink_and_scales_and_biases_are_left_alone(params, name):
  """Without a gradient, an update takes rate * decay of a matrix, and nothing of the others."""
  config = Optimizer(name=name, learning_rate=0.1, weight_decay=0.5)
  optimizer = optim.make_optimizer(config, 10)

  def update(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return optimizer.update(zeros, optimizer.init(params), params)[0]

  updates = jax.tree_util.tree_leaves_with_path(jax.jit(update)(params))
  for (path, change), value in zip(updates, jax.tree.leaves(params)):
    is_spared = path[-1].key in ("scale", "bias")
    # optax decays the matrices of Muon alone, and AdamW has the others.
    is_spared |= name == "muon" and path[0].key in ("embed", "head")
    share = 0.0 if is_spared else 0.05
    np.testing.assert_allclose(
      change, -share * value, rtol=1e-6, err_msg=jax.tree_util.keystr(path)
    )
  assert {path[-1].key for path, _ in updates} >= {"scale", "bias", "kernel", "embedding"}


def test_experts_and_adapters_are_decayed_too():
  """All but scales of norms, biases, and how fast the delta rule forgets."""
  fixed = {"scale", "bias", "decay"}
  names = {"router", "gate", "lora_a", "kernel", "embedding"} | fixed
  params = {"layer": {name: jnp.ones((2, 2)) for name in names}}
  config = Optimizer(learning_rate=1.0, weight_decay=0.1, max_grad_norm=0.0)
  optimizer = optim.make_optimizer(config, 1)
  updates, _ = optimizer.update(
    jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
  )
  assert {name for name, x in updates["layer"].items() if x.any()} == names - fixed


@pytest.mark.parametrize(
  "name, dtype",
  [
    *(
      pytest.param(name, "float32", marks=() if name in ("adamw", "sgd") else pytest.mark.slow)
      for name in optim.OPTIMIZERS
    ),
    pytest.param("muon", "bfloat16", marks=pytest.mark.slow),
  ],
)
def test_every_optimizer_lowers_a_loss(params, name, dtype):
  """Ten updates of |p - t|^2 / 2 over all parameters, whose gradient is p - t."""
  rate = 0.02 if name != "sgd" else 0.5
  config = Optimizer(name=name, learning_rate=rate, max_grad_norm=0.0, moments_dtype=dtype)
  optimizer = optim.make_optimizer(config, 10)
  targets = jax.tree.map(jnp.zeros_like, params)

  @jax.jit
  def update(params, state):
    grads = jax.tree.map(jnp.subtract, params, targets)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  moved, state = params, optimizer.init(params)
  for _ in range(10):
    moved, state = update(moved, state)
  before, after = (optax.tree.norm(jax.tree.map(jnp.subtract, p, targets)) for p in (params, moved))
  assert after < 0.9 * before


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, share",
  [
    ("adamw", 0.75),
    ("lion", 0.5),
    ("sgd", 0.5),
  ],
)
def test_first_moments_in_bfloat16_take_half_and_learning_goes_on(params, name, share):
  """Of AdamW's two moments, the second stays float32. Muon has AdamW's for some parameters."""
  rate = 0.5 if name == "sgd" else 0.02
  objective = learner.supervised(CONFIG, LEARNER)
  batch, sizes, losses = make_batch(), [], []
  for dtype in ("float32", "bfloat16"):
    config = Optimizer(name=name, learning_rate=rate / 4, max_grad_norm=0.0, moments_dtype=dtype)
    optimizer = optim.make_optimizer(config, 20)
    state = learner.init_state(params, optimizer, ALGO)
    sizes.append(sum(x.nbytes for x in jax.tree.leaves(state.opt_state) if x.ndim))
    losses.append([])
    for _ in range(20):
      state, metrics = jitted_step(objective, optimizer, 0)(state, None, None, batch)
      losses[-1].append(metrics_lib.reduced(metrics)["loss"])
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
  assert sizes[1] == share * sizes[0]
  exact, rounded = np.array(losses)
  assert exact[0] == rounded[0] and exact[-1] < 0.9 * exact[0]
  assert 0 < abs(exact - rounded).max() < 0.02 * (exact[0] - exact[-1])


@pytest.mark.parametrize("b1", [0.9, 0.0])
@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_moments_are_in_bfloat16_or_that_is_refused(params, name, b1):
  try:
    optimizer = optim.make_optimizer(Optimizer(name=name, b1=b1, moments_dtype="bfloat16"), 1)
  except ConfigError as error:
    assert str(error).startswith("config key optimizer.moments_dtype is 'bfloat16': ")
  else:
    state = jax.eval_shape(optimizer.init, params)
    assert jnp.dtype(jnp.bfloat16) in {x.dtype for x in jax.tree.leaves(state)}


@pytest.mark.parametrize("name, b1", [("adafactor", 0.9), ("sgd", 0.0)])
def test_moments_that_an_optimizer_does_not_have_are_in_no_bfloat16(name, b1):
  with pytest.raises(ConfigError, match=rf"'bfloat16': {name} .*has no .*; set 'float32'$"):
    optim.make_optimizer(Optimizer(name=name, b1=b1, moments_dtype="bfloat16"), 1)
  optim.make_optimizer(Optimizer(name=name, b1=b1), 1)


def test_muon_turns_a_matrix_into_an_orthogonal_update(params):
  """Inputs by outputs, whichever axes those are: each update's singular values lie around one size.

  The Newton-Schulz iteration leaves them between 0.7 and 1.2 times that size.
  """
  config = Optimizer(name="muon", learning_rate=1.0, max_grad_norm=0.0)
  optimizer = optim.make_optimizer(config, 10)
  rng = np.random.default_rng(0)
  grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
  updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
  layer = updates["layers_0"]
  matrices = {
    "q": layer["attention"]["q"]["kernel"].reshape(2, 16, 32),
    "o": layer["attention"]["o"]["kernel"].reshape(2, 32, 16),
    "up": layer["mlp"]["up"]["kernel"],
  }
  for name, of_layers in matrices.items():
    for matrix in np.asarray(of_layers):
      singular = np.linalg.svd(matrix, compute_uv=False)
      assert singular.max() / singular.min() < 2, name


@pytest.mark.parametrize(
  "name, theirs, parameter",
  [
    ("adamw", optax.adamw, "b2"),
    ("lion", optax.lion, "b2"),
    ("muon", optax.contrib.muon, "adam_b2"),
  ],
)
def test_b2_is_that_of_optax_unless_it_is_set(name, theirs, parameter, monkeypatch):
  seen = []

  def keep_b2(config, rate):
    seen.append(config.b2)
    return optax.identity()

  monkeypatch.setitem(optim.OPTIMIZERS, name, keep_b2)
  optim.make_optimizer(Optimizer(name=name), 1)
  optim.make_optimizer(Optimizer(name=name, b2=0.9), 1)
  assert seen == [inspect.signature(theirs).parameters[parameter].default, 0.9]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_eps_shortens_the_steps_of_parameters_with_moments(name):
  """Muon takes the embedding as AdamW does."""
  params = {"embed": {"embedding": jnp.ones((4, 3))}}
  moved = {}
  for eps in (1e-8, 1.0):
    made = optim.make_optimizer(Optimizer(name=name, learning_rate=1.0, eps=eps), 1)
    updates, _ = made.update(params, made.init(params), params)
    moved[eps] = float(jnp.abs(updates["embed"]["embedding"]).max())
  assert moved[1.0] < 0.8 * moved[1e-8]


def test_an_unknown_optimizer_is_named():
  with pytest.raises(
    ConfigError, match=r"^config key optimizer\.name is 'adam': choose one of 'ad"
  ):
    optim.make_optimizer(Optimizer(name="adam"), 1)
