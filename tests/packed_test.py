"""Completions packed into one stream give the numbers that rows of them give."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_batch

from grpo_jax import learner, model
from grpo_jax.algo import presets
from grpo_jax.algo.metrics import reduced
from grpo_jax.config import Learner
from grpo_jax.learner import features, packed
from grpo_jax.model.attention import make_packing, pack, unpack

CONFIG = model.ModelConfig(
  vocab_size=31, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24
)
P, G, S, T = 4, 3, 6, 7


params_of = functools.partial(small_batch.params_of, mean=0.2)


def make_batch(lengths_PG, tokens=T, seed=0):
  return small_batch.make_batch(lengths_PG, S, tokens, seed=seed)


LENGTHS = [[7, 1, 3], [2, 0, 5], [1, 1, 1], [0, 0, 0]]


def test_a_stream_by_hand():
  """Rows of 4 tokens with 2, 0 and 3 of them in a stream of 6 slots."""
  packing = make_packing(jnp.array([[2, 0, 3]]), 4, 6)
  np.testing.assert_array_equal(packing.token_PN, [[0, 1, 8, 9, 10, -1]])
  rows = jnp.arange(12.0)[None]
  stream = pack(rows, packing)
  np.testing.assert_array_equal(stream[0, :5], [0, 1, 8, 9, 10])
  back = unpack(stream, packing)
  np.testing.assert_array_equal(back[0, [0, 1, 8, 9, 10]], [0, 1, 8, 9, 10])


@pytest.mark.slow
def test_the_gradient_of_packing_is_that_of_a_gather():
  packing = make_packing(jnp.array([[2, 0, 3]]), 4, 6)
  x = jax.random.normal(jax.random.key(0), (1, 12, 2))
  weights = jax.random.normal(jax.random.key(1), (1, 6, 2)).at[:, 5].set(0)

  def there(x):
    return (pack(x, packing) * weights).sum()

  def plain(x):
    index = jnp.array([0, 1, 8, 9, 10, 0])
    return (x[:, index] * weights).sum()

  np.testing.assert_allclose(jax.grad(there)(x), jax.grad(plain)(x))
  used = jnp.array([0, 1, 8, 9, 10])
  back_weights = jnp.zeros((1, 12, 2)).at[:, used].set(weights[:, :5])
  stream = pack(x, packing)
  gradient = jax.grad(lambda y: (unpack(y, packing) * back_weights).sum())(stream)
  np.testing.assert_allclose(gradient, weights)


@pytest.mark.parametrize("slots", [9, pytest.param(18, marks=pytest.mark.slow)])
@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_log_probs_and_gradients_do_not_depend_on_the_slots(slots, window):
  """Also with windows that reach into the prompt, with empty rows and with full ones."""
  config = dataclasses.replace(CONFIG, windows=(window, 0) if window else ())
  params, batch = params_of(config), make_batch(LENGTHS)
  options = learner.StatsOptions(config, Learner(logprob_chunk=16), entropy_gradient=True)
  weights = jax.random.normal(jax.random.key(2), (2, P, G, T))

  @functools.partial(jax.jit, static_argnums=1)
  def value_and_grad(params, slots):
    def loss(params):
      stats = learner.batch_stats(params, None, batch.replace(slots=slots), options)
      total = (weights[0] * stats.logprobs_PGT + weights[1] * stats.entropies_PGT).sum()
      return total, stats

    return jax.value_and_grad(loss, has_aux=True)(params)

  (_, rows), grads = value_and_grad(params, 0)
  (_, stream), grads_of_stream = value_and_grad(params, slots)
  np.testing.assert_allclose(stream.logprobs_PGT, rows.logprobs_PGT, atol=2e-5)
  np.testing.assert_allclose(stream.entropies_PGT, rows.entropies_PGT, atol=2e-5)

  def close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * max(1e-2, np.abs(y).max()))

  jax.tree.map(close, grads_of_stream, grads)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 9])
def test_rows_of_an_accelerator_give_the_same_numbers(slots, monkeypatch):
  """Their last token, which predicts nothing, is computed, too."""
  params, options = params_of(CONFIG), learner.StatsOptions(CONFIG, Learner())
  batch = make_batch(LENGTHS).replace(slots=slots)

  def logprobs():
    return jax.jit(lambda: learner.batch_stats(params, None, batch, options).logprobs_PGT)()

  shorter = logprobs()
  assert packed.row_slots(T, "cpu") == T - 1 and packed.row_slots(1, "tpu") == 0
  accelerator = functools.partial(packed.row_slots, platform="tpu")
  monkeypatch.setattr(features, "row_slots", lambda tokens, platform: accelerator(tokens))
  np.testing.assert_allclose(logprobs(), shorter, atol=2e-5)
  assert features.row_slots(T, "cpu") == T


@pytest.mark.slow
def test_routing_counts_each_token_once_wherever_it_lies():
  config = dataclasses.replace(
    CONFIG,
    family="qwen3_moe",
    qkv_bias=False,
    qk_norm="head",
    num_experts=4,
    experts_per_token=2,
    expert_dim=8,
    sparse_layers=(0, 1),
  )
  params, batch = params_of(config), make_batch(LENGTHS)
  options = learner.StatsOptions(config, Learner(logprob_chunk=16))

  def routing(slots):
    return learner.batch_stats(params, None, batch.replace(slots=slots), options).routing

  rows, stream = routing(0), routing(9)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), stream, rows)


def test_sizes_are_parts_of_all_slots_and_not_small():
  """Sixteenths on a CPU and quarters on accelerators, where rows have a slot more. 0 means rows."""
  assert packed.slot_sizes(8, 33, "cpu") == [128, 0]
  assert packed.slot_sizes(8, 65, "cpu") == [128, 256, 384, 0]
  assert packed.slot_sizes(8, 513, "cpu") == [*range(256, 4096, 256), 0]
  assert packed.slot_sizes(8, 512, "tpu") == [1024, 2048, 3072, 0]
  assert packed.slot_sizes(4, 9, "cpu") == packed.slot_sizes(4, 9, "gpu") == [0]


def test_a_part_is_computed_in_the_fewest_slots_that_hold_its_largest_group():
  """Slots of 0 are needed where completions have one token, and -1 says that there is none."""
  needed = np.array([401, 400, 300, 128, 100, 0, -1, -1])
  found = packed.segments(needed, [128, 256, 400, 0])
  assert found == [(0, 0, 1), (400, 1, 3), (128, 3, 6)]
  assert packed.segments(needed, [0]) == [(0, 0, 6)]
  assert packed.segments(np.array([-1, -1]), [128, 0]) == []


@pytest.mark.slow
def test_groups_with_equally_many_tokens_come_into_one_part():
  """A completion of n tokens needs n - 1 slots: its last token predicts nothing."""
  batch = make_batch([[7, 7, 7], [1, 0, 0], [0, 0, 0], [7, 7, 6], [1, 1, 0], [0, 0, 0]])
  parts = packed.in_parts(batch, 2)
  np.testing.assert_array_equal(parts.needed_M, [18, 0, -1])
  totals = packed.lengths(parts.batch.mask_PGT.reshape(6, G, T)).sum(1).reshape(3, 2)
  np.testing.assert_array_equal(np.sort(totals), [[20, 21], [1, 2], [0, 0]])
  in_order = packed.joined(parts.batch.prompts_PS)
  np.testing.assert_array_equal(in_order, batch.prompts_PS[parts.order_P])
  whole = packed.in_parts(batch, 0)
  np.testing.assert_array_equal(whole.needed_M, [18])
  np.testing.assert_array_equal(whole.batch.prompts_PS[0], batch.prompts_PS)
  real = batch.prompt_lengths_P[jnp.array([0, 1, 3, 4])].sum() + 18 + 17
  assert packed.real_tokens(batch) == real


def slow(value):
  return pytest.param(value, marks=pytest.mark.slow)


UNEVEN = [[7, 7, 7], [1, 0, 0], [4, 2, 3], [1, 1, 0]]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [slow(1), 2, slow(4)])
def test_log_probs_come_back_in_the_order_of_the_batch(micro_batch, monkeypatch):
  monkeypatch.setattr(packed, "_FEWEST_SLOTS", 2)
  params, batch = params_of(CONFIG), make_batch(UNEVEN)
  options = learner.StatsOptions(CONFIG, Learner(logprob_chunk=16))
  stats = jax.jit(learner.batch_stats, static_argnums=3)
  whole = stats(params, None, batch, options).logprobs_PGT
  parts = learner.logprobs_pass(options, micro_batch)(params, batch)
  np.testing.assert_allclose(parts, whole, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("change", [{}, slow(dict(top_entropy_quantile=0.4))], ids=str)
@pytest.mark.parametrize("lengths", [UNEVEN, slow([[0] * 3] * 4)])
def test_an_update_in_few_slots_is_a_train_step(lengths, change, micro_batch, monkeypatch):
  """The update compiles a program for each number of slots, and train_step computes rows of T."""
  monkeypatch.setattr(packed, "_FEWEST_SLOTS", 2)
  algo = dataclasses.replace(presets.preset("grpo"), kl_coef=0.0, **change)
  objective = learner.grpo(CONFIG, algo, Learner(logprob_chunk=16))
  rule = learner.UpdateRule(objective, optax.sgd(1.0), micro_batch)
  params, batch = params_of(CONFIG), make_batch(lengths)
  advantages = np.random.default_rng(3).normal(size=(P, G, 1)) * batch.mask_PGT
  batch = batch.replace(advantages_PGT=advantages, sampler_logprobs_PGT=-3 * batch.mask_PGT)
  state = learner.init_state(params, rule.optimizer, algo)
  step = jax.jit(functools.partial(learner.train_step, rule=rule))
  expected, theirs = step(state, None, None, batch)
  update = learner.Update(rule, "cpu")
  assert packed.slot_sizes(G, T, "cpu") == [*range(2, 18, 2), 0]
  found, ours = update(jax.tree.map(jnp.copy, state), None, None, batch)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), found, expected)
  theirs, ours = reduced(theirs), reduced(ours)
  if batch.mask_PGT.sum() and micro_batch < 4:
    assert 1 <= ours["perf/padding"] < theirs["perf/padding"]
  padding = {"perf/padding": None}
  np.testing.assert_equal((ours | padding).keys(), (theirs | padding).keys())
  for name in theirs.keys() - padding.keys():
    np.testing.assert_allclose(ours[name], theirs[name], atol=1e-5, err_msg=name)


def test_a_program_is_compiled_for_each_number_of_slots_that_occurs(monkeypatch):
  monkeypatch.setattr(packed, "_FEWEST_SLOTS", 2)
  traced = []

  def function(params, part):
    traced.append(part.slots)
    return part.mask_PGT

  passed = learner.MicroBatchPass(function, 1, "cpu")
  for lengths in (UNEVEN, UNEVEN, [[4, 2, 3]] * 4):
    batch = make_batch(lengths)
    np.testing.assert_array_equal(passed(None, batch), batch.mask_PGT)
  assert sorted(traced) == [0, 0, 2, 6]  # once for the shapes, and 3 + 3 + 0, 18 and 0 slots
