"""Chooses the micro-batch and how to sample, so that a run fits into the memory of a device.

The choices depend on estimates. `python -m grpo_jax.plan` prints the compiler's numbers.
"""

from collections.abc import Callable
import dataclasses

from jax.sharding import Mesh

from grpo_jax import model
from grpo_jax.config import AUTO, KEEPS_PRODUCTS, Config
from grpo_jax.parallel import sharding
from grpo_jax.parallel.chips import Chip
from grpo_jax.parallel.mesh import CONTEXT, sampling_mesh
from grpo_jax.run.memory import activation_bytes, sampler_bytes, sampler_calls

# The fractions of memory that estimates may fill. An update needs more than the estimate: more live
# arrays, and fragmentation. A sampler holds mostly weights and caches, whose sizes are known.
_USABLE_BY_UPDATE, _USABLE_BY_SAMPLER = 0.85, 0.93
# Tokens of a micro-batch. With eight times as many, an update took a quarter to a third longer on a
# CPU, because the activations exceed the CPU's caches (experiments/LOG.md, 2026-11-22).
_TOKENS_ON_CPU = 2048
# Seconds of latency of a sum over the devices that share a row. It is not measured but a guess,
# above what neighbouring TPUs or GPUs with NVLink should need.
_LATENCY = 20e-6


