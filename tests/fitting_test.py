"""What is chosen from lengths and from the memory of a device, and what older checkpoints hold."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_run import small_config, with_section

from grpo_jax import model
from grpo_jax.batches import collect
from grpo_jax.config import BatchSize, Config, Data, Eval, Learner, Mesh, Rollout, Sampling
from grpo_jax.learner.token_stats import StatsOptions, batch_stats
from grpo_jax.parallel.chips import Chip
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.parallel.sharding import batch_sharding, model_shardings, param_specs
from grpo_jax.run import fitting
from grpo_jax.run.memory import activation_bytes, device_bytes, sampler_bytes
from grpo_jax.run.run import Run
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.programs import most_rewound
from grpo_jax.sampler.sampling import Sampler
from grpo_jax.sampler.seats import Grid
from grpo_jax.sampler.stream import by_row
from grpo_jax.settings import ConfigError
from grpo_jax.storage.checkpoint import Checkpoints
from grpo_jax.types import Batch

CONFIG = Config(
  batch=BatchSize(prompts=16, group_size=4),
  sampling=Sampling(max_tokens=64),
  data=Data(max_prompt_tokens=32),
)


def shape_on(mesh, **fields):
  shape = model.ModelConfig(
    vocab_size=96, embed_dim=16, num_layers=3, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
  )
  return dataclasses.replace(shape, rows=batch_sharding(mesh), **fields)


@pytest.mark.slow
def test_the_largest_micro_batch_that_fits_is_taken():
  mesh = make_mesh(Mesh(2, 1, 1, 1), jax.devices()[:2])
  shape = shape_on(mesh)
  params = jax.eval_shape(functools.partial(model.init, config=shape), jax.random.key(0))

  def choose(config, memory):
    return fitting.micro_batch(config, fitting.Room(shape, params, 1000.0, memory))

  small = dataclasses.replace(CONFIG, sampling=Sampling(max_tokens=32))
  for prompts in (2, 4, 8, 16):  # multiples of the two devices that divide 16
    needed = activation_bytes(small, shape, params)(prompts // 2)
    memory = (needed + 1000) / 0.85 + 1
    assert choose(small, memory=memory) == prompts
    assert choose(small, memory=memory - 100) == max(2, prompts // 2)
  assert (
    choose(CONFIG, memory=1e12) == choose(CONFIG, memory=None) == 8
  )  # a CPU, 288 tokens each, 2048 on each of two devices
  assert choose(small, memory=None) == 16
  long = dataclasses.replace(CONFIG, sampling=Sampling(max_tokens=4096))
  assert choose(long, memory=None) == 2
  balanced = dataclasses.replace(CONFIG, learner=Learner(router_aux_coef=0.001))
  assert choose(balanced, memory=None) == 16
  given = dataclasses.replace(CONFIG, batch=dataclasses.replace(CONFIG.batch, micro_batch=4))
  assert choose(given, memory=1.0) == choose(given, memory=None) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
  "attention, remat",
  [
    ("dense", False),
    ("chunked", True),
  ],
)
def test_the_estimate_of_a_prompt_is_what_the_compiler_says_or_a_little_more(attention, remat):
  mesh = make_mesh(Mesh(1, 1, 1, 1), jax.devices()[:1])
  shape = shape_on(mesh, num_layers=6, embed_dim=64, mlp_dim=192, attention=attention)
  config = dataclasses.replace(CONFIG, learner=Learner(remat=remat, logprob_chunk=64))
  params = jax.eval_shape(functools.partial(model.init, config=shape), jax.random.key(0))
  options = StatsOptions(shape, config.learner)

  def loss(params, batch):
    return batch_stats(params, None, batch, options).logprobs_PGT.sum()

  def temporary(P):
    array, S, G, T = jax.ShapeDtypeStruct, 32, 4, 64
    batch = Batch(
      prompts_PS=array((P, S), jnp.int32),
      prompt_lengths_P=array((P,), jnp.int32),
      completions_PGT=array((P, G, T), jnp.int32),
      mask_PGT=array((P, G, T), jnp.float32),
      temperature_P=array((P,), jnp.float32),
    )
    compiled = jax.jit(jax.grad(loss)).lower(params, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  estimate = activation_bytes(config, shape, params)
  ratio = (estimate(16) - estimate(8)) / (temporary(16) - temporary(8))
  assert 1 <= ratio < 1.3


def test_inputs_of_layers_that_the_host_keeps_take_no_memory_of_a_device():
  mesh = make_mesh(Mesh(2, 1, 1, 1), jax.devices()[:2])
  shape = shape_on(mesh, dtype=jnp.bfloat16)
  params = jax.eval_shape(functools.partial(model.init, config=shape), jax.random.key(0))

  def needed(policy):
    learner = Learner(remat=True, remat_policy=policy)
    return activation_bytes(dataclasses.replace(CONFIG, learner=learner), shape, params)(1)

  inputs = 3 * (32 + 4 * 64) * 16 * 2  # layers, tokens of a prompt and its completions, D, bytes
  assert needed("nothing_saveable") - needed("offload") == inputs


def test_weights_lie_whole_while_sampling_where_they_fit():
  mesh = make_mesh(Mesh(1, 4, 1, 1), jax.devices()[:4])
  shape = shape_on(mesh)

  def held_on(there):
    """1,000 bytes, and a table of 16,000 that is split along `tensor`."""
    return 1000.0 + 16000 / there.shape["tensor"]

  # 3 layers, 2 heads of 8 numbers, keys and values: 4 prompts of a device, each of 32 + 4 * 64
  # tokens. Two copies of 16 rows of 96 logits.
  cache = 4 * (32 + 4 * 64) * 3 * 2 * 8 * 2 * 4 + 2 * 16 * 96 * 4
  config = dataclasses.replace(CONFIG, eval=Eval(every=1, batch=8))
  assert sampler_bytes(config, shape) == cache
  drawn = dataclasses.replace(CONFIG, eval=Eval(every=1, batch=8, samples=16))
  assert sampler_bytes(drawn, shape) == (2 * (32 + 16 * 64) * 3 * 2 * 8 * 2 * 4 + 2 * 32 * 96 * 4)
  split = functools.partial(fitting.sampling_tensor, config, shape, held_on, mesh, chip=None)
  enough = (1000 + 16000 + cache) / 0.93
  assert split(enough + 1) == split(None) == 1 and split(enough - 1) == 2
  # Two devices share the weights, and the rows of two. Four cannot share two heads.
  assert split((1000 + 8000 + cache) / 0.93 + 1) == split(1.0) == 2
  # Where the rows never fit all at once, weights that leave half of the memory are not split.
  assert split(2 * (1000 + 16000) / 0.93 + 1) == 1 and split(2 * (1000 + 16000) / 0.93 - 1) == 2
  given = dataclasses.replace(config, sampling=Sampling(tensor=2))
  assert fitting.sampling_tensor(given, shape, held_on, mesh, 1.0, None) == 2
  whole = make_mesh(Mesh(4, 1, 1, 1), jax.devices()[:4])
  assert fitting.sampling_tensor(config, shape, held_on, whole, 1.0, None) == 1


def test_more_devices_share_a_row_where_reading_weights_takes_longer_than_messages():
  mesh = make_mesh(Mesh(1, 4, 1, 1), jax.devices()[:4])
  shape = shape_on(mesh)

  def devices(weights, link_bandwidth, memory=1e15, shape=shape):
    chip = Chip(memory, 1.0, 1e9, link_bandwidth)  # reads 1 GB a second

    def held_on(there):
      return 1000.0 + weights / there.shape["tensor"]

    return fitting.sampling_tensor(CONFIG, shape, held_on, mesh, memory, chip)

  # Two sums in each of 3 layers take 20 microseconds each. Two devices save half of the weights,
  # at a byte in a nanosecond. Four cannot share two heads.
  saved = 2 * 3 * 20e-6 * 1e9
  assert devices(2 * saved + 100, 1e15) == 2 and devices(2 * saved - 100, 1e15) == 1
  # Two devices have 32 of 64 rows of 16 numbers, and each sends as many bytes as these have.
  sent = 2 * 3 * 32 * 16 * 4
  assert devices(2 * (saved + sent) + 100, 1e9) == 2 and devices(2 * (saved + sent) - 100, 1e9) == 1
  # Where not all rows fit, memory alone counts.
  assert devices(3e5, 1e15) == 2 and devices(3e5, 1e15, memory=6.48e5) == 1
  mixture = dataclasses.replace(shape, num_experts=4, experts_per_token=2)
  assert devices(1e9, 1e15, shape=mixture) == 1


@pytest.mark.parametrize("micro_batch", [0, 4])
def test_layers_keep_their_products_where_these_fit(micro_batch, monkeypatch):
  shape = shape_on(make_mesh(Mesh(2, 1, 1, 1), jax.devices()[:2]), dtype=jnp.bfloat16)
  params = jax.eval_shape(functools.partial(model.init, config=shape), jax.random.key(0))

  def config_of(policy, remat=True):
    learner = Learner(remat=remat, remat_policy=policy)
    batch = dataclasses.replace(CONFIG.batch, micro_batch=micro_batch)
    return dataclasses.replace(CONFIG, learner=learner, batch=batch)

  room = functools.partial(fitting.Room, shape, params, 1000.0)
  on_cpu = fitting.with_policy(config_of("auto"), room(1e12))  # other programs share its memory
  assert on_cpu == config_of("nothing_saveable")
  monkeypatch.setattr(model.ModelConfig, "platform", "gpu")
  prompts = micro_batch // 2 or 1  # on each of two devices
  needed = activation_bytes(config_of("dots_with_no_batch_dims_saveable"), shape, params)(prompts)
  enough = (needed + 1000) / 0.85

  def kept(memory, policy="auto", remat=True):
    config = fitting.with_policy(config_of(policy, remat), room(memory))
    return config.learner.saved_activations

  assert kept(enough + 1) == "dots_with_no_batch_dims_saveable"
  assert kept(enough - 1) == kept(None) == "nothing_saveable"
  assert kept(1e12, "offload") == "offload" and kept(1e12, remat=False) == ""


def test_rows_that_stay_in_flight_leave_room_for_the_cache_of_an_evaluation():
  mesh = make_mesh(Mesh(1, 4, 1, 1), jax.devices()[:4])
  shape, call = shape_on(mesh), (16, 4)
  choose = functools.partial(fitting.rows_in_flight, shape=shape, held=1000.0, call=call)
  stays = dataclasses.replace(CONFIG, rollout=Rollout(max_staleness=1, weights="in_flight"))
  for config, caches in (
    (dataclasses.replace(stays, eval=Eval(every=1)), 2),
    (dataclasses.replace(stays, eval=Eval(every=0)), 1),
    (dataclasses.replace(CONFIG, eval=Eval(every=1)), 1),
    (dataclasses.replace(stays, eval=Eval(every=1), mesh=Mesh(sampler=1)), 1),
  ):
    memory = (caches * sampler_bytes(config, shape, 0, call) + 1000) / 0.93 + 1
    assert choose(config, memory=memory) == 0 < choose(config, memory=memory - 100)


def test_rows_whose_weights_change_in_flight_have_copies_of_their_prompts():
  """Each free seat goes to the oldest group, so no two rows share a place."""
  mesh = make_mesh(Mesh(1, 4, 1, 1), jax.devices()[:4])
  shape = shape_on(mesh)
  config = dataclasses.replace(CONFIG, rollout=Rollout(max_staleness=1, weights="in_flight"))
  # 16 rows of a device, each with 32 + 64 tokens.
  expected = 16 * (32 + 64) * 3 * 2 * 8 * 2 * 4 + 2 * 16 * 96 * 4
  assert sampler_bytes(dataclasses.replace(config, eval=Eval(every=0)), shape) == expected
  evaluation = dataclasses.replace(config, eval=Eval(every=1, batch=8, samples=16))
  assert sampler_bytes(evaluation, shape, call=(8, 16)) == sampler_bytes(
    dataclasses.replace(CONFIG, eval=evaluation.eval), shape, call=(8, 16)
  )


@pytest.mark.slow
def test_an_update_finds_the_rows_that_stay_in_flight_in_its_account():
  whole = Run(small_config(old_logprobs="sampler")).programs
  rollout = dict(max_staleness=1, weights="in_flight")
  kept = Run(with_section(small_config(old_logprobs="sampler"), "rollout", **rollout)).programs
  assert whole.flight_bytes == 0 < kept.flight_bytes
  assert kept.estimate_of_update[0] == whole.estimate_of_update[0] + kept.flight_bytes


def test_as_many_rows_as_fit_are_in_flight():
  mesh = make_mesh(Mesh(1, 4, 1, 1), jax.devices()[:4])
  shape = shape_on(mesh)
  choose = functools.partial(fitting.rows_in_flight, shape=shape, held=1000.0, call=(16, 4))
  config = dataclasses.replace(CONFIG, eval=Eval(every=0))
  for rows in (64, 32, 16, 8, 4):
    needed = sampler_bytes(config, shape, rows)
    memory = (needed + 1000) / 0.93 + 1
    assert choose(config, memory=memory) == (rows if rows < 64 else 0)  # 0: all
    assert choose(config, memory=memory - 100) == max(4, rows // 2)  # a row for each device
  assert choose(config, memory=None) == 0
  # More draws are evaluated than a step samples, which is nothing to the step.
  drawn = dataclasses.replace(config, eval=Eval(every=1, batch=8, samples=16))
  memory = (sampler_bytes(drawn, shape, 0) + 1000) / 0.93 + 1
  for_eval = functools.partial(choose, drawn, call=(8, 16))
  assert for_eval(memory=memory) == 0 and for_eval(memory=memory - 100) == 64
  assert choose(drawn, memory=memory - 100) == 0
  # 16 rows are in 16 places, each with its prompt: 4 on a device. Two copies of 96 logits a row.
  cache, logits = 4 * (32 + 64) * 3 * 2 * 8 * 2 * 4, 4 * 96 * 4
  assert sampler_bytes(CONFIG, shape, 16) == cache + 2 * logits
  filtered = dataclasses.replace(CONFIG, sampling=Sampling(max_tokens=64, top_p=0.9))
  assert sampler_bytes(filtered, shape, 16) == cache + 4 * logits
  given = dataclasses.replace(CONFIG, sampling=Sampling(max_tokens=64, rows=12))
  assert choose(given, memory=1.0) == choose(given, memory=None) == 12


def test_a_tpu_holds_prompts_twice_and_half_of_the_rows_again_while_they_grow(monkeypatch):
  """Heads of 8 numbers are decoded without the kernel. In 16 places are 16 rows."""
  monkeypatch.setattr(model.ModelConfig, "platform", "tpu")
  shape = shape_on(make_mesh(Mesh(1, 4, 1, 1), jax.devices()[:4]))
  token, logits = 3 * 2 * 8 * 2 * 4, 4 * 96 * 4
  assert sampler_bytes(CONFIG, shape, 16) == 4 * (2 * 32 + 64) * token + 4 * 64 * token / 2
  large = dataclasses.replace(shape, vocab_size=96000)  # whose logits are more than that half
  assert sampler_bytes(CONFIG, large, 16) == 4 * (2 * 32 + 64) * token + 2 * 1000 * logits


MIXERS = [
  *(pytest.param(x, marks=pytest.mark.slow) for x in ("gemma4", "gemma4_e", "gpt_oss", "mistral")),
  *("gemma3", "qwen3_5", "deepseek_v3"),
]


@pytest.mark.parametrize("cache_dtype", ["", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MIXERS)
def test_the_bytes_of_a_cache_are_those_of_its_arrays(name, cache_dtype):
  """Of each kind of layer, with its heads on two devices where they can be split."""
  config = model.load_config(Path(__file__).parent / "golden" / "families" / name)
  mesh = make_mesh(Mesh(data=1, fsdp=1, tensor=2), jax.devices()[:2])
  config = dataclasses.replace(config, cache_dtype=cache_dtype, **model_shardings(config, mesh))
  params = jax.eval_shape(functools.partial(model.init, config=config), jax.random.key(0))
  sampler, settings = Sampler(config, Decoding(max_tokens=100)), by_row(RowSettings(), 1, 6)
  for slots in (8, 100):
    flight = sampler.programs.abstract(Grid(2, 3), slots, params, 12, settings)
    cache, rewind = flight.cache, most_rewound(sampler.programs.columns)
    found = device_bytes((cache.keys, cache.values, cache.states))
    prompts = cache.prefix
    of_prompts = device_bytes((prompts.keys, prompts.values, prompts.states))
    expected = model.cache_bytes(config, 12, slots, rewind)
    assert (2 * expected.place, 6 * expected.row) == (of_prompts, found)


def test_windows_take_less_of_the_estimate():
  mesh = make_mesh(Mesh(1, 1, 1, 1), jax.devices()[:1])
  config = dataclasses.replace(CONFIG, sampling=Sampling(max_tokens=4096))
  of_windows = (), (16, 0, 16)
  whole, rings = (sampler_bytes(config, shape_on(mesh, windows=windows)) for windows in of_windows)
  # Two layers have 16 + 61 slots of 4,096 for each of 64 rows, and 16 of 32 for each of 16 prompts.
  spared = 2 * (64 * (4096 - 77) + 16 * (32 - 16)) * 2 * 8 * 2 * 4
  assert whole - rings == spared


def test_completions_are_cut_to_a_few_lengths():
  assert collect.cut_lengths(512) == [64, 128, 256, 512] and collect.cut_lengths(36) == [36]
  tree = {"tokens": np.arange(2 * 3 * 512).reshape(2, 3, 512), "scores": np.ones((2, 3, 1))}
  cut = collect.cut(tree, np.array([[5, 65, 1], [0, 2, 3]]), 512)
  np.testing.assert_array_equal(cut["tokens"], tree["tokens"][..., :128])
  assert cut["scores"].shape == (2, 3, 1)
  assert collect.cut(tree, np.array([[512]]), 512)["tokens"].shape == (2, 3, 512)


@pytest.mark.parametrize("windows", [(), (4, 0, 4)])
@pytest.mark.slow
def test_a_checkpoint_of_single_layers_is_restored_as_stacks(windows, tmp_path):
  """As versions before 2026-11-22 saved them: parameters and moments, on a mesh."""
  mesh = make_mesh(Mesh(1, 2, 1, 1), jax.devices()[:2])
  config = shape_on(mesh, windows=windows)
  apart = dataclasses.replace(config, unrolled=True)
  params = jax.jit(model.init, static_argnums=1)(jax.random.key(0), config)
  layers = jax.tree.map(lambda x: x, model.unrolled(params, config))
  for name in [name for name in layers if name.startswith("layers_")]:
    layers[name] = jax.tree.map(lambda x: x[0], layers[name])
  assert set(layers) == set(jax.eval_shape(lambda: model.init(jax.random.key(0), apart)))
  optimizer = optax.adamw(1e-3)
  saved = {"params": layers, "opt_state": optimizer.init(layers)}
  store = Checkpoints(tmp_path, keep=1)
  store.save(3, saved)
  store.close()

  def place(x, where):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

  places = param_specs(params, mesh)
  wanted = {"params": jax.tree.map(place, params, places)}
  wanted["opt_state"] = jax.eval_shape(optimizer.init, wanted["params"])
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  wanted["opt_state"] = jax.tree.map(lambda x: place(x, everywhere), wanted["opt_state"])
  layers_of = functools.partial(model.layer_names, config=config)
  step, restored = Checkpoints(tmp_path, keep=1, layers_of=layers_of).restore_latest(wanted)
  assert step == 3
  jax.tree.map(np.testing.assert_array_equal, restored["params"], params)
  assert jax.tree.map(jnp.shape, restored["opt_state"][0].mu) == jax.tree.map(jnp.shape, params)
  gate = restored["params"]["layers_0"]["mlp"]["gate"]["kernel"]
  assert gate.sharding.is_equivalent_to(places["layers_0"]["mlp"]["gate"]["kernel"], gate.ndim)
  with pytest.raises(ConfigError, match="layers_0"):
    Checkpoints(tmp_path, keep=1).restore_latest(wanted)
