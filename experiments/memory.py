"""Measures what a model in the shape of Qwen2.5-1.5B takes: time to load it, memory to train it.

  python experiments/memory.py write FOLDER
    Writes random bfloat16 weights in that shape, as one file of 3.1 GB.
  python experiments/memory.py load FOLDER [DTYPE]
    Loads them as float32 master weights, or as frozen weights of lora.base_dtype=DTYPE.
  python experiments/memory.py compile FOLDER [DTYPE [TOPOLOGY]]
    Reports what update and sampler hold on a TPU. Needs jax[tpu], but no TPU.
  python experiments/memory.py step FOLDER DTYPE
    Makes one real step with adapters of rank 32 and a tiny batch.

All commands but `write` print one line of JSON, in bytes and seconds. Without DTYPE, or with "",
all weights are trained. With DTYPE, adapters of rank 32 are trained on frozen weights of that type.

On a CPU, the memory of the device is the memory of the host, so `peak` is both together. It is the
peak of the whole process, so each command needs a process of its own.
"""

from collections.abc import Callable, Sequence
import json
import math
import os
from pathlib import Path
import resource
import sys
import tempfile
import time
from typing import Any

import jax
from jax.experimental import topologies
from ml_collections import ConfigDict
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from configs import gsm8k
from grpo_jax import model
from grpo_jax.config import from_dict
from grpo_jax.data import arithmetic, tokenizer
from grpo_jax.model import families, huggingface
from grpo_jax.run.build import Run
from grpo_jax.train import train
from grpo_jax.types import Batch

SHAPE = model.ModelConfig(
  vocab_size=151936,
  embed_dim=1536,
  num_layers=28,
  num_heads=12,
  num_kv_heads=2,
  head_dim=128,
  mlp_dim=8960,
  rope_theta=1e6,
  tie_embeddings=True,
  stop_ids=(1,),
)


def write(folder: Path) -> None:
  """Writes a Hugging Face folder of SHAPE with random weights, and a tokenizer of characters."""
  folder.mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(huggingface.config_json(SHAPE)))
  sizes, rng, tensors = families.sizes(SHAPE), np.random.default_rng(0), {}
  for spec in families.FAMILIES["qwen2"].tensors(SHAPE):
    shape = spec.hf_shape(sizes)
    random = rng.standard_normal(shape, np.float32) / math.sqrt(shape[-1])
    is_matrix = len(shape) > 1
    tensors[spec.hf_name] = (random if is_matrix else np.ones(shape)).astype(ml_dtypes.bfloat16)
  save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
  tokenizer.characters(arithmetic.ALPHABET).save(folder)


def make_config(folder: Path, dtype: str, **batch: int) -> ConfigDict:
  """configs/gsm8k.py for this folder, with sums as problems. `batch` changes keys of c.batch."""
  c = gsm8k.get_config()
  c.model.path = str(folder)
  c.data.update(task="arithmetic", prompt="{question}", chat=False)
  c.lora.update(rank=32 if dtype else 0, alpha=64.0, base_dtype=dtype or "bfloat16")
  c.batch.update(batch)
  return c


def make_run(folder: Path, dtype: str, devices: Sequence[Any] | None = None, **batch: int) -> Run:
  return Run(from_dict(make_config(folder, dtype, **batch).to_dict()), devices=devices)


def read_from_disk(file: Path) -> float:
  """The seconds that reading the file takes. It is dropped from the page cache before and after."""
  start = time.perf_counter()
  with open(file, "rb", buffering=0) as opened:
    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    while opened.read(1 << 24):
      pass
    seconds = time.perf_counter() - start
    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
  return seconds


def load(folder: Path, dtype: str = "") -> dict[str, float]:
  """Times reading the file alone and loading the weights, both from the disk."""
  file = folder / "model.safetensors"
  read_s = read_from_disk(file)
  run = make_run(folder, dtype)
  start, before = time.perf_counter(), peak()
  params = run.parameters.base if dtype else run.initial_params()
  jax.block_until_ready(params)
  return {
    "read_s": read_s,
    "load_s": time.perf_counter() - start,
    "file": file.stat().st_size,
    "weights": sum(x.nbytes for x in jax.tree.leaves(params)),
    "peak_before": before,
    "peak": peak(),
  }


