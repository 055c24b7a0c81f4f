"""Texts whose tokens are split over devices give the numbers of one device."""

import dataclasses
import functools
import itertools
import os
from pathlib import Path
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest
import small_batch
from small_run import small_config, with_reward, with_section

from grpo_jax import learner, model
from grpo_jax.around.planning.cost.count import count
from grpo_jax.config import Learner, Mesh
from grpo_jax.model.attention import chunked, context, ring
from grpo_jax.model.attention.context import EXCHANGES, SplitAttention, cheapest
from grpo_jax.model.attention.sent import exchanges_in_words, recurrence_bytes, split_attention
from grpo_jax.model.config import DeltaShape
from grpo_jax.parallel import sharding
from grpo_jax.parallel.mesh import make_mesh, sampling_mesh
from grpo_jax.run.device_checks import check_batches
from grpo_jax.run.memory import activation_bytes
from grpo_jax.run.run import Run
from grpo_jax.settings import ConfigError
from grpo_jax.storage.reading import read_metrics
from grpo_jax.training.loop import run_steps

CONFIG = model.ModelConfig(
  vocab_size=31, embed_dim=16, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=6, mlp_dim=24
)
P, G, S, T = 4, 3, 7, 9
REWARD = """
def reward(completions, **_):
  return [float(len({*text})) for text in completions]
"""
LENGTHS = [[9, 1, 3], [2, 0, 5], [1, 1, 1], [0, 0, 0]]


params_of = functools.partial(small_batch.params_of, mean=0.1)


def make_batch(lengths_PG=LENGTHS, tokens=T, slots=0, seed=0):
  return small_batch.make_batch(lengths_PG, S, tokens, slots, seed)


def mesh_of(**axes):
  sizes = dict(data=1) | axes
  return make_mesh(Mesh(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])


def on_mesh(config, mesh):
  shardings = sharding.model_shardings(config, mesh, splits_tokens=True)
  return dataclasses.replace(config, **shardings)


@functools.partial(jax.jit, static_argnums=2)
def stats_and_grads(params, batch, options):
  P, G, T = batch.completions_PGT.shape
  weights = jax.random.normal(jax.random.key(2), (2, P, G, T))

  def loss(params):
    stats = learner.batch_stats(params, None, batch, options)
    total = (weights[0] * stats.logprobs_PGT + weights[1] * stats.entropies_PGT).sum()
    return total, stats

  return jax.value_and_grad(loss, has_aux=True)(params)


def exchange_of(config, layer=-1):
  """The way in which the last layer of a model exchanges tokens, or that of another number."""
  return cheapest(split_attention(config, config.kind(layer % config.num_layers)))


def assert_same(config, batch, mesh, chunk=16, params=None, bound=1e-5, **options):
  params = params_of(config) if params is None else params
  given = dict(learner=Learner(logprob_chunk=chunk), entropy_gradient=True)
  (loss, stats), grads = stats_and_grads(
    params, batch, learner.StatsOptions(config, **given | options)
  )
  places = sharding.param_specs(params, mesh)
  options = learner.StatsOptions(on_mesh(config, mesh), **given | options)
  split = stats_and_grads(
    jax.device_put(params, places), jax.device_put(batch, sharding.batch_sharding(mesh)), options
  )
  (split_loss, split_stats), split_grads = split
  np.testing.assert_allclose(split_loss, loss, rtol=1e-5, atol=bound)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
    split_stats.routing,
    stats.routing,
  )
  np.testing.assert_allclose(split_stats.logprobs_PGT, stats.logprobs_PGT, rtol=1e-5, atol=bound)
  np.testing.assert_allclose(split_stats.entropies_PGT, stats.entropies_PGT, rtol=1e-5, atol=bound)
  scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(grads))

  def close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=bound * scale)

  jax.tree.map(close, split_grads, grads)


def slow(value):
  return pytest.param(value, marks=pytest.mark.slow)


