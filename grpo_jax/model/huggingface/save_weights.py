"""Saves Hugging Face folders. families/ and config_json.py explain the names in them."""

import collections
from collections.abc import Callable, Iterable, Mapping
import math
import os
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict
import jax
import numpy as np

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface import config_json, families
from grpo_jax.model.huggingface.folders import new_folder, write_json, write_tensors
from grpo_jax.model.huggingface.tensor_spec import TensorSpec
from grpo_jax.model.lora import merged
from grpo_jax.model.stacks import Places
from grpo_jax.settings import ConfigError

FILE_BYTES = 4 << 30  # of a safetensors file. The host holds the tensors of one file at a time.
Fetch = Callable[[jax.Array], np.ndarray]  # fetch(array) -> a copy of it on the host
Specs = dict[str, list[TensorSpec]]  # name of a tensor -> its leaves, in their order


def save(
  path: str | os.PathLike | None, config: ModelConfig, params: Any, fetch: Fetch = jax.device_get
) -> None:
  """Writes a folder of float32 weights for transformers 4 and 5, completely or not at all.

  Args:
    path: The folder, which must be empty or not exist. None fetches but writes nothing: if there
      are several processes, one writes, and the others pass None to take part in fetching.
    config: The model.
    params: The tree of parameters. Adapters are merged into the weights.
    fetch: fetch(array) -> a copy of it on the host. All processes call it together.

  Raises:
    ConfigError: The folder is not empty, or `params` do not fit `config`.
  """
  leaves = flatten_dict(params, sep="/")
  _check_leaves(path, config, leaves)
  files = _assign_to_files(config)
  # A generator, so that the host holds the tensors of one file at a time.
  tensors_of_files = (
    {name: _tensor(config, specs, leaves, fetch) for name, specs in specs_of_tensor.items()}
    for specs_of_tensor in files
  )
  if path is None:
    collections.deque(tensors_of_files, maxlen=0)  # fetches everything and keeps nothing
    return
  with new_folder(path) as folder:
    write_json(folder / "config.json", config_json.config_to_json(config))
    write_json(folder / "generation_config.json", config_json.stop_ids_to_json(config))
    _write_weights(folder, tensors_of_files, len(files))


def _check_leaves(
  path: str | os.PathLike | None, config: ModelConfig, leaves: Mapping[str, Any]
) -> None:
  """Raises ConfigError unless the names and shapes of the leaves are those of the config."""
  sizes, places = families.sizes(config), Places(config)
  wanted = {}
  for spec in config_json.all_tensors(config):
    name, _ = places.find(spec.leaf_name)
    wanted[name] = places.shape(name, spec.leaf_shape(sizes))
  found = {
    name: np.shape(leaf)
    for name, leaf in leaves.items()
    if not name.endswith(("/lora_a", "/lora_b"))  # adapters are merged into kernels
  }
  for name in sorted(found.keys() | wanted.keys()):
    found_shape, wanted_shape = found.get(name, "absent"), wanted.get(name, "absent")
    if found_shape != wanted_shape:
      raise ConfigError(
        f"{path or 'the folder'} is not written: parameter {name} is {found_shape}, by its"
        f" config it should be {wanted_shape}"
      )


def _write_weights(
  folder: Path, tensors_of_files: Iterable[dict[str, np.ndarray]], count: int
) -> None:
  """Writes the `count` safetensors files and, if there are several, their index."""
  weight_map: dict[str, str] = {}
  total = 0
  for number, tensors in enumerate(tensors_of_files, 1):
    name = "model.safetensors"
    if count > 1:
      name = f"model-{number:05}-of-{count:05}.safetensors"
    write_tensors(folder / name, tensors)
    weight_map |= dict.fromkeys(tensors, name)
    total += sum(tensor.nbytes for tensor in tensors.values())
  if count > 1:
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def _assign_to_files(config: ModelConfig) -> list[Specs]:
  """Distributes the tensors over files of at most FILE_BYTES. A tensor is never split."""
  sizes = families.sizes(config)
  specs_of_tensor: Specs = {}
  for spec in config_json.saved_tensors(config):
    specs_of_tensor.setdefault(spec.hf_name, []).append(spec)
  files: list[Specs] = []
  free = 0  # bytes that the last file can still take. At first there is no file
  for hf_name, specs in specs_of_tensor.items():
    size = 4 * sum(math.prod(spec.hf_shape(sizes)) for spec in specs)  # 4 bytes a float32
    if size > free:
      files.append({})
      free = FILE_BYTES
    files[-1][hf_name] = specs
    free -= size
  return files


def _tensor(
  config: ModelConfig, specs: list[TensorSpec], leaves: Mapping[str, Any], fetch: Fetch
) -> np.ndarray:
  """Fetches the leaves of `specs` and joins them into the tensor that holds them."""
  parts = [_part_of_leaf(config, spec, leaves, fetch) for spec in specs]
  return specs[0].joined(parts, families.sizes(config))


def _part_of_leaf(
  config: ModelConfig, spec: TensorSpec, leaves: Mapping[str, Any], fetch: Fetch
) -> np.ndarray:
  """Fetches a leaf, with its adapter merged, in the layout of its part of the tensor."""
  places = Places(config)
  leaf = places.take(leaves, spec.leaf_name)
  if spec.expert is not None:
    leaf = leaf[spec.expert]
  module = spec.leaf_name.removesuffix("kernel")
  adapter, _ = places.find(module + "lora_a")
  has_adapter = adapter in leaves
  a, b = (places.take(leaves, module + x) if has_adapter else None for x in ("lora_a", "lora_b"))
  scale = config.lora.scale if config.lora else 0.0
  # JAX keeps an array's host copy for as long as the array lives, so fetching the parameters
  # themselves would fill the host's memory. `merged` makes a new array.
  return spec.to_hf(fetch(merged(leaf, a, b, scale)), families.sizes(config))
