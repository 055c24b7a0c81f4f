"""Hugging Face folders: what is loaded and saved, and which folders are refused."""

import contextlib
import dataclasses
import functools
import json
import math
from pathlib import Path
import shutil

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax.config import Mesh
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface import families, folders, load_weights, save_weights
from grpo_jax.model.huggingface.load_weights import load
from grpo_jax.model.huggingface.save_weights import save
from grpo_jax.model.huggingface.tensor_spec import TensorSpec
from grpo_jax.model.stacks import Places, stacked
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.parallel.sharding import param_specs
from grpo_jax.progress import Work
from grpo_jax.settings import ConfigError

GOLDEN = Path(__file__).parent / "golden"
TIED = ModelConfig(
  vocab_size=96,
  embed_dim=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  mlp_dim=64,
  rope_theta=50000.0,
  norm_eps=1e-5,
  max_positions=128,
  stop_ids=(3,),
)
UNTIED = dataclasses.replace(
  TIED,
  num_kv_heads=4,
  head_dim=8,
  rope_theta=1000000.0,
  norm_eps=1e-6,
  tie_embeddings=False,
  stop_ids=(5, 7),
)


@pytest.fixture
def tied(tmp_path):
  return Path(shutil.copytree(GOLDEN / "qwen2_tied", tmp_path / "tied"))


@pytest.fixture
def untied(tmp_path):
  return Path(shutil.copytree(GOLDEN / "qwen2_untied", tmp_path / "untied"))


def edit(file, **fields):
  """Sets fields of a JSON file. The value ... removes a field."""
  values = {**json.loads(file.read_text()), **fields}
  file.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def edit_tensors(folder, **tensors):
  """Sets tensors of model.safetensors (`__` is a dot in a name). The value ... removes one."""
  file = folder / "model.safetensors"
  values = {**load_file(file), **{k.replace("__", "."): v for k, v in tensors.items()}}
  save_file({k: v for k, v in values.items() if v is not ...}, file)


def tensors_of(folder):
  """The tensors of all safetensors files of a folder."""
  tensors = {}
  for file in folder.glob("*.safetensors"):
    tensors |= load_file(file)
  return tensors


def assert_refused(folder, *words):
  with pytest.raises(ConfigError) as error:
    load(folder)
  message = str(error.value)
  assert "\n" not in message
  for word in words:
    assert word in message


def random_params(config, seed=0):
  rng, sizes = np.random.default_rng(seed), families.sizes(config)
  leaves = {
    spec.leaf_name: rng.normal(size=spec.leaf_shape(sizes)).astype(np.float32)
    for spec in families.family_of(config).tensors(config)
  }
  return stacked(unflatten_dict(leaves, sep="/"), config, np.stack)


def assert_same(a, b):
  a, b = flatten_dict(a, sep="/"), flatten_dict(b, sep="/")
  assert a.keys() == b.keys()
  for name in a:
    assert a[name].dtype == b[name].dtype == np.float32
    np.testing.assert_array_equal(a[name], b[name], err_msg=name)


# --- The layout ---


def test_projection_layout_by_hand():
  """Two heads of size 2, D = 1: row h * 2 + e of the tensor of q is [:, h, e] of its leaf."""
  sizes = dict(H=2, E=2, D=1)
  q = TensorSpec("q", "q", "HE D", "DHE")
  q_leaf = q.from_hf(np.array([[1], [2], [3], [4]]), sizes)
  np.testing.assert_array_equal(q_leaf, [[[1, 2], [3, 4]]])
  o = TensorSpec("o", "o", "D HE", "HED")
  o_leaf = o.from_hf(np.array([[1, 2, 3, 4]]), sizes)
  np.testing.assert_array_equal(o_leaf, [[[1], [2]], [[3], [4]]])


def test_experts_are_stacked_by_number():
  folder = GOLDEN / "families/qwen3_moe"
  tensors = load_file(folder / "model.safetensors")
  _, params = load(folder)
  experts = {name: x[1] for name, x in params["layers_0"]["experts"].items()}
  assert experts["gate"].shape == (6, 32, 20) and experts["down"].shape == (6, 20, 32)
  for name in ("gate", "up", "down"):
    tensor = tensors[f"model.layers.1.mlp.experts.4.{name}_proj.weight"]
    np.testing.assert_array_equal(experts[name][4], tensor.T)
  np.testing.assert_array_equal(experts["router"], tensors["model.layers.1.mlp.gate.weight"].T)