# Eight heads, which every axis divides: tokens are exchanged for heads.
MESHES = [
  dict(context=2),
  dict(context=4),
  dict(context=8),
  dict(data=2, context=2, tensor=2),
  dict(fsdp=2, context=4),
]


@pytest.mark.parametrize("slots", [slow(0), 14])
@pytest.mark.parametrize("axes", [MESHES[0], *map(slow, MESHES[1:])], ids=str)
def test_log_probs_and_gradients_are_those_of_one_device(axes, slots):
  """Groups have unequal lengths, rows without a token, and slots that no axis divides."""
  mesh = mesh_of(**axes)
  assert exchange_of(on_mesh(CONFIG, mesh)).name == "all-to-all"
  assert_same(CONFIG, make_batch(slots=slots), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [dict(context=4), dict(context=2, tensor=2)], ids=str)
def test_heads_that_the_devices_do_not_divide_get_some_more(axes):
  """Each of two key heads has five query heads, and then six: the others are thrown away."""
  config = dataclasses.replace(CONFIG, num_heads=10, attention_sinks=True)
  mesh = mesh_of(**axes)
  assert exchange_of(on_mesh(config, mesh)).name == "all-to-all"
  assert_same(config, make_batch(slots=14), mesh)


RINGS = dataclasses.replace(
  CONFIG, num_heads=9, num_kv_heads=3, windows=(4, 0), attention_cap=3.0, attention_sinks=True
)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [slow(0), 14])
@pytest.mark.parametrize(
  "axes",
  [
    dict(context=2),
    *map(slow, (dict(context=8), dict(data=2, context=4), dict(tensor=3, context=2))),
  ],
  ids=str,
)
def test_a_ring_gives_the_numbers_of_one_device(axes, slots, monkeypatch):
  """Nine heads, with windows that reach into the prompt, caps and sinks. Chunks are short."""
  monkeypatch.setattr(ring, "MAX_CHUNK", 2)
  mesh = mesh_of(**axes)
  assert exchange_of(on_mesh(RINGS, mesh)).name == "ring"
  monkeypatch.setattr(context, "EXCHANGES", EXCHANGES[1:2])  # in the layers with a window, too
  assert_same(RINGS, make_batch(slots=slots), mesh)


@pytest.mark.slow
def test_a_window_reaches_a_prompt_that_is_most_of_the_slots():
  """The devices have fewer slots than the window and the prompt."""
  config = dataclasses.replace(RINGS, windows=(9, 0))
  mesh = mesh_of(context=2)
  assert exchange_of(on_mesh(config, mesh), 0).name == "halo"
  assert_same(config, make_batch([[2], [1], [2], [0]], tokens=2), mesh)


@pytest.mark.parametrize("window", [4, slow(1), slow(15)])
@pytest.mark.parametrize("slots", [slow(0), 14])
@pytest.mark.parametrize(
  "axes", [dict(context=4), slow(dict(context=8)), slow(dict(tensor=3, context=2))], ids=str
)
def test_devices_that_send_what_a_window_reaches_give_the_numbers_of_one(
  axes, slots, window, monkeypatch
):
  """The windows reach into the prompt, and over several devices. Chunks are short."""
  monkeypatch.setattr(ring, "MAX_CHUNK", 2)
  config = dataclasses.replace(RINGS, windows=(window, 0))
  mesh = mesh_of(**axes)
  assert exchange_of(on_mesh(config, mesh), 0).name == "halo"
  assert_same(config, make_batch(slots=slots), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [8, 6])
def test_one_token_and_short_prompts(heads):
  """Completions of one token, and fewer slots of prompts than completions."""
  config = dataclasses.replace(CONFIG, num_heads=heads)
  assert_same(config, make_batch(np.ones((2, 9), int), tokens=1), mesh_of(context=4))
  assert_same(config, make_batch(np.full((2, 9), 2), tokens=3), mesh_of(context=4))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["nothing_saveable", "offload"])
