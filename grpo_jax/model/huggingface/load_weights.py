"""Loads models from Hugging Face folders and GGUF files.

families/ and config_json.py explain the names in folders, and gguf_config.py and gguf_tensors.py
the names in GGUF files.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
import os
from pathlib import Path
import re
from typing import Any

from flax.traverse_util import unflatten_dict
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import gguf_file
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface import config_json, families, fp8
from grpo_jax.model.huggingface.families import Family
from grpo_jax.model.huggingface.folders import TensorFiles, read_json, weight_files
from grpo_jax.model.huggingface.gguf_config import config_values
from grpo_jax.model.huggingface.gguf_tensors import GGUFTensors
from grpo_jax.model.huggingface.packed_experts import UnpackedExperts
from grpo_jax.model.huggingface.tensor_spec import Sizes, TensorSpec
from grpo_jax.model.huggingface.text_part import has_other_parts, text_name, whole_name
from grpo_jax.model.huggingface.vision import VISION
from grpo_jax.model.stacks import Places, of_layer
from grpo_jax.progress import doing
from grpo_jax.settings import ConfigError

_MB = 10**6
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # of the dtypes that can be loaded
Shardings = Mapping[str, Any]  # the sharding of each parameter, by its path
Convert = Callable[[str, jax.Array], Any]  # convert(name, array) -> the parameter
# The number of layers after the last one that predict further tokens. They are not read.
_FURTHER_LAYERS = "num_nextn_predict_layers"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
Tensors = TensorFiles | UnpackedExperts | GGUFTensors


def load_model_config(
  path: str | os.PathLike, labels: Collection[int] = (0,), vision: bool = False
) -> ModelConfig:
  """Reads the config of the model in a Hugging Face folder or a GGUF file. See `load`.

  Reads no weights, but checks their names and shapes against the config if the files exist.
  """
  family, config = _read_config(path, labels, vision)
  source = Path(path).expanduser()
  if gguf_file.is_gguf(source) or any(source.glob("*.safetensors")):
    files = _tensors_of(source, family, config)
    _check_names_and_shapes(files, config, source)
  return config


def to_float32(name: str, leaf: jax.Array) -> jax.Array:
  """A `Convert` that changes only the dtype."""
  del name
  return leaf.astype(jnp.float32)


def load(
  path: str | os.PathLike,
  shardings: Shardings | None = None,
  convert: Convert = to_float32,
  labels: Collection[int] = (0,),
  converted: Shardings | None = None,
  *,
  vision: bool = False,
) -> tuple[ModelConfig, Any]:
  """Loads a Hugging Face folder or a GGUF file.

  Each device receives its shard of a tensor, in the dtype of the file. The host holds one shard at
  a time, and the mapped pages of one file. It dequantises tensors in GGUF or FP8 to float32.

  Args:
    path: The folder or the file.
    shardings: The sharding of each parameter to read, by its path. None reads all parameters onto
      the default device.
    convert: convert(name, array in the dtype of the file) -> the parameter. It runs on the devices
      under `jax.jit`, for one layer of a stacked parameter at a time.
    labels: The accepted values of `ModelConfig.labels`: 0 for a language model, or the keys of
      REWARD_HEADS.
    converted: The shardings of the results of `convert`. None means `shardings`.
    vision: Read the vision tower, too, if the folder has one that is supported.

  Returns:
    The config and the tree of parameters, with stacked layers.

  Raises:
    ConfigError: The folder or file is incomplete or damaged, or has a weight that is not finite, or
      the model cannot be computed exactly here.
  """
  family, config = _read_config(path, labels, vision)
  folder = Path(path).expanduser()
  files = _tensors_of(folder, family, config)
  _check_tensors(files, family, config, folder)
  sizes, places, targets = families.sizes(config), Places(config), converted or shardings
  leaves = _leaves_to_read(config, places, shardings)
  total, done = sum(_count_bytes(files, leaf.specs, sizes) for leaf in leaves), 0
  params, are_finite = dict[str, Any](), {}
  with doing("loading weights", total // _MB, "MB") as work:
    for leaf in leaves:
      parameter, spec = leaf.parameter, leaf.specs[0]
      tensor = _read_tensor(files, leaf.specs, sizes, leaf.tensor_sharding(shardings))
      # Without the name of a tensor, all layers have equal conversions and share a compilation.
      conversion = _Conversion(
        spec=dataclasses.replace(spec, hf_name="", leaf_name=parameter),
        sizes=tuple(sizes.items()),
        convert=convert,
        layers=places.shape(parameter, ()),
        sharding=targets and targets[parameter],
      )
      stack = params.get(parameter)
      params[parameter], are_finite[spec.hf_name] = _put(conversion, stack, leaf.place, tensor)
      done += _count_bytes(files, leaf.specs, sizes)
      work.reach(done // _MB)
    _check_finite(are_finite, folder)
  return config, unflatten_dict(params, sep="/")


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """A parameter, or one layer of a stacked parameter, and the tensors that it is read from."""

  parameter: str  # the path of the parameter
  place: int | None  # the index of the layer in the stack, or None outside of the layers
  specs: Sequence[TensorSpec]  # one spec, or one for each expert

  def tensor_sharding(self, shardings: Shardings | None) -> jax.sharding.NamedSharding | None:
    """The sharding with which the tensor is read, from the shardings of the parameters."""
    if shardings is None:
      return None
    whole = shardings[self.parameter]
    return self.specs[0].hf_sharding(whole if self.place is None else of_layer(whole))


def _leaves_to_read(
  config: ModelConfig, places: Places, shardings: Shardings | None
) -> list[_Leaf]:
  """The leaves to read, in the order of the specs: all, or those of parameters in `shardings`."""
  specs = config_json.all_tensors(config)
  leaves = []
  for name, group in itertools.groupby(specs, lambda spec: spec.leaf_name):
    parameter, place = places.find(name)
    if shardings is None or parameter in shardings:
      leaves.append(_Leaf(parameter, place, tuple(group)))
  return leaves


def _count_bytes(files: Tensors, specs: Sequence[TensorSpec], sizes: Sizes) -> int:
  """The bytes that the leaf with these specs has in the files."""
  return sum(
    math.prod(spec.hf_shape(sizes)) * ITEM_BYTES[files.dtypes[spec.hf_name]] for spec in specs
  )


def _check_finite(are_finite: Mapping[str, jax.Array], folder: Path) -> None:
  """Raises ConfigError for the first tensor that is not finite. `are_finite` has bool arrays."""
  # All are fetched together at the end, so that reading never waits for the devices.
  for name, is_finite in jax.device_get(dict(are_finite)).items():
    if not is_finite:
      raise ConfigError(
        f"{folder}: tensor {name}, or one that is stacked with it, has a value that is NaN or"
        " infinite: download it again, or train it again from an earlier checkpoint"
      )


def _tensors_of(source: Path, family: Family, config: ModelConfig) -> Tensors:
  """Opens the tensors of a GGUF file or of a folder, with the names of the family's table."""
  if gguf_file.is_gguf(source):
    return GGUFTensors(gguf_file.open_file(source), config.head_dim)
  values = read_json(source / "config.json")
  has_parts = has_other_parts(values)
  further_layers = 0
  if _FURTHER_LAYERS in family.reads:
    further_layers = values.get(_FURTHER_LAYERS) or 0

  def rename(name: str) -> str | None:  # None: the tensor is not read
    found = name
    if has_parts:
      found = whole_name(name) if config.vision else text_name(name)
    layer = _LAYER.match(found or "")
    is_further = layer and 0 <= int(layer[1]) - config.num_layers < further_layers
    return None if is_further else found

  files = TensorFiles(weight_files(source), rename, fp8.block_of(values))
  has_tensor_per_expert = any("{x}" in entry.hf_name for entry in family.table)
  return UnpackedExperts(files, config.embed_dim if has_tensor_per_expert else 0)


