"""A kernel for TPUs: the next token of each row attends to the row's own earlier tokens.

XLA reads every slot of the cache, writes the scores to memory, and wants keys and values in two
orders. This kernel reads a row's blocks of slots from the newest back to the row's first token, and
keeps the scores on the chip.
"""

import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax.model.attention.softmax import Int8
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.layers import KeysAndValues, einsum

SLOTS = 128  # the slots of a cache are a multiple of this
_BLOCKS = (512, 256, SLOTS)  # slots that are read at a time
_ROWS = 8  # rows whose blocks are read together
_HIDDEN = -1e30  # a score that stands for minus infinity, without its NaNs


def fits(config: ModelConfig) -> bool:
  """Whether the kernel can read the model's cache: on a TPU, whose lanes the heads fill."""
  return config.platform == "tpu" and config.head_dim % 128 == 0


def attention(
  config: ModelConfig,
  q_PKGRE: jax.Array,
  own: tuple[Any, Any],
  layer: jax.Array,
  time: jax.Array,
  visible_PG: jax.Array,
  prefix: KeysAndValues | None,
  prefix_mask: jax.Array | None,
) -> jax.Array:
  """`softmax_attention` of one token of each row, on the devices that hold the rows.

  Args:
    config: The model.
    q_PKGRE: As in `own_attention`, like own, layer, time and visible_PG.
    own: With the axes L, P, K and G.
    layer: The layer.
    time: The newest token's.
    visible_PG: How many tokens rows see.
    prefix: Keys and values [P, K, S, E] of the prompts, or None.
    prefix_mask: Broadcasts to the scores [P, K, G, R, S].

  Returns:
    [P, K, G, R, E] in the dtype of the queries.
  """
  cap, interpret = config.attention_cap, config.platform != "tpu"
  kernel = functools.partial(own_attention, cap=cap, interpret=interpret)
  if not config.on_one_device:
    rows, heads = config.rows.spec[0], config.heads_axis
    by_row, of_own = PartitionSpec(rows, heads), PartitionSpec(None, rows, heads)
    kernel = jax.shard_map(
      kernel,
      mesh=config.rows.mesh,
      in_specs=(by_row, of_own, PartitionSpec(), PartitionSpec(), PartitionSpec(rows)),
      out_specs=by_row,
      check_vma=False,  # the outputs of kernels do not say over which axes they vary
    )
  out, norm = kernel(q_PKGRE, own, layer, time, visible_PG)
  if prefix is None:
    return out.astype(q_PKGRE.dtype)
  scores = einsum("pkgre,pkse->pkgrs", q_PKGRE, prefix[0])
  scores = cap * jnp.tanh(scores / cap) if cap else scores
  scores = jnp.where(prefix_mask, scores, -jnp.inf)
  # With a window, a row may see nothing of its prompt.
  largest = jnp.maximum(scores.max(-1, keepdims=True), norm)
  weights, own_weight = jnp.exp(scores - largest), jnp.exp(norm - largest)
  of_prompt = einsum("pkgrs,pkse->pkgre", weights.astype(q_PKGRE.dtype), prefix[1])
  total = own_weight + weights.sum(-1, keepdims=True)
  return ((own_weight * out + of_prompt) / total).astype(q_PKGRE.dtype)


