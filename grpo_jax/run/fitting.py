"""What fits into the memory of a device: chooses the micro-batch and how to sample.

The numbers are estimates. `python -m grpo_jax.plan` gives those of the compiler.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax import model
from grpo_jax.config import Config
from grpo_jax.learner.features import completion_features
from grpo_jax.learner.token_stats import default_chunk
from grpo_jax.parallel import sharding
from grpo_jax.parallel.mesh import sampling_mesh
from grpo_jax.sampler.programs import most_rewound
from grpo_jax.sampler.sampling import longest_chunk, sizes_up_to
from grpo_jax.sampler.seats import first_grid
from grpo_jax.types import Batch, Images, Visual

# A step needs more than the estimate: arrays that overlap in time, and gaps between them. What a
# sampler holds is mostly weights and caches, whose sizes are known.
_USABLE_BY_UPDATE, _USABLE_BY_SAMPLER = 0.85, 0.93
# With eight times as many, an update took a quarter to a third longer on a CPU, whose caches do not
# hold the activations (experiments/LOG.md, 2026-11-22).
_TOKENS_ON_CPU = 2048
# The compiler for TPUs keeps the keys or the values in a second order while rows are decoded.
_CACHE_COPIES_ON_TPU = 1.5
_LOGITS_COPIES = 4  # a sampler may hold logits, tempered ones, filtered ones and their weights
# Of a chunk in an update: logits and their gradient. A CPU writes weights and theirs, too.
_CHUNK_COPIES, _CHUNK_COPIES_ON_CPU = 2, 4


def device_bytes(tree: Any) -> float:
  """The bytes of a tree of shapes and shardings on one device."""
  leaves = jax.tree.leaves(tree)
  return sum(1.0 * math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def sampling_tensor(
  config: Config,
  shape: model.ModelConfig,
  params: Any,
  held: float,
  mesh: jax.sharding.Mesh,
  memory: float | None,
) -> int:
  """How many devices share a row while sampling: sampling.tensor itself, or what 0 means.

  Weights that lie whole along fsdp need not travel for every token.

  Args:
    config: The config of the run.
    shape: The model on the mesh.
    params: All parameters of the policy: shapes and dtypes as in sampling.
    held: Bytes that one device holds while it samples, without the sampler's weights.
    mesh: The mesh of the run, or that of the devices which only sample.
    memory: The bytes of a device, or None if they are not known.
  """
  own = mesh.shape["tensor"]
  if config.sampling.tensor or mesh.shape["fsdp"] == 1 or memory is None:
    return config.sampling.tensor or own
  devices = mesh.size // mesh.shape["expert"]
  sizes = [
    size
    for size in range(own, devices + 1, own)
    if devices % size == 0 and (size == own or shape.num_heads % size == 0)
  ]
  usable = _USABLE_BY_SAMPLER * memory
  copies = 1 if config.lora.rank else config.sampling_copies  # of adapters, versions are small

  def on_mesh(size: int) -> tuple[float, float]:
    """The bytes that a device holds without a cache, and those of the cache of all rows."""
    there = sampling_mesh(mesh, size)
    places = sharding.param_specs(params, there)
    placed = jax.tree.map(
      lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), params, places
    )
    there_shape = dataclasses.replace(shape, **sharding.model_shardings(shape, there))
    return held + copies * device_bytes(placed), sampler_bytes(config, there_shape)

  needed = {size: on_mesh(size) for size in sizes}
  all_fit = [size for size, (weights, cache) in needed.items() if weights + cache <= usable]
  # If the rows do not fit all at once, fewer are in flight. They get half of the memory at least.
  some_fit = [size for size, (weights, _) in needed.items() if weights <= usable / 2]
  return (all_fit or some_fit or sizes[-1:])[0]


def sampler_bytes(config: Config, shape: model.ModelConfig, rows: int | None = None) -> float:
  """The bytes of one device's keys, values and logits while the largest batch is sampled.

  Args:
    config: The config of the run.
    shape: The model on the sampler's mesh.
    rows: The most in flight, 0 for all. None means sampling.rows.
  """
  S, T = config.data.max_prompt_tokens, config.sampling.max_tokens
  dtype, cache_dtype = config.sampling.dtype or shape.dtype, config.sampling.cache_dtype
  shape = dataclasses.replace(shape, dtype=dtype, cache_dtype=cache_dtype)
  slots, rewind = sizes_up_to(T, model.slots_step(shape))[-1], most_rewound(longest_chunk(T))
  cache = model.cache_bytes(shape, S, slots, rewind)
  is_copied = shape.platform == "tpu" and model.slots_step(shape) == 1
  copies = _CACHE_COPIES_ON_TPU if is_copied else 1.0
  logits = _LOGITS_COPIES * shape.vocab_size / shape.rows.mesh.shape["tensor"] * 4
  rows = config.sampling.rows if rows is None else rows
  grids = [first_grid(*call, rows, shape.row_shards) for call in _calls(config)]
  of_images = _image_bytes(config, shape, 2.0 if dtype == "bfloat16" else 4.0)
  sizes = [
    copies * (grid.places * cache.place + grid.rows * cache.row)
    + grid.places * of_images
    + grid.rows * logits
    for grid in grids
  ]
  return max(sizes) / shape.row_shards


def images_of(
  config: Config, shape: model.ModelConfig, prompts: int, most: tuple[int, int] | None = None
) -> Images | None:
  """The shapes of the most images that prompts have. None if there are none.

  Args:
    config: The config of the run.
    shape: The model.
    prompts: How many prompts.
    most: `Prompts.most_images`. None if that is not known: all tokens are those of an image.
  """
  S, v = config.data.max_prompt_tokens, shape.vision
  pictures, tokens = most or (1, S)
  if v is None or not pictures:
    return None
  some = jax.ShapeDtypeStruct
  patches = tokens * v.merge**2
  axes, next_P = some((prompts, S, 3), jnp.int32), some((prompts,), jnp.int32)
  return Images(
    patches_PINC=some((prompts, pictures, patches, math.prod(v.patch)), jnp.float32),
    places_PIN2=some((prompts, pictures, patches, 2), jnp.int32),
    seen_PS2=some((prompts, S, 2), jnp.int32),
    positions_PS3=axes if shape.has_axes else None,
    next_P=next_P if shape.has_axes else None,
  )


def visual_of(
  config: Config,
  shape: model.ModelConfig,
  params: Any,
  prompts: int,
  most: tuple[int, int] | None = None,
) -> Visual | None:
  """The shapes of what a vision tower makes of `images_of`."""
  images = images_of(config, shape, prompts, most)
  if images is None:
    return None
  shape = dataclasses.replace(shape, rows=None)
  return jax.eval_shape(lambda params, images: model.encode(params, shape, images), params, images)


def visual_bytes(
  config: Config, shape: model.ModelConfig, params: Any, most: tuple[int, int] | None = None
) -> float:
  """What one device holds of a batch's visual tokens. 0 without a vision tower that is frozen.

  The arguments are those of `visual_of`.
  """
  if not shape.has_frozen_tower:
    return 0.0
  visual = visual_of(config, shape, params, config.batch.prompts, most)
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(visual)) / shape.row_shards


def _image_bytes(config: Config, shape: model.ModelConfig, item: float) -> float:
  """The bytes of a prompt's images while it is sampled: pixels, and what the decoder reads."""
  if shape.vision is None:
    return 0.0
  images = images_of(config, shape, 1)
  levels = 1 + len(shape.vision.level_layers)
  tokens = config.data.max_prompt_tokens
  return 4.0 * math.prod(images.patches_PINC.shape) + item * levels * tokens * shape.embed_dim


