"""Models that see images compute what transformers computes (tests/golden/make_vision.py).

Run `pytest -s -n 0` to print the largest differences.
"""

import dataclasses
from pathlib import Path
import shutil

from flax.traverse_util import flatten_dict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax import model
from grpo_jax.model.huggingface import config_json, families
from grpo_jax.model.stacks import Places
from grpo_jax.types import Images

GOLDEN = Path(__file__).parent / "golden" / "vision"
BOUND, G, T = 1e-4, 2, 5


@pytest.fixture(scope="module", params=sorted(x.name for x in GOLDEN.iterdir()))
def golden(request):
  config, params = model.load(GOLDEN / request.param, vision=True)
  return request.param, config, params, np.load(GOLDEN / request.param / "expected.npz")


def images_of(expected):
  return Images(
    patches_PINC=jnp.asarray(expected["patches"]),
    places_PIN2=jnp.asarray(expected["places"]),
    seen_PS2=jnp.asarray(expected["seen"]),
    positions_PS3=jnp.asarray(expected["positions"]) if "positions" in expected else None,
    next_P=jnp.asarray(expected["next"]) if "next" in expected else None,
  )


def check(name, how, found, expected, valid_BT):
  difference = np.abs(np.where(valid_BT[..., None], found - expected, 0)).max()
  print(f"{name}, {how}: largest difference of a logit {difference:.1e}")
  assert valid_BT.any() and np.abs(expected[valid_BT]).max() > 1 and difference <= BOUND


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


@pytest.mark.parametrize("how", ["rows", "packed"])
@pytest.mark.parametrize("attention", ["dense", "chunked"])
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
    arguments = tokens_PS, positions_PS, None, lengths_P, visual
    _, cache = model.features(params, config, *arguments)
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


def test_saved_folders_are_equal_when_they_are_read_back(golden, tmp_path):
  _, config, params, _ = golden
  model.save(tmp_path / "saved", config, params)
  again, loaded = model.load(tmp_path / "saved", vision=True)
  assert again == config
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


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
    arguments = tokens_PS, groups, None, remat, visual
    hidden_PSD, _ = model.group_features(params, own, *arguments)
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


def test_the_text_part_alone_can_be_read(golden):
  """It is what a language model of its own has."""
  name, config, params, _ = golden
  text_config, text_params = model.load(GOLDEN / name)
  assert text_config == dataclasses.replace(config, vision=None)
  assert model.ignores_parts(GOLDEN / name) and not model.ignores_parts(GOLDEN / name, vision=True)
  assert params.keys() - text_params.keys() == {"vision"}
  of_text = {key: value for key, value in params.items() if key != "vision"}
  jax.tree.map(np.testing.assert_array_equal, text_params, of_text)


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
