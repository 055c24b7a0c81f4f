"""What Gemma 4 alone has: borrowed keys, heads that differ by layer, two forms of its config."""

import dataclasses
import functools
import json
from pathlib import Path
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax import model
from grpo_jax.config import Mesh
from grpo_jax.learner.optimizer import decayed
from grpo_jax.model.attention import make_packing
from grpo_jax.model.rope import RopeScaling, proportional
from grpo_jax.model.stacks import segments
from grpo_jax.parallel import sharding
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.settings import ConfigError

FAMILIES = Path(__file__).parent / "golden" / "families"
SLIDES, FULL = "sliding_attention", "full_attention"
_DEFAULT = {"rope_theta": 1e4, "rope_type": "default"}
_LINEAR = {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}
_LATE = [FULL] * 2 + [SLIDES] * 3 + [FULL]  # the first layer with a window borrows


def copied(tmp_path, name, **fields):
  """A folder of tests/golden with other fields in its config.json. None removes one."""
  folder = tmp_path / "model"
  shutil.copytree(FAMILIES / name, folder)
  values = json.loads((folder / "config.json").read_text()) | fields
  values = {key: value for key, value in values.items() if value is not None}
  (folder / "config.json").write_text(json.dumps(values))
  return folder


def test_the_last_layers_borrow_from_the_last_layer_with_their_window():
  """As E4B has it: 42 layers, every sixth without a window, of which 18 borrow."""
  windows = (*[512] * 5, 0) * 7
  config = model.load_config(FAMILIES / "gemma4_e")
  config = dataclasses.replace(config, num_layers=42, windows=windows, borrowing_layers=18)
  keys = [config.kind(layer).keys for layer in range(42)]
  assert keys == ["own"] * 22 + ["lent"] * 2 + ["borrowed"] * 18
  widths = [config.kind(layer).mlp_dim for layer in range(42)]
  assert widths == [config.mlp_dim] * 24 + [2 * config.mlp_dim] * 18
  # 3 times 6 layers, 4 with a window, the two that lend, and 3 times 6 that borrow.
  found = [(segment.first, segment.period, segment.count) for segment in segments(config)]
  assert found == [(0, 6, 3), (18, 1, 4), (22, 1, 1), (23, 1, 1), (24, 6, 3)]


def empty_cache(name, P, G):
  """The cache of rows [P, G] with prompts of 5 tokens, as shapes."""
  config = model.load_config(FAMILIES / name)
  params = jax.eval_shape(functools.partial(model.init, config=config), jax.random.key(0))

  def made(params):
    tokens_PS, positions_PS = jnp.ones((P, 5), jnp.int32), jnp.tile(jnp.arange(5), (P, 1))
    _, cache = model.features(params, config, tokens_PS, positions_PS)
    return model.empty_cache(config, model.as_prefix(cache, jnp.full(P, 5)), G, slots=4)

  return jax.eval_shape(made, params)


def shapes(stacks):
  return {name: x.shape for name, x in stacks.items()}


def test_a_cache_holds_what_is_lent_once():
  """Layers 0 to 2 have keys: with a window E = 8, and without E = 12. Layers 3 to 5 borrow."""
  cache, sizes = empty_cache("gemma4_e", P=2, G=3), ((0, 8), (1, 8), (2, 12))
  of_prompts = {f"layers_{i}": (1, 2, 2, 5, E) for i, E in sizes}
  own = {f"layers_{i}": (2, 2, 3, 4, E) for i, E in sizes}
  assert shapes(cache.prefix.keys) == shapes(cache.prefix.values) == of_prompts
  assert shapes(cache.keys) == shapes(cache.values) == own


def test_a_cache_keeps_an_axis_of_heads_where_some_layers_have_several():
  """Two layers have a window and two heads, and two have one head of another size."""
  cache = empty_cache("gemma4", P=1, G=1)
  assert cache.axes == "K"
  assert shapes(cache.keys) == {"layers_0": (2, 2, 4, 8), "layers_1": (2, 1, 4, 12)}