def ignores_parts(path: str | os.PathLike, vision: bool = False) -> bool:
  """Whether `load` with this `vision` would leave out a part of the model, such as its tower."""
  file = Path(path).expanduser() / "config.json"
  if not file.exists():
    return False
  values = read_json(file)
  if not has_other_parts(values):
    return False
  return not (vision and values["model_type"] in VISION) or values.get("audio_config") is not None


def _read_config(
  path: str | os.PathLike, labels: Collection[int], vision: bool
) -> tuple[Family, ModelConfig]:
  """Reads the metadata of a GGUF file, or the config.json of a folder. See `load`.

  Stop ids in generation_config.json take precedence over those in config.json, as in transformers.
  """
  folder = Path(path).expanduser()
  if gguf_file.is_gguf(folder):
    values = config_values(gguf_file.open_file(folder))
    return config_json.family_and_config(values, folder, labels)
  if not folder.is_dir():
    raise ConfigError(
      f"model folder {path} does not exist: download it first, hf download NAME --local-dir FOLDER"
    )
  file = folder / "config.json"
  if not file.exists() and gguf_file.names_in(folder):
    raise ConfigError(f"{folder} has no config.json{gguf_file.names_in(folder)}")
  family, config = config_json.family_and_config(read_json(file), file, labels, vision)
  generation = folder / "generation_config.json"
  if generation.exists():
    stop_ids = config_json.read_stop_ids(read_json(generation), generation)
    if stop_ids is not None:
      config = dataclasses.replace(config, stop_ids=stop_ids)
  return family, config


