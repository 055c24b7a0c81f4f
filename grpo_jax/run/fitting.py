"""Chooses the micro-batch and how to sample, so that a run fits into the memory of a device.

The numbers are estimates. `python -m grpo_jax.plan` gives those of the compiler.
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

# A step needs more than the estimate: arrays that overlap in time, and gaps between them. What a
# sampler holds is mostly weights and caches, whose sizes are known.
_USABLE_BY_UPDATE, _USABLE_BY_SAMPLER = 0.85, 0.93
# With eight times as many, an update took a quarter to a third longer on a CPU, whose caches do not
# hold the activations (experiments/LOG.md, 2026-11-22).
_TOKENS_ON_CPU = 2048
# Seconds until a message of no size has reached all devices that share a row. Nobody has measured
# it for this program: it is a guess, above what a TPU's neighbours or GPUs with NVLink should need.
_LATENCY = 20e-6


def sampling_tensor(
  config: Config,
  shape: model.ModelConfig,
  held_on: Callable[[Mesh], float],
  mesh: Mesh,
  memory: float | None,
  chip: Chip | None,
) -> int:
  """How many devices share a row while sampling: sampling.tensor itself, or what 0 means.

  Weights that lie whole along fsdp need not travel for every token. 0 means the fewest devices with
  which weights and cache fit, and more where that is faster: a round of decoding then reads a
  smaller part of the weights, but adds up the outputs of each layer over the devices. For speed,
  only devices of one process share a row, and only of a model without experts.

  Args:
    config: The config of the run.
    shape: The model on the mesh.
    held_on: The sampler's mesh -> bytes that one device holds while it samples, with the weights.
    mesh: The mesh of the run, or that of the devices which only sample.
    memory: The bytes of a device, or None if they are not known.
    chip: The peaks of a device, or None if they are not known: then speed is not asked.
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
  least = (all_fit or some_fit or sizes[-1:])[0]
  # By plan, a mixture reads a tenth less in a round and three times as much for its prompts, and
  # sends five times as much (experiments/LOG.md, 2026-11-28).
  if chip is None or not all_fit or shape.num_experts:
    return least

  def seconds(size: int) -> float:
    """The time of a round of decoding as far as it depends on `size`: reads and messages."""
    weights, cache = needed[size]
    return (weights + cache) / chip.memory_bandwidth + _messages_s(config, shape, mesh, size, chip)

  # Messages to other machines would take longer than the peaks of a chip's own links say.
  first, *others = mesh.devices.flat
  near = 1 + sum(device.process_index == first.process_index for device in others)
  return min((size for size in all_fit if size == least or near % size == 0), key=seconds)


def _messages_s(
  config: Config, shape: model.ModelConfig, mesh: Mesh, size: int, chip: Chip
) -> float:
  """Seconds in which `size` devices add up the outputs of all layers, for one token of their rows.

  Each layer has two sums, after attention and after its MLP. A ring sends 2 (size - 1) / size of an
  array.
  """
  if size == 1:
    return 0.0
  rows = config.batch.prompts * config.batch.group_size / (mesh.size / size)
  number = 2 if (config.sampling.dtype or shape.dtype) == "bfloat16" else 4
  sent = 2 * (size - 1) / size * rows * shape.embed_dim * number
  return 2 * shape.num_layers * (_LATENCY + sent / chip.link_bandwidth)


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


@dataclasses.dataclass(frozen=True)
class Room:
  """The memory of a device that updates, and the model whose activations must fit there.

  Attributes:
    shape: The model on the mesh.
    params: All parameters of the policy: shapes and dtypes.
    held: Bytes that one device holds while it updates, without activations.
    memory: The bytes of a device, or None if they are not known.
    most_images: `PromptSet.most_images`, or None.
  """

  shape: model.ModelConfig
  params: model.Params
  held: float
  memory: float | None
  most_images: tuple[int, int] | None = None

  def needed(self, config: Config) -> Callable[[int], float]:
    """Prompts of one device -> the bytes of their activations (see `activation_bytes`)."""
    return activation_bytes(config, self.shape, self.params, self.most_images)

  @property
  def free(self) -> float | None:
    """The bytes that activations can take, or None if they are not known."""
    return None if self.memory is None else _USABLE_BY_UPDATE * self.memory - self.held


def with_policy(config: Config, room: Room) -> Config:
  """The config with what a layer keeps for the backward pass, where learner.remat_policy is auto.

  A layer keeps its products where they fit for one prompt on each device, and otherwise its input.
  To compute them again costs more than to compute fewer prompts at once: by plan, 5.3 s in place of
  4.5 s for configs/gsm8k.py (experiments/LOG.md, 2026-11-27). On a CPU it keeps its input, because
  other programs share the memory, and so it does where the memory is not known.
  """
  learner = config.learner
  if not learner.remat or learner.remat_policy != AUTO:
    return config

  def keeps(policy: str) -> Config:
    return dataclasses.replace(config, learner=dataclasses.replace(learner, remat_policy=policy))

  if room.free is not None and room.shape.platform != "cpu":
    prompts = -(-config.batch.micro_batch // room.shape.row_shards) or 1
    if room.needed(keeps(KEEPS_PRODUCTS))(prompts) <= room.free:
      return keeps(KEEPS_PRODUCTS)
  return keeps(learner.saved_activations)


def micro_batch(config: Config, room: Room) -> int:
  """How many prompts an update computes at once: batch.micro_batch, or a choice where that is 0.

  The choice is the largest number whose activations fit beside what is held and, on a CPU, that has
  at most 2,048 tokens. It divides the prompts of an update and is a multiple of the rows of the
  mesh. All fit where the memory of a device is not known.
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
  # A loss that reads the routers of all micro-batches costs a forward pass if there are several.
  if room.shape.platform == "cpu" and not config.learner.router_aux_coef:
    tokens = config.data.max_prompt_tokens + config.rows_per_prompt * config.sampling.max_tokens
    tokens //= room.shape.context
    few = [size for size in sizes if size // row_shards * tokens <= _TOKENS_ON_CPU]
    sizes = few or sizes[:1]
  return max(sizes)