def compile_for_tpu(folder: Path, dtype: str = "", topology: str = "v4:2x2x1") -> dict[str, int]:
  """What update and sampler hold on one TPU, by its compiler.

  A step has 64 x 8 completions of 512 tokens after prompts of 320. A micro-batch is one prompt.
  """
  devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:1]
  run = make_run(folder, dtype, devices, micro_batch=1)
  out = {
    "state": num_bytes(run.programs.abstract_state),
    "frozen": num_bytes(run.parameters.abstract_base),
  }
  for name, lowered in (("update", lower_update(run)), ("sample", lower_sampler(run))):
    memory = lowered.compile().memory_analysis()
    out[f"{name}_arguments"] = memory.argument_size_in_bytes
    out[f"{name}_temporary"] = memory.temp_size_in_bytes
  return out


def lower_update(run: Run) -> Any:
  """The update of one batch of the run's config, before compilation."""
  c, place = run.config, run.parameters.model.rows
  P, G, S, T = c.batch.prompts, c.batch.group_size, c.data.max_prompt_tokens, c.sampling.max_tokens

  def integers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "int32", sharding=place)

  def floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "float32", sharding=place)

  batch = Batch(
    prompts_PS=integers(P, S),
    prompt_lengths_P=integers(P),
    completions_PGT=integers(P, G, T),
    mask_PGT=floats(P, G, T),
    temperature_P=floats(P),
    advantages_PGT=floats(P, G, T),
    sampler_logprobs_PGT=floats(P, G, T),
    behavior_logprobs_PGT=floats(P, G, T),
    ref_logprobs_PGT=floats(P, G, T),
  )
  update: Any = run.programs.update
  reference = None  # the update reads its log-probs from the batch
  base = run.parameters.abstract_base
  return update.lower(run.programs.abstract_state, base, reference, batch)


def lower_sampler(run: Run) -> Any:
  """The sampler of the run's config, before compilation, with weights in the sampling dtype."""
  c, parameters = run.config, run.parameters
  place = parameters.model.rows

  def integers(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, "int32", sharding=place)

  def converted(x: Any, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)

  policy = parameters.abstract_policy
  weights = jax.tree.map(converted, policy, jax.tree_util.tree_map_with_path(lambda p, x: parameters.sampling_dtype(jax.tree_util.keystr(p, simple=True, separator="/"), x), policy))
  P, S = c.batch.prompts, c.data.max_prompt_tokens
  key = jax.eval_shape(lambda: jax.random.key(0))
  temperature_P = jax.ShapeDtypeStruct((P,), "float32", sharding=place)
  sampler: Any = run.programs.sampler(c.batch.group_size)
  return sampler.lower(weights, integers(P, S), integers(P), key, temperature_P)


def num_bytes(tree: Any) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def step(folder: Path, dtype: str = "") -> dict[str, int]:
  """One real step of 1 x 2 completions of 16 tokens."""
  c = make_config(folder, dtype, prompts=1, group_size=2, micro_batch=1)
  c.steps = 1
  c.sampling.max_tokens = c.data.max_prompt_tokens = 16
  c.eval.every = c.checkpoint.every = 0
  with tempfile.TemporaryDirectory() as workdir:
    train(from_dict(c.to_dict()), workdir)
  return {"peak": peak()}


def peak() -> int:
  """The peak memory of this process so far, in bytes."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


COMMANDS: dict[str, Callable[..., Any]] = {
  "write": write,
  "load": load,
  "compile": compile_for_tpu,
  "step": step,
}


def main(arguments: Sequence[str]) -> None:
  if len(arguments) < 2 or arguments[0] not in COMMANDS:
    sys.exit(__doc__)
  command, folder, *options = arguments
  result = COMMANDS[command](Path(folder), *options)
  if result is not None:
    print(json.dumps(result))


if __name__ == "__main__":
  main(sys.argv[1:])