def _read_tensor(
  files: Tensors,
  specs: Sequence[TensorSpec],
  sizes: Sizes,
  sharding: jax.sharding.NamedSharding | None,
) -> np.ndarray | jax.Array:
  """Reads the leaf's part of a tensor, or of all experts' tensors stacked on a first axis.

  Returns a jax.Array with `sharding`, or a numpy array if it is None.
  """
  # The tensors of experts differ only in their names, so one spec has the shape of all.
  spec, is_stacked = specs[0], specs[0].expert is not None
  starts, shape = spec.starts(sizes), spec.hf_shape(sizes)
  if is_stacked:
    shape = (len(specs), *shape)

  def read_one(spec: TensorSpec, index: tuple[slice, ...]) -> np.ndarray:
    if starts is None:  # the leaf's part is not contiguous in the tensor
      return spec.part_of(_read_whole(files, spec.hf_name), sizes)[index]
    moved = (slice(x.start + start, x.stop + start) for x, start in zip(index, starts, strict=True))
    return files.read(spec.hf_name, tuple(moved))

  def read(index: tuple[slice, ...]) -> np.ndarray:
    # Open ends must become numbers, because the tensor may be longer than the leaf's part of it.
    bounded = tuple(slice(*part.indices(length)) for part, length in zip(index, shape))
    if not is_stacked:
      return read_one(spec, bounded)
    experts, *within = bounded
    return np.stack([read_one(spec, tuple(within)) for spec in specs[experts]])

  if sharding is None:
    return read((slice(None),) * len(shape))
  return jax.make_array_from_callback(shape, sharding, read)


def _check_tensors(files: Tensors, family: Family, config: ModelConfig, folder: Path) -> None:
  """Raises ConfigError for a missing, wrong or additional tensor, before weights are read."""
  expected = _check_names_and_shapes(files, config, folder)
  head, embedding = family.head.hf_name, family.embedding.hf_name
  for name in sorted(files.shapes.keys() - expected - set(family.surplus(config))):
    if name == head and not config.labels:
      # The embeddings are tied. A stored head that equals the embedding is harmless, but
      # transformers 5 would use a stored head that differs.
      if not _are_equal(files, head, embedding):
        raise ConfigError(
          f"{folder}: {head} is not {embedding}: set tie_word_embeddings to false in config.json"
        )
    elif not families.HARMLESS.search(name) and not _is_surplus(name, config):
      raise ConfigError(
        f"{folder}: tensor {name} does not belong to the model of its {files.config}: correct"
        " either"
      )


def _is_surplus(name: str, config: ModelConfig) -> bool:
  """Whether checkpoints of this vision family may have the tensor although it is never read."""
  pattern = config_json.whole_of(config).surplus if config.vision else ""
  return bool(pattern) and bool(re.search(pattern, name))