def own_attention(
  q_PKGRE: jax.Array,
  own: tuple[Any, Any],
  layer: jax.Array,
  time: jax.Array,
  visible_PG: jax.Array,
  cap: float,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Softmax attention of one token of each row over the tokens that the row wrote last.

  Args:
    q_PKGRE: Queries that are already divided by the square root of E.
    own: Keys and values [L, P, K, G, C, E] of all layers, arrays or `Int8`.
    layer: int32 scalar, the layer to read.
    time: int32 scalar. The newest token lies in slot time modulo C.
    visible_PG: int32, how many tokens each row sees, the newest included. At least 1, at most C.
    cap: Scores become cap * tanh(score / cap). 0 leaves them as they are.
    interpret: Emulate the kernel, so that it runs on any platform.

  Returns:
    Outputs float32 [P, K, G, R, E], and the logarithm of each one's normaliser [P, K, G, R, 1].
  """
  P, K, G, R, E = q_PKGRE.shape
  arrays = jax.tree.leaves(own)
  C = arrays[0].shape[4]
  block = next(size for size in _BLOCKS if C % size == 0)
  members = _divisor(G, _ROWS)
  prompts = _divisor(P, _ROWS // members)
  # How many blocks the rows that are read together need: the newest, and those before it.
  most = visible_PG.reshape(P // prompts, prompts, G // members, members).max((1, 3))
  needed = 1 + -(-jnp.maximum(most - time % C % block - 1, 0) // block)
  scalars = jnp.stack([layer, time % C]), jnp.minimum(needed, C // block), visible_PG

  def of_rows(p: Any, k: Any, g: Any, b: Any, *_: Any) -> tuple[Any, ...]:
    del b
    return p, k, g, 0, 0

  def of_slots(p: Any, k: Any, g: Any, b: Any, at: Any, needed: Any, _: Any) -> tuple[Any, ...]:
    # A block that is asked for again is not read again.
    back = jnp.minimum(b, needed[p, g] - 1)
    return at[0], p, k, g, (at[1] // block - back + C // block) % (C // block), 0

  def spec(x: jax.Array) -> pl.BlockSpec:
    if x.shape[-1] == 1:  # scales
      where = lambda *args: (*of_slots(*args)[:4], 0, of_slots(*args)[4])  # noqa: E731
      return pl.BlockSpec((1, prompts, 1, members, 1, block), where)
    return pl.BlockSpec((1, prompts, 1, members, block, E), of_slots)

  inputs = [x if x.shape[-1] > 1 else x.swapaxes(-1, -2) for x in arrays]
  row_block = (prompts, 1, members, R)
  out_types = [
    jax.ShapeDtypeStruct((P, K, G, R, E), jnp.float32),
    jax.ShapeDtypeStruct((P, K, G, R, 1), jnp.float32),
  ]
  read = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in arrays)
  return pl.pallas_call(
    functools.partial(_kernel, jax.tree.structure(own), C, block, cap),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(P // prompts, K, G // members, C // block),
      in_specs=[pl.BlockSpec((*row_block, E), of_rows), *map(spec, arrays)],
      out_specs=[pl.BlockSpec((*row_block, x.shape[-1]), of_rows) for x in out_types],
      scratch_shapes=[
        pltpu.VMEM((prompts * members, R, width), jnp.float32) for width in (1, 1, E)
      ],
    ),
    out_shape=out_types,
    # If every row sees every slot.
    cost_estimate=pl.CostEstimate(
      flops=4 * P * K * G * R * C * E, bytes_accessed=read, transcendentals=P * K * G * R * C
    ),
    interpret=interpret,
    name="decode_attention",
  )(*scalars, q_PKGRE, *inputs)


def _kernel(
  structure: Any, slots: int, block: int, cap: float, at: Any, needed: Any, visible: Any, *refs: Any
) -> None:
  """One block of slots of a few rows: adds it to their maxima, sums and outputs so far."""
  q_ref, *own_refs, out_ref, norm_ref, max_ref, sum_ref, total_ref = refs
  prompts, members = q_ref.shape[0], q_ref.shape[2]
  p, _, g, b = (pl.program_id(axis) for axis in range(4))

  @pl.when(b == 0)
  def _() -> None:
    max_ref[...] = jnp.full(max_ref.shape, _HIDDEN)
    sum_ref[...] = jnp.zeros(sum_ref.shape)
    total_ref[...] = jnp.zeros(total_ref.shape)

  @pl.when(b < needed[p, g])
  def _() -> None:
    first = (at[1] // block - b + slots // block) % (slots // block) * block
    slots_1B = first + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
    back_1B = at[1] - slots_1B
    age_1B = jnp.where(back_1B < 0, back_1B + slots, back_1B)
    for row in range(prompts * members):
      i, j = divmod(row, members)
      keys, values = jax.tree.unflatten(structure, [ref[0, i, 0, j] for ref in own_refs])
      sees_1B = age_1B < visible[p * prompts + i, g * members + j]
      state = max_ref[row], sum_ref[row], total_ref[row]
      max_ref[row], sum_ref[row], total_ref[row] = _with_block(
        state, q_ref[i, 0, j], keys, values, sees_1B, cap
      )

  @pl.when(b == slots // block - 1)
  def _() -> None:
    for row in range(prompts * members):
      i, j = divmod(row, members)
      out_ref[i, 0, j] = total_ref[row] / sum_ref[row]
      norm_ref[i, 0, j] = max_ref[row] + jnp.log(sum_ref[row])


def _with_block(
  state: tuple[jax.Array, ...],
  q_RE: jax.Array,
  keys: Any,
  values: Any,
  sees_1B: jax.Array,
  cap: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The maximum [R, 1], the sum [R, 1] and the output [R, E] so far, with a block's tokens."""
  max_R1, sum_R1, total_RE = state
  keys_BE, key_scales = _parts(keys, q_RE.dtype)
  values_BE, value_scales = _parts(values, q_RE.dtype)
  scores_RB = _product(q_RE, keys_BE, 1) * key_scales
  if cap:
    scores_RB = cap * jnp.tanh(scores_RB / cap)
  scores_RB = jnp.where(sees_1B, scores_RB, _HIDDEN)
  new_max_R1 = jnp.maximum(max_R1, scores_RB.max(-1, keepdims=True))
  shrink_R1 = jnp.exp(max_R1 - new_max_R1)
  weights_RB = jnp.where(sees_1B, jnp.exp(scores_RB - new_max_R1), 0.0)
  sum_R1 = sum_R1 * shrink_R1 + weights_RB.sum(-1, keepdims=True)
  added_RE = _product((weights_RB * value_scales).astype(q_RE.dtype), values_BE, 0)
  return new_max_R1, sum_R1, total_RE * shrink_R1 + added_RE


def _parts(x: Any, dtype: Any) -> tuple[jax.Array, jax.Array | float]:
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