@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_to_hf_is_the_inverse_of_from_hf(config):
  sizes = families.sizes(config)
  for spec in families.family_of(config).tensors(config):
    shape = spec.hf_shape(sizes)
    tensor = np.arange(np.prod(shape)).reshape(shape)
    leaf = spec.from_hf(tensor, sizes)
    assert leaf.shape == spec.leaf_shape(sizes)
    np.testing.assert_array_equal(spec.to_hf(leaf, sizes), tensor)


# --- Reading ---


def test_tied_checkpoint(tied):
  config, params = load(tied)
  assert config == TIED
  tensors, leaves = load_file(tied / "model.safetensors"), flatten_dict(params, sep="/")
  assert len(tensors) == 2 + 2 * 12 and len(leaves) == 2 + 12 and "head/kernel" not in leaves
  assert all(isinstance(x, jax.Array) and x.dtype == jnp.float32 for x in leaves.values())
  np.testing.assert_array_equal(leaves["embed/embedding"], tensors["model.embed_tokens.weight"])
  for layer in range(2):
    down = tensors[f"model.layers.{layer}.mlp.down_proj.weight"].T
    np.testing.assert_array_equal(leaves["layers_0/mlp/down/kernel"][layer], down)
    k = tensors[f"model.layers.{layer}.self_attn.k_proj.weight"]
    found = leaves["layers_0/attention/k/kernel"][layer, :, 1, 3]
    np.testing.assert_array_equal(found, k[1 * 16 + 3])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen2_window", "qwen3_moe_mixed"])
def test_every_layer_is_read_into_its_place_and_written_from_it(name, tmp_path):
  """In models whose layers differ."""
  config, params = load(GOLDEN / "families" / name)
  leaves, places = flatten_dict(params, sep="/"), Places(config)
  tensors, sizes = tensors_of(GOLDEN / "families" / name), families.sizes(config)
  assert {len(x) for path, x in leaves.items() if path.startswith("layers_")} != {config.num_layers}
  for spec in families.family_of(config).tensors(config):
    leaf = places.take(leaves, spec.leaf_name)
    leaf = leaf if spec.expert is None else leaf[spec.expert]
    expected = tensors[spec.hf_name].astype(np.float32)
    # Gemma's norms are 1 + w, which rounds w.
    np.testing.assert_allclose(
      spec.to_hf(np.asarray(leaf), sizes), expected, atol=1e-6, err_msg=spec.leaf_name
    )
  save(tmp_path / "m", config, params)
  assert_same(params, load(tmp_path / "m")[1])


