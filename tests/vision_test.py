"""Models that see images compute what transformers computes (tests/golden/make_vision.py).

Run `pytest -s -n 0` to print the largest differences.
"""

import dataclasses
import functools
from pathlib import Path
import shutil

from flax.traverse_util import flatten_dict
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_batch import images_of

from grpo_jax import model
from grpo_jax.model.attention import chunked
from grpo_jax.model.huggingface import config_json, families
from grpo_jax.model.stacks import Places
from grpo_jax.model.towers import attention as attention_of_towers
from grpo_jax.parallel import sharding

GOLDEN = Path(__file__).parent / "golden" / "vision"
BOUND, G, T = 1e-4, 2, 5
# Its decays and routers make much of rounding: float32 of transformers is 2e-4 away from its own
# float64, and ours 1.3e-4. Two results in float32 may differ by twice that.
BOUNDS = {"qwen3_5_moe": 4e-4}


def _params(*fast):
  """All checkpoints, of which these alone are read by the fast tests."""
  for name in sorted(x.name for x in GOLDEN.iterdir()):
    marks = () if name in fast else pytest.mark.slow
    yield pytest.param(name, id=name, marks=marks)


@pytest.fixture(scope="module", params=_params("qwen3_vl"))
def golden(request):
  config, params = model.load(GOLDEN / request.param, vision=True)
  return request.param, config, params, np.load(GOLDEN / request.param / "expected.npz")


def check(name, how, found, expected, valid_BT):
  difference = np.abs(np.where(valid_BT[..., None], found - expected, 0)).max()
  print(f"{name}, {how}: largest difference of a logit {difference:.1e}")
  assert valid_BT.any() and np.abs(expected[valid_BT]).max() > 1
  assert difference <= BOUNDS.get(name, BOUND)


def test_logits_are_those_of_transformers(golden):
  """Rows of different lengths that see 0, 1 and 3 images, in one pass."""
  name, config, params, expected = golden
  tokens_BT = jnp.asarray(expected["tokens"])
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  valid_BT = np.asarray(positions_BT) < expected["lengths"][:, None]

  @jax.jit
  def run(params):
    visual = model.encode(params, config, images_of(expected))
    return model.forward(params, config, tokens_BT, positions_BT, visual=visual)[0]

  check(name, "one pass", run(params), expected["logits"], valid_BT)


def completions_of(expected):
  """Tokens [P, G, T] of completions, and how many of them each has."""
  rng = np.random.default_rng(0)
  tokens_PGT = rng.integers(4, 60, (len(expected["tokens"]), G, T), dtype=np.int32)
  return tokens_PGT, np.array([[5, 3], [1, 4], [2, 5]])


def next_of(expected):
  return expected["next"] if "next" in expected else expected["lengths"]


@pytest.fixture(scope="module")
def one_by_one(golden):
  """The logits [P, G, T, V] of each completion in a row of its own, after its prompt."""
  _, config, params, expected = golden
  tokens_PGT, _ = completions_of(expected)
  images, longest = images_of(expected), expected["tokens"].shape[1] + T
  place_T = np.arange(longest)

  def row(p, g):
    """The row of a completion: prompt, completion and padding, and what it sees."""
    length = expected["lengths"][p]
    tokens_T = np.concatenate([expected["tokens"][p, :length], tokens_PGT[p, g]])
    tokens_T = np.pad(tokens_T, (0, longest - len(tokens_T)))
    positions_T = np.where(place_T < length, place_T, next_of(expected)[p] + place_T - length)
    own = jax.tree.map(lambda x: x[p : p + 1], images)
    seen_1T2 = jnp.pad(own.seen_PS2, ((0, 0), (0, T), (0, 0)), constant_values=-1)
    own = own.replace(seen_PS2=seen_1T2)
    if own.positions_PS3 is not None:
      positions_1T3 = np.repeat(positions_T[None, :, None], 3, axis=2)
      positions_1T3[:, :length] = own.positions_PS3[:, :length]
      own = own.replace(positions_PS3=jnp.asarray(positions_1T3))
    return tokens_T[None], positions_T[None], own

  @jax.jit
  def run(params, tokens_1T, positions_1T, own):
    visual = model.encode(params, config, own)
    return model.forward(params, config, tokens_1T, positions_1T, visual=visual)[0]

  def logits(p, g):
    length = expected["lengths"][p]
    return run(params, *row(p, g))[0, length : length + T]

  return np.stack([[logits(p, g) for g in range(G)] for p in range(len(tokens_PGT))])