def test_a_kl_of_the_whole_vocabulary_and_activations_that_are_computed_again(policy):
  config, mesh = CONFIG, mesh_of(context=2)
  assert_same(
    config,
    make_batch(slots=14),
    mesh,
    learner=Learner(logprob_chunk=8, remat=True, remat_policy=policy),
  )


@pytest.mark.slow
def test_adapters_give_the_numbers_of_one_device():
  shape = model.AdapterShape(
    2, 4.0, False, tuple(model.kernels_of(("q_proj", "o_proj", "up_proj")))
  )
  config = dataclasses.replace(CONFIG, lora=shape)
  base = params_of(CONFIG)
  adapters = model.init_adapters(jax.random.key(0), config=config, base=base)
  rng = np.random.default_rng(2)
  adapters = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), adapters)
  assert_same(config, make_batch(slots=14), mesh_of(context=2), params=model.join(base, adapters))


GOLDEN = Path(__file__).parent / "golden" / "families"


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(x.name for x in GOLDEN.iterdir()))
def test_families_give_the_numbers_of_one_device(family):
  config, params = model.load(GOLDEN / family)
  # One unit in the last place of each weight moves a log-prob of qwen3_5_moe by up to 1e-4, and the
  # sum of gemma3's by 8e-5.
  bound = 1e-4 if family in ("qwen3_5_moe", "gemma3") else 1e-5
  assert_same(config, make_batch(slots=14), mesh_of(context=2), params=params, bound=bound)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [dict(context=4), dict(expert=2, context=2)], ids=str)
def test_experts_that_the_sampler_used_go_with_their_tokens(axes):
  """A mixture, on an axis of experts too, and with the experts of some tokens given."""
  config, params = model.load(GOLDEN / "qwen3_moe")
  Y, batch, rng = config.experts_in_all, make_batch(slots=14), np.random.default_rng(3)

  def drawn(*shape):
    experts = rng.permuted(np.tile(np.arange(config.num_experts), (*shape, 1)), axis=-1)
    layers = len(config.sparse_layers)
    return jnp.asarray(np.tile(experts[..., : Y // layers], layers), config.experts_dtype)

  given = dict(experts_PGTY=drawn(P, G, T), prompt_experts_PSY=drawn(P, S))
  assert_same(config, batch.replace(**given), mesh_of(**axes), params=params)
  assert_same(config, batch, mesh_of(**axes), params=params)


DELTA = dataclasses.replace(
  CONFIG,
  mixers=("delta", "attention"),
  delta=DeltaShape(key_heads=4, value_heads=8, key_dim=5, value_dim=3, width=4),
)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [slow(0), 14])
@pytest.mark.parametrize(
  "axes",
  [dict(context=2), *map(slow, (dict(context=4), dict(fsdp=2, context=2, tensor=2)))],
  ids=str,
)
def test_the_delta_rule_gives_the_numbers_of_one_device(axes, slots):
  """Its convolution reaches over the ends of the tokens that a device has."""
  assert_same(DELTA, make_batch(slots=slots), mesh_of(**axes))


@pytest.mark.slow
@pytest.mark.parametrize(
  "axes", [dict(context=8), dict(context=3), dict(context=3, tensor=2)], ids=str
)
def test_heads_of_the_delta_rule_that_devices_do_not_divide_get_some_more(axes):
  assert_same(DELTA, make_batch(slots=14), mesh_of(**axes))


@pytest.mark.slow
def test_states_of_rows_are_those_of_one_device():
  """The pass of reward models, which returns a cache too."""
  params, rng = params_of(DELTA), np.random.default_rng(4)
  tokens_BT = jnp.asarray(rng.integers(0, 31, (2, 12)), jnp.int32)
  places_BT = jnp.broadcast_to(jnp.arange(12), tokens_BT.shape)
  features = jax.jit(model.features, static_argnums=1)
  one = features(params, DELTA, tokens_BT, places_BT)
  for axes in (dict(context=2), dict(context=3)):  # which does not divide the heads
    split = features(params, on_mesh(DELTA, mesh_of(**axes)), tokens_BT, places_BT)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), split, one)


