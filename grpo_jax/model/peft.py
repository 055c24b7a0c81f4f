"""PEFT's folders of LoRA adapters in and out: adapter_config.json and adapter_model.safetensors."""

import os
from pathlib import Path
from typing import Any, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import save_file

from grpo_jax.model import families
from grpo_jax.model.config import PROJECTIONS, Lora, ModelConfig
from grpo_jax.model.families import Row
from grpo_jax.model.folders import Tensors, new_folder, read_json, write_json
from grpo_jax.settings import ConfigError

PREFIX, RANK = "base_model.model.", "r"  # of their names; the axis letter of the rank
IDLE = {  # fields of adapter_config.json that change nothing of what the adapter computes
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


def load_lora(path: str | os.PathLike) -> Lora:
  """What adapter_config.json says. Raises ConfigError for another kind of adapter, or one that is not computed here."""
  folder = Path(path).expanduser()
  file = folder / "adapter_config.json"
  for needed in (file, folder / "adapter_model.safetensors"):
    if not needed.is_file():
      raise ConfigError(
        f"config key lora.path: {needed} is missing: name a folder of adapters that PEFT saved as safetensors"
      )
  values = read_json(file)

  def need(holds, key, why):
    if not holds:
      raise ConfigError(f"{file}: {key} is {values.get(key)!r}: {why}")

  for key, allowed in (
    ("peft_type", ("LORA",)),
    ("bias", ("none", None)),
    ("use_rslora", (True, False, None)),
  ):
    need(values.get(key) in allowed, key, f"only {allowed[0]!r} is computed here")
  for key, value in values.items():
    need(key in IDLE or not value, key, "adapters with it are not computed here")
  rank, alpha, targets = values.get("r"), values.get("lora_alpha"), values.get("target_modules")
  need(type(rank) is int and rank > 0, "r", "it must be a positive int")
  need(type(alpha) in (int, float) and alpha > 0, "lora_alpha", "it must be a positive number")
  need(
    isinstance(targets, list) and targets and {_ours(str(t)) for t in targets} <= set(PROJECTIONS),
    "target_modules",
    f"it must be a list of {', '.join(f'{name}_proj' for name in PROJECTIONS)}",
  )
  return Lora(
    rank, float(alpha), bool(values.get("use_rslora")), tuple(sorted(map(_ours, targets)))
  )


def load_adapters(path: str | os.PathLike, config: ModelConfig) -> Any:
  """The adapters that config.lora describes, float32 numpy arrays, out of a PEFT folder. Errors as `load`."""
  folder, sizes, leaves = Path(path).expanduser(), _sizes(config), {}
  tensors, rows = Tensors([folder / "adapter_model.safetensors"]), list(_rows(config))
  for name in sorted(tensors.shapes.keys() ^ {row.theirs for row in rows}):
    raise ConfigError(
      f"{folder}: tensor {name} "
      + (
        "is not of a projection that adapter_config.json names"
        if name in tensors.shapes
        else "is missing: save the adapter again"
      )
    )
  for row in rows:
    if tensors.shapes[row.theirs] != row.their_shape(sizes):
      raise ConfigError(
        f"{folder}: tensor {row.theirs} is {tensors.shapes[row.theirs]}, for this model it should be "
        f"{row.their_shape(sizes)}: it is the adapter of another one"
      )
    whole = tuple(slice(0, n) for n in row.their_shape(sizes))
    leaves[row.ours] = row.from_theirs(tensors.read(row.theirs, 0, whole).astype(np.float32), sizes)
  return unflatten_dict(leaves, sep="/")


def save_adapters(
  path: str | os.PathLike,
  config: ModelConfig,
  adapters: Any,
  base: str,
  revision: str | None = None,
) -> None:
  """Writes a folder that PEFT loads onto the model at `base`, a folder or a name: all of it or nothing. Errors as `save`."""
  lora, sizes, leaves = config.lora, _sizes(config), flatten_dict(adapters, sep="/")
  fetch = lambda row: row.to_theirs(jax.device_get(jnp.array(leaves[row.ours], jnp.float32)), sizes)
  rows = list(_rows(config))
  assert leaves.keys() == {row.ours for row in rows}
  values = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "revision": revision,
    "r": lora.rank,
    "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
    "use_rslora": lora.rslora,
    "target_modules": [f"{name}_proj" for name in lora.targets],
    "lora_dropout": 0.0,
    "bias": "none",
    "inference_mode": True,
    "fan_in_fan_out": False,
  }
  with new_folder(path) as folder:
    write_json(folder / "adapter_config.json", values)
    save_file(
      {row.theirs: fetch(row) for row in rows},
      folder / "adapter_model.safetensors",
      metadata={"format": "pt"},
    )


def _ours(name: str) -> str:
  return name.removesuffix("_proj")


def _sizes(config):
  return families.sizes(config) | {RANK: config.lora.rank}


def _rows(config: ModelConfig) -> Iterator[Row]:
  """A row for each of A and B. Their A is [r, inputs], their B [outputs, r]."""
  for row in families.family_of(config).tensors(config):
    path = row.ours.split("/")
    if path[-1] != "kernel" or path[-2] not in config.lora.targets:
      continue
    if row.before or row.after:
      raise ConfigError(
        f"{config.family}: PEFT knows {row.theirs.split('.')[-2]}, several projections in one, where adapters "
        "are of each: their folders are neither read nor written here; export the merged model"
      )
    outputs, inputs = row.their_axes.split()
    name, parent = PREFIX + row.theirs.removesuffix("weight"), row.ours.removesuffix("kernel")
    yield Row(f"{name}lora_A.weight", f"{parent}lora_a", f"{RANK} {inputs}", inputs + RANK)
    yield Row(f"{name}lora_B.weight", f"{parent}lora_b", f"{outputs} {RANK}", RANK + outputs)