def test_sharded_bfloat16_checkpoint(untied):
  config, params = load(untied)
  assert config == UNTIED
  tensors = tensors_of(untied)
  assert {x.dtype for x in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
  head = params["head"]["kernel"]
  assert head.dtype == jnp.float32
  np.testing.assert_array_equal(head, tensors["lm_head.weight"].astype(np.float32).T)


def test_config_of_transformers_4(tied):
  expected = load(tied)[0]
  shutil.move(tied / "config_transformers4.json", tied / "config.json")
  assert "rope_parameters" not in json.loads((tied / "config.json").read_text())
  assert load(tied)[0] == expected


def test_fields_of_published_checkpoints_that_change_nothing(tied):
  edit(
    tied / "config.json",
    rope_parameters=...,
    layer_types=...,
    rope_theta=50000.0,
    sliding_window=32768,
    max_window_layers=1,
    use_mrope=False,
    torch_dtype="bfloat16",
    _name_or_path="x",
    rope_scaling=None,
  )
  assert load(tied)[0] == TIED


@pytest.mark.slow
@pytest.mark.parametrize(
  "fields, windows",
  [
    (dict(max_window_layers=1, layer_types=...), (0, 64)),
    (dict(max_window_layers=None, layer_types=...), ()),  # the default is 28
    (dict(layer_types=["sliding_attention", "full_attention"]), (64, 0)),
    (dict(layer_types=["sliding_attention"] * 2, use_sliding_window=False), ()),
  ],
)
def test_windows_of_layers(tied, fields, windows):
  edit(tied / "config.json", **{"use_sliding_window": True, "sliding_window": 64, **fields})
  assert load(tied)[0] == dataclasses.replace(TIED, windows=windows)


# Larger ones, whose kinds of layers and of tensors have tests of their own.
_SLOW = (
  *("gemma4", "deepseek_v3", "gpt_oss", "glm4_moe", "qwen3_5", "qwen3_next"),
  *("olmo3", "smollm3", "qwen3_moe_mixed", "gemma2", "llama3", "olmo2"),
)
# Those with a vision tower or in FP8 are saved as other ones: their text part, and float32.
FAMILIES = sorted(
  folder
  for folder in (GOLDEN / "families").iterdir()
  if not folder.name.endswith(("_images", "_fp8", "_mxfp4"))
)


@pytest.mark.parametrize(
  "folder",
  [pytest.param(x, marks=pytest.mark.slow if x.name.startswith(_SLOW) else ()) for x in FAMILIES],
  ids=lambda f: f.name,
)
def test_every_family_is_saved_as_it_was_loaded(folder, tmp_path, monkeypatch):
  """It is saved in several files, and a tensor that holds several leaves is not split.

  Norms that are stored as w and used as 1 + w differ by one rounding.
  """
  is_rounded = folder.name.startswith(("gemma", "qwen3_5", "qwen3_next"))
  equal = functools.partial(np.testing.assert_allclose, rtol=0, atol=2.4e-7 if is_rounded else 0)
  config, params = load(folder)
  monkeypatch.setattr(save_weights, "FILE_BYTES", 20000)
  save(tmp_path / "again", config, params)
  again, same = load(tmp_path / "again")
  assert again == config
  jax.tree.map(equal, same, params)
  before, after = tensors_of(folder), tensors_of(tmp_path / "again")
  assert before.keys() == after.keys()
  for name in before:
    equal(before[name].astype(np.float32), after[name])


@pytest.mark.parametrize(
  "name, fields",
  [
    (
      "llama3",
      dict(
        rope_theta=5000.0,
        rope_scaling=dict(
          rope_type="llama3",
          factor=4.0,
          low_freq_factor=1.0,
          high_freq_factor=4.0,
          original_max_position_embeddings=16,
        ),
      ),
    ),
    ("llama_linear", dict(rope_theta=10000.0, rope_scaling=dict(type="linear", factor=4.0))),
    (
      "gemma3",
      dict(
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        rope_scaling=dict(rope_type="linear", factor=8.0),
      ),
    ),
    ("mistral", dict(rope_theta=10000.0)),
    ("phi3", dict(rope_theta=10000.0, rope_scaling=None)),
    (
      "qwen3_moe",
      dict(rope_theta=1000000.0, num_local_experts=..., num_experts=6, max_window_layers=2),
    ),
  ],
)
def test_a_family_as_transformers_4_writes_it(name, fields, tmp_path):
  folder = Path(shutil.copytree(GOLDEN / "families" / name, tmp_path / name))
  expected = load(folder)[0]
  edit(folder / "config.json", rope_parameters=..., **fields)
  assert load(folder)[0] == expected


@pytest.mark.slow
def test_the_default_pattern_of_windows(tmp_path):
  """Gemma 2: every other layer has a window, beginning with the first. Gemma 3: five of six."""
  for name, expected in (("gemma2", (7, 0, 7)), ("gemma3", (7, 7, 7))):
    folder = Path(shutil.copytree(GOLDEN / "families" / name, tmp_path / name))
    edit(folder / "config.json", layer_types=...)
    assert load(folder)[0].windows == expected


def test_a_window_as_long_as_the_longest_text_is_allowed(tied):
  edit(
    tied / "config.json",
    layer_types=...,
    use_sliding_window=True,
    sliding_window=128,
    max_window_layers=0,
  )
  load(tied)


@pytest.mark.parametrize(
  "name, mesh",
  [
    pytest.param("qwen2_untied", (1, 4, 1, 2), marks=pytest.mark.slow),
    pytest.param("families/phi3", (1, 4, 1, 2), marks=pytest.mark.slow),
    pytest.param("families/gemma2", (1, 4, 1, 2), marks=pytest.mark.slow),
    pytest.param("families/phi3", (1, 1, 1, 1), marks=pytest.mark.slow),
    pytest.param("families/qwen3_moe", (1, 2, 2, 2), marks=pytest.mark.slow),
    pytest.param("families/qwen3_moe_mixed", (2, 2, 2, 1), marks=pytest.mark.slow),
    pytest.param("families/gemma4_moe", (1, 2, 2, 2), marks=pytest.mark.slow),
  ],
)
def test_devices_read_their_own_parts(name, mesh, monkeypatch):
  """Each device reads its part of a tensor, also of a tensor that holds several leaves.

  `convert` gets single layers in the dtype of the file, and `load` returns what it makes of them.
  """
  config, whole = load(GOLDEN / name)
  _, fsdp, _, tensor = mesh
  mesh = make_mesh(Mesh(*mesh), jax.devices()[: math.prod(mesh)])
  places = flatten_dict(param_specs(whole, mesh), sep="/")
  whole_leaves = flatten_dict(whole, sep="/")
  read, arrays_read, works = folders.TensorFiles.read, [], []

  def recording_read(*args):
    arrays_read.append(read(*args))
    return arrays_read[-1]

  def recorded(what, total, unit):
    works.append(Work(what, total, unit, is_routine=False))
    return contextlib.nullcontext(works[-1])

  monkeypatch.setattr(load_weights, "_MB", 1)
  monkeypatch.setattr(load_weights, "doing", recorded)
  monkeypatch.setattr(folders.TensorFiles, "read", recording_read)

  def convert(path, x):
    half = name in ("qwen2_untied", "families/qwen3_moe_mixed") or (
      "gemma2" in name and "norm" not in path
    )
    assert x.dtype == ("bfloat16" if half else "float32")
    assert x.shape == whole_leaves[path].shape[path.startswith("layers_") :]
    return 2 * x.astype(jnp.float32)

  _, params = load(GOLDEN / name, places, convert)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 2 * b), params, whole)
  for path, x in flatten_dict(params, sep="/").items():
    assert x.sharding.is_equivalent_to(places[path], x.ndim), path
  largest = max(x.size for x in arrays_read)
  assert largest == config.vocab_size * config.embed_dim // (fsdp * tensor)
  (work,) = works
  assert work.done == work.total >= max(x.nbytes for x in arrays_read)