@pytest.mark.parametrize("how", ["packed", "remat", "chunked", "mesh"])
@pytest.mark.parametrize("name", ["gemma4_e", "gemma4"])
@pytest.mark.slow
def test_hidden_states_and_gradients_do_not_depend_on_how_they_are_computed(name, how):
  config, params = model.load(FAMILIES / name)
  P, S, G, T = 2, 9, 3, 8
  lengths_P, lengths_PG = jnp.array([9, 4]), jnp.array([[8, 1, 5], [0, 3, 6]])
  tokens_PN = jax.random.randint(jax.random.key(0), (P, S + G * T), 4, 96)
  weights_PND = jax.random.normal(jax.random.key(1), (P, S + G * T, config.embed_dim))
  is_token_PGT = jnp.arange(T) < lengths_PG[..., None]
  weights_PND = (
    weights_PND.at[:, :S].set(0) * jnp.pad(is_token_PGT.reshape(P, -1), ((0, 0), (S, 0)))[..., None]
  )

  def loss(params, config, packing=None, remat=""):
    def stream(x_PN):
      return x_PN if packing is None else model.pack(x_PN[:, S:], packing)

    tokens, weights = tokens_PN, weights_PND
    if packing is not None:
      tokens = jnp.concatenate([tokens_PN[:, :S], stream(tokens_PN)], 1)
      weights = jnp.concatenate([weights_PND[:, :S], stream(weights_PND)], 1)
    groups = model.Groups(lengths_P, S, G, T, packing)
    hidden, _ = model.group_features(params, config, tokens, groups, remat=remat)
    return (hidden * weights).sum()

  expected = jax.jit(jax.value_and_grad(lambda p: loss(p, config)))(params)
  mesh = make_mesh(Mesh(data=1, fsdp=2, tensor=2), jax.devices()[:4])
  options = {
    "mesh": dict(config=dataclasses.replace(config, **sharding.model_shardings(config, mesh))),
    "packed": dict(config=config, packing=make_packing(lengths_PG, T, 14)),
    "remat": dict(config=config, remat="nothing_saveable"),
    "chunked": dict(config=dataclasses.replace(config, attention="chunked")),
  }[how]
  if how == "mesh":
    params = jax.device_put(params, sharding.param_specs(params, mesh))
  found = jax.jit(jax.value_and_grad(lambda p: loss(p, **options)))(params)

  def close(x, y):
    np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4 * max(1e-2, np.abs(y).max()))

  jax.tree.map(close, found, expected)


@pytest.mark.slow
def test_what_is_not_trained_does_not_decay():
  _, params = model.load(FAMILIES / "gemma4")
  of_layer = decayed(params)["layers_0"]
  assert not of_layer["layer_scale"] and of_layer["mlp"]["up"]["kernel"]


def test_proportional_rotates_the_first_pairs_with_the_frequencies_of_all():
  """Of 6 pairs int(0.5 * 12 / 2) = 3, at half of their frequencies."""
  scaling = RopeScaling("proportional", 2.0, 64, share=0.5)
  found = proportional(np.arange(6, 0, -1.0), 1e4, scaling, 64)
  np.testing.assert_array_equal(found, [3, 2.5, 2, 0, 0, 0])


@pytest.mark.parametrize(
  "fields",
  [
    dict(global_head_dim=12, num_global_key_value_heads=1),
    dict(
      per_layer_config={
        "1": {"head_dim": 12, "num_key_value_heads": 1},
        "3": {"num_key_value_heads": 1, "head_dim": 12},
      },
      global_head_dim=99,
    ),
  ],
)
def test_heads_of_layers_without_a_window_are_read_in_both_forms(fields, tmp_path):
  """Published folders have two fields. transformers 5.23 writes one entry for each layer."""
  folder = copied(tmp_path, "gemma4", **{"per_layer_config": None} | fields)
  config = model.load_model_config(folder)
  assert config == model.load_model_config(FAMILIES / "gemma4")
  assert (config.global_head_dim, config.global_kv_heads) == (12, 1)


