"""Reads and writes the folders of PEFT: adapter_config.json and adapter_model.safetensors."""

from collections.abc import Iterator
import os
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.model.config import ADAPTABLE, AdapterShape, ModelConfig
from grpo_jax.model.huggingface import config_json, families
from grpo_jax.model.huggingface.folders import (
  TensorFiles,
  new_folder,
  read_json,
  write_json,
  write_tensors,
)
from grpo_jax.model.huggingface.save_weights import Fetch
from grpo_jax.model.huggingface.tensor_spec import TensorSpec
from grpo_jax.model.stacks import Places, stacked
from grpo_jax.settings import ConfigError

PREFIX = "base_model.model."  # how PEFT's tensor names begin
RANK = "r"  # the axis letter of the rank
# Fields of adapter_config.json that `load_adapter_shape` reads, or that do not change what the
# adapter computes. Any other field must be empty.
KNOWN_FIELDS = {
  "auto_mapping",
  "base_model_name_or_path",
  "revision",
  "inference_mode",
  "init_lora_weights",
  "lora_dropout",
  "task_type",
  "peft_version",
  "megatron_core",
  "qalora_group_size",
  "runtime_config",
  "loftq_config",
  "r",
  "lora_alpha",
  "use_rslora",
  "target_modules",
  "peft_type",
  "bias",
}
ALLOWED_VALUES = {
  "peft_type": ("LORA",),
  "bias": ("none", None),
  "use_rslora": (True, False, None),
}


def load_adapter_shape(path: str | os.PathLike) -> AdapterShape:
  """Reads the shape of the adapters from adapter_config.json.

  Raises:
    ConfigError: A file is missing, or the adapters are of a kind that is not supported here.
  """
  folder = Path(path).expanduser()
  file = folder / "adapter_config.json"
  for needed in (file, folder / "adapter_model.safetensors"):
    if not needed.is_file():
      raise ConfigError(
        f"config key lora.path: {needed} is missing: name a folder of adapters that PEFT saved as"
        " safetensors"
      )
  values = read_json(file)

  def require(holds: Any, key: str, reason: str) -> None:
    if not holds:
      raise ConfigError(f"{file}: {key} is {values.get(key)!r}: {reason}")

  for key, allowed in ALLOWED_VALUES.items():
    require(values.get(key) in allowed, key, f"only {allowed[0]!r} is computed here")
  for key, value in values.items():
    require(key in KNOWN_FIELDS or not value, key, "adapters with it are not computed here")
  rank, alpha, targets = values.get("r"), values.get("lora_alpha"), values.get("target_modules")
  require(type(rank) is int and rank > 0, "r", "it must be a positive int")
  require(type(alpha) in (int, float) and alpha > 0, "lora_alpha", "it must be a positive number")
  kernels = {module: kernel for kernel, module in ADAPTABLE.items()}
  is_list = isinstance(targets, list) and bool(targets)
  require(
    is_list and {str(target) for target in targets} <= kernels.keys(),
    "target_modules",
    f"it must be a list of {', '.join(kernels)}",
  )
  return AdapterShape(
    rank=rank,
    alpha=float(alpha),
    rslora=bool(values.get("use_rslora")),
    targets=tuple(sorted(kernels[target] for target in targets)),
  )


def base_of_adapters(path: str | os.PathLike) -> str:
  """The name or the folder of the model that the adapters were trained on. "" if it is not said."""
  base = read_json(Path(path).expanduser() / "adapter_config.json").get("base_model_name_or_path")
  return base if isinstance(base, str) else ""


def check_adapters(path: str | os.PathLike, config: ModelConfig) -> None:
  """Checks the names and the shapes of adapters, and reads none of them. See `load_adapters`."""
  _open_adapters(Path(path).expanduser(), config)


def load_adapters(path: str | os.PathLike, config: ModelConfig) -> Any:
  """Reads the adapters that `config.lora` describes, as float32 numpy arrays.

  Raises:
    ConfigError: A tensor is missing, has another shape, belongs to no adapter of the model, or has
      a value that is not finite.
  """
  folder = Path(path).expanduser()
  files, sizes = _open_adapters(folder, config), _sizes(config)
  leaves = {}
  for spec in _specs(config):
    shape = spec.hf_shape(sizes)
    tensor = files.read(spec.hf_name, tuple(slice(0, length) for length in shape))
    tensor = tensor.astype(np.float32)
    if not np.isfinite(tensor).all():
      raise ConfigError(
        f"{folder}: tensor {spec.hf_name} has a value that is NaN or infinite: train the adapter"
        " again from an earlier checkpoint"
      )
    leaves[spec.leaf_name] = spec.from_hf(tensor, sizes)
  return stacked(unflatten_dict(leaves, sep="/"), config, np.stack)