def test_stop_ids_of_generation_config_take_precedence(tied):
  edit(tied / "generation_config.json", eos_token_id=[9, 3])
  assert load(tied)[0].stop_ids == (9, 3)
  edit(tied / "generation_config.json", eos_token_id=...)
  assert load(tied)[0].stop_ids == (3,)
  (tied / "generation_config.json").unlink()
  edit(tied / "config.json", eos_token_id=[4, 5])
  assert load(tied)[0].stop_ids == (4, 5)
  edit(tied / "config.json", eos_token_id=None)
  assert load(tied)[0].stop_ids == ()


def test_redundant_tensors_are_ignored(tied):
  embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
  edit_tensors(
    tied, lm_head__weight=embedding, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(8)
  )
  assert load(tied)[0] == TIED


# --- Writing ---


@pytest.mark.parametrize("config", [TIED, UNTIED, dataclasses.replace(TIED, stop_ids=())])
def test_loading_returns_what_was_saved_bit_for_bit(config, tmp_path):
  params = random_params(config)
  save(tmp_path / "new/model", config, params)
  loaded, again = load(tmp_path / "new/model")
  assert loaded == config
  assert_same(params, again)
  assert [p.name for p in (tmp_path / "new").iterdir()] == ["model"]
  # All files have the same permissions.
  assert len({file.stat().st_mode for file in (tmp_path / "new/model").iterdir()}) == 1


def test_saved_tensors_are_those_that_transformers_wrote(tied, tmp_path):
  save(tmp_path / "again", *load(tied))
  before, after = (
    load_file(tied / "model.safetensors"),
    load_file(tmp_path / "again/model.safetensors"),
  )
  assert before.keys() == after.keys()
  for name in before:
    np.testing.assert_array_equal(before[name], after[name])


def test_saved_config_serves_transformers_4_and_5(tmp_path):
  save(tmp_path / "m", UNTIED, random_params(UNTIED))
  values = json.loads((tmp_path / "m/config.json").read_text())
  assert values["rope_theta"] == 1000000.0
  assert values["rope_parameters"] == {"rope_theta": 1000000.0, "rope_type": "default"}
  assert values["architectures"] == ["Qwen2ForCausalLM"] and values["torch_dtype"] == "float32"
  assert json.loads((tmp_path / "m/generation_config.json").read_text()) == {"eos_token_id": [5, 7]}