@pytest.mark.slow
@pytest.mark.parametrize("golden", _params("qwen3_vl"), indirect=True)
@pytest.mark.parametrize(
  ("how", "attention"),
  [
    ("rows", "dense"),
    ("packed", "dense"),
    ("packed", "chunked"),
  ],
)
def test_a_group_is_its_rows_one_by_one(golden, one_by_one, how, attention):
  """With images encoded once for all completions of a prompt."""
  name, config, params, expected = golden
  config = dataclasses.replace(config, attention=attention)
  tokens_PGT, counts_PG = completions_of(expected)
  tokens_PS, P = jnp.asarray(expected["tokens"]), len(tokens_PGT)
  packing = model.make_packing(jnp.asarray(counts_PG), T, 9) if how == "packed" else None
  lengths_P = jnp.asarray(expected["lengths"])
  groups = model.Groups(lengths_P, tokens_PS.shape[1], G, T, packing)
  own_PC = jnp.asarray(tokens_PGT.reshape(P, G * T))
  own_PN = own_PC if packing is None else model.pack(own_PC, packing)

  @jax.jit
  def run(params):
    visual = model.encode(params, config, images_of(expected))
    tokens_PN = jnp.concatenate([tokens_PS, own_PN], 1)
    hidden_PND, _ = model.group_features(params, config, tokens_PN, groups, visual=visual)
    own_PND = hidden_PND[:, tokens_PS.shape[1] :]
    own_PND = own_PND if packing is None else model.unpack(own_PND, packing)
    return model.unembed(params, config, own_PND)

  valid_PGT = np.arange(T) < counts_PG[..., None]
  found_PGTV = np.asarray(run(params)).reshape(one_by_one.shape)
  check(name, f"group, {how}, {attention}", found_PGTV, one_by_one, valid_PGT)


@pytest.mark.slow
@pytest.mark.parametrize("golden", _params("qwen3_vl"), indirect=True)
def test_decoding_with_a_cache_is_the_forward_pass(golden, one_by_one):
  """Token by token after prompts that are computed once."""
  name, config, params, expected = golden
  tokens_PGT, _ = completions_of(expected)
  tokens_PS, lengths_P = jnp.asarray(expected["tokens"]), jnp.asarray(expected["lengths"])
  positions_PS = jnp.broadcast_to(jnp.arange(tokens_PS.shape[1]), tokens_PS.shape)
  config = dataclasses.replace(config, length=tokens_PS.shape[1] + T)
  first_B = jnp.repeat(jnp.asarray(next_of(expected)), G)

  @jax.jit
  def run(params):
    visual = model.encode(params, config, images_of(expected))
    arguments = tokens_PS, positions_PS, None, lengths_P
    _, cache = model.features(params, config, *arguments, visual=visual)
    cache = model.empty_cache(config, model.as_prefix(cache, lengths_P), G, slots=T)

    def step(cache, inputs):
      tokens_B, time = inputs
      arguments = tokens_B[:, None], (first_B + time)[:, None], cache
      logits_B1V, cache = model.forward(params, config, *arguments)
      return cache, logits_B1V[:, 0]

    own_BT = jnp.asarray(tokens_PGT.reshape(-1, T))
    _, logits_TBV = jax.lax.scan(step, cache, (own_BT.T, jnp.arange(T)))
    return logits_TBV.swapaxes(0, 1)

  found_PGTV = np.asarray(run(params)).reshape(one_by_one.shape)
  check(name, "token by token", found_PGTV, one_by_one, np.ones(tokens_PGT.shape, bool))


