"""Hugging Face folders in and out. What their names mean is in families.py and huggingface.py."""

import dataclasses
import functools
import itertools
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, Callable, Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file

from grpo_jax.model import families, huggingface
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.folders import Tensors, new_folder, read_json, weight_files, write_json
from grpo_jax.model.lora import merged
from grpo_jax.settings import ConfigError

SHARD_BYTES = 4 << 30  # of one written file: what the host holds at once
ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2}  # of the dtypes that are read
Places = Mapping[str, jax.sharding.NamedSharding]  # our path -> where it lies
Convert = Callable[
  [str, jax.Array], Any
]  # (our path, array in the file's dtype) -> the leaf of the tree
Progress = Callable[[int, int], None]  # (bytes read, of how many)


def load_config(path: str | os.PathLike, labels: Collection[int] = (0,)) -> ModelConfig:
  """The shape of the model in a Hugging Face folder, and what ends its texts; reads no weights. Arguments as `load`."""
  return _read_config(path, labels)[1]


def load(
  path: str | os.PathLike,
  places: Places | None = None,
  convert: Convert = lambda name, x: x.astype(jnp.float32),
  labels: Collection[int] = (0,),
  progress: Progress = lambda *_: None,
) -> tuple[ModelConfig, Any]:
  """A Hugging Face folder as (config, float32 params), or as what `convert` makes of them on the devices.

  `places` says where the parameters lie; each device is sent its own part of a tensor, as it is in the file. The host holds
  one such part at a time, and the mapped pages of one file. `convert` is asked once for all layers, with the path in the
  first of them. `labels`: which heads the model may have, as in ModelConfig: a language model's (0), or those of SCORERS.
  Raises ConfigError for a folder that is incomplete or damaged, or a model that is not computed exactly here.
  """
  family, config = _read_config(path, labels)
  folder = Path(path).expanduser()
  sizes, leaves, done = families.sizes(config), {}, 0
  tensors = Tensors(weight_files(folder))
  _check(tensors, family, config, folder)
  ours, alike = (
    jax.jit(lambda row, x: convert(row.ours, row.from_theirs(x, sizes)), static_argnums=0),
    {},
  )
  size = lambda rows: sum(
    math.prod(row.their_shape(sizes)) * ITEMSIZE[tensors.dtypes[row.theirs]] for row in rows
  )
  total = size(family.tensors(config))
  for name, rows in itertools.groupby(family.tensors(config), lambda row: row.ours):
    rows = list(rows)  # of each expert, where they have a tensor each
    x = _read(tensors, rows, sizes, places and rows[0].their_sharding(places[name]))
    first = alike.setdefault(
      re.sub(r"layers_\d+", "", name), name
    )  # of the layers that have it: compiled once for all
    leaves[name] = ours(dataclasses.replace(rows[0], theirs="", ours=first), x)
    done += size(rows)
    progress(done, total)
  return config, unflatten_dict(leaves, sep="/")


def save(path: str | os.PathLike, config: ModelConfig, params: Any) -> None:
  """Writes params as a folder of float32 weights that transformers 4 and 5 read: all of it or nothing. Adapters are merged.

  Raises ConfigError where the folder exists and is not empty, or `params` are not those of `config`.
  """
  sizes, leaves = families.sizes(config), flatten_dict(params, sep="/")
  adapters = {name for name in leaves if name.endswith(("/lora_a", "/lora_b"))}
  shapes = {row.ours: row.our_shape(sizes) for row in families.family_of(config).tensors(config)}
  for name in sorted((leaves.keys() - adapters) | shapes.keys()):
    found, wanted = (
      np.shape(leaves[name]) if name in leaves else "absent",
      shapes.get(name, "absent"),
    )
    if found != wanted:
      raise ConfigError(
        f"{path} is not written: parameter {name} is {found}, by its config it should be {wanted}"
      )
  with new_folder(path) as folder:
    write_json(folder / "config.json", huggingface.config_json(config))
    write_json(folder / "generation_config.json", huggingface.stop_ids_json(config))
    _write_weights(folder, config, leaves)