def test_large_models_are_saved_in_several_files(tmp_path, monkeypatch):
  monkeypatch.setattr(save_weights, "FILE_BYTES", 20000)
  params = random_params(UNTIED)
  save(tmp_path / "m", UNTIED, params)
  index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
  files = sorted((tmp_path / "m").glob("*.safetensors"))
  assert len(files) > 2 and set(index["weight_map"].values()) == {f.name for f in files}
  assert all(f.stat().st_size < 20000 + 4000 for f in files)
  assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(params))
  assert_same(params, load(tmp_path / "m")[1])


@pytest.mark.slow
def test_sharded_and_bfloat16_arrays_are_saved_as_float32(tmp_path):
  params = random_params(TIED)
  mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  sharded = jax.tree.map(
    lambda x: jax.device_put(x, split) if x.shape[0] % len(jax.devices()) == 0 else x, params
  )
  save(tmp_path / "sharded", TIED, sharded)
  assert_same(params, load(tmp_path / "sharded")[1])
  save(tmp_path / "short", TIED, jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params))
  rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), params)
  assert_same(rounded, load(tmp_path / "short")[1])


def test_save_never_overwrites(tmp_path):
  (tmp_path / "full").mkdir()
  (tmp_path / "full/notes").write_text("mine")
  (tmp_path / "file").write_text("mine")
  (tmp_path / "empty").mkdir()
  for name in ("full", "file"):
    with pytest.raises(ConfigError, match=name):
      save(tmp_path / name, TIED, random_params(TIED))
  save(tmp_path / "empty", TIED, random_params(TIED))
  assert (tmp_path / "empty/model.safetensors").exists()
  assert [p.name for p in (tmp_path / "full").iterdir()] == ["notes"]


def test_a_failing_save_leaves_nothing(tmp_path, monkeypatch):
  def fail(*args, **kwargs):
    raise OSError("disk full")

  monkeypatch.setattr(folders, "save_file", fail)
  with pytest.raises(OSError, match="disk full"):
    save(tmp_path / "m", TIED, random_params(TIED))
  assert not list(tmp_path.iterdir())


def test_save_refuses_parameters_of_another_config(tmp_path):
  params = random_params(TIED)
  with pytest.raises(ConfigError, match="head/kernel is absent"):
    save(tmp_path / "m", dataclasses.replace(TIED, tie_embeddings=False), params)
  with pytest.raises(
    ConfigError, match=r"attention/k/bias is \(2, 2, 16\), by its config it should be \(2, 4, 16\)"
  ):
    save(tmp_path / "m", dataclasses.replace(TIED, num_kv_heads=4), params)
  with pytest.raises(ConfigError, match=r"layers_0/.* is \(2, .* should be \(1, "):
    save(tmp_path / "m", dataclasses.replace(TIED, num_layers=1), params)
  with pytest.raises(ConfigError, match=r"layers_0/.* is \(2, .* should be \(1, "):
    save(tmp_path / "m", dataclasses.replace(TIED, windows=(8, 0)), params)
  with pytest.raises(ConfigError, match="qkv_bias=False"):
    save(tmp_path / "m", dataclasses.replace(TIED, qkv_bias=False), params)
  assert not list(tmp_path.iterdir())


# --- Refusals ---


def test_missing_folder_says_to_download():
  assert_refused("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", "hf download")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", "\0\xff"])
def test_invalid_json(tied, name, text):
  (tied / name).write_bytes(text.encode("latin-1"))
  assert_refused(tied, name, "JSON")


def test_config_json_missing(tied):
  (tied / "config.json").unlink()
  assert_refused(tied, "config.json is missing")