@pytest.mark.slow
def test_long_rows_of_the_delta_rule_have_many_chunks():
  batch = make_batch([[150, 70], [3, 129]], tokens=150, slots=280)
  assert_same(DELTA, batch, mesh_of(context=4), chunk=64)


# --- Images ---

VISION = Path(__file__).parent / "golden" / "vision"


def golden_batch(name):
  """A batch whose prompts have the golden images of a family."""
  expected = np.load(VISION / name / "expected.npz")
  return make_batch([[5, 3], [1, 4], [2, 5]], tokens=5, slots=9).replace(
    prompts_PS=jnp.asarray(expected["tokens"]),
    prompt_lengths_P=jnp.asarray(expected["lengths"], jnp.int32),
    images=small_batch.images_of(expected),
  )


def with_tower(**fields):
  """A decoder with a trained tower of one layer, as Gemma 3 has it."""
  golden = model.load_config(VISION / "gemma3", vision=True)
  tower = dataclasses.replace(golden.vision, **dict(trained=True, num_layers=1) | fields)
  return dataclasses.replace(CONFIG, vocab_size=golden.vocab_size, vision=tower)


@pytest.mark.slow
def test_images_in_prompts_give_the_numbers_of_one_device():
  """Tokens of a picture see each other."""
  config = with_tower()
  assert config.sees_both_ways(0)
  assert_same(config, golden_batch("gemma3"), mesh_of(context=2))


