"""Completions packed into one stream give the numbers that rows of them give."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import learner, model
from grpo_jax.config import Learner
from grpo_jax.learner import features, packed
from grpo_jax.model.attention import make_packing, pack, unpack
from grpo_jax.types import Batch

CONFIG = model.ModelConfig(
  vocab_size=31, embed_dim=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24
)
P, G, S, T = 4, 3, 6, 7


def make_batch(lengths_PG, tokens=T, seed=0):
  rng = np.random.default_rng(seed)
  lengths_PG = np.asarray(lengths_PG)
  prompts, group = lengths_PG.shape
  mask = np.arange(tokens) < lengths_PG[..., None]
  return Batch(
    prompts_PS=jnp.asarray(rng.integers(0, 31, (prompts, S)), jnp.int32),
    prompt_lengths_P=jnp.asarray(rng.integers(1, S + 1, prompts), jnp.int32),
    completions_PGT=jnp.asarray(rng.integers(0, 31, (prompts, group, tokens)), jnp.int32),
    mask_PGT=jnp.asarray(mask, jnp.float32),
    temperature_P=jnp.linspace(0.5, 1.5, prompts),
  )


def params_of(config):
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), config))
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.2, 0.3, x.shape), jnp.float32), shapes)


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

  (_, rows), grads = value_and_grad(params, None)
  (_, stream), grads_of_stream = value_and_grad(params, slots)
  np.testing.assert_allclose(stream.logprobs_PGT, rows.logprobs_PGT, atol=2e-5)
  np.testing.assert_allclose(stream.entropies_PGT, rows.entropies_PGT, atol=2e-5)

  def close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * max(1e-2, np.abs(y).max()))

  jax.tree.map(close, grads_of_stream, grads)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [None, 9])
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

  rows, stream = routing(None), routing(9)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), stream, rows)


def test_sizes_are_eighths_and_not_small():
  assert packed.slot_sizes(8, 32) == [128, None]
  assert packed.slot_sizes(8, 64) == [128, 256, 384, None]
  assert packed.slot_sizes(8, 128) == [128, 256, 384, 512, 640, 768, 896, None]
  assert packed.slot_sizes(8, 512) == [512, 1024, 1536, 2048, 2560, 3072, 3584, None]
  assert packed.slot_sizes(4, 8) == [None]


@pytest.mark.slow
def test_a_part_takes_the_fewest_slots_that_hold_its_largest_group(monkeypatch):
  monkeypatch.setattr(packed, "_FEWEST_SLOTS", 2)
  assert packed.slot_sizes(G, T - 1) == [3, 6, 9, 12, 15, None]

  def slots(batch):
    return jnp.int32(-1 if batch.slots is None else batch.slots)

  # A completion of n tokens takes n - 1 slots: its last token predicts nothing.
  cases = {3: [4, 1, 0], 6: [3, 3, 3], 9: [5, 4, 3], 15: [7, 6, 5], -1: [7, 7, 6]}
  for expected, lengths in cases.items():
    batch = make_batch([[1, 1, 1], lengths])
    assert packed.with_fewest_slots(slots, batch) == expected
    computed = 2 * (S + (expected if expected > 0 else G * (T - 1)))
    assert packed.computed_tokens(batch) == computed
    real = batch.prompt_lengths_P.sum() + sum(max(0, n - 1) for n in lengths)
    assert packed.real_tokens(batch) == real


def test_groups_with_equally_many_tokens_come_into_one_part(monkeypatch):
  monkeypatch.setattr(packed, "_FEWEST_SLOTS", 2)
  batch = make_batch([[7, 7, 7], [1, 0, 0], [7, 7, 6], [1, 1, 0]])
  ordered, order_P = packed.sorted_by_tokens(batch, 2)
  parts = learner.split_batch(ordered, 2)
  totals = packed.lengths(parts.mask_PGT.reshape(4, G, T)).sum(1).reshape(2, 2)
  np.testing.assert_array_equal(np.sort(totals), [[20, 21], [1, 2]])
  np.testing.assert_array_equal(ordered.prompts_PS, batch.prompts_PS[order_P])


@pytest.mark.slow
@pytest.mark.parametrize(
  "micro_batch",
  [
    1,
    2,
    4,
  ],
)
def test_log_probs_come_back_in_the_order_of_the_batch(micro_batch, monkeypatch):
  monkeypatch.setattr(packed, "_FEWEST_SLOTS", 2)
  params, batch = params_of(CONFIG), make_batch([[7, 7, 7], [1, 0, 0], [7, 7, 6], [1, 1, 0]])
  options = learner.StatsOptions(CONFIG, Learner(logprob_chunk=16))
  stats = jax.jit(learner.batch_stats, static_argnums=3)
  whole = stats(params, None, batch, options).logprobs_PGT
  parts = learner.whole_batch_stats(params, batch, options, micro_batch).logprobs_PGT
  np.testing.assert_allclose(parts, whole, atol=2e-5)