@pytest.mark.parametrize(
  "key, fields",
  [
    ("model_type", dict(model_type="mamba")),
    ("model_type", dict(model_type=...)),
    ("architectures", dict(architectures=["Qwen2ForSequenceClassification"])),
    ("hidden_act", dict(hidden_act="gelu")),
    ("attention_dropout", dict(attention_dropout=0.1)),
    ("quantization_config", dict(quantization_config={"quant_method": "gptq"})),
    (
      "sliding_window",
      dict(use_sliding_window=True, sliding_window=-1, max_window_layers=1, layer_types=...),
    ),
    ("layer_types", dict(layer_types=["full_attention", "linear_attention"])),
    ("layer_types", dict(layer_types=["full_attention"])),
    ("attention_sinks", dict(attention_sinks=4)),  # an unknown field
    ("attention_bias", dict(attention_bias=True)),
    (
      "short_factor",
      dict(rope_parameters={"rope_type": "longrope", "factor": 4.0, "rope_theta": 50000.0}),
    ),
    (
      "short_factor",
      dict(
        rope_parameters={
          "rope_type": "longrope",
          "short_factor": [1.0],
          "long_factor": [1.0],
          "rope_theta": 50000.0,
        }
      ),
    ),
    (
      "rope_parameters",
      dict(rope_parameters={"rope_type": "other", "factor": 4.0, "rope_theta": 50000.0}),
    ),
    (
      "rope_parameters",
      dict(
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0, "mscale": 1.0}
      ),
    ),
    ("factor", dict(rope_parameters={"rope_type": "linear", "rope_theta": 50000.0})),
    (
      "partial_rotary_factor",
      dict(rope_parameters={"rope_theta": 50000.0, "partial_rotary_factor": 0.5}),
    ),
    ("rope_scaling", dict(rope_scaling={"type": "linear", "factor": 2.0})),
    ("rope_scaling", dict(rope_scaling="linear")),
    ("partial_rotary_factor", dict(partial_rotary_factor=0.5)),
    ("rope_theta", dict(rope_theta=10000.0)),  # rope_parameters says 50000
    ("rope_theta", dict(rope_parameters=...)),
    ("max_window_layers", dict(max_window_layers="28")),
    ("rope_theta", dict(rope_parameters={"rope_theta": "large"})),
    ("hidden_size", dict(hidden_size=...)),
    ("vocab_size", dict(vocab_size=-1)),
    ("num_hidden_layers", dict(num_hidden_layers=True)),
    ("rms_norm_eps", dict(rms_norm_eps="1e-6")),
    ("tie_word_embeddings", dict(tie_word_embeddings="yes")),
    ("hidden_size", dict(head_dim=None, num_attention_heads=5)),
    ("num_attention_heads", dict(num_key_value_heads=3)),
  ],
)
def test_config_field_is_refused_by_name(tied, key, fields):
  edit(tied / "config.json", **fields)
  assert_refused(tied, "config.json: " + key)


@pytest.mark.parametrize(
  "key, fields",
  [
    ("num_experts", dict(num_experts=5)),  # num_local_experts is 6
    ("num_experts", dict(num_local_experts=...)),
    ("num_experts_per_tok", dict(num_experts_per_tok=7)),
    ("moe_intermediate_size", dict(moe_intermediate_size=...)),
    ("norm_topk_prob", dict(norm_topk_prob=1)),
    ("decoder_sparse_step", dict(decoder_sparse_step=0)),
    ("mlp_only_layers", dict(mlp_only_layers="0")),
    (
      "layer_types",
      dict(use_sliding_window=True, layer_types=["full_attention", "sliding_attention"]),
    ),
    (
      "shared_expert_intermediate_size",
      dict(shared_expert_intermediate_size=8),
    ),  # of another family
  ],
)
def test_field_of_a_mixture_of_experts_is_refused_by_name(key, fields, tmp_path):
  folder = Path(shutil.copytree(GOLDEN / "families/qwen3_moe", tmp_path / "m"))
  edit(folder / "config.json", **fields)
  assert_refused(folder, "config.json: " + key)


def test_tensor_of_an_expert_missing(tmp_path):
  folder = Path(shutil.copytree(GOLDEN / "families/qwen3_moe", tmp_path / "m"))
  edit_tensors(folder, model__layers__0__mlp__experts__5__up_proj__weight=...)
  assert_refused(folder, "no tensor model.layers.0.mlp.experts.5.up_proj.weight")


def test_stop_id_that_is_not_a_number(tied):
  edit(tied / "generation_config.json", eos_token_id=["</s>"])
  assert_refused(tied, "generation_config.json", "eos_token_id")


def test_folder_with_only_a_pickle(tied):
  shutil.move(tied / "model.safetensors", tied / "pytorch_model.bin")
  assert_refused(tied, "no model.safetensors", "pickl")


def test_tensor_missing(tied):
  edit_tensors(tied, model__norm__weight=...)
  assert_refused(tied, "no tensor model.norm.weight")


def test_tensor_that_does_not_belong(tied):
  edit(tied / "config.json", num_hidden_layers=1, layer_types=...)
  assert_refused(tied, "model.layers.1.input_layernorm.weight", "config.json")


