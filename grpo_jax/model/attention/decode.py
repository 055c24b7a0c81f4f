"""A kernel for TPUs: the next token of each row attends to the row's own earlier tokens.

XLA reads every slot of the cache, writes the scores to memory, and wants keys and values in two
memory layouts. This kernel reads a row's blocks of slots from the newest back to the row's first
token, and keeps the scores on the chip.
"""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

from flax import struct
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax.model.attention.decode_choice import SLOTS
from grpo_jax.model.attention.softmax import Int8
from grpo_jax.model.config import SLOTS_AXIS, ModelConfig
from grpo_jax.model.layers import einsum
from grpo_jax.model.mixers.seen import KeysAndValues
from grpo_jax.model.on_devices import on_devices

_BLOCKS = (512, 256, SLOTS)  # slots that are read at a time
_BLOCK_BYTES = 2**18  # of a row's keys in a block. With more, a v5e's kernel does not compile.
_ROWS = 8  # the most rows whose blocks are read together
_HIDDEN = -1e30  # a score that stands for minus infinity, without its NaNs
_TINY = 1e-30  # below every sum of weights, the largest of which is 1


class OwnTokens(struct.PyTreeNode):
  """The tokens that rows have written, and which of them they see.

  Attributes:
    stacks: Keys and values [L, P, K, G, C, E] of all layers, arrays or `Int8`.
    layer: int32 scalar, the layer to read.
    time: int32 scalar. The newest token is in slot time modulo C.
    visible_PG: int32, how many tokens each row sees, the newest included. At least 1, at most C.
  """

  stacks: tuple[Any, Any]
  layer: jax.Array
  time: jax.Array
  visible_PG: jax.Array


class _Blocks(NamedTuple):
  """The sizes of the blocks that the kernel reads at a time.

  Attributes:
    slots: The number of slots of a block.
    in_cache: The number of blocks in the cache, on this device.
    prompts: The number of prompts whose rows are read together.
    members: How many rows of each of these prompts are read together.
    structure: The tree structure of `OwnTokens.stacks`.
    devices: How many devices split the slots of a row.
  """

  slots: int
  in_cache: int
  prompts: int
  members: int
  structure: Any
  devices: int = 1

  def number(self, slot: Any, back: Any) -> Any:
    """The index of the block `back` blocks before that of the newest token, wrapping around.

    `slot` is the slot of the newest token that this device has.
    """
    # Not // and %: Pallas asks the TPU about their signs, and `plan` has none. Nothing is negative.
    newest = jax.lax.div(slot, jnp.int32(self.slots))
    return jax.lax.rem(newest - back + self.in_cache, jnp.int32(self.in_cache))


def attention(
  config: ModelConfig,
  q_PKGRE: jax.Array,
  own: OwnTokens,
  prefix: KeysAndValues | None,
  prefix_mask: jax.Array | None,
  sinks_H: jax.Array | None = None,
) -> jax.Array:
  """`softmax_attention` of one token of each row, on the devices that hold the rows.

  Args:
    config: The model.
    q_PKGRE: Queries that are already divided by the square root of E.
    own: The rows' own tokens.
    prefix: Keys and values [P, K, S, E] of the prompts, or None.
    prefix_mask: Broadcasts to the scores [P, K, G, R, S]. True where a row sees a slot.
    sinks_H: As in `View`.

  Returns:
    [P, K, G, R, E] in the dtype of the queries.
  """
  cap, interpret = config.attention_cap, config.platform != "tpu"  # tests emulate the kernel
  shards = config.slot_shards
  kernel: Callable[..., Any] = functools.partial(
    own_attention, cap=cap, interpret=interpret, devices=shards
  )
  if not config.on_one_device:
    rows, heads = config.rows.spec[0], config.axis_of(q_PKGRE.shape[1])
    by_row, everywhere = PartitionSpec(rows, heads), PartitionSpec()
    of_stacks = PartitionSpec(None, rows, heads, None, SLOTS_AXIS if shards > 1 else None)
    of_own: Any = OwnTokens(of_stacks, everywhere, everywhere, PartitionSpec(rows))
    kernel = on_devices(kernel, config.rows.mesh, (by_row, of_own), by_row)
  out, log_total = kernel(q_PKGRE, own)  # over the rows' own tokens alone
  if sinks_H is not None:  # a sink adds to the sum of the softmax, but brings no value
    K, _, R, _ = q_PKGRE.shape[1:]
    with_sinks = jnp.logaddexp(log_total, sinks_H.astype(jnp.float32).reshape(K, 1, R, 1))
    out, log_total = out * jnp.exp(log_total - with_sinks), with_sinks
  if prefix is None:
    return out.astype(q_PKGRE.dtype)
  scores = einsum("pkgre,pkse->pkgrs", q_PKGRE, prefix[0])
  scores = cap * jnp.tanh(scores / cap) if cap else scores
  scores = jnp.where(prefix_mask, scores, -jnp.inf)
  # With a window, a row may see nothing of its prompt: `log_total` keeps the maximum finite.
  largest = jnp.maximum(scores.max(-1, keepdims=True), log_total)
  weights, own_weight = jnp.exp(scores - largest), jnp.exp(log_total - largest)
  of_prompt = einsum("pkgrs,pkse->pkgre", weights.astype(q_PKGRE.dtype), prefix[1])
  total = own_weight + weights.sum(-1, keepdims=True)
  return ((own_weight * out + of_prompt) / total).astype(q_PKGRE.dtype)