@pytest.mark.slow
@pytest.mark.parametrize("golden", _params("qwen3_vl"), indirect=True)
def test_saved_folders_are_equal_when_they_are_read_back(golden, tmp_path):
  _, config, params, _ = golden
  model.save(tmp_path / "saved", config, params)
  again, loaded = model.load(tmp_path / "saved", vision=True)
  assert again == config
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.slow
def test_gradients_are_those_of_transformers():
  """Of every tensor of decoder and tower, and 0 in a tower that is frozen."""
  folder = GOLDEN / "qwen3_vl"
  config, params = model.load(folder, vision=True)
  expected, gradients = np.load(folder / "expected.npz"), np.load(folder / "gradients.npz")
  tokens_PS, lengths_P = jnp.asarray(expected["tokens"]), jnp.asarray(expected["lengths"])
  valid_PS = np.arange(tokens_PS.shape[1]) < expected["lengths"][:, None]

  def loss(params, trained, remat=""):
    vision = dataclasses.replace(config.vision, trained=trained)
    own = dataclasses.replace(config, vision=vision)
    visual = model.encode(params, own, images_of(expected), remat)
    groups = model.Groups(lengths_P, tokens_PS.shape[1])
    arguments = tokens_PS, groups, None, remat
    hidden_PSD, _ = model.group_features(params, own, *arguments, visual=visual)
    probs_PSV = jax.nn.softmax(model.unembed(params, own, hidden_PSD))
    return (jnp.square(probs_PSV).sum(-1) * valid_PS).sum()

  gradient = jax.jit(jax.grad(loss), static_argnums=(1, 2))
  found = flatten_dict(gradient(params, True), sep="/")
  sizes, places, largest = families.sizes(config), Places(config), 0.0
  whole, names = config_json.whole_of(config), set()
  for spec in config_json.all_tensors(config):
    names.add(name := whole.saved(spec).hf_name)
    theirs = gradients[name]
    ours = spec.to_hf(np.asarray(places.take(found, spec.leaf_name)), sizes)
    difference = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    largest = max(largest, difference)
    assert difference <= BOUND, (name, difference)
  print(f"largest difference of a gradient {largest:.1e}")
  assert names == set(gradients.files)
  again = flatten_dict(gradient(params, True, "nothing_saveable"), sep="/")
  frozen = flatten_dict(gradient(params, False), sep="/")
  for name, leaf in found.items():
    np.testing.assert_allclose(again[name], leaf, rtol=1e-3, atol=1e-5)
    of_tower = name.startswith("vision/")
    np.testing.assert_allclose(frozen[name], 0 * leaf if of_tower else leaf, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("golden", _params("gemma3"), indirect=True)
def test_the_text_part_alone_can_be_read(golden):
  """It is what a language model of its own has."""
  name, config, params, _ = golden
  text_config, text_params = model.load(GOLDEN / name)
  assert text_config == dataclasses.replace(config, vision=None)
  assert model.ignores_parts(GOLDEN / name) and not model.ignores_parts(GOLDEN / name, vision=True)
  assert params.keys() - text_params.keys() == {"vision"}
  of_text = {key: value for key, value in params.items() if key != "vision"}
  jax.tree.map(np.testing.assert_array_equal, text_params, of_text)


@pytest.mark.slow
def test_experts_are_read_as_they_are_published(tmp_path):
  """The folders of Qwen3-VL have the transposes of what transformers 5 saves."""
  folder = shutil.copytree(GOLDEN / "qwen3_vl_moe", tmp_path / "model")
  tensors = load_file(folder / "model.safetensors")
  for name, tensor in tensors.items():
    if "experts" in name:
      tensors[name] = np.ascontiguousarray(tensor.swapaxes(1, 2))
  save_file(tensors, folder / "model.safetensors")
  _, params = model.load(folder, vision=True)
  _, expected = model.load(GOLDEN / "qwen3_vl_moe", vision=True)
  jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.slow
@pytest.mark.parametrize("golden", _params("gemma3", "qwen2_5_vl"), indirect=True)
def test_pictures_with_many_patches_are_computed_in_chunks(golden, monkeypatch):
  """A chunk of queries at a time, and fewer pictures: outputs and gradients are the same."""
  name, config, params, expected = golden
  config = dataclasses.replace(
    config, vision=dataclasses.replace(config.vision, trained=True), attention="chunked"
  )
  tokens_BT = jnp.asarray(expected["tokens"])
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  valid_BT = np.asarray(positions_BT) < expected["lengths"][:, None]

  def loss(params):
    visual = model.encode(params, config, images_of(expected))
    logits_BTV = model.forward(params, config, tokens_BT, positions_BT, visual=visual)[0]
    return (jnp.square(jax.nn.softmax(logits_BTV)).sum(-1) * valid_BT).sum(), logits_BTV

  def run():
    """Traces it again, because what is patched below is read then."""
    return jax.jit(jax.value_and_grad(lambda params: loss(params), has_aux=True))(params)

  (_, whole), of_whole = run()
  monkeypatch.setattr(attention_of_towers, "MAX_SCORES", 2000)
  monkeypatch.setattr(chunked, "MAX_CHUNK", 8)
  (_, found), gradients = run()
  check(name, "in chunks", found, whole, valid_BT)
  # One unit in the last place of each weight moves the gradients of qwen3_5_moe by up to 1.5e-4.
  bound = 3e-4 if name == "qwen3_5_moe" else 1e-4
  for ours, theirs in zip(jax.tree.leaves(gradients), jax.tree.leaves(of_whole), strict=True):
    assert np.linalg.norm(ours - theirs) <= bound * np.linalg.norm(theirs) + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("golden", _params("qwen3_vl"), indirect=True)
def test_a_mesh_splits_tower_and_images(golden):
  """Every parameter has a rule, and prompts, heads and weights lie on several devices."""
  name, config, params, expected = golden
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 1, 1, 2), ("data", "fsdp", "expert", "tensor"))
  places = sharding.param_specs(params, mesh)
  config = dataclasses.replace(config, **sharding.model_shardings(config, mesh))
  rows = sharding.batch_sharding(mesh)

  def twice(x):  # so that the mesh divides the rows
    return jax.device_put(jnp.concatenate([x, x])[:4], rows)

  images = jax.tree.map(twice, images_of(expected))
  tokens_BT = twice(jnp.asarray(expected["tokens"]))
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  lengths_B = np.concatenate([expected["lengths"]] * 2)[:4]

  @jax.jit
  def run(params):
    visual = model.encode(params, config, images)
    return model.forward(params, config, tokens_BT, positions_BT, visual=visual)[0]

  found_BTV = run(jax.device_put(params, places))
  expected_BTV = np.concatenate([expected["logits"]] * 2)[:4]
  check(name, "mesh", found_BTV, expected_BTV, np.asarray(positions_BT) < lengths_B[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "smolvlm"])