def test_head_that_is_not_the_embedding(tied):
  edit_tensors(tied, lm_head__weight=np.zeros((96, 32), np.float32))
  assert_refused(tied, "lm_head.weight", "tie_word_embeddings")


def test_tensor_of_another_shape(tied):
  edit(tied / "config.json", intermediate_size=65)
  assert_refused(tied, "mlp.gate_proj.weight", "(64, 32)", "(65, 32)")


def test_tensor_of_integers(tied):
  edit_tensors(tied, model__norm__weight=np.ones(32, np.int8))
  assert_refused(tied, "model.norm.weight", "I8")


@pytest.mark.parametrize("size", [0, 4, 1000, -1])
def test_file_cut_off(tied, size):
  file = tied / "model.safetensors"
  file.write_bytes(file.read_bytes()[:size])
  assert_refused(tied, "model.safetensors", "damaged or cut off")


def test_file_of_the_index_missing(untied):
  (untied / "model-00002-of-00003.safetensors").unlink()
  assert_refused(untied, "model-00002-of-00003.safetensors", "missing")


def test_index_without_a_map(untied):
  edit(untied / "model.safetensors.index.json", weight_map=...)
  assert_refused(untied, "model.safetensors.index.json", "weight_map")


@pytest.mark.parametrize(
  "axes, starts",
  [
    ("(A,B,B) C", [(0, 0), (2, 0), (5, 0)]),
    ("C(A,B) 1", [None, None]),
    ("C (A,B) A", [(0, 0, 0), (0, 2, 0)]),
  ],
)
def test_parts_of_a_tensor_are_taken_and_joined(axes, starts):
  """Of its rows, of each group of its rows, and of a later axis."""
  sizes = {"A": 2, "B": 3, "C": 4}
  count = axes[axes.index("(") : axes.index(")")].count(",") + 1
  specs = [TensorSpec("tensor", "leaf", axes, "", part=part) for part in range(count)]
  shape = specs[0].tensor_shape(sizes)
  tensor = np.arange(np.prod(shape)).reshape(shape)
  expected = {
    "(A,B,B) C": [tensor[:2], tensor[2:5], tensor[5:]],
    "C(A,B) 1": [x.reshape(-1, 1) for x in np.split(tensor.reshape(4, -1), [2], axis=1)],
    "C (A,B) A": [tensor[:, :2], tensor[:, 2:]],
  }[axes]
  found = [spec.part_of(tensor, sizes) for spec in specs]
  for ours, theirs, spec in zip(found, expected, specs, strict=True):
    np.testing.assert_array_equal(ours, theirs)
    assert ours.shape == spec.hf_shape(sizes)
  np.testing.assert_array_equal(specs[0].joined(found, sizes), tensor)
  assert [spec.starts(sizes) for spec in specs] == starts
  for ours, start, spec in zip(found, starts, specs):
    if start is not None:
      ends = np.add(start, spec.hf_shape(sizes))
      np.testing.assert_array_equal(ours, tensor[tuple(map(slice, start, ends))])


@pytest.mark.parametrize(
  "family",
  [
    "llama",
    "granite",
    pytest.param("glm4_moe", marks=pytest.mark.slow),
    pytest.param("deepseek_v3", marks=pytest.mark.slow),
    pytest.param("glm4_moe_lite", marks=pytest.mark.slow),
  ],
)
def test_a_window_is_refused_by_families_that_have_none(family, tmp_path):
  folder = Path(shutil.copytree(GOLDEN / "families" / family, tmp_path / "m"))
  layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
  edit(folder / "config.json", layer_types=["full_attention"] * layers)
  load(folder)
  edit(folder / "config.json", layer_types=["sliding_attention"] * layers)
  assert_refused(folder, "config.json: layer_types")


@pytest.mark.slow
def test_heads_that_guess_further_tokens_are_left_out(tmp_path):
  folder = tmp_path / "mtp"
  shutil.copytree(GOLDEN / "families" / "qwen3_5", folder)
  tensors = tensors_of(folder)
  save_file(
    {**tensors, "mtp.fc.weight": np.zeros((2, 2), np.float32)}, folder / "model.safetensors"
  )
  jax.tree.map(
    np.testing.assert_array_equal, load(folder)[1], load(GOLDEN / "families" / "qwen3_5")[1]
  )