def _check_names_and_shapes(files: Tensors, config: ModelConfig, folder: Path) -> set[str]:
  """Raises ConfigError for a missing or wrong tensor. Returns the names of the model's tensors.

  It stops at the first error, because a damaged config.json may describe an endless model.
  """
  sizes = families.sizes(config)
  expected = set()
  for spec in config_json.all_tensors(config):
    name = spec.hf_name
    wanted = spec.tensor_shape(sizes)
    if name not in files.shapes:
      raise ConfigError(
        f"{folder} has no tensor {name}: download it again or correct its {files.config}"
      )
    shape, dtype = files.shapes[name], files.dtypes[name]
    if shape != wanted:
      raise ConfigError(
        f"{folder}: tensor {name} is {shape}, by {files.config} it should be {wanted}: correct"
        " either"
      )
    if dtype not in ITEM_BYTES:
      raise ConfigError(
        f"{folder}: tensor {name} is {dtype}: save it as float32, float16 or bfloat16"
      )
    expected.add(name)
  return expected


def _are_equal(files: Tensors, first: str, second: str) -> bool:
  """Whether two tensors have the same values."""
  return np.array_equal(_read_whole(files, first), _read_whole(files, second))


def _read_whole(files: Tensors, name: str) -> np.ndarray:
  """Reads a whole tensor onto the host."""
  return files.read(name, tuple(slice(0, size) for size in files.shapes[name]))


@dataclasses.dataclass(frozen=True)
class _Conversion:
  """How tensors become a parameter. Equal conversions share a compilation, also between loads."""

  spec: TensorSpec  # `hf_name` is "" and `leaf_name` the parameter, so that layers are equal
  sizes: tuple[tuple[str, int], ...]  # the items of `families.sizes`
  convert: Convert
  layers: tuple[int, ...]  # (the number of layers in the stack,), or () outside of the layers
  sharding: Any  # the sharding of the result of `convert`, or None

  def layer(self, tensor: jax.Array) -> Any:
    """Converts one tensor: a whole parameter, or one layer of a stacked one."""
    leaf = self.spec.from_hf(tensor, dict(self.sizes))
    return self.convert(self.spec.leaf_name, leaf)

  def placed(self, parameter: Any) -> Any:
    """The parameter with the wanted sharding."""
    if self.sharding is None:
      return parameter
    return jax.lax.with_sharding_constraint(parameter, self.sharding)


def _put(
  how: _Conversion, stack: Any, place: int | None, tensor: np.ndarray | jax.Array
) -> tuple[Any, jax.Array]:
  """Converts a tensor and writes it into its parameter.

  Args:
    how: How the tensor becomes the parameter, or a layer of it.
    stack: The stacked parameter so far, which is donated, or None before its first layer.
    place: The index of the layer in the stack, or None for a parameter outside of the layers.
    tensor: The leaf's part of the tensor, in the dtype of the file.

  Returns:
    The parameter, and a bool array: whether all values of the tensor are finite.
  """
  if place is None:
    return _whole(how, tensor)
  if stack is None:
    stack = _empty_stack(how, tensor)
  return _into_stack(how, stack, place, tensor)


@functools.partial(jax.jit, static_argnums=0)
def _whole(how: _Conversion, tensor: jax.Array) -> tuple[Any, jax.Array]:
  return how.placed(how.layer(tensor)), jnp.isfinite(tensor).all()


@functools.partial(jax.jit, static_argnums=0)
def _empty_stack(how: _Conversion, tensor: jax.Array) -> Any:
  """Zeros for all layers, with the shapes and dtypes that `convert` returns for `tensor`."""

  def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros((*how.layers, *x.shape), x.dtype)

  return how.placed(jax.tree.map(zeros, jax.eval_shape(how.layer, tensor)))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _into_stack(
  how: _Conversion, stack: Any, place: jax.Array, tensor: jax.Array
) -> tuple[Any, jax.Array]:
  def write(whole: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(whole, layer, place, 0)

  stack = jax.tree.map(write, stack, how.layer(tensor))
  return how.placed(stack), jnp.isfinite(tensor).all()
