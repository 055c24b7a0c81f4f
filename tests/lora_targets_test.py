"""Which projections have adapters, and PEFT's adapters of modules that hold several of them."""

import dataclasses
import importlib
import json
from pathlib import Path
import shutil

from flax.traverse_util import flatten_dict
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax import model
from grpo_jax.config import Mesh
from grpo_jax.export import is_misread_by_peft
from grpo_jax.model import kernels, lora
from grpo_jax.model.huggingface import config_json, families
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.parallel.sharding import param_specs
from grpo_jax.settings import ConfigError

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = sorted(path.name for path in (GOLDEN / "families").iterdir())
JOINED = ("phi3", "qwen3_5", "qwen3_next")  # folders of adapters and their families
TOKENS_BT, POSITIONS_BT = np.arange(4, 24)[None], np.arange(20)[None]


# --- The table ---


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_are_what_the_tensors_of_a_family_say(family):
  """The modules that hold a kernel, and how many axes of it are inputs."""
  config, held = model.load_config(GOLDEN / "families" / family), {}
  for spec in families.family_of(config).tensors(config):
    if not lora.is_projection(spec.leaf_name):
      continue
    path = spec.leaf_name.split("/", 1)[1].removesuffix("/kernel")
    module = spec.hf_name.split(".")[-2]
    assert lora.TARGETS[path].inputs == len(spec.hf_axes.split()[1])
    held.setdefault(module, set()).add(path.split("/")[-1])
  assert held
  for module, names in held.items():
    assert model.ADAPTABLE[module] == tuple(sorted(names))


def test_every_module_can_be_named_and_is_one_of_a_golden_family():
  for module, names in model.ADAPTABLE.items():
    assert model.kernels_of([module]) == names
    assert model.kernels_of(model.modules_of(names)) == names
  assert model.modules_of(("in_proj_k", "in_proj_q", "in_proj_v")) == ("in_proj_qkv",)
  assert model.kernels_of(["qkv_proj", "q_proj", "gate_up_proj"]) == ("gate", "k", "q", "up", "v")
  folders = [*(GOLDEN / "families" / family for family in FAMILIES), *(GOLDEN / "vision").iterdir()]
  configs = [model.load_config(folder, vision=True) for folder in folders]
  tensors = [spec for config in configs for spec in config_json.all_tensors(config)]
  assert {*model.ADAPTABLE} <= {spec.hf_name.split(".")[-2] for spec in tensors}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("dtype", ["int8", "nf4", "rounded"])
def test_every_target_can_be_quantised(family, dtype):
  """The scales are those of outputs, or of tiles of inputs."""
  _, base = model.load(GOLDEN / "families" / family)
  names = [name for name in flatten_dict(base, sep="/") if model.is_projection(name)]
  assert len(names) >= 10
  for name in names:
    leaf, path = flatten_dict(base, sep="/")[name][0], name.split("/", 1)[1]
    inputs = lora.TARGETS[path.removesuffix("/kernel")].inputs
    outputs = int(np.prod(leaf.shape[inputs:]))
    small = lora.rounded(name, leaf) if dtype == "rounded" else lora.quantised(name, leaf, dtype)
    matrix_IO, scale_O = kernels.factors(small, jnp.float32, outputs)
    assert small.scale.size % outputs == 0 and (dtype != "rounded" or scale_O.shape == (outputs,))
    product = (matrix_IO if scale_O is None else matrix_IO * scale_O).reshape(leaf.shape)
    assert jnp.abs(product - leaf).max() <= (0.2 if dtype == "nf4" else 0.01) * jnp.abs(leaf).max()


# --- Folders of PEFT ---


def changed_adapters(name):
  """(config, base, adapters) of a golden folder.

  The adapters are changed so that projections of one module have no A in common.
  """
  config, base = model.load(GOLDEN / "families" / name)
  config = dataclasses.replace(config, lora=model.load_adapter_shape(GOLDEN / "lora" / name))
  leaves, tree = jax.tree.flatten(model.load_adapters(GOLDEN / "lora" / name, config))
  rng = np.random.default_rng(0)
  leaves = [x + rng.normal(0, 0.1, x.shape).astype(np.float32) for x in leaves]
  return config, base, jax.tree.unflatten(tree, leaves)