def sampling_tensor(
  config: Config,
  shape: model.ModelConfig,
  held_on: Callable[[Mesh], float],
  mesh: Mesh,
  memory: float | None,
  chip: Chip | None,
) -> int:
  """How many devices share a row while sampling: sampling.tensor, or a choice if that is 0.

  While sampling, weights are replicated along fsdp, so that they are not gathered for every token.
  The choice is the fewest devices with which weights and cache fit, or more if that is faster: each
  device then reads a smaller part of the weights in a decoding step, but each layer's outputs are
  summed over the devices. More are used only within a process, and for models without experts.

  Args:
    config: The config of the run.
    shape: The model on the mesh.
    held_on: held_on(sampler's mesh) returns the bytes of a device while sampling, without cache.
    mesh: The mesh of the run, or of the devices that only sample.
    memory: The memory of a device in bytes, or None if unknown.
    chip: The peak rates of a device, or None if unknown: then speed is ignored.

  Raises:
    ConfigError: sampling.context does not divide the devices.
  """
  learner_tensor = mesh.shape["tensor"]
  context, slot_shards = mesh.shape.get(CONTEXT, 1), config.sampling.context
  if config.sampling.tensor or mesh.shape["fsdp"] * context == 1 or memory is None:
    return config.sampling.tensor or learner_tensor
  sampling_mesh(mesh, learner_tensor, slot_shards)  # raises if no size is possible
  devices = mesh.size // (mesh.shape["expert"] * slot_shards)
  sizes = [
    size
    for size in range(learner_tensor, devices + 1, learner_tensor)
    if devices % size == 0 and (size == learner_tensor or shape.num_heads % size == 0)
  ]
  if context > 1:  # if possible, the number of groups of devices divides the prompts of each call
    prompts = [prompts for prompts, _ in sampler_calls(config)]
    groups = {size: mesh.size // (size * slot_shards) for size in sizes}
    sizes = [size for size in sizes if not any(p % groups[size] for p in prompts)] or sizes
  usable = _USABLE_BY_SAMPLER * memory

  def on_mesh(size: int) -> tuple[float, float]:
    """The bytes of a device if `size` devices share a row: without a cache, and of the cache."""
    there = sampling_mesh(mesh, size, slot_shards)
    there_shape = dataclasses.replace(shape, **sharding.model_shardings(shape, there))
    return held_on(there), sampler_bytes(config, there_shape)

  needed = {size: on_mesh(size) for size in sizes}
  all_fit = [size for size, (weights, cache) in needed.items() if weights + cache <= usable]
  # If not all rows fit, fewer are in flight. They get at least half of the memory.
  some_fit = [size for size, (weights, _) in needed.items() if weights <= usable / 2]
  least = (all_fit or some_fit or sizes[-1:])[0]
  # By `grpo_jax.plan`, a mixture of experts would read a tenth less in a decoding step, but three
  # times as much for prompts, and would send five times as much (experiments/LOG.md, 2026-11-28).
  if chip is None or not all_fit or shape.num_experts:
    return least

  def seconds(size: int) -> float:
    """The time of a decoding step that depends on `size`: memory reads and messages."""
    weights, cache = needed[size]
    return (weights + cache) / chip.memory_bandwidth + _messages_s(config, shape, mesh, size, chip)

  # Messages to other machines would be slower than the links of a chip.
  first, *others = mesh.devices.flat
  near = 1 + sum(device.process_index == first.process_index for device in others)
  return min((size for size in all_fit if size == least or near % size == 0), key=seconds)


def _messages_s(
  config: Config, shape: model.ModelConfig, mesh: Mesh, size: int, chip: Chip
) -> float:
  """Seconds in which `size` devices sum the outputs of all layers, for one token of each row.

  Each layer has two sums, after attention and after the MLP. A ring all-reduce sends
  2 (size - 1) / size times the bytes of an array.
  """
  if size == 1:
    return 0.0
  groups = mesh.size / (size * config.sampling.context)  # of devices that have the same rows
  rows = config.batch.prompts * config.batch.group_size / groups
  item_bytes = 2 if (config.sampling.dtype or shape.dtype) == "bfloat16" else 4
  sent = 2 * (size - 1) / size * rows * shape.embed_dim * item_bytes
  return 2 * shape.num_layers * (_LATENCY + sent / chip.link_bandwidth)


def rows_in_flight(
  config: Config,
  shape: model.ModelConfig,
  held: float,
  memory: float | None,
  call: tuple[int, int],
) -> int:
  """The most rows of a sampler call that are decoded together: sampling.rows, or what fits.

  0 means all rows. If they do not fit, the number of rows is halved until it fits, but not below
  row_shards. The choice ignores completion lengths: a decoding step reads the weights once for all
  rows, so decoding more rows together moves fewer bytes, and the last long rows move to a smaller
  batch (experiments/rows_in_flight.py). A choice that changed during a run would also change the
  rounding of log-probs.

  Args:
    config: The config of the run.
    shape: The model on the sampler's mesh.
    held: Bytes of a device while sampling, with the sampler's weights, without cache and logits.
    memory: The memory of a device in bytes, or None if unknown: then all rows fit.
    call: The number of prompts of the call, and of completions of each prompt.
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


@dataclasses.dataclass(frozen=True)
class Room:
  """The memory of a device during an update, and the model whose activations must fit.

  Attributes:
    shape: The model on the mesh.
    params: The shapes and dtypes of all parameters of the policy.
    held: Bytes of a device during an update, without activations.
    memory: The memory of a device in bytes, or None if unknown.
    most_images: `PromptSet.most_images`, or None.
  """

  shape: model.ModelConfig
  params: model.Params
  held: float
  memory: float | None
  most_images: tuple[int, int] | None = None

  def needed(self, config: Config) -> Callable[[int], float]:
    """Returns a function: (prompts of a device) -> bytes of activations, see `activation_bytes`."""
    return activation_bytes(config, self.shape, self.params, self.most_images)

  @property
  def free(self) -> float | None:
    """The bytes that are free for activations, or None if unknown."""
    return None if self.memory is None else _USABLE_BY_UPDATE * self.memory - self.held


def with_policy(config: Config, room: Room) -> Config:
  """Replaces learner.remat_policy = "auto" by the activations that a layer keeps for backward.

  A layer keeps its matrix products if they fit, by default for one prompt per device, otherwise its
  input. Recomputing the products costs more than a smaller micro-batch: by `grpo_jax.plan`, 5.3 s
  instead of 4.5 s for configs/gsm8k.py (experiments/LOG.md, 2026-11-27). On a CPU, whose memory
  other programs share, or if the memory is unknown, a layer keeps its input.
  """
  learner = config.learner
  if not learner.remat or learner.remat_policy != AUTO:
    return config

  def keeps(policy: str) -> Config:
    return dataclasses.replace(config, learner=dataclasses.replace(learner, remat_policy=policy))

  if room.free is not None and room.shape.platform != "cpu":
    # A micro-batch of 0 is not chosen yet: it may then be as small as one prompt per device.
    prompts = -(-config.batch.micro_batch // room.shape.row_shards) or 1
    if room.needed(keeps(KEEPS_PRODUCTS))(prompts) <= room.free:
      return keeps(KEEPS_PRODUCTS)
  return keeps(learner.saved_activations)


def micro_batch(config: Config, room: Room) -> int:
  """How many prompts are in a micro-batch of an update: batch.micro_batch, or a choice if it is 0.

  The choice is the largest number whose activations fit in `room` and, on a CPU, that has at most
  2,048 tokens per device. It divides the prompts of an update and is a multiple of row_shards, if
  possible. If the memory of a device is unknown, all prompts fit.
  """
  if config.batch.micro_batch:
    return config.batch.micro_batch
  prompts = config.batch.prompts // config.algo.minibatches
  row_shards = room.shape.row_shards
  sizes = [size for size in range(row_shards, prompts + 1, row_shards) if prompts % size == 0] or [
    prompts
  ]
  free = room.free
  if free is not None:
    needed = room.needed(config)
    sizes = [size for size in sizes if needed(size // row_shards) <= free] or sizes[:1]
  # With router_aux_coef, several micro-batches cost an extra forward pass, so size is not limited.
  if room.shape.platform == "cpu" and not config.learner.router_aux_coef:
    tokens = config.data.max_prompt_tokens + config.rows_per_prompt * config.sampling.max_tokens
    tokens //= room.shape.context
    few = [size for size in sizes if size // row_shards * tokens <= _TOKENS_ON_CPU]
    sizes = few or sizes[:1]
  return max(sizes)
