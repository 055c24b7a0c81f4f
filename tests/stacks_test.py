"""Layers that lie stacked: which ones, the way there and back, and what is computed from them."""

import dataclasses
from pathlib import Path

from flax.traverse_util import flatten_dict
import jax
from jax.extend.core import subjaxprs
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from grpo_jax import model
from grpo_jax.model import blocks, stacks
from grpo_jax.model.stacks import Places, Segment
from grpo_jax.types import Visual

CONFIG = model.ModelConfig(
  vocab_size=31, embed_dim=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24
)
MIXTURE = dataclasses.replace(
  CONFIG,
  family="qwen3_moe",
  qkv_bias=False,
  qk_norm="head",
  num_experts=4,
  experts_per_token=2,
  expert_dim=12,
)
GEMMA3 = (3, 3, 3, 3, 3, 0)  # five layers with a window, one without


def of_windows(*windows, config=CONFIG):
  return dataclasses.replace(config, num_layers=len(windows), windows=windows)


def mixture(layers, *sparse):
  return dataclasses.replace(MIXTURE, num_layers=layers, sparse_layers=sparse)


MODELS = {
  "uniform": dataclasses.replace(CONFIG, num_layers=3),
  "single": CONFIG,
  "alternating": of_windows(3, 0, 3, 0),
  "rest": of_windows(3, 3, 0, 3, 3, 0, 3),
  # A pattern in layers_9 and layers_10, which trees of JAX sort the other way round.
  "late pattern": of_windows(*[4] * 9, 3, 0, 3, 0),
  "late windows": of_windows(0, 0, 3, 3, 3),
  "mixture": mixture(2, 0, 1),
  "first dense": mixture(4, 1, 2, 3),
  "sparse runs": mixture(6, 0, 1, 3, 4),
  "every other sparse": mixture(4, 1, 3),
  "two periods": dataclasses.replace(mixture(8, 1, 3, 5, 7), windows=(3, 0, 0, 0) * 2),
}


@pytest.fixture(params=MODELS)
def config(request):
  return MODELS[request.param]