def test_each_projection_of_a_module_gets_its_rows():
  """Of Phi-3's gate_up_proj, the first half is gate. Of Qwen3-Next's in_proj_ba, see below."""
  for name, module, kernels_, rows in (
    ("phi3", "layers.1.mlp.gate_up_proj", ("mlp/gate", "mlp/up"), np.arange(96).reshape(2, 48)),
    # Two key heads with two values each: b b a a b b a a.
    (
      "qwen3_next",
      "layers.0.linear_attn.in_proj_ba",
      ("delta/in_proj_b", "delta/in_proj_a"),
      np.array([[0, 1, 4, 5], [2, 3, 6, 7]]),
    ),
  ):
    folder = GOLDEN / "lora" / name
    config = model.load_config(GOLDEN / "families" / name)
    config = dataclasses.replace(config, lora=model.load_adapter_shape(folder))
    leaves = flatten_dict(model.load_adapters(folder, config), sep="/")
    tensors = load_file(folder / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.model.{module}.lora_{x}.weight"] for x in "AB")
    layer = 1 if name == "phi3" else 0
    for kernel, of_kernel in zip(kernels_, rows):
      np.testing.assert_array_equal(leaves[f"layers_0/{kernel}/lora_a"][layer], a.T)
      found = leaves[f"layers_0/{kernel}/lora_b"][layer]
      np.testing.assert_array_equal(found.reshape(2, -1), b[of_kernel].T)


@pytest.mark.slow
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", JOINED)
def test_a_folder_is_the_change_of_the_merged_weights(name, rslora, tmp_path):
  """By PEFT's arithmetic: alpha / rank B A, or alpha / sqrt(rank) B A, with the ranks of patterns.

  And it is read as it was written.
  """
  config, base, adapters = changed_adapters(name)
  config = dataclasses.replace(config, lora=dataclasses.replace(config.lora, rslora=rslora))
  model.save_adapters(tmp_path / "adapter", config, adapters, "base")
  assert model.load_adapter_shape(tmp_path / "adapter") == config.lora
  loaded = model.load_adapters(tmp_path / "adapter", config)
  jax.tree.map(np.testing.assert_array_equal, loaded, adapters)
  values = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
  tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
  model.save(tmp_path / "merged", config, model.join(base, adapters))
  before = load_file(GOLDEN / "families" / name / "model.safetensors")
  after = load_file(tmp_path / "merged" / "model.safetensors")
  modules = {key.rsplit(".lora_", 1)[0] for key in tensors}
  assert {key.split(".")[-1] for key in modules} == {*values["target_modules"]}
  for key in modules:
    a, b = (tensors[f"{key}.lora_{x}.weight"] for x in "AB")
    last, weight = key.split(".")[-1], key.removeprefix("base_model.model.") + ".weight"
    rank = values["rank_pattern"].get(last, values["r"])
    alpha = values["alpha_pattern"].get(last, values["lora_alpha"])
    assert len(a) == rank == config.lora.rank * len(model.ADAPTABLE[last])
    change = alpha / (rank**0.5 if rslora else rank) * b @ a
    assert np.abs(change).max() > 0.1
    np.testing.assert_allclose(after[weight] - before[weight], change, atol=1e-5, err_msg=weight)


@pytest.mark.slow
def test_projections_of_a_module_without_an_adapter_have_zeros(tmp_path):
  """PEFT adapts all projections of qkv_proj. What is read computes the same, and so does a step."""
  config, base = model.load(GOLDEN / "families" / "phi3")
  config = dataclasses.replace(config, lora=model.AdapterShape(2, 2.0, False, ("q", "v")))
  adapters = model.init_adapters(jax.random.key(0), config, base)
  adapters = jax.tree.map(lambda x: x + 0.1, adapters)
  model.save_adapters(tmp_path / "adapter", config, adapters, "base")
  read = dataclasses.replace(config, lora=model.load_adapter_shape(tmp_path / "adapter"))
  assert read.lora.targets == ("k", "q", "v")
  loaded = model.load_adapters(tmp_path / "adapter", read)
  before = model.forward(model.join(base, adapters), config, TOKENS_BT, POSITIONS_BT)[0]
  after = model.forward(model.join(base, loaded), read, TOKENS_BT, POSITIONS_BT)[0]
  np.testing.assert_array_equal(before, after)

  def loss(adapters):
    joined = model.join(base, adapters)
    return jnp.square(model.forward(joined, read, TOKENS_BT, POSITIONS_BT)[0]).mean()

  gradient = jax.tree.map(jnp.abs, jax.grad(loss)(loaded)["layers_0"]["attention"])
  assert all(x.max() == 0 for x in jax.tree.leaves(gradient["k"]))
  assert all(x.max() > 0 for x in jax.tree.leaves(gradient["v"]))


@pytest.mark.parametrize(
  "name", [pytest.param(x, marks=() if x == "phi3" else pytest.mark.slow) for x in JOINED]
)
def test_adapters_have_rules_of_sharding(name):
  config, base, adapters = changed_adapters(name)
  specs = param_specs(adapters, make_mesh(Mesh(tensor=2), jax.devices()[:2]))
  split = {path for path, spec in flatten_dict(specs, sep="/").items() if "tensor" in spec.spec}
  assert {"v/lora_b", "k/lora_b", "q/lora_b"} <= {
    "/".join(path.split("/")[-2:]).removeprefix("in_proj_") for path in split
  }


@pytest.mark.slow
@pytest.mark.parametrize("name", JOINED)
def test_peft_and_transformers_compute_the_same_with_what_is_saved(name, monkeypatch):
  for package in ("torch", "transformers", "peft"):
    pytest.importorskip(package, reason=f"pip install {package}")
  monkeypatch.syspath_prepend(GOLDEN)
  found = importlib.import_module("make_lora").differences(name)
  assert found.keys() == {"adapter", "merged"} and max(found.values()) < 1e-4


# --- Refusals ---


@pytest.fixture
def folder(tmp_path):
  """One of Phi-3 with blocks, whose r is 2 and whose alpha is 6."""
  config, _, adapters = changed_adapters("phi3")
  model.save_adapters(tmp_path / "adapter", config, adapters, "base")
  return tmp_path / "adapter"


def edit(folder, **fields):
  file = folder / "adapter_config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | fields))


RANKS, ALPHAS = {"qkv_proj": 6, "gate_up_proj": 4}, {"qkv_proj": 18.0, "gate_up_proj": 12.0}


@pytest.mark.parametrize(
  "key, value",
  [
    ("rank_pattern", RANKS | {"qkv_proj": 5}),
    ("rank_pattern", RANKS | {".*.qkv_proj": 6}),
    ("rank_pattern", RANKS | {"o_proj": 4}),
    ("rank_pattern", ["qkv_proj"]),
    ("rank_pattern", RANKS | {"qkv_proj": "6"}),
    ("alpha_pattern", {}),
    ("alpha_pattern", ALPHAS | {"qkv_proj": 6.0}),
    ("alpha_pattern", ALPHAS | {"o_proj": 6.0}),
    ("alpha_pattern", 3),
  ],
)
def test_other_ranks_and_scales_are_refused(folder, key, value):
  edit(folder, rank_pattern=RANKS, alpha_pattern=ALPHAS)
  assert model.load_adapter_shape(folder).rank == 2
  edit(folder, **{key: value})
  with pytest.raises(ConfigError, match=rf"adapter_config\.json: {key} is ") as error:
    model.load_adapter_shape(folder)
  assert "\n" not in str(error.value)


def read(folder, name):
  config = model.load_config(GOLDEN / "families" / name)
  config = dataclasses.replace(config, lora=model.load_adapter_shape(folder))
  return model.load_adapters(folder, config)


def test_numbers_outside_of_blocks_are_refused(folder):
  file, name = folder / "adapter_model.safetensors", "qkv_proj.lora_B.weight"
  tensors = load_file(file)
  whole = next(key for key in tensors if key.endswith(name))
  tensors[whole][0, -1] = 0.5
  save_file(tensors, file)
  with pytest.raises(ConfigError, match="mixes the projections of"):
    read(folder, "phi3")


def test_a_rank_that_the_tensors_do_not_have_is_refused(folder):
  edit(folder, rank_pattern={}, alpha_pattern={})
  with pytest.raises(ConfigError, match=r"qkv_proj.lora_A.weight is \(6, 32\), .*\(2, 32\)"):
    read(folder, "phi3")


def test_an_adapter_of_some_projections_of_a_module_is_refused(tmp_path):
  folder = Path(shutil.copytree(GOLDEN / "lora" / "qwen3_next", tmp_path / "adapter"))
  edit(folder, target_modules=["in_proj_z", "in_proj_ba", "out_proj", "v_proj"])
  with pytest.raises(ConfigError, match="target_modules .* must name in_proj_qkvz"):
    read(folder, "qwen3_next")


def test_export_says_what_peft_misreads():
  lora = model.AdapterShape(rank=2, alpha=4.0, rslora=False, targets=("q", "up"))
  glm, phi3 = (model.load_config(GOLDEN / "families" / name) for name in ("glm4_moe", "phi3"))
  mixture = dataclasses.replace(glm, lora=lora)
  assert is_misread_by_peft(mixture)
  of_attention = dataclasses.replace(lora, targets=("q",))
  assert not is_misread_by_peft(dataclasses.replace(mixture, lora=of_attention))
  assert not is_misread_by_peft(dataclasses.replace(phi3, lora=lora))