@pytest.mark.slow
@pytest.mark.parametrize("both_ways", ["", "all"])
def test_encoded_images_in_prompts_give_the_numbers_of_one_device(both_ways, monkeypatch):
  """In a ring, where tokens of a picture do not see those after them."""
  config, batch = with_tower(both_ways=both_ways, trained=False), golden_batch("gemma3")
  visual = model.encode(params_of(config), config, batch.images)
  if not both_ways:
    monkeypatch.setattr(context, "EXCHANGES", EXCHANGES[1:2])
  assert_same(config, batch.replace(images=None, visual=visual), mesh_of(context=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(x.name for x in VISION.iterdir()))
def test_images_lie_in_prompts_that_are_split(name):
  """Their tokens replace embeddings, have positions of their own and may see each other."""
  config, params = model.load(VISION / name, vision=True)
  # One unit in the last place of each weight moves this gradient by 1e-4 of its largest number.
  bound = 1e-4 if name == "qwen3_5_moe" else 1e-5
  assert_same(config, golden_batch(name), mesh_of(context=2), params=params, bound=bound)


# --- The ring ---


@pytest.mark.parametrize("devices", [2, 8])
def test_zigzag_gives_each_device_an_early_and_a_late_piece(devices):
  mesh = mesh_of(context=devices)

  def there_and_back(numbers):
    moved = ring._zigzag(numbers, "context")
    return moved, ring._zigzag(moved, "context", back=True)

  split = PartitionSpec("context")
  moved, back = jax.jit(
    jax.shard_map(there_and_back, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
  )(jnp.arange(2 * devices))
  wanted = [[i, 2 * devices - 1 - i] for i in range(devices)]
  np.testing.assert_array_equal(moved.reshape(-1, 2), wanted)
  np.testing.assert_array_equal(back, np.arange(2 * devices))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_each_device_of_a_ring_computes_equally_many_pairs_of_pieces(devices):
  """Piece a of the queries sees the pieces 0 to a of the keys."""
  q, slots = jnp.zeros((2, 1, 1, 2, 1, 1, 1)), jnp.zeros((2 * devices, 1, 2), jnp.int32)
  constants, of_pieces = ring._Ring(0, 0.0, "context"), ring.Slots(slots, slots)

  def computed():
    pairs = [
      ring._pair(constants, q, of_pieces, number, (a, b)).is_before
      for number in range(devices)
      for a in range(2)
      for b in range(2)
    ]
    return jnp.stack(pairs).sum(keepdims=True)

  mesh = mesh_of(context=devices)
  on_each = jax.shard_map(computed, mesh=mesh, in_specs=(), out_specs=PartitionSpec("context"))
  found = jax.jit(on_each)()
  assert found.tolist() == [2 * devices + 1] * devices


# --- Memory ---


@pytest.mark.parametrize(
  "tied, axes",
  [
    (False, dict(data=2, fsdp=2, tensor=2)),
    *(
      pytest.param(tied, axes, marks=pytest.mark.slow)
      for tied, axes in itertools.product(
        (True, False),
        (dict(data=4), dict(fsdp=4, tensor=2), dict(fsdp=2, expert=2), dict(tensor=2)),
      )
    ),
  ],
  ids=str,
)
def test_devices_with_rows_of_their_own_give_the_numbers_of_one(tied, axes):
  """Logits in chunks, of a vocabulary of 32 that `tensor` splits."""
  config = dataclasses.replace(CONFIG, tie_embeddings=tied, vocab_size=32)
  assert_same(config, make_batch(slots=14), mesh_of(**axes), chunk=2)


@pytest.mark.parametrize(
  "axes", [dict(fsdp=4), slow(dict(data=4)), slow(dict(fsdp=2, context=2))], ids=str
)
def test_the_head_travels_once_however_many_chunks_of_tokens_there_are(axes):
  """And its gradient. Each of 36 chunks gathered it, and summed its gradient over devices."""
  config = dataclasses.replace(CONFIG, tie_embeddings=False, vocab_size=400)
  prompts = [[9, 9, 9]] * 4
  sent = {
    chunk: count(
      compiled_update(config, mesh_of(**axes), T, prompts, chunk).as_text()
    ).whole.link_bytes
    for chunk in (1, 1000)
  }
  head = 4 * config.vocab_size * config.embed_dim
  assert head < sent[1000] and abs(sent[1] - sent[1000]) < 0.1 * head


def test_weights_are_gathered_over_one_axis_after_the_other():
  """Of 16 dimensions, a device has 2, then the 8 that devices along context have, and then all."""
  axes = dict(fsdp=2, context=4)
  text = compiled_update(CONFIG, mesh_of(**axes), T, [[9, 9]] * 2).as_text()
  assert {"f32[8,24]", "f32[16,24]"} <= set(re.findall(r"= (f32\[\d+,24\])\S* all-gather\(", text))
  narrow = dataclasses.replace(CONFIG, embed_dim=12)  # split over one of the axes
  text = compiled_update(narrow, mesh_of(**axes), T, [[9, 9]] * 2).as_text()
  assert set(re.findall(r"= (f32\[\d+,24\])\S* all-gather\(", text)) == {"f32[12,24]"}


def compiled_update(config, mesh, tokens, lengths_PG=None, chunk=64):
  """The compiled gradient of the log-probs of a prompt with two completions, or of others."""
  params = jax.eval_shape(lambda: model.init(jax.random.key(0), config))
  places = sharding.param_specs(params, mesh)

  def at(x, place):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

  lengths_PG = lengths_PG or [[tokens, tokens]]
  batch = jax.eval_shape(lambda: make_batch(lengths_PG, tokens=tokens, slots=tokens))
  batch = jax.tree.map(lambda x: at(x, sharding.batch_sharding(mesh)), batch)
  options = learner.StatsOptions(on_mesh(config, mesh), Learner(logprob_chunk=chunk, remat=True))

  def loss(params, batch):
    return learner.batch_stats(params, None, batch, options).logprobs_PGT.sum()

  grad = jax.jit(jax.grad(loss), out_shardings=places)
  return grad.lower(jax.tree.map(at, params, places), batch).compile()


@pytest.mark.slow
@pytest.mark.parametrize("heads", [8, 6])
def test_memory_falls_and_no_array_is_the_square_of_a_length(heads, monkeypatch):
  monkeypatch.setattr(ring, "MAX_SCORES", 2**16)
  monkeypatch.setattr(chunked, "MAX_SCORES", 2**16)
  tokens, sizes = 4096, {}
  config = dataclasses.replace(CONFIG, num_heads=heads, attention="chunked", embed_dim=64)
  for devices in (1, 4):
    compiled = compiled_update(config, mesh_of(context=devices), tokens)
    sizes[devices] = compiled.memory_analysis().temp_size_in_bytes
  text = compiled.as_text()
  shapes = [tuple(map(int, x.split(","))) for x in re.findall(r"(?:f32|pred)\[([\d,]+)\]", text)]
  own = tokens // 4
  assert not [shape for shape in shapes if sum(size >= own for size in shape) > 1]
  assert not [shape for shape in shapes if own in shape and CONFIG.vocab_size in shape]
  assert sizes[4] < sizes[1] / 2.5  # weights and scores do not fall


@pytest.mark.slow
def test_the_numbers_of_routers_stay_with_their_tokens(monkeypatch):
  """No device has an array of the experts for the tokens of all."""
  monkeypatch.setattr(chunked, "MAX_SCORES", 2**16)
  tokens, experts = 4096, 11
  config = dataclasses.replace(
    CONFIG,
    attention="chunked",
    num_experts=experts,
    experts_per_token=3,
    expert_dim=20,
    sparse_layers=(0, 1),
  )
  text = compiled_update(config, mesh_of(context=4), tokens).as_text()
  shapes = {tuple(map(int, x.split(","))) for x in re.findall(r"[a-z]+\d*\[([\d,]+)\]", text)}
  assert any(experts in shape for shape in shapes)
  assert not [shape for shape in shapes if experts in shape and max(shape) >= tokens]
  assert not [shape for shape in shapes if CONFIG.vocab_size in shape and max(shape) >= tokens // 4]
  assert not [shape for shape in shapes if sum(size >= tokens // 4 for size in shape) > 1]


# --- The mesh ---


def test_the_axis_is_there_only_where_it_is_used():
  assert mesh_of(data=8).axis_names == ("data", "fsdp", "expert", "tensor")
  mesh = mesh_of(fsdp=2, context=2, tensor=2)
  assert dict(mesh.shape) == dict(data=1, fsdp=2, context=2, expert=1, tensor=2)
  sampling = sampling_mesh(mesh, 2)
  assert dict(sampling.shape) == dict(data=4, fsdp=1, expert=1, tensor=2)
  assert list(sampling.devices.flat) == list(mesh.devices.flat)
  assert make_mesh(Mesh(data=1, context=-1)).shape["context"] == 8
  with pytest.raises(ConfigError, match="mesh.tensor=1, mesh.context=3 does not fit 8 devices"):
    make_mesh(Mesh(context=3))


def test_parameters_are_split_over_it_as_over_fsdp():
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), CONFIG))
  specs = sharding.param_specs(shapes, mesh_of(fsdp=2, context=2, tensor=2))
  assert specs["layers_0"]["mlp"]["up"]["kernel"].spec == PartitionSpec(
    None, ("fsdp", "context"), "tensor"
  )
  # 16 is no multiple of 3, and 3 does not divide it.
  whole = sharding.param_specs(shapes, mesh_of(fsdp=2, context=3))
  assert whole["head" if "head" in whole else "embed"]["embedding"].spec[1] == "fsdp"
  said = sharding.undivided(shapes, mesh_of(fsdp=2, context=3))
  line = "16 is not divisible by fsdp x context = 6: it is split over fsdp alone"
  assert any(line in x for x in said)
  # 3 divides 18, and 4 does not.
  odd = jax.eval_shape(
    lambda: model.init(jax.random.key(0), dataclasses.replace(CONFIG, embed_dim=18))
  )
  specs = sharding.param_specs(odd, mesh_of(fsdp=1, context=3))
  assert specs["embed"]["embedding"].spec[1] in ("context", ("fsdp", "context"))
  specs = sharding.param_specs(odd, mesh_of(fsdp=4, context=2))
  assert specs["embed"]["embedding"].spec[1] == "context"


def test_devices_share_rows_while_sampling_where_there_are_fewer_prompts_than_devices():
  config = with_section(small_config(), "mesh", context=4)
  config = with_section(with_section(config, "batch", prompts=2), "eval", every=0)
  run = Run(config, devices=jax.devices()[:4])
  assert dict(run.parameters.sampling.mesh.shape) == dict(data=2, fsdp=1, expert=1, tensor=2)
  check_batches(config, run.hosts)
  alone = with_section(config, "sampling", tensor=1)
  run = Run(alone, devices=jax.devices()[:4])
  wanted = "batch.prompts is 2: it must be a multiple of 4, so that the devices which learn"
  with pytest.raises(ConfigError, match=wanted):
    check_batches(alone, run.hosts)
  # One prompt at a time is learned on all four.
  run.hosts.check_rows({"batch.micro_batch": 1}, sampled=False)


def test_the_estimate_of_activations_falls_with_the_axis():
  config, sizes = small_config(), {}
  for devices in (1, 4):
    run = Run(with_section(config, "mesh", context=devices), devices=jax.devices()[:devices])
    needed = activation_bytes(config, run.parameters.model, run.parameters.abstract_policy)
    sizes[devices] = needed(8) - needed(4)
  assert sizes[4] < sizes[1] / 2


@pytest.mark.slow
def test_the_estimate_of_a_vision_tower_does_not_fall_with_the_axis():
  """A device computes the tower for all images of its prompts, which are most of this update."""
  shape, sizes = with_tower(), {}
  params = jax.eval_shape(functools.partial(model.init, config=shape), jax.random.key(0))
  for devices in (1, 4):
    split = on_mesh(shape, mesh_of(context=devices))
    needed = activation_bytes(small_config(), split, params, most=(32, 16))
    sizes[devices] = needed(8) - needed(4)
  assert sizes[1] * 0.7 < sizes[4] < sizes[1]


def test_a_plan_says_what_is_sent():
  of_heads = exchanges_in_words(on_mesh(CONFIG, mesh_of(context=2)))
  # Eight query heads with outputs, and two key heads with values, of which a half stays.
  assert f"all-to-all sends {2 * (8 + 2) / 2 * 6 * 4 / 1e3:.1f} KB for each token" in of_heads
  assert "by ring sends" in exchanges_in_words(on_mesh(RINGS, mesh_of(context=4)))


def test_a_plan_says_what_each_kind_of_layer_sends():
  lines = exchanges_in_words(on_mesh(DELTA, mesh_of(context=2))).splitlines()
  # Queries, keys and values of two of four heads there, in float32, with decays and strengths, and
  # what 8 values read back.
  sent = (4 * (2 * 5) + 8 * 3 + 2 * 8 + 8 * 3) * 4 / 2
  assert recurrence_bytes(on_mesh(DELTA, mesh_of(context=2))) == sent
  by, token = "by all-to-all sends", "KB for each token of a device"
  heads = "together, they compute 8 heads in place of 8"
  assert lines[1:] == [
    f"  1 of the layers: the delta rule {by} {sent / 1e3:.1f} {token}",
    f"  1 of the layers: attention {by} 0.2 {token}: {heads}",
  ]


def test_the_cheapest_exchange_is_taken():
  """A kernel pays for more heads, until these are too many."""
  qwen = SplitAttention(heads=28, key_heads=4, head_dim=128, item=2, devices=4, has_kernel=True)
  assert cheapest(qwen).name == "all-to-all"
  odd = dataclasses.replace(qwen, heads=9, key_heads=3, devices=8)
  assert odd.divisible_heads == 24
  assert cheapest(odd).name == "all-to-all"
  assert cheapest(dataclasses.replace(odd, has_kernel=False)).name == "ring"
  many = dataclasses.replace(qwen, heads=1, key_heads=1, devices=16)
  assert cheapest(many).name == "ring"
  assert cheapest(dataclasses.replace(many, has_pictures=True)).name == "all-to-all"
  # 28 query heads with outputs and 4 key heads with values, of which a quarter stays; or all of
  # them into pieces and back, and keys and values around 4 devices.
  assert [x.bytes_sent(qwen) for x in EXCHANGES[:2]] == [
    2 * 32 * 3 / 4 * 256,
    (2 * 32 + 2 * 4 * 4) * 256,
  ]
  # Of 8,192 tokens on a device, the next one gets an eighth, and all get as many of the prompt.
  windowed = dataclasses.replace(qwen, window=1024, has_kernel=False)
  assert cheapest(windowed).name == "halo"
  assert cheapest(windowed).bytes_sent(windowed) == 2 * 4 * 3 / 8 * 256
  # Other heads are not worth more scores, as a kernel is.
  assert cheapest(dataclasses.replace(windowed, has_kernel=True)).name == "all-to-all"
  assert cheapest(dataclasses.replace(windowed, has_pictures=True)).name == "all-to-all"


@pytest.mark.slow
def test_a_run_that_resumes_on_another_mesh_is_that_without_the_axis(tmp_path):
  """Its first two steps are with mesh.context, and its last one with mesh.fsdp."""
  config = small_config(kl_coef=0.1)
  config = dataclasses.replace(config, steps=3)
  config = with_section(config, "checkpoint", every=1)
  config = with_reward(config, tmp_path, REWARD)
  one, two = tmp_path / "one", tmp_path / "two"
  run_steps(config, one)
  first = dataclasses.replace(config, steps=2)
  run_steps(with_section(first, "mesh", context=2), two)
  run_steps(with_section(config, "mesh", fsdp=2), two)
  for ours, expected in zip(read_metrics(two), read_metrics(one), strict=True):
    for name in ("reward", "kl", "grad_norm", "entropy"):
      assert ours[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (ours["step"], name)


def run_command(devices, program, *flags):
  """The output of a command of the shell that has so many simulated devices."""
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": str(devices),
  }
  command = [sys.executable, "-m", f"grpo_jax.{program}", *flags]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.slow
def test_the_quick_start_and_an_evaluation_have_the_numbers_of_one_device(tmp_path):
  """Shortened, with a reward that differs between completions, and in float32."""
  (tmp_path / "reward.py").write_text(REWARD)
  keys = [
    *("steps=3", "warm_start.steps=6", "eval.every=3", "eval.examples=64", "eval.batch=64"),
    *("batch.prompts=8", "batch.micro_batch=4", "algo.kl_coef=0.1", "data.count_at_start=500"),
    f"reward.functions=('{tmp_path}/reward.py:reward',)",
  ]
  flags = ["--config=configs/arithmetic.py", *(f"--config.{key}" for key in keys)]
  for devices in (1, 2):
    folder = f"--workdir={tmp_path}/{devices}"
    run_command(devices, "train", folder, *flags, f"--config.mesh.context={devices}")
  one, two = (read_metrics(tmp_path / str(devices)) for devices in (1, 2))
  assert len(one) > 3
  for ours, expected in zip(two, one, strict=True):
    assert ours.keys() == expected.keys()
    for name in expected:
      if not name.startswith(("time/", "perf/", "memory/")):
        assert ours[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
  found = [run_command(n, "evaluate", f"--workdir={tmp_path}/2", "--samples=2") for n in (1, 2)]
  assert "64 test problems" in found[0]
  assert found[0] == found[1]