def _calls(config: Config) -> list[tuple[int, int]]:
  """The prompts and members of the sampler's calls, in training and in evaluation."""
  calls = [(config.batch.prompts, config.batch.group_size)]
  if config.eval.every:
    calls.append((config.eval.batch, max(1, config.eval.samples)))
  return calls


def rows_in_flight(
  config: Config,
  shape: model.ModelConfig,
  held: float,
  memory: float | None,
) -> int:
  """The most rows that are decoded together: sampling.rows itself, or what fits.

  That is 0, which means all of them, or the largest half, quarter and so on that fits.

  Args:
    config: The config of the run.
    shape: The model on the sampler's mesh.
    held: Bytes that one device holds while it samples, with the sampler's weights.
    memory: The bytes of a device, or None if they are not known. Then all fit.
  """
  if config.sampling.rows or memory is None:
    return config.sampling.rows
  free = _USABLE_BY_SAMPLER * memory - held
  if sampler_bytes(config, shape, 0) <= free:
    return 0
  rows = max(prompts * members for prompts, members in _calls(config)) // 2
  while rows > shape.row_shards and sampler_bytes(config, shape, rows) > free:
    rows //= 2
  return max(rows, shape.row_shards)


def micro_batch(
  config: Config,
  shape: model.ModelConfig,
  params: Any,
  held: float,
  mesh: jax.sharding.Mesh,
  memory: float | None,
  *,
  most: tuple[int, int] | None = None,
) -> int:
  """How many prompts an update computes at once: batch.micro_batch itself, or what 0 means.

  That is the largest number whose activations fit beside what is held and, on a CPU, that has at
  most 2,048 tokens. It divides the prompts of an update and is a multiple of the rows of the mesh.

  Args:
    config: The config of the run.
    shape: The model on the mesh.
    params: All parameters of the policy: shapes and dtypes.
    held: Bytes that one device holds while it updates: state, reference and gradients.
    mesh: The mesh of the run.
    memory: The bytes of a device, or None if they are not known. Then all fit.
    most: Of `images_of`.
  """
  if config.batch.micro_batch:
    return config.batch.micro_batch
  prompts = config.batch.prompts // config.algo.minibatches
  row_shards = shape.row_shards
  sizes = [size for size in range(row_shards, prompts + 1, row_shards) if prompts % size == 0] or [
    prompts
  ]
  if memory is not None:
    free = _USABLE_BY_UPDATE * memory - held
    needed = activation_bytes(config, shape, params, mesh, most)
    sizes = [size for size in sizes if needed(size // row_shards) <= free] or sizes[:1]
  # A loss that reads the routers of all micro-batches costs a forward pass if there are several.
  if mesh.devices.flat[0].platform == "cpu" and not config.learner.router_aux_coef:
    tokens = config.data.max_prompt_tokens + config.rows_per_prompt * config.sampling.max_tokens
    few = [size for size in sizes if size // row_shards * tokens <= _TOKENS_ON_CPU]
    sizes = few or sizes[:1]
  return max(sizes)


def activation_bytes(
  config: Config,
  shape: model.ModelConfig,
  params: Any,
  mesh: jax.sharding.Mesh,
  most: tuple[int, int] | None = None,
) -> Callable[[int], float]:
  """prompts of one device -> the bytes that it needs to update with them, beside what is held.

  The arguments are those of `micro_batch`.
  """
  split = mesh.shape["tensor"]
  everything = _kept_bytes(config, shape, params, split, "", most)
  kept = everything
  if config.learner.remat:
    saved = config.learner.saved_activations
    kept = _kept_bytes(config, shape, params, split, saved, most)
  # The backward pass computes one layer at a time again, with arrays that are never kept, such as
  # scores, and with their gradients.
  per_prompt = kept + 3 * everything / shape.num_layers
  chunk = config.learner.logprob_chunk or default_chunk(shape.vocab_size, shape.platform)
  copies = _CHUNK_COPIES_ON_CPU if shape.platform == "cpu" else _CHUNK_COPIES
  per_token = copies * shape.vocab_size * 4 / split
  tokens = config.rows_per_prompt * config.sampling.max_tokens

  def needed(prompts: int) -> float:
    in_chunk = min(max(chunk, prompts), prompts * tokens)
    return prompts * per_prompt + in_chunk * per_token

  return needed


def _kept_bytes(
  config: Config,
  shape: model.ModelConfig,
  params: Any,
  split: int,
  remat: str,
  most: tuple[int, int] | None,
) -> float:
  """The bytes that the backward pass keeps of one prompt and its completions, by JAX's count.

  Args:
    config: The config of the run.
    shape: The model on the mesh.
    params: All parameters of the policy: shapes and dtypes.
    split: Over how many devices a layer's heads and hidden units are split.
    remat: What a layer keeps (see `completion_features`).
    most: Of `images_of`.
  """
  S, G, T = config.data.max_prompt_tokens, config.rows_per_prompt, config.sampling.max_tokens
  lanes = 128 if shape.platform == "tpu" else 1  # a TPU fills up the last axis of every array

  def backward(params: model.Params, batch: Batch) -> Any:
    return jax.vjp(lambda params: completion_features(params, shape, batch, remat)[0], params)[1]

  def on_one_device(x: jax.ShapeDtypeStruct) -> float:
    last = x.shape[-1] if x.shape else 1
    padded = math.prod(x.shape[:-1]) * -(-last // lanes) * lanes * x.dtype.itemsize
    return padded if last == shape.embed_dim else padded / split

  def kept(prompts: int) -> float:
    is_frozen = shape.has_frozen_tower
    batch = Batch(
      images=None if is_frozen else images_of(config, shape, prompts, most),
      visual=visual_of(config, shape, params, prompts, most) if is_frozen else None,
      prompts_PS=jax.ShapeDtypeStruct((prompts, S), jnp.int32),
      prompt_lengths_P=jax.ShapeDtypeStruct((prompts,), jnp.int32),
      completions_PGT=jax.ShapeDtypeStruct((prompts, G, T), jnp.int32),
      mask_PGT=jax.ShapeDtypeStruct((prompts, G, T), jnp.float32),
    )
    arrays = jax.tree.leaves(jax.eval_shape(backward, params, batch))
    return sum(on_one_device(x) for x in arrays)

  # The difference leaves out the parameters.
  return (kept(2 * shape.row_shards) - kept(shape.row_shards)) / shape.row_shards
