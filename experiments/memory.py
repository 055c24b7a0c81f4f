"""Measures what a model in the shape of Qwen2.5-1.5B takes: time to load it, memory to train it.

  python experiments/memory.py write FOLDER
    Writes random bfloat16 weights in that shape, as one file of 3.1 GB.
  python experiments/memory.py load FOLDER [DTYPE]
    Loads them as float32 master weights, or as frozen weights of lora.base_dtype=DTYPE.
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
from ml_collections import ConfigDict
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from grpo_jax import model
from grpo_jax.config import from_dict
from grpo_jax.configs import gsm8k
from grpo_jax.data.tasks import arithmetic
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.model.huggingface import config_json, families
from grpo_jax.run.run import Run
from grpo_jax.train import train

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
  (folder / "config.json").write_text(json.dumps(config_json.config_to_json(SHAPE)))
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


def make_run(folder: Path, dtype: str) -> Run:
  return Run(from_dict(make_config(folder, dtype).to_dict()))


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
