"""Hugging Face folders in and out. What their names mean is in families.py and huggingface.py."""
import contextlib
import dataclasses
import itertools
import json
import math
import os
from pathlib import Path
import shutil
from typing import Any, Callable, Mapping

from flax.traverse_util import flatten_dict, unflatten_dict
import jax
import jax.numpy as jnp  # its import also names bfloat16 to numpy, without which safetensors cannot read it
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from grpo_jax.config import ConfigError
from grpo_jax.model import families, huggingface
from grpo_jax.model.config import ModelConfig

SHARD_BYTES = 4 << 30  # of one written file: what the host holds at once
Place = Callable[[str, np.ndarray], Any]  # (our path, float32 array) -> the leaf of the tree


def load_config(path: str | os.PathLike) -> ModelConfig:
  """The shape of the model in a Hugging Face folder, and what ends its texts; reads no weights. Errors as `load`."""
  return _read_config(path)[1]


def load(path: str | os.PathLike, place: Place | None = None) -> tuple[ModelConfig, Any]:
  """A Hugging Face folder as (config, float32 params). `place` puts each tensor where it belongs as it is read.

  Raises ConfigError for a folder that is incomplete or damaged, or a model that is not computed exactly here.
  """
  family, config = _read_config(path)
  folder = Path(path).expanduser()
  place = place or (lambda name, array: jnp.array(array))
  sizes, leaves = families.sizes(config), {}
  with contextlib.ExitStack() as stack:
    files = _open(folder, stack)
    _check(files, family, config, folder)
    for ours, rows in itertools.groupby(family.tensors(config), lambda row: row.ours):
      leaves[ours] = place(ours, _read(files, list(rows), sizes))
  return config, unflatten_dict(leaves, sep="/")


def save(path: str | os.PathLike, config: ModelConfig, params: Any) -> None:
  """Writes float32 params as a folder that transformers 4 and 5 read: all of it or nothing.

  Raises ConfigError where the folder exists and is not empty, or `params` are not those of `config`.
  """
  target = Path(path).expanduser().resolve()
  if target.exists() and (not target.is_dir() or any(target.iterdir())):
    raise ConfigError(f"{target} exists and is not an empty folder: choose another or remove it")
  sizes, leaves = families.sizes(config), flatten_dict(params, sep="/")
  shapes = {row.ours: row.our_shape(sizes) for row in families.family_of(config).tensors(config)}
  for name in sorted(leaves.keys() | shapes.keys()):
    found, wanted = np.shape(leaves[name]) if name in leaves else "absent", shapes.get(name, "absent")
    if found != wanted:
      raise ConfigError(f"{target} is not written: parameter {name} is {found}, by its config it should be {wanted}")
  partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
  partial.mkdir(parents=True)
  try:
    _write_json(partial / "config.json", huggingface.config_json(config))
    _write_json(partial / "generation_config.json", huggingface.stop_ids_json(config))
    _write_weights(partial, config, leaves)
    os.replace(partial, target)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _read_config(path):
  folder = Path(path).expanduser()
  if not folder.is_dir():
    raise ConfigError(f"model folder {path} does not exist: download it first, hf download NAME --local-dir FOLDER")
  family, config = huggingface.read_config(_read_json(folder / "config.json"), folder / "config.json")
  generation = folder / "generation_config.json"
  if generation.exists():
    stop_ids = huggingface.read_stop_ids(_read_json(generation), generation)
    config = config if stop_ids is None else dataclasses.replace(config, stop_ids=stop_ids)
  return family, config


