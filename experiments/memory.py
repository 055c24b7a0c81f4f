"""What the shape of Qwen2.5-1.5B takes: time and memory of loading it, and of training all of it or adapters.

  python experiments/memory.py write FOLDER            # random bfloat16 weights in that shape, as one file of 3.1 GB
  python experiments/memory.py load FOLDER [DTYPE]     # as float32 master weights, or as a frozen base of lora.base_dtype
  python experiments/memory.py compile FOLDER [DTYPE [TOPOLOGY]]  # what update and sampler hold on a TPU; needs jax[tpu]
  python experiments/memory.py step FOLDER DTYPE       # one real step with adapters of rank 32, tiny batch

One line of JSON each, in bytes and seconds. On a CPU the device's memory is the host's: `peak` is both together, of a
process of its own.
"""

import json
import math
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.experimental import topologies
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


def write(folder):
  folder.mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(huggingface.config_json(SHAPE)))
  sizes, rng, tensors = families.sizes(SHAPE), np.random.default_rng(0), {}
  for row in families.FAMILIES["qwen2"].tensors(SHAPE):
    shape = row.their_shape(sizes)
    random = rng.standard_normal(shape, np.float32) / math.sqrt(shape[-1])
    tensors[row.theirs] = (random if len(shape) > 1 else np.ones(shape)).astype(ml_dtypes.bfloat16)
  save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
  tokenizer.characters(arithmetic.ALPHABET).save(folder)


def make_config(folder, dtype, **batch):
  """The recipe's, with sums for problems. dtype "" = all weights are trained."""
  c = gsm8k.get_config()
  c.model.path, c.data.task, c.data.prompt, c.data.chat = (
    str(folder),
    "arithmetic",
    "{question}",
    False,
  )
  c.lora.update(rank=32 if dtype else 0, alpha=64.0, base_dtype=dtype or "bfloat16")
  c.batch.update(batch)
  return c


def make_run(folder, dtype, devices=None, **batch):
  return Run(from_dict(make_config(folder, dtype, **batch).to_dict()), devices=devices)


def load(folder, dtype):
  """Both times from the disk: pages of the file that Linux holds are dropped first."""
  start = time.perf_counter()
  with open(folder / "model.safetensors", "rb", buffering=0) as file:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    while file.read(1 << 24):
      pass
    read = time.perf_counter() - start
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
  run = make_run(folder, dtype)
  start, before = time.perf_counter(), peak()
  params = run.parameters.base if dtype else run.initial_params()
  jax.block_until_ready(params)
  return {
    "read_s": read,
    "load_s": time.perf_counter() - start,
    "file": (folder / "model.safetensors").stat().st_size,
    "weights": sum(x.nbytes for x in jax.tree.leaves(params)),
    "peak_before": before,
    "peak": peak(),
  }


def compiled(folder, dtype, topology="v4:2x2x1"):
  """On one TPU: 64 x 8 completions of 512 tokens after prompts of 320, micro-batches of one prompt."""
  devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:1]
  run = make_run(folder, dtype, devices, micro_batch=1)
  c, shape, place = run.config, jax.ShapeDtypeStruct, run.model.rows
  P, G, S, T = c.batch.prompts, c.batch.group_size, c.data.max_prompt_tokens, c.sampling.max_tokens
  integers = lambda *s: shape(s, "int32", sharding=place)
  values = shape((P, G, T), "float32", sharding=place)
  batch = Batch(
    integers(P, S), integers(P), integers(P, G, T), values, values, values, values, None, values
  )
  parameters = run.parameters
  update = run.update.lower(run.abstract_state, parameters.abstract_base, batch)
  converted = lambda tree: jax.tree.map(
    lambda x, dtype: shape(x.shape, dtype, sharding=x.sharding),
    tree,
    jax.tree.map(parameters.sampled_dtype, tree),
  )
  key = jax.eval_shape(lambda: jax.random.key(0))
  sample = run.sampler(c.sampling, G).lower(
    converted(parameters.abstract_policy), integers(P, S), integers(P), key
  )
  held = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
  out = {"state": held(run.abstract_state), "frozen": held(parameters.abstract_base)}
  for name, lowered in (("update", update), ("sample", sample)):
    memory = lowered.compile().memory_analysis()
    out |= {
      f"{name}_arguments": memory.argument_size_in_bytes,
      f"{name}_temporary": memory.temp_size_in_bytes,
    }
  return out


def step(folder, dtype):
  c = make_config(folder, dtype, prompts=1, group_size=2, micro_batch=1)
  c.steps, c.sampling.max_tokens, c.data.max_prompt_tokens, c.eval.every, c.checkpoint.every = (
    1,
    16,
    16,
    0,
    0,
  )
  with tempfile.TemporaryDirectory() as workdir:
    train(from_dict(c.to_dict()), workdir)
  return {"peak": peak()}


def peak():
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
  command, path, *rest = sys.argv[1:]
  what = {
    "write": lambda folder, dtype: write(folder),
    "load": load,
    "compile": compiled,
    "step": step,
  }[command]
  print(json.dumps(what(Path(path), *(rest or [""]))))
