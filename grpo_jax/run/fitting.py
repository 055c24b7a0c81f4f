"""What fits into the memory of a device: chooses the micro-batch and the layout for sampling.

The numbers are estimates from shapes. `python -m grpo_jax.plan` gives those of the compiler.
"""

import math
from typing import Any

import jax

from grpo_jax import model
from grpo_jax.config import Config
from grpo_jax.learner.token_stats import default_chunk
from grpo_jax.parallel import sharding

# A step needs more than the estimate: arrays that overlap in time, and gaps between them.
_USABLE = 0.85
_LOGITS_COPIES = 4  # of a chunk: logits, weights, and the gradients of both


def device_bytes(tree: Any) -> float:
  """The bytes of a tree of shapes and shardings on one device."""
  leaves = jax.tree.leaves(tree)
  return sum(1.0 * math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def layout(
  name: str, params: Any, held: float, mesh: jax.sharding.Mesh, memory: float | None
) -> str:
  """The layout of the sampler's weights: `name` itself, or what "auto" means.

  Weights that lie whole along fsdp need not travel for every token.

  Args:
    name: sampling.layout.
    params: All parameters of the policy: shapes, dtypes of sampling and shardings.
    held: Bytes that one device holds while it samples, without the sampler's weights.
    mesh: The mesh of the run.
    memory: The bytes of a device, or None if they are not known.
  """
  if name != "auto":
    return name
  if mesh.shape["fsdp"] == 1:
    return "train"  # the same places, so that weights of the right dtype need no copy
  places = sharding.param_specs(params, mesh, "tensor")
  placed = jax.tree.map(
    lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), params, places
  )
  # The other half is for the cache, the logits and what else a step holds.
  fits = memory is None or held + device_bytes(placed) <= _USABLE * memory / 2
  return "tensor" if fits else "train"


def micro_batch(
  config: Config,
  shape: model.ModelConfig,
  held: float,
  mesh: jax.sharding.Mesh,
  memory: float | None,
) -> int:
  """How many prompts an update computes at once: batch.micro_batch itself, or what 0 means.

  That is the largest number whose activations fit beside what is held. It divides the prompts of an
  update and is a multiple of the rows of the mesh.

  Args:
    config: The config of the run.
    shape: The model on the mesh.
    held: Bytes that one device holds while it updates: state, reference and gradients.
    mesh: The mesh of the run.
    memory: The bytes of a device, or None if they are not known. Then it is all prompts.
  """
  prompts = config.batch.prompts // config.algo.minibatches
  if config.batch.micro_batch or memory is None:
    return config.batch.micro_batch or prompts
  row_shards = shape.row_shards
  sizes = [size for size in range(row_shards, prompts + 1, row_shards) if prompts % size == 0] or [
    prompts
  ]
  free = _USABLE * memory - held
  fitting = [
    size for size in sizes if activation_bytes(config, shape, size // row_shards, mesh) <= free
  ]
  return max(fitting, default=sizes[0])


def activation_bytes(
  config: Config, shape: model.ModelConfig, prompts: int, mesh: jax.sharding.Mesh
) -> float:
  """The bytes that one device needs to update with so many prompts at once, beside what is held."""
  S, G, T = config.data.max_prompt_tokens, config.batch.group_size, config.sampling.max_tokens
  D, L, E = shape.embed_dim, shape.num_layers, shape.head_dim
  split = mesh.shape["tensor"]
  item = 2 if shape.dtype == "bfloat16" else 4
  tokens = prompts * (S + G * T)
  width = max(shape.mlp_dim, shape.experts_per_token * shape.expert_dim)
  heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
  layer = tokens * item * (8 * D + (2 * heads * E + 5 * width) / split)
  name, _ = model.attention_of(shape)
  scores = prompts * shape.num_heads / split * (S * S + G * T * (S + T)) * 4
  layer += (3 if name == "dense" else 0) * scores
  saved = L * layer / 2
  if config.learner.remat:
    saved = L * tokens * D * item
  chunk = max(config.learner.logprob_chunk or default_chunk(shape.vocab_size), prompts)
  logits = _LOGITS_COPIES * chunk * shape.vocab_size * 4 / split
  return saved + 2 * layer + logits