@pytest.mark.parametrize(
  "name, fields, key",
  [
    ("gemma4", dict(attention_k_eq_v=False), "attention_k_eq_v"),
    ("gemma4", dict(per_layer_config={"0": {"head_dim": 12}}), "per_layer_config"),
    (
      "gemma4",
      dict(per_layer_config={"1": {"head_dim": 12}, "3": {"head_dim": 8}}),
      "per_layer_config",
    ),
    ("gemma4", dict(per_layer_config={"1": {"mlp": 2}, "3": {"mlp": 2}}), "per_layer_config"),
    ("gemma4", dict(per_layer_config=[1]), "per_layer_config"),
    ("gemma4", dict(use_bidirectional_attention="all"), "use_bidirectional_attention"),
    ("gemma4", dict(rope_parameters={"rope_theta": 1e4}), "rope_parameters"),
    ("gemma4", dict(rope_parameters={FULL: _LINEAR, SLIDES: _DEFAULT}), "rope_parameters"),
    ("gemma4", dict(sliding_window=0), "sliding_window"),
    (
      "gemma4",
      dict(num_global_key_value_heads=3, per_layer_config=None),
      "num_global_key_value_heads",
    ),
    (
      "gemma4_e",
      dict(num_kv_shared_layers=4, layer_types=_LATE, per_layer_config=None),
      "num_kv_shared_layers",
    ),
    ("gemma4_e", dict(num_kv_shared_layers=6), "num_kv_shared_layers"),
    ("gemma4_e", dict(vocab_size_per_layer_input=64), "vocab_size_per_layer_input"),
    ("gemma4_e", dict(hidden_size_per_layer_input=-1), "hidden_size_per_layer_input"),
    ("gemma4_moe", dict(use_double_wide_mlp=True), "use_double_wide_mlp"),
    ("gemma4_moe", dict(top_k_experts=7), "top_k_experts"),
    ("gemma4_moe", dict(num_experts=0), "num_experts"),
  ],
)
def test_what_is_not_computed_is_refused_by_name(name, fields, key, tmp_path):
  with pytest.raises(ConfigError, match=f"config.json: {key} ") as caught:
    model.load_model_config(copied(tmp_path, name, **fields))
  assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_keys_of_layers_that_borrow_are_left_out(tmp_path):
  """Published folders have them. transformers does not read them either."""
  folder = copied(tmp_path, "gemma4_e")
  file, expected = folder / "model.safetensors", model.load(FAMILIES / "gemma4_e")
  tensors = load_file(file)
  name = "model.layers.{}.self_attn.k_proj.weight"
  save_file(tensors | {name.format(3): np.zeros((16, 32), np.float32)}, file)
  config, params = model.load(folder)
  assert config == expected[0]
  jax.tree.map(np.testing.assert_array_equal, params, expected[1])
  save_file(tensors | {name.format(6): np.zeros((16, 32), np.float32)}, file)
  with pytest.raises(ConfigError, match="layers.6"):
    model.load(folder)


def test_the_towers_of_a_whole_folder_are_left_out():
  config = model.load_config(FAMILIES / "gemma4_images")
  names = load_file(FAMILIES / "gemma4_images" / "model.safetensors")
  assert {name.split(".")[1] for name in names} == {
    "language_model",
    "vision_tower",
    "audio_tower",
    "embed_vision",
    "embed_audio",
  }
  assert model.ignores_parts(FAMILIES / "gemma4_images") and config.family == "gemma4_text"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4_moe", "gemma4_e"])
def test_adapters_go_out_and_in_where_layers_lack_projections(name, tmp_path):
  shape, base = model.load(FAMILIES / name)
  lora = model.AdapterShape(2, 4.0, False, ("q", "k", "v", "o", "gate", "up", "down"))
  shape = dataclasses.replace(shape, lora=lora)
  adapters = jax.tree.map(lambda x: x + 0.1, model.init_adapters(jax.random.key(0), shape, base))
  model.save_adapters(tmp_path / "peft", shape, adapters, "")
  loaded = model.load_adapters(tmp_path / "peft", shape)
  jax.tree.map(np.testing.assert_array_equal, loaded, jax.device_get(adapters))
  tokens_BT, positions_BT = np.arange(4, 24)[None], np.arange(20)[None]
  found, _ = model.forward(model.join(base, adapters), shape, tokens_BT, positions_BT)
  model.save(tmp_path / "merged", shape, model.join(base, adapters))
  merged_shape, merged = model.load(tmp_path / "merged")
  expected, _ = model.forward(merged, merged_shape, tokens_BT, positions_BT)
  np.testing.assert_allclose(found, expected, atol=2e-4)