def _read_config(path, labels):
  folder = Path(path).expanduser()
  if not folder.is_dir():
    raise ConfigError(
      f"model folder {path} does not exist: download it first, hf download NAME --local-dir FOLDER"
    )
  family, config = huggingface.read_config(
    read_json(folder / "config.json"), folder / "config.json", labels
  )
  generation = folder / "generation_config.json"
  if generation.exists():
    stop_ids = huggingface.read_stop_ids(read_json(generation), generation)
    config = config if stop_ids is None else dataclasses.replace(config, stop_ids=stop_ids)
  return family, config


def _read(
  tensors: Tensors,
  rows: list[families.Row],
  sizes: Mapping[str, int],
  place: jax.sharding.NamedSharding | None,
):
  """Their tensor, or those of all experts on a first axis: each device's own part of it, or with `place` None all here."""
  (start, _, _), shape = rows[0].part(sizes), rows[0].their_shape(sizes)
  read = functools.partial(tensors.read, rows[0].theirs, start)
  if rows[0].expert is not None:
    shape = len(rows), *shape
    read = lambda index: np.stack(
      [tensors.read(row.theirs, start, index[1:]) for row in rows[index[0]]]
    )
  within = lambda index: tuple(
    slice(*i.indices(n)) for i, n in zip(index, shape)
  )  # of the row: its tensor may have more
  if place is None:
    return read(within((slice(None),) * len(shape)))
  return jax.make_array_from_callback(shape, place, lambda index: read(within(index)))


def _check(tensors: Tensors, family: families.Family, config: ModelConfig, folder: Path) -> None:
  """Finds what is wrong before the first tensor is read."""
  sizes = families.sizes(config)
  expected = {
    row.theirs: (row.part(sizes)[2], *row.their_shape(sizes)[1:]) for row in family.tensors(config)
  }
  for name, wanted in expected.items():
    if name not in tensors.shapes:
      raise ConfigError(
        f"{folder} has no tensor {name}: download it again or correct its config.json"
      )
    shape, dtype = tensors.shapes[name], tensors.dtypes[name]
    if shape != wanted:
      raise ConfigError(
        f"{folder}: tensor {name} is {shape}, by config.json it should be {wanted}: correct either"
      )
    if dtype not in ITEMSIZE:
      raise ConfigError(
        f"{folder}: tensor {name} is {dtype}: save it as float32, float16 or bfloat16"
      )
  head, embedding = family.head.theirs, family.embedding.theirs
  for name in sorted(tensors.shapes.keys() - expected.keys()):
    if (
      name == head and not config.labels
    ):  # tied: a copy says nothing new, but transformers 5 would use one that differs
      if not np.array_equal(
        *(tensors.read(name, 0, (slice(0, tensors.shapes[name][0]),)) for name in (head, embedding))
      ):
        raise ConfigError(
          f"{folder}: {head} is not {embedding}: set tie_word_embeddings to false in config.json"
        )
    elif not families.HARMLESS.search(name):
      raise ConfigError(
        f"{folder}: tensor {name} does not belong to the model of its config.json: correct either"
      )


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

  def fetch(row):
    leaf = leaves[row.ours] if row.expert is None else leaves[row.ours][row.expert]
    a, b = (leaves.get(row.ours.removesuffix("kernel") + name) for name in ("lora_a", "lora_b"))
    # jax keeps an array's host copy for as long as the array lives, so a copy is fetched and let go.
    return row.to_theirs(
      jax.device_get(merged(leaf, a, b, config.lora.scale if config.lora else 0.0)), sizes
    )

  for n, tensors_of_shard in enumerate(shards, 1):
    name = (
      f"model-{n:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
    )
    tensors = {
      theirs: np.concatenate([fetch(row) for row in rows]) if len(rows) > 1 else fetch(rows[0])
      for theirs, rows in tensors_of_shard.items()
    }
    save_file(tensors, folder / name, metadata={"format": "pt"})
    shutil.copymode(
      folder / "config.json", folder / name
    )  # safetensors lets nobody but the owner read it
    weight_map.update(dict.fromkeys(tensors, name))
    total += sum(t.nbytes for t in tensors.values())
  if len(shards) > 1:
    write_json(
      folder / "model.safetensors.index.json",
      {"metadata": {"total_size": total}, "weight_map": weight_map},
    )
