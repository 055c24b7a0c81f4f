"""The kernel that decodes on TPUs, emulated."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import model
from grpo_jax.config import Mesh
from grpo_jax.model.attention import decode, decode_choice
from grpo_jax.model.attention.softmax import Own, Scoring, as_int8, softmax_attention
from grpo_jax.model.mlps import experts
from grpo_jax.parallel import sharding
from grpo_jax.parallel.mesh import make_mesh, sampling_mesh
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.sampling import Draws, Sampler, whole

L, P, K, G, R, C, E, S = 2, 3, 2, 5, 3, 384, 128, 7
LAYER = 1


def arrays(dtype, cache_dtype, slots=C):
  """Queries, keys and values of all layers, and those of prompts."""
  rng = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), dtype)

  own = normal(L, P, K, G, slots, E), normal(L, P, K, G, slots, E)
  if cache_dtype:
    own = tuple(map(as_int8, own))
  prefix = normal(P, K, S, E), normal(P, K, S, E)
  return normal(P, K, G, R, E) / E**0.5, own, prefix


@functools.partial(jax.jit, static_argnums=6)
def expected(q, own, time, visible_PG, prefix, prefix_mask, cap, sinks_H):
  """The same by the definition, over all slots."""
  slots = jax.tree.leaves(own)[0].shape[-2]
  age_C = (time - jnp.arange(slots)) % slots
  mask = age_C < visible_PG[:, None, :, None, None, None]
  keys, values = jax.tree.map(lambda x: x[LAYER], own)
  mask_of_prompts = None if prefix is None else prefix_mask[..., None, :]
  q, own, scoring = q[..., None, :], Own(keys, values), Scoring(cap, sinks_H)
  out = softmax_attention(q, own, mask, prefix, mask_of_prompts, scoring)
  return out[..., 0, :]


@functools.partial(jax.jit, static_argnums=0)
def found(config, q, tokens, prefix, prefix_mask, sinks_H):
  return decode.attention(config, q, tokens, prefix, prefix_mask, sinks_H)


CAPS_AND_SINKS = [(0.0, False), (2.0, False), (0.0, True)]
PLAIN = "", True, 0.0, False
FAST = [("int8", *PLAIN[1:]), ("", True, 2.0, False), ("", False, 0.0, True)]


def kinds():
  """Each dtype, prompts or none, and each of caps and sinks. The fast ones have each of them."""
  for dtype, cache_dtype, with_prefix, (cap, sinks) in itertools.product(
    ("float32", "bfloat16"), ("", "int8"), (True, False), CAPS_AND_SINKS
  ):
    kind = cache_dtype, with_prefix, cap, sinks
    is_fast = kind == PLAIN or (dtype == "float32" and kind in FAST)
    yield pytest.param(dtype, *kind, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize("dtype, cache_dtype, with_prefix, cap, sinks", kinds())
@pytest.mark.parametrize(
  "time", [130, 1000, *(pytest.param(x, marks=pytest.mark.slow) for x in (0, 383))]
)
def test_it_equals_the_definition(time, dtype, cache_dtype, with_prefix, cap, sinks):
  bound = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
  q, own, prefix = arrays(dtype, cache_dtype)
  # One token, a few, around the end of a block, and all slots.
  visible_PG = jnp.asarray(np.resize([1, 2, 127, 128, 129, 300, C], (P, G)), jnp.int32)
  # The first prompt is hidden from its second row, as a window may do.
  prefix_mask = jnp.arange(S) < jnp.asarray([S, 3, 1])[:, None, None, None, None]
  prefix_mask &= ~jnp.zeros((P, 1, G, 1, 1), bool).at[0, 0, 1].set(True)
  config = dataclasses.replace(small_model(), attention_cap=cap)
  tokens = decode.OwnTokens(own, jnp.int32(LAYER), jnp.int32(time), visible_PG)
  prompts = (prefix, prefix_mask) if with_prefix else (None, None)
  sinks_H = jnp.linspace(-3, 3, K * R) if sinks else None
  got = found(config, q, tokens, *prompts, sinks_H)
  wanted = expected(q, own, time, visible_PG, *prompts, cap, sinks_H)
  np.testing.assert_allclose(got.astype(float), wanted.astype(float), atol=bound)


@pytest.mark.parametrize("dtype, cache_dtype", [("float32", ""), ("float32", "int8")])
@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_devices_that_split_the_slots_equal_the_definition(devices, dtype, cache_dtype):
  """The newest token is on each of them in turn. Rows see some of its tokens, or all, or none."""
  q, own, prefix = arrays(dtype, cache_dtype, slots=2 * C)
  prefix_mask = jnp.arange(S) < jnp.asarray([S, 3, 1])[:, None, None, None, None]
  config = small_model()
  mesh = sampling_mesh(make_mesh(Mesh(data=devices), jax.devices()[:devices]), 1, devices)
  config = dataclasses.replace(config, **sharding.model_shardings(config, mesh))
  for time in (0, 127, 128, 300, 383, 384, 767, 768 + 450):
    for visible in ([1, 2, 127, 128, 129, 300, 2 * C], [5, 640, 641, 767, 766, 512, 513]):
      visible_PG = jnp.asarray(np.resize(visible, (P, G)), jnp.int32)
      tokens = decode.OwnTokens(own, jnp.int32(LAYER), jnp.int32(time), visible_PG)
      got = found(config, q, tokens, prefix, prefix_mask, None)
      wanted = expected(q, own, time, visible_PG, prefix, prefix_mask, 0.0, None)
      np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_a_row_reads_its_own_blocks_alone():
  """Slots of blocks that no row needs may hold anything, NaN included."""
  q, own, _ = arrays("float32", "")
  visible_PG = jnp.full((P, G), 100)  # slots 1 to 100
  spoilt = tuple(x.at[..., 128:, :].set(jnp.nan) for x in own)
  outputs = [
    decode.own_attention(
      q, decode.OwnTokens(stacks, jnp.int32(LAYER), jnp.int32(C + 100), visible_PG), interpret=True
    )
    for stacks in (spoilt, own)
  ]
  jax.tree.map(np.testing.assert_array_equal, *outputs)


def small_model(**changes):
  shape = dict(vocab_size=50, embed_dim=32, num_layers=L, num_heads=K * R, num_kv_heads=K)
  return model.ModelConfig(**shape | dict(head_dim=E, mlp_dim=48) | changes)


def drawn(config, params, rows=0, max_tokens=48, least=0):
  """The completions that a sampler draws of four prompts."""
  prompts_PS = np.array([[5, 6, 7], [8, 9, 0], [3, 0, 0], [4, 4, 0]], np.int32)
  sampler = Sampler(config, Decoding(max_tokens=max_tokens, stop_ids=(1,)), rows=rows)
  draws = Draws(jax.random.key(0), RowSettings(min_tokens=least))
  return whole(sampler(params, prompts_PS, np.array([3, 2, 1, 2]), members=3, draws=draws))


_MIXTURE = dict(
  embed_dim=128,
  windows=(0, 20),
  num_experts=4,
  experts_per_token=2,
  expert_dim=256,
  sparse_layers=(0, 1),
)
_BORROWING = dict(
  num_layers=5,
  windows=(20, 0, 20, 0, 0),
  borrowing_layers=3,
  global_head_dim=24,
  global_kv_heads=1,
)


@pytest.mark.slow
@pytest.mark.parametrize(
  "fields",
  [
    pytest.param(dict(num_layers=1), id="plain"),
    pytest.param(_MIXTURE, id="mixture"),
    pytest.param(_BORROWING, id="borrowing"),
  ],
)
@pytest.mark.parametrize("context", [1, 2])
def test_a_sampler_draws_the_same_tokens_with_both_kernels(context, fields, monkeypatch):
  """With windows. Rows wait for seats, and are split over a mesh, which may split their slots."""
  config = small_model(qk_norm="head", **fields)
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(1), config)
  wanted = drawn(config, params)
  mesh = make_mesh(Mesh(data=2 * context, fsdp=1, tensor=2), jax.devices()[: 4 * context])
  mesh = sampling_mesh(mesh, 2, context)
  config = dataclasses.replace(config, **sharding.model_shardings(config, mesh))
  params = jax.device_put(params, sharding.param_specs(params, mesh))
  used, real = [], decode.own_attention

  def counted(*args, **settings):
    used.append(args)
    return real(*args, **settings)

  monkeypatch.setattr(decode, "own_attention", counted)
  monkeypatch.setattr(decode_choice, "fits", lambda config: True)
  monkeypatch.setattr(experts, "reads_stacks", lambda config: True)
  got = drawn(config, params, rows=4)
  assert used and len(set(wanted.lengths_PG.ravel().tolist())) > 3
  np.testing.assert_array_equal(got.tokens_PGT, wanted.tokens_PGT)
  np.testing.assert_allclose(got.logprobs_PGT, wanted.logprobs_PGT, atol=1e-4)


@pytest.mark.slow
def test_the_kernel_reads_rings(monkeypatch):
  """Rows of 280 to 300 tokens, of which a layer with a window of 90 keeps 256."""
  config = small_model(windows=(90, 0))
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(1), config)
  long = dict(rows=5, max_tokens=300, least=280)
  wanted = drawn(config, params, **long)
  rings = []

  def read(q, own, **settings):
    rings.append(own.stacks[0].shape[-2])
    return real(q, own, **settings)

  real = decode.own_attention
  monkeypatch.setattr(decode, "own_attention", read)
  monkeypatch.setattr(decode_choice, "fits", lambda config: True)
  got = drawn(config, params, **long)
  assert set(rings) == {128, 256, 384}
  np.testing.assert_array_equal(got.tokens_PGT, wanted.tokens_PGT)
  np.testing.assert_allclose(got.logprobs_PGT, wanted.logprobs_PGT, atol=1e-4)


def test_the_kernel_is_lowered_for_a_tpu_where_there_is_none():
  """As `plan` does for one chip. Pallas must not have to ask a device what it can do."""
  q, own, _ = arrays("bfloat16", "")
  tokens = decode.OwnTokens(own, jnp.int32(LAYER), jnp.int32(7), jnp.ones((P, G), jnp.int32))
  traced = jax.jit(decode.own_attention).trace(q, tokens)
  assert "decode_attention" in traced.lower(lowering_platforms=("tpu",)).as_text()
