"""Chooses the micro-batch and how to sample, so that a run fits into the memory of a device.

The numbers are estimates. `python -m grpo_jax.plan` gives those of the compiler.
"""

from collections.abc import Callable
import dataclasses

from jax.sharding import Mesh

from grpo_jax import model
from grpo_jax.config import Config
from grpo_jax.parallel import sharding
from grpo_jax.parallel.mesh import CONTEXT, sampling_mesh
from grpo_jax.run.memory import activation_bytes, sampler_bytes, sampler_calls

# A step needs more than the estimate: arrays that overlap in time, and gaps between them. What a
# sampler holds is mostly weights and caches, whose sizes are known.
_USABLE_BY_UPDATE, _USABLE_BY_SAMPLER = 0.85, 0.93
# With eight times as many, an update took a quarter to a third longer on a CPU, whose caches do not
# hold the activations (experiments/LOG.md, 2026-11-22).
_TOKENS_ON_CPU = 2048


def sampling_tensor(
  config: Config,
  shape: model.ModelConfig,
  held_on: Callable[[Mesh], float],
  mesh: Mesh,
  memory: float | None,
) -> int:
  """How many devices share a row while sampling: sampling.tensor itself, or what 0 means.

  Weights that lie whole along fsdp need not travel for every token.

  Args:
    config: The config of the run.
    shape: The model on the mesh.
    held_on: The sampler's mesh -> bytes that one device holds while it samples, with the weights.
    mesh: The mesh of the run, or that of the devices which only sample.
    memory: The bytes of a device, or None if they are not known.
  """
  own = mesh.shape["tensor"]
  context = mesh.shape.get(CONTEXT, 1)
  if config.sampling.tensor or mesh.shape["fsdp"] * context == 1 or memory is None:
    return config.sampling.tensor or own
  devices = mesh.size // mesh.shape["expert"]
  sizes = [
    size
    for size in range(own, devices + 1, own)
    if devices % size == 0 and (size == own or shape.num_heads % size == 0)
  ]
  if context > 1:  # its devices share rows where there are fewer rows than devices
    prompts = [prompts for prompts, _ in sampler_calls(config)]
    sizes = [size for size in sizes if not any(p % (mesh.size // size) for p in prompts)] or sizes
  usable = _USABLE_BY_SAMPLER * memory

  def on_mesh(size: int) -> tuple[float, float]:
    """The bytes that a device holds without a cache, and those of the cache of all rows."""
    there = sampling_mesh(mesh, size)
    there_shape = dataclasses.replace(shape, **sharding.model_shardings(shape, there))
    return held_on(there), sampler_bytes(config, there_shape)

  needed = {size: on_mesh(size) for size in sizes}
  all_fit = [size for size, (weights, cache) in needed.items() if weights + cache <= usable]
  # If the rows do not fit all at once, fewer are in flight. They get half of the memory at least.
  some_fit = [size for size, (weights, _) in needed.items() if weights <= usable / 2]
  return (all_fit or some_fit or sizes[-1:])[0]


def rows_in_flight(
  config: Config,
  shape: model.ModelConfig,
  held: float,
  memory: float | None,
  call: tuple[int, int],
) -> int:
  """The most rows of a call that are decoded together: sampling.rows itself, or what fits.

  That is 0, which means all of them, or the largest half, quarter and so on that fits. Lengths are
  not asked: a round reads the weights once for all rows, and the last ones of a tail move into
  smaller grids. So more rows move fewer bytes (experiments/rows_in_flight.py). Another choice in
  the middle of a run would also round its log-probs differently.

  Args:
    config: The config of the run.
    shape: The model on the sampler's mesh.
    held: Bytes that one device holds while it samples, with the sampler's weights.
    memory: The bytes of a device, or None if they are not known. Then all fit.
    call: The prompts of the call, and the members of each.
  """
  if config.sampling.rows or memory is None:
    return config.sampling.rows
  # While an evaluation samples, rows of training may stay in flight.
  caches = 2 if config.keeps_flight and config.eval.every else 1
  free = (_USABLE_BY_SAMPLER * memory - held) / caches
  if sampler_bytes(config, shape, 0, call) <= free:
    return 0
  prompts, members = call
  rows = prompts * members // 2
  while rows > shape.row_shards and sampler_bytes(config, shape, rows, call) > free:
    rows //= 2
  return max(rows, shape.row_shards)


def micro_batch(
  config: Config,
  shape: model.ModelConfig,
  params: model.Params,
  held: float,
  memory: float | None,
  most: tuple[int, int] | None = None,
) -> int:
  """How many prompts an update computes at once: batch.micro_batch, or a choice where that is 0.

  The choice is the largest number whose activations fit beside what is held and, on a CPU, that has
  at most 2,048 tokens. It divides the prompts of an update and is a multiple of the rows of the
  mesh.

  Args:
    config: The config of the run.
    shape: The model on the mesh.
    params: All parameters of the policy: shapes and dtypes.
    held: Bytes that one device holds while it updates, without activations.
    memory: The bytes of a device, or None if they are not known. Then all fit.
    most: `PromptSet.most_images`, as `images_of` takes it.
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
    needed = activation_bytes(config, shape, params, most)
    sizes = [size for size in sizes if needed(size // row_shards) <= free] or sizes[:1]
  # A loss that reads the routers of all micro-batches costs a forward pass if there are several.
  if shape.platform == "cpu" and not config.learner.router_aux_coef:
    tokens = config.data.max_prompt_tokens + config.rows_per_prompt * config.sampling.max_tokens
    tokens //= shape.context
    few = [size for size in sizes if size // row_shards * tokens <= _TOKENS_ON_CPU]
    sizes = few or sizes[:1]
  return max(sizes)