def _open_adapters(folder: Path, config: ModelConfig) -> TensorFiles:
  """The file of the adapters, which has those that `config.lora` describes and no others."""
  files = TensorFiles([folder / "adapter_model.safetensors"])
  specs, sizes = list(_specs(config)), _sizes(config)
  wanted = {spec.hf_name for spec in specs}
  for name in sorted(files.shapes.keys() ^ wanted):
    if name in wanted:
      raise ConfigError(f"{folder}: tensor {name} is missing: save the adapter again")
    raise ConfigError(
      f"{folder}: tensor {name} is not of a projection that adapter_config.json names"
    )
  for spec in specs:
    shape, found = spec.hf_shape(sizes), files.shapes[spec.hf_name]
    if found != shape:
      raise ConfigError(
        f"{folder}: tensor {spec.hf_name} is {found}, for this model it should be {shape}: it is"
        " the adapter of another one"
      )
  return files


def save_adapters(
  path: str | os.PathLike | None,
  config: ModelConfig,
  adapters: Any,
  base: str,
  revision: str | None = None,
  fetch: Fetch = jax.device_get,
) -> None:
  """Writes a folder that PEFT loads onto the base model, completely or not at all.

  Args:
    path: The folder. It must be empty or not exist. None writes nothing, as in `save`.
    config: The model, with `config.lora`.
    adapters: The tree of adapters.
    base: The folder of the base model, or its name on huggingface.co.
    revision: The revision of the base model.
    fetch: Brings an array to the host, as in `save`.

  Raises:
    ConfigError: The folder is not empty, or PEFT has no adapters for this family.
  """
  lora, sizes, leaves = config.lora, _sizes(config), flatten_dict(adapters, sep="/")
  specs, places = list(_specs(config)), Places(config)
  assert leaves.keys() == {places.find(spec.leaf_name)[0] for spec in specs}

  def tensor(spec: TensorSpec) -> np.ndarray:
    leaf = jnp.array(places.take(leaves, spec.leaf_name), jnp.float32)
    return spec.to_hf(fetch(leaf), sizes)

  values = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "revision": revision,
    "r": lora.rank,
    "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
    "use_rslora": lora.rslora,
    "target_modules": [ADAPTABLE[name] for name in lora.targets],
    "lora_dropout": 0.0,
    "bias": "none",
    "inference_mode": True,
    "fan_in_fan_out": False,
  }
  tensors = {spec.hf_name: tensor(spec) for spec in specs}
  if path is None:
    return
  with new_folder(path) as folder:
    write_json(folder / "adapter_config.json", values)
    write_tensors(folder / "adapter_model.safetensors", tensors)


def _sizes(config: ModelConfig) -> dict[str, int]:
  return families.sizes(config) | {RANK: config.lora.rank}


def _specs(config: ModelConfig) -> Iterator[TensorSpec]:
  """The specs of A and B of every adapter. PEFT's A is [r, inputs] and its B is [outputs, r]."""
  for spec in families.family_of(config).tensors(config):
    if config.vision:
      spec = config_json.whole_of(config).saved(spec)
    path = spec.leaf_name.split("/")
    if path[-1] != "kernel" or path[-2] not in config.lora.targets:
      continue
    if spec.is_joined:
      raise ConfigError(
        f"{config.family}: PEFT has one adapter for {spec.hf_name.split('.')[-2]}, which holds"
        " several projections, but here each projection has its own: these adapters can neither be"
        " read nor written; export the merged model"
      )
    outputs, inputs = spec.hf_axes.split()
    hf_name = PREFIX + spec.hf_name.removesuffix("weight")
    leaf_name = spec.leaf_name.removesuffix("kernel")
    yield TensorSpec(
      f"{hf_name}lora_A.weight", f"{leaf_name}lora_a", f"{RANK} {inputs}", inputs + RANK
    )
    yield TensorSpec(
      f"{hf_name}lora_B.weight", f"{leaf_name}lora_b", f"{outputs} {RANK}", RANK + outputs
    )