def _read_json(file: Path) -> dict[str, Any]:
  try:
    values = json.loads(file.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise ConfigError(f"{file} is missing: the folder must be one that transformers saved") from None
  except ValueError as error:
    raise ConfigError(f"{file} is not JSON ({error}): download or save it again") from None
  if not isinstance(values, dict):
    raise ConfigError(f"{file} is not a JSON object: download or save it again")
  return values


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
  file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _open(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
  """Tensor name -> the open file that holds it."""
  index, names, files = folder / "model.safetensors.index.json", ["model.safetensors"], {}
  if not (folder / names[0]).is_file():
    if not index.is_file():
      pickled = " (a .bin is not read: unpickling can run code)" if any(folder.glob("*.bin")) else ""
      raise ConfigError(f"{folder} has no model.safetensors{pickled}: download or save it as safetensors")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
      raise ConfigError(f"{index} has no weight_map: download it again")
    names = sorted(set(weight_map.values()))
  for file in (folder / name for name in names):
    if not file.is_file():
      raise ConfigError(f"{file} is missing, {index.name} lists it: download it again")
    try:
      opened = stack.enter_context(safe_open(file, framework="numpy"))
    except (SafetensorError, OSError) as error:
      raise ConfigError(f"{file} is damaged or cut off ({error}): download it again") from None
    files.update(dict.fromkeys(opened.keys(), opened))
  return files


def _read(files: Mapping[str, Any], rows: list[families.Row], sizes: Mapping[str, int]) -> np.ndarray:
  """One of our parameters, float32: of one row, or of one per expert."""
  out = np.empty(rows[0].our_shape(sizes), np.float32)
  for row in rows:
    start, end, whole = row.part(sizes)
    tensor = files[row.theirs]
    array = tensor.get_tensor(row.theirs) if end - start == whole else tensor.get_slice(row.theirs)[start:end]
    out[... if row.expert is None else row.expert] = row.from_theirs(array.astype(np.float32, copy=False), sizes)
  return out


def _check(files: Mapping[str, Any], family: families.Family, config: ModelConfig, folder: Path) -> None:
  """Finds what is wrong before the first tensor is read."""
  sizes = families.sizes(config)
  expected = {row.theirs: (row.part(sizes)[2], *row.their_shape(sizes)[1:]) for row in family.tensors(config)}
  for name, wanted in expected.items():
    if name not in files:
      raise ConfigError(f"{folder} has no tensor {name}: download it again or correct its config.json")
    tensor = files[name].get_slice(name)
    shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    if shape != wanted:
      raise ConfigError(f"{folder}: tensor {name} is {shape}, by config.json it should be {wanted}: correct either")
    if dtype not in ("F32", "F16", "BF16"):
      raise ConfigError(f"{folder}: tensor {name} is {dtype}: save it as float32, float16 or bfloat16")
  head, embedding = family.head.theirs, family.embedding.theirs
  for name in sorted(files.keys() - expected.keys()):
    if name == head:  # tied: a copy says nothing new, but transformers 5 would use one that differs
      if not np.array_equal(files[head].get_tensor(head), files[embedding].get_tensor(embedding)):
        raise ConfigError(f"{folder}: {head} is not {embedding}: set tie_word_embeddings to false in config.json")
    elif not families.HARMLESS.search(name):
      raise ConfigError(f"{folder}: tensor {name} does not belong to the model of its config.json: correct either")


def _write_weights(folder: Path, config: ModelConfig, leaves: Mapping[str, Any]) -> None:
  sizes, shards, room, parts = families.sizes(config), [], 0, {}
  for row in families.family_of(config).tensors(config):
    parts.setdefault(row.theirs, []).append(row)
  for name, rows in parts.items():
    size = 4 * sum(math.prod(row.their_shape(sizes)) for row in rows)
    if size > room:
      shards.append({})
      room = SHARD_BYTES
    shards[-1][name] = rows
    room -= size
  weight_map, total = {}, 0
  one = lambda row: leaves[row.ours] if row.expert is None else leaves[row.ours][row.expert]
  # jax keeps an array's host copy for as long as the array lives, so a copy is fetched and let go.
  fetch = lambda row: row.to_theirs(jax.device_get(jnp.array(one(row), jnp.float32)), sizes)
  for n, tensors_of_shard in enumerate(shards, 1):
    name = f"model-{n:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
    tensors = {theirs: np.concatenate([fetch(row) for row in rows]) if len(rows) > 1 else fetch(rows[0])
               for theirs, rows in tensors_of_shard.items()}
    save_file(tensors, folder / name, metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / name)  # safetensors lets nobody but the owner read it
    weight_map.update(dict.fromkeys(tensors, name))
    total += sum(t.nbytes for t in tensors.values())
  if len(shards) > 1:
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
