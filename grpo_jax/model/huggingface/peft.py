"""Reads and writes the folders of PEFT: adapter_config.json and adapter_model.safetensors."""

from collections.abc import Iterable
import math
import os
from pathlib import Path
import re
import sys
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.model.config import AdapterShape, ModelConfig
from grpo_jax.model.huggingface import families
from grpo_jax.model.huggingface.folders import (
  TensorFiles,
  new_folder,
  read_json,
  write_json,
  write_tensors,
)
from grpo_jax.model.huggingface.peft_tensors import PREFIX, RANK, ModuleAdapter, module_adapters
from grpo_jax.model.huggingface.save_weights import Fetch
from grpo_jax.model.huggingface.tensor_spec import TensorSpec
from grpo_jax.model.lora import ADAPTABLE, kernels_of
from grpo_jax.model.stacks import Places, stacked
from grpo_jax.settings import ConfigError

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
  "rank_pattern",
  "alpha_pattern",
  "peft_type",
  "bias",
}
ALLOWED_VALUES = {
  "peft_type": ("LORA",),
  "bias": ("none", None),
  "use_rslora": (True, False, None),
}
# The values of init_lora_weights with which PEFT leaves the base model as it is. With others, such
# as "pissa", it subtracts the first adapter from the base whenever it loads the folder.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