def own_attention(
  q_PKGRE: jax.Array,
  own: OwnTokens,
  cap: float = 0.0,
  interpret: bool = False,
  devices: int = 1,
) -> tuple[jax.Array, jax.Array]:
  """Softmax attention of one token of each row over the tokens that the row wrote last.

  Args:
    q_PKGRE: Queries that are already divided by the square root of E.
    own: The rows' own tokens.
    cap: Scores become cap * tanh(score / cap). 0 leaves them as they are.
    interpret: Emulate the kernel, so that it runs on any platform.
    devices: How many devices of the mesh axis `slots` split the slots of a row. Above 1, this runs
      in a shard_map, and C is the number of slots on a device.

  Returns:
    Outputs float32 [P, K, G, R, E], and the logarithms of the softmax sums [P, K, G, R, 1].
  """
  P, K, G, R, E = q_PKGRE.shape
  arrays, structure = jax.tree.flatten(own.stacks)
  C = arrays[0].shape[4]
  most_slots = _BLOCK_BYTES // (E * arrays[0].dtype.itemsize)
  fitting = [size for size in _BLOCKS if C % size == 0 and size <= most_slots]
  slots = max(fitting, default=SLOTS)
  # The rows that are read together are of one prompt, and of further prompts if _ROWS has room.
  members = _divisor(G, _ROWS)
  prompts = _divisor(P, _ROWS // members)
  blocks = _Blocks(slots, C // slots, prompts, members, structure, devices)
  newest, newer = _newest_here(own.time, C, devices)
  # How many blocks the rows that are read together need: the block of the newest token here, which
  # has `in_newest_block` slots up to this token, and earlier blocks with the others that they see.
  most_visible = own.visible_PG.reshape(P // prompts, prompts, G // members, members).max((1, 3))
  # The slots after that of the newest token have the oldest tokens of all devices.
  later = C - 1 - newest
  seen = jnp.clip(most_visible - newer, 0, newest + 1)
  seen += jnp.clip(most_visible - (devices * C - later), 0, later)
  in_newest_block = newest % slots + 1
  needed = 1 + -(-jnp.maximum(seen - in_newest_block, 0) // slots)
  needed = jnp.minimum(needed, blocks.in_cache)
  scalars = jnp.stack([own.layer, newest, newer]), needed, own.visible_PG  # see `_kernel`
  out_types = [jax.ShapeDtypeStruct((P, K, G, R, width), jnp.float32) for width in (E, 1)]
  rows = prompts * members
  out, log_total = pl.pallas_call(
    functools.partial(_kernel, blocks, cap),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(P // prompts, K, G // members, blocks.in_cache),
      in_specs=[_by_row(blocks, q_PKGRE), *(_by_slot(blocks, x) for x in arrays)],
      out_specs=[_by_row(blocks, x) for x in out_types],
      # The running maxima, sums and outputs of the rows.
      scratch_shapes=[pltpu.VMEM((rows, R, width), jnp.float32) for width in (1, 1, E)],
    ),
    out_shape=out_types,
    cost_estimate=pl.CostEstimate(  # if every row sees every slot
      flops=4 * P * K * G * R * C * E,
      bytes_accessed=sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in arrays),
      transcendentals=P * K * G * R * C,
    ),
    interpret=interpret,
    name="decode_attention",
    # Scales [..., C, 1] become [..., 1, C]: a TPU would pad an axis of 1 at the end to 128.
  )(*scalars, q_PKGRE, *(x if x.shape[-1] > 1 else x.swapaxes(-1, -2) for x in arrays))
  return (out, log_total) if devices == 1 else _joined(out, log_total)


def _newest_here(time: jax.Array, slots: int, devices: int) -> tuple[jax.Array, jax.Array]:
  """The slot of the newest token on this device, and how many newer ones other devices have.

  Args:
    time: int32 scalar. The newest token of all is in slot time modulo slots * devices.
    slots: C, the slots of a device.
    devices: How many devices split the slots of a row, one after the other.
  """
  if devices == 1:
    return time % slots, jnp.int32(0)
  newest, first = time % (slots * devices), jax.lax.axis_index(SLOTS_AXIS) * slots
  is_here = (newest >= first) & (newest < first + slots)
  last = slots - 1  # the slot of the newest token here, if newer ones are on the next devices
  newer = (newest - (first + last)) % (slots * devices)
  return jnp.where(is_here, newest - first, last), jnp.where(is_here, 0, newer)


def _joined(out: jax.Array, log_total: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Softmax attention over the tokens of all devices, from that over each device's own."""
  largest = jax.lax.pmax(log_total, SLOTS_AXIS)
  weight = jnp.exp(log_total - largest)
  summed, total = jax.lax.psum((out * weight, weight), SLOTS_AXIS)
  return summed / total, largest + jnp.log(total)


def _by_row(blocks: _Blocks, x: Any) -> pl.BlockSpec:
  """The block of an array [P, K, G, R, ...] with the rows that are read together."""
  shape = blocks.prompts, 1, blocks.members, *x.shape[3:]
  return pl.BlockSpec(shape, lambda p, k, g, *_: (p, k, g, 0, 0))


def _by_slot(blocks: _Blocks, x: jax.Array) -> pl.BlockSpec:
  """The rows' block of slots in keys, values [L, P, K, G, C, E] or scales [L, P, K, G, 1, C].

  The grid's last axis, `back`, counts blocks back from the newest token's. The functions return the
  index of a block, from the indices of the grid and the scalars that `_kernel` explains. Scales are
  given as [..., C, 1]: `own_attention` swaps their last two axes when it calls the kernel.
  """

  def where(p: Any, k: Any, g: Any, *rest: Any) -> tuple[Any, ...]:
    back, at, needed, _ = rest
    # After the last needed block the index stays the same, so Pallas reads nothing more.
    return at[0], p, k, g, blocks.number(at[1], jnp.minimum(back, needed[p, g] - 1)), 0

  def where_scales(*args: Any) -> tuple[Any, ...]:
    *outer, block, _ = where(*args)
    return *outer, 0, block

  outer = 1, blocks.prompts, 1, blocks.members
  if x.shape[-1] == 1:
    return pl.BlockSpec((*outer, 1, blocks.slots), where_scales)
  return pl.BlockSpec((*outer, blocks.slots, x.shape[-1]), where)


def _kernel(blocks: _Blocks, cap: float, *refs: Any) -> None:
  """Adds one block of slots to the running maxima, sums and outputs of a few rows.

  The last block also writes the outputs, and the logs of the softmax sums, with which the caller
  adds the tokens of the prompt. Scores become cap * tanh(score / cap); a `cap` of 0 means no cap.
  """
  # `at` holds the layer, the slot of the newest token here, and how many newer tokens other devices
  # have; `needed` how many blocks the rows read, and `visible` how many tokens each row sees,
  # counted back from the newest one of all.
  at, needed, visible, q_ref, *own_refs, out_ref, norm_ref, max_ref, sum_ref, values_ref = refs
  p, _, g, back = (pl.program_id(axis) for axis in range(4))
  # (prompt, member) of each of the rows that are read together.
  rows = [divmod(row, blocks.members) for row in range(blocks.prompts * blocks.members)]

  @pl.when(back == 0)
  def begin() -> None:
    max_ref[...] = jnp.full(max_ref.shape, _HIDDEN)
    sum_ref[...] = jnp.zeros(sum_ref.shape)
    values_ref[...] = jnp.zeros(values_ref.shape)

  @pl.when(back < needed[p, g])
  def add() -> None:
    first = blocks.number(at[1], back) * blocks.slots
    slots_1B = first + jax.lax.broadcasted_iota(jnp.int32, (1, blocks.slots), 1)
    age_1B = at[1] - slots_1B
    all_slots = blocks.devices * blocks.in_cache * blocks.slots
    age_1B = at[2] + jnp.where(age_1B < 0, age_1B + all_slots, age_1B)
    for row, (i, j) in enumerate(rows):
      own = jax.tree.unflatten(blocks.structure, [ref[0, i, 0, j] for ref in own_refs])
      sees_1B = age_1B < visible[p * blocks.prompts + i, g * blocks.members + j]
      state = max_ref[row], sum_ref[row], values_ref[row]
      state = _with_block(state, q_ref[i, 0, j], own, sees_1B, cap)
      max_ref[row], sum_ref[row], values_ref[row] = state

  @pl.when(back == blocks.in_cache - 1)
  def end() -> None:
    for row, (i, j) in enumerate(rows):
      total = jnp.maximum(sum_ref[row], _TINY)  # a device may have none of the row's tokens
      out_ref[i, 0, j] = values_ref[row] / total
      norm_ref[i, 0, j] = max_ref[row] + jnp.log(total)


def _with_block(
  state: tuple[jax.Array, ...],
  q_RE: jax.Array,
  own: tuple[Any, Any],
  sees_1B: jax.Array,
  cap: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Adds a block to the running maximum [R, 1], sum [R, 1] and output [R, E] of the softmax."""
  max_R1, sum_R1, summed_RE = state
  keys_BE, key_scales = _vectors_and_scales(own[0], q_RE.dtype)
  values_BE, value_scales = _vectors_and_scales(own[1], q_RE.dtype)
  scores_RB = _product(q_RE, keys_BE, 1) * key_scales
  if cap:
    scores_RB = cap * jnp.tanh(scores_RB / cap)
  scores_RB = jnp.where(sees_1B, scores_RB, _HIDDEN)
  new_max_R1 = jnp.maximum(max_R1, scores_RB.max(-1, keepdims=True))
  shrink_R1 = jnp.exp(max_R1 - new_max_R1)
  # Where a row has seen nothing yet, exp(_HIDDEN - _HIDDEN) is 1, not 0.
  weights_RB = jnp.where(sees_1B, jnp.exp(scores_RB - new_max_R1), 0.0)
  sum_R1 = sum_R1 * shrink_R1 + weights_RB.sum(-1, keepdims=True)
  added_RE = _product((weights_RB * value_scales).astype(q_RE.dtype), values_BE, 0)
  return new_max_R1, sum_R1, summed_RE * shrink_R1 + added_RE


def _vectors_and_scales(x: Any, dtype: Any) -> tuple[jax.Array, jax.Array | float]:
  """A block's vectors [B, E] in a dtype, and the factors [1, B] of the products with them."""
  if isinstance(x, Int8):
    return x.values.astype(dtype), x.scales
  return x.astype(dtype), 1.0


def _product(x: jax.Array, y: jax.Array, axis: int) -> jax.Array:
  """The product in float32 over the last axis of x and an axis of y."""
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return jax.lax.dot_general(
    x,
    y,
    (((1,), (axis,)), ((), ())),
    precision=precision,
    preferred_element_type=jnp.float32,
  )


def _divisor(number: int, most: int) -> int:
  """The largest divisor of a number that is at most `most`."""
  return next(size for size in range(min(number, most), 0, -1) if number % size == 0)