def test_adapters_in_a_trained_tower_compute_what_merged_weights_do(name, tmp_path):
  """And their folders are read back, with the names that the whole model has."""
  config, params = model.load(GOLDEN / name, vision=True)
  vision = dataclasses.replace(config.vision, trained=True)
  modules = {"qwen3_vl": "qkv", "qwen2_5_vl": "gate_proj", "smolvlm": "out_proj"}
  targets = model.kernels_of(["q_proj", modules[name]])
  lora = model.AdapterShape(rank=2, alpha=4.0, rslora=False, targets=targets)
  config = dataclasses.replace(config, vision=vision, lora=lora)
  adapters = model.init_adapters(jax.random.key(0), config, params)
  adapters = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape) * 0.3, adapters)
  assert "vision" in adapters
  expected = np.load(GOLDEN / name / "expected.npz")
  tokens_BT = jnp.asarray(expected["tokens"])
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  valid_BT = np.asarray(positions_BT) < expected["lengths"][:, None]

  @functools.partial(jax.jit, static_argnums=1)
  def run(params, config):
    visual = model.encode(params, config, images_of(expected))
    return model.forward(params, config, tokens_BT, positions_BT, visual=visual)[0]

  joined = model.join(params, adapters)
  with_adapters = run(joined, config)
  model.save(tmp_path / "merged", config, joined)
  merged_config, merged = model.load(tmp_path / "merged", vision=True)
  check(name, "adapters", with_adapters, run(merged, merged_config), valid_BT)
  assert np.abs(with_adapters - run(params, merged_config))[valid_BT].max() > 0.1
  model.save_adapters(tmp_path / "peft", config, adapters, base="base")
  names = load_file(tmp_path / "peft" / "adapter_model.safetensors").keys()
  text_at = config_json.whole_of(config).text_at
  assert all(x.startswith("base_model.model.model.") for x in names)
  assert any(x.startswith(f"base_model.model.{text_at}layers.") for x in names)
  again = model.load_adapters(tmp_path / "peft", config)
  jax.tree.map(np.testing.assert_array_equal, again, adapters)