def load_adapter_shape(path: str | os.PathLike) -> AdapterShape:
  """Reads the shape of the adapters in a folder of PEFT from adapter_config.json.

  Raises:
    ConfigError: A file is missing, or the adapters need something that is not supported here.
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
  require(
    values.get("init_lora_weights") in _INITS,
    "init_lora_weights",
    "PEFT then changes the base model, too: convert the adapter with PEFT's"
    " save_pretrained(path_initial_model_for_weight_conversion=...) or, with loftq, merge it with"
    " PEFT",
  )
  for key, value in values.items():
    require(key in KNOWN_FIELDS or not value, key, "adapters with it are not computed here")
  rank, alpha = values.get("r"), values.get("lora_alpha")
  require(type(rank) is int and rank > 0, "r", "it must be a positive int")
  is_number = type(alpha) in (int, float) and 0 < alpha <= sys.float_info.max
  require(is_number, "lora_alpha", "it must be a positive number")
  modules, problem = _adapted_modules(folder, values.get("target_modules"))
  require(not problem, "target_modules", problem)
  lora = AdapterShape(rank, float(alpha), bool(values.get("use_rslora")), kernels_of(modules))
  # The only supported patterns are those that `save_adapters` writes: an adapter in blocks for a
  # module of several projections.
  ranks, alphas = (values.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
  rank_rule = "only modules of several projections may have a rank of their own, in blocks"
  require(_has_blocks(ranks) and ranks == _ranks(lora, ranks), "rank_pattern", rank_rule)
  wanted = _alphas(lora, ranks)
  require(
    _has_blocks(alphas)
    and alphas.keys() == wanted.keys()
    and all(math.isclose(alphas[key], wanted[key], rel_tol=1e-9) for key in wanted),
    "alpha_pattern",
    "it must leave the scale of the adapters alike",
  )
  return lora


def _adapted_modules(folder: Path, targets: Any) -> tuple[list[str], str]:
  """Finds the modules that a folder adapts by `targets`, its field `target_modules`.

  A list has names of modules or their last parts. A string is a regular expression that matches
  whole names, or "all-linear". Returns the keys of ADAPTABLE that are adapted, such as "q_proj",
  and the problem with `targets`, or "".
  """
  names = TensorFiles([folder / "adapter_model.safetensors"]).shapes
  end = ".lora_A.weight"  # each adapted module has one such tensor
  all_modules = [name.removeprefix(PREFIX)[: -len(end)] for name in names if name.endswith(end)]
  if isinstance(targets, str):
    try:
      pattern = re.compile(".*" if targets == "all-linear" else targets)
    except re.error as error:
      return [], f"it is no regular expression ({error})"
    meant = {targets: [module for module in all_modules if pattern.fullmatch(module)]}
  elif isinstance(targets, list) and targets and all(type(target) is str for target in targets):
    meant = {
      target: [module for module in all_modules if f".{module}".endswith(f".{target}")]
      for target in targets
    }
    for target in meant.keys() & ADAPTABLE.keys():
      # These are accepted even if the file has no such module: `_open_adapters` then says which
      # tensors are missing.
      meant[target] = meant[target] or [target]
  else:
    return [], "it must be a list of modules, or a regular expression of their names"
  unmatched = [target for target, modules in meant.items() if not modules]
  if unmatched:
    return [], f"adapter_model.safetensors has no adapter of {unmatched[0]!r:.80}"
  kinds = sorted({module.rpartition(".")[2] for modules in meant.values() for module in modules})
  other = [kind for kind in kinds if kind not in ADAPTABLE]
  if other:
    return [], f"it means {other[0]!r:.80}, and adapters are of {', '.join(ADAPTABLE)}"
  return kinds, ""


def _has_blocks(pattern: Any) -> bool:
  """Whether `rank_pattern` or `alpha_pattern` is an object of numbers by keys of ADAPTABLE."""
  return isinstance(pattern, dict) and all(
    key in ADAPTABLE and type(value) in (int, float) for key, value in pattern.items()
  )


def _ranks(lora: AdapterShape, modules: Iterable[str]) -> dict[str, int]:
  """`rank_pattern` for modules whose adapters have a block for each kernel (peft_tensors.py)."""
  return {module: lora.rank * len(ADAPTABLE[module]) for module in modules}


def _alphas(lora: AdapterShape, modules: Iterable[str]) -> dict[str, float]:
  """`alpha_pattern` for these modules, so that PEFT scales their adapters by `lora.scale`."""
  ratios = {module: len(ADAPTABLE[module]) for module in modules}
  return {
    module: lora.alpha * (math.sqrt(ratio) if lora.rslora else ratio)
    for module, ratio in ratios.items()
  }


def base_of_adapters(path: str | os.PathLike) -> str:
  """The name or folder of the model that adapters were trained on, or "" if the file has none."""
  base = read_json(Path(path).expanduser() / "adapter_config.json").get("base_model_name_or_path")
  return base if isinstance(base, str) else ""


def check_adapters(path: str | os.PathLike, config: ModelConfig) -> None:
  """Checks adapters as `load_adapters` does, but only the names and shapes of their tensors."""
  _open_adapters(Path(path).expanduser(), config)


def load_adapters(path: str | os.PathLike, config: ModelConfig) -> Any:
  """Reads the adapters that `config.lora` describes, as a tree of float32 arrays on the host.

  Raises:
    ConfigError: A tensor is missing, has the wrong shape, belongs to no adapter of the model, has
      a value that is not finite, or mixes projections that this program adapts one by one.
  """
  folder = Path(path).expanduser()
  files, sizes = _open_adapters(folder, config), _sizes(config)

  def read(name: str) -> np.ndarray:  # a whole tensor as float32
    tensor = files.read(name, tuple(slice(0, length) for length in files.shapes[name]))
    tensor = tensor.astype(np.float32)
    if not np.isfinite(tensor).all():
      raise ConfigError(
        f"{folder}: tensor {name} has a value that is NaN or infinite: train the adapter again from"
        " an earlier checkpoint"
      )
    return tensor

  leaves: dict[str, np.ndarray] = {}
  for adapter in module_adapters(config):
    of_module = adapter.split(read(adapter.a_name), read(adapter.b_name), sizes)
    if of_module is None:
      raise ConfigError(
        f"{folder}: tensor {adapter.b_name} mixes the projections of {adapter.module}: an adapter"
        " of a higher rank than r must have a block for each projection, and zeros elsewhere"
      )
    leaves |= of_module
  return stacked(unflatten_dict(leaves, sep="/"), config, np.stack)


def _open_adapters(folder: Path, config: ModelConfig) -> TensorFiles:
  """Opens the adapters, or raises ConfigError if they are not exactly those of `config.lora`."""
  files = TensorFiles([folder / "adapter_model.safetensors"])
  values = read_json(folder / "adapter_config.json")
  wanted: dict[str, tuple[int, ...]] = {}
  for adapter in module_adapters(config):
    _check_parts(folder, config, adapter)
    # The adapters of a module's n kernels may be the blocks of one adapter of rank n r. Then
    # rank_pattern names the module (see peft_tensors.py).
    is_in_blocks = adapter.module in (values.get("rank_pattern") or {})
    wanted |= adapter.shapes(_sizes(config), len(adapter.parts) if is_in_blocks else 1)
  for name in sorted(files.shapes.keys() ^ wanted.keys()):
    if name in wanted:
      raise ConfigError(
        f"{folder}: tensor {name} is missing: save the adapter again, with adapters of all layers"
      )
    raise ConfigError(
      f"{folder}: tensor {name} is not of a projection that adapter_config.json names"
    )
  for name, shape in wanted.items():
    if files.shapes[name] != shape:
      raise ConfigError(
        f"{folder}: tensor {name} is {files.shapes[name]}, for this model it should be {shape}: it"
        " is the adapter of another one"
      )
  return files


def _check_parts(folder: Path, config: ModelConfig, adapter: ModuleAdapter) -> None:
  """Raises ConfigError if `config.lora` has only some of the kernels of an adapter's module."""
  if not {part.kernel for part in adapter.parts} <= {*config.lora.targets}:
    raise ConfigError(
      f"{folder}: target_modules of adapter_config.json must name {adapter.module}, of which PEFT"
      " adapts all projections or none"
    )


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
    path: The folder, which must be empty or not exist. None fetches but writes nothing, as in
      `save`.
    config: The model, with `config.lora`.
    adapters: The tree of adapters, with stacked layers.
    base: The folder of the base model, or its name on huggingface.co.
    revision: The revision of the base model on huggingface.co.
    fetch: fetch(array) -> a copy of it on the host, as in `save`.

  Raises:
    ConfigError: The folder is not empty.
  """
  sizes, leaves = _sizes(config), flatten_dict(adapters, sep="/")
  of_modules, places = list(module_adapters(config)), Places(config)
  trained = {
    spec.leaf_name
    for adapter in of_modules
    for part in adapter.parts
    for spec in (part.a, part.b)
    if part.kernel in config.lora.targets
  }
  assert leaves.keys() == {places.find(name)[0] for name in trained}

  def leaf(spec: TensorSpec) -> np.ndarray:
    # A module's other projections get zeros for A and B, so that the adapter changes nothing there.
    if spec.leaf_name not in trained:
      return np.zeros(spec.leaf_shape(sizes), np.float32)
    # JAX keeps the host copy of an array for as long as the array lives, so a new array is fetched.
    return fetch(jnp.array(places.take(leaves, spec.leaf_name), jnp.float32))

  tensors: dict[str, np.ndarray] = {}
  for adapter in of_modules:
    tensors |= adapter.joined(leaf, sizes)
  if path is None:
    return
  values = {"base_model_name_or_path": base, "revision": revision}
  with new_folder(path) as folder:
    write_json(folder / "adapter_config.json", values | _shape_to_json(config.lora, of_modules))
    write_tensors(folder / "adapter_model.safetensors", tensors)


def _shape_to_json(lora: AdapterShape, of_modules: Iterable[ModuleAdapter]) -> dict[str, Any]:
  """The fields of adapter_config.json that define what the adapters compute."""
  kernel_counts = {adapter.module: len(adapter.parts) for adapter in of_modules}
  in_blocks = sorted(module for module, count in kernel_counts.items() if count > 1)
  return {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": lora.rank,
    "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
    "use_rslora": lora.rslora,
    "target_modules": sorted(kernel_counts),
    "rank_pattern": _ranks(lora, in_blocks),
    "alpha_pattern": _alphas(lora, in_blocks),
    "lora_dropout": 0.0,
    "bias": "none",
    "inference_mode": True,
    "fan_in_fan_out": False,
  }


def _sizes(config: ModelConfig) -> dict[str, int]:
  """The length of each axis letter, including the rank of the adapters."""
  return families.sizes(config) | {RANK: config.lora.rank}