def make_params(config):
  """Random parameters, biases and norms included, different for each layer."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), config))
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(0.1, 0.3, x.shape), jnp.float32), shapes)


def unroll(params, config):
  """The same model without stacks: its parameters and its config."""
  return stacks.unrolled(params, config), dataclasses.replace(config, unrolled=True)


def assert_close(a, b, **bounds):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **bounds), a, b)


# --- Which layers ---


@pytest.mark.parametrize(
  "config, expected",
  [
    (dataclasses.replace(CONFIG, num_layers=24), [Segment(0, 1, 24)]),
    (of_windows(*[7] * 24), [Segment(0, 1, 24)]),
    (CONFIG, [Segment(0, 1, 1)]),
    # Gemma 2.
    (of_windows(*[3, 0] * 13), [Segment(0, 2, 13)]),
    (of_windows(3, 0, 3, 0, 3), [Segment(0, 2, 2), Segment(4, 1, 1)]),
    (of_windows(3, 0, 3), [Segment(0, 1, 1), Segment(1, 1, 1), Segment(2, 1, 1)]),
    # Gemma 3 1B: the last two of its 26 layers are the start of a pattern.
    (of_windows(*GEMMA3 * 4, 3, 3), [Segment(0, 6, 4), Segment(24, 1, 2)]),
    # Gemma 3 4B.
    (of_windows(*GEMMA3 * 5, 3, 3, 3, 3), [Segment(0, 6, 5), Segment(30, 1, 4)]),
    # Qwen2 with max_window_layers=21.
    (of_windows(*[0] * 21, *[3] * 7), [Segment(0, 1, 21), Segment(21, 1, 7)]),
    (mixture(48, *range(48)), [Segment(0, 1, 48)]),
    (mixture(27, *range(1, 27)), [Segment(0, 1, 1), Segment(1, 1, 26)]),
    (mixture(8, 1, 3, 5, 7), [Segment(0, 2, 4)]),
    # Windows repeat every 4 layers, experts every 2.
    (MODELS["two periods"], [Segment(0, 4, 2)]),
  ],
)
def test_segments_by_hand(config, expected):
  assert stacks.segments(config) == expected
  unrolled = stacks.segments(dataclasses.replace(config, unrolled=True))
  assert unrolled == [Segment(layer, 1, 1) for layer in range(config.num_layers)]


def test_stacks_by_hand():
  config = of_windows(3, 3, 0, 3, 3, 0, 3)
  assert stacks.stacks(config) == {
    "layers_0": [0, 3],
    "layers_1": [1, 4],
    "layers_2": [2, 5],
    "layers_6": [6],
  }
  assert stacks.layer_names("opt/layers_1/mlp/up", config) == [
    "opt/layers_1/mlp/up",
    "opt/layers_4/mlp/up",
  ]
  assert stacks.layer_names("opt.layers_6.mlp", config) == ["opt.layers_6.mlp"]
  assert stacks.layer_names("final_norm/scale", config) == []


def test_each_layer_is_in_one_stack_of_its_kind(config):
  found = stacks.stacks(config)
  assert sorted(sum(found.values(), [])) == list(range(config.num_layers))
  for name, layers in found.items():
    assert name == f"layers_{layers[0]}" and layers == sorted(layers)
    kinds = {config.kind(layer) for layer in layers}
    assert len(kinds) == 1, name


# --- The way there and back ---


def test_layers_come_back_from_their_stacks(config):
  rng, places = np.random.default_rng(0), Places(config)
  layers = {
    f"layers_{layer}": {"mlp": {"up": rng.normal(size=(2, 3))}, "norm": rng.normal(size=5)}
    for layer in range(config.num_layers)
  }
  tree = {"head": rng.normal(size=4), **layers}
  joined = stacks.stacked(tree, config, np.stack)
  assert joined.keys() == {"head", *stacks.stacks(config)} and joined["head"] is tree["head"]
  leaves = flatten_dict(joined, sep="/")
  assert all(isinstance(x, np.ndarray) for x in leaves.values())
  for name, x in flatten_dict(tree, sep="/").items():
    np.testing.assert_array_equal(places.take(leaves, name), x, name)
  for name, x in leaves.items():
    of_layer = x.shape[1:] if stacks.is_stacked(name) else x.shape
    assert places.shape(name, of_layer) == x.shape
  apart = stacks.unrolled(joined, config)
  expected = {name: jax.tree.map(lambda x: x[None], x) for name, x in layers.items()}
  jax.tree.map(np.testing.assert_array_equal, apart, {"head": tree["head"], **expected})


@pytest.mark.slow
def test_init_stacks_what_it_makes_for_single_layers():
  """Random numbers belong to a layer, whichever layers it lies with."""
  config = MODELS["alternating"]
  init = jax.jit(model.init, static_argnums=1)
  apart = dataclasses.replace(config, unrolled=True)
  found = stacks.unrolled(init(jax.random.key(0), config), config)
  jax.tree.map(np.testing.assert_array_equal, found, init(jax.random.key(0), apart))


def test_a_function_of_a_layer_is_applied_to_each():
  double_first = stacks.per_layer(lambda x: 2 * x[0], "layers_0/norm/scale")
  assert double_first(jnp.array([[1, 2], [3, 4]])).tolist() == [2, 6]
  double_first = stacks.per_layer(lambda x: 2 * x[0], "final_norm/scale")
  assert double_first(jnp.array([1, 2])).tolist() == 2


def test_a_layer_lies_as_its_stack():
  mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
  assert stacks.of_layer(NamedSharding(mesh, P(None, "x"))) == NamedSharding(mesh, P("x"))


# --- What is computed ---

S, G, T = 5, 2, 4
LENGTHS_P = jnp.array([5, 2])


def loss_and_gradient(config, remat="", visual=None):
  """A jitted function of parameters: (sum of squares, (hidden states, routing)), gradient."""
  tokens_PN = jax.random.randint(jax.random.key(1), (2, S + G * T), 0, config.vocab_size)
  groups = model.Groups(LENGTHS_P, S, G, T)
  counted_PN = jnp.broadcast_to(jnp.arange(S + G * T) % 3 > 0, tokens_PN.shape)

  def loss(params):
    routes = model.Routes(counted_PN)
    found = model.group_features(params, config, tokens_PN, groups, routes, remat, visual=visual)
    shares = found[1].probs_BLX if found[1] else 0.0
    return (found[0] ** 2).mean() + jnp.sin(shares).sum(), found

  return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    "alternating",
    "rest",
    "late pattern",
    "first dense",
    "two periods",
  ],
)
def test_stacked_layers_compute_what_layers_apart_compute(name):
  """Hidden states, the statistics of the routers in the order of the layers, and the gradient."""
  config = MODELS[name]
  params = make_params(config)
  (value, found), gradient = loss_and_gradient(config)(params)
  params_apart, apart = unroll(params, config)
  (value_apart, found_apart), gradient_apart = loss_and_gradient(apart)(params_apart)
  assert_close((value, found), (value_apart, found_apart), rtol=1e-5, atol=1e-5)
  gradient = stacks.unrolled(gradient, config)
  largest = max(jnp.abs(x).max() for x in jax.tree.leaves(gradient))
  assert_close(gradient, gradient_apart, rtol=1e-4, atol=1e-5 * largest)
  for path, x in flatten_dict(gradient, sep="/").items():
    assert jnp.abs(x).max() > 0, path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alternating", "rest"])
def test_stacked_layers_keep_what_layers_apart_keep_in_the_cache(name):
  """A prompt, then two tokens at once and one alone."""
  config = MODELS[name]
  params = make_params(config)
  tokens_BT = jax.random.randint(jax.random.key(2), (4, 3), 0, config.vocab_size)

  def run(params, config):
    prompts_PS = jnp.arange(2 * S).reshape(2, S)
    positions_PS = jnp.broadcast_to(jnp.arange(S), (2, S))
    _, cache = model.features(params, config, prompts_PS, positions_PS)
    cache = model.empty_cache(config, model.as_prefix(cache, LENGTHS_P), G, slots=3)
    positions_BT = jnp.repeat(LENGTHS_P, G)[:, None] + jnp.arange(3)
    logits = []
    for part in (slice(0, 2), slice(2, 3)):
      out, cache = model.forward(params, config, tokens_BT[:, part], positions_BT[:, part], cache)
      logits.append(out)
    return logits, cache

  run = jax.jit(run, static_argnums=1)
  logits, cache = run(params, config)
  logits_apart, cache_apart = run(*unroll(params, config))
  assert_close(logits, logits_apart, rtol=1e-5, atol=1e-5)
  for stacks_of, layers, ndim in ((cache, cache_apart, 6), (cache.prefix, cache_apart.prefix, 5)):
    for found, expected in ((stacks_of.keys, layers.keys), (stacks_of.values, layers.values)):
      # A row's own slots have no axis of layers where a stack has one layer.
      found = {name: x if x.ndim == ndim else x[None] for name, x in found.items()}
      single = jax.tree.map(
        lambda x, y: x.reshape(y.shape), stacks.unrolled(found, config), expected
      )
      assert_close(single, expected, rtol=1e-5, atol=1e-5)
  assert cache.time == 3


GOLDEN = Path(__file__).parent / "golden"
FAMILIES = {
  "families/gemma3": "windows",
  "families/gemma4_e": "borrowed keys and values, embeddings for each layer",
  "families/gpt_oss": "windows and experts",
  "families/qwen3_next": "the gated delta rule and experts",
  "families/deepseek_v3": "latent attention, dense layers first",
  "vision/qwen3_vl": "levels of visual tokens",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_scan_computes_what_the_plain_loop_over_layers_computes(name, monkeypatch):
  """With every loop there is: hidden states, routing and gradient, then a prompt and two tokens."""
  monkeypatch.setattr(blocks, "_MOST_UNROLLED_LAYERS", {})
  monkeypatch.setattr(blocks, "_loops_over_runs", lambda config: True)
  config, params = model.load(GOLDEN / name, vision="vision" in name)
  visual = visual_of(config) if config.vision else None

  def decoded(params, config):
    prompts_PS = jnp.arange(2 * S).reshape(2, S)
    positions_PS = jnp.broadcast_to(jnp.arange(S), (2, S))
    hidden, cache = model.features(
      params, config, prompts_PS, positions_PS, None, LENGTHS_P, visual=visual
    )
    cache = model.empty_cache(config, model.as_prefix(cache, LENGTHS_P), G, slots=2)
    positions_BT = jnp.repeat(LENGTHS_P, G)[:, None] + jnp.arange(2)
    logits, _ = model.forward(params, config, positions_BT + 3, positions_BT, cache)
    return hidden, logits

  def all_of(params, config):
    found, gradient = loss_and_gradient(config, visual=visual)(params)
    return found, gradient, jax.jit(decoded, static_argnums=1)(params, config)

  found, gradient, tokens = all_of(params, config)
  found_apart, gradient_apart, tokens_apart = all_of(*unroll(params, config))
  gradient = stacks.unrolled(gradient, config)
  largest = max(jnp.abs(x).max() for x in jax.tree.leaves(gradient))
  assert_close((found, tokens), (found_apart, tokens_apart), rtol=1e-4, atol=1e-5)
  assert_close(gradient, gradient_apart, rtol=1e-4, atol=1e-5 * largest)


def visual_of(config):
  """Random visual tokens in place of the first two tokens of each prompt, with further levels."""
  levels = 1 + len(config.vision.level_layers)
  number_PS = jnp.broadcast_to(jnp.where(jnp.arange(S) < 2, jnp.arange(S), -1), (2, S))
  features_PKND = jax.random.normal(jax.random.key(3), (2, levels, 2, config.embed_dim))
  return Visual(
    features_PKND=features_PKND,
    seen_PS=number_PS,
    picture_PS=jnp.minimum(number_PS, 0),
    positions_PS3=None,
    next_P=LENGTHS_P,
  )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse runs", "rest"])
def test_a_loop_over_equal_neighbours_of_a_pattern_changes_nothing(name, monkeypatch):
  """As on accelerators: hidden states, statistics of routers, gradient, and what prompts keep."""
  config = MODELS[name]
  params = make_params(config)
  tokens_BT = jnp.arange(2 * S).reshape(2, S)
  positions_BT = jnp.broadcast_to(jnp.arange(S), (2, S))

  def run():
    cache = jax.jit(lambda p: model.features(p, config, tokens_BT, positions_BT))(params)
    return loss_and_gradient(config)(params), cache

  monkeypatch.setattr(blocks, "_MOST_UNROLLED_LAYERS", {})
  expected = run()
  monkeypatch.setattr(blocks, "_loops_over_runs", lambda config: True)
  loops = []
  monkeypatch.setattr(
    blocks, "_apply_run", lambda *args, f=blocks._apply_run: loops.append(len(args[1])) or f(*args)
  )
  found = run()
  assert set(loops) - {1} == {2}
  largest = max(jnp.abs(x).max() for x in jax.tree.leaves(expected[0][1]))
  assert_close(found, expected, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alternating", "first dense"])
def test_what_is_saved_for_the_backward_pass_changes_no_number(name):
  """In a loop, and in a layer that is alone in its segment."""
  config = MODELS[name]
  params = make_params(config)
  expected = loss_and_gradient(config)(params)
  for remat in (
    "nothing_saveable",
    "offload",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
  ):
    assert_close(loss_and_gradient(config, remat)(params), expected, rtol=1e-4, atol=1e-5)


def equations(jaxpr):
  """How many equations a jaxpr has, those of its inner jaxprs included."""
  return len(jaxpr.eqns) + sum(equations(inner) for inner in subjaxprs(jaxpr))


@pytest.mark.slow
@pytest.mark.parametrize(
  "remat",
  [
    "",
    "nothing_saveable",
  ],
)
@pytest.mark.parametrize("windows", [(0,), (3, 0)])
def test_the_program_of_an_update_does_not_grow_with_depth(windows, remat):
  def size(repeats, **how):
    config = dataclasses.replace(of_windows(*windows * repeats), **how)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), config))
    return equations(jax.make_jaxpr(loss_and_gradient(config, remat))(params).jaxpr)

  assert size(2) == size(8)
  assert size(3, unrolled=True) > 1.5 * size(8)
