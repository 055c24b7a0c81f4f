"""The key/value cache: a struct that `features` takes as an argument and returns updated.

The keys and values that a row attends to lie in two parts. The prompt's part is held once for the
whole group, in `Prefix`. The other part holds the row's own tokens. Arrays are [L, P, K, G, C, E]
with the layers of a stack (see stacks.py) on the first axis. The slots C lie next to E, because the
einsums of decoding read this order several times faster than an order with the slots first.

The row's own part has no axis L where a stack has one layer, as on a CPU. There, XLA would compute
the write of a new token a second time to drop the axis, and copy the cache for that.
"""

from collections.abc import Mapping
import dataclasses
import functools

from flax import struct
import jax
from jax.experimental.layout import Layout, with_layout_constraint
import jax.numpy as jnp

from grpo_jax.model.attention.softmax import own_mask, prompt_mask, softmax_attention
from grpo_jax.model.blocks import LayerMemory, Pass
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.layers import Attend, KeysAndValues

PerStack = dict[str, jax.Array]  # one array for each stack of layers


@struct.dataclass
class Prefix:
  """The keys and values of the prompts, which the G rows of a group share.

  Attributes:
    keys: [L, P, K, S, E] for each stack.
    values: [L, P, K, S, E] for each stack.
    lengths_P: int32, how many tokens each prompt has. Slots after them are not attended to.
  """

  keys: PerStack
  values: PerStack
  lengths_P: jax.Array


@struct.dataclass
class Cache:
  """The cache of all layers. Rows are ordered by group: number p * G + g is row g of prompt p.

  Attributes:
    keys: [L, P, K, G, C, E] for each stack, or [P, K, G, C, E] if L is 1.
    values: The same.
    length: int32 scalar, how many of the C slots are in use.
    capacity: How many of the C slots attention reads. Those after them must be free.
    prefix: The prompts of the groups, or None where the rows share no prompt.
  """

  keys: PerStack
  values: PerStack
  length: jax.Array
  capacity: int = struct.field(pytree_node=False)
  prefix: Prefix | None = None

  @property
  def slots(self) -> int:
    """C, the number of slots for a row's own tokens."""
    return next(iter(self.keys.values())).shape[-2]


def empty_cache(
  config: ModelConfig, prefix: Prefix, group_size: int, capacity: int, slots: int = 0
) -> Cache:
  """A cache for G rows per prompt of `prefix`, without any tokens of their own yet.

  Args:
    config: The model.
    prefix: The prompts, as `as_prefix` returns them.
    group_size: G, the rows of each prompt.
    capacity: The slots for each row's own tokens that attention reads.
    slots: C, the slots that there are, at least `capacity`: `grow_cache` up to C copies nothing.
  """
  P, C = prefix.lengths_P.shape[0], max(slots, capacity)
  shape = (P, config.num_kv_heads, group_size, C, config.head_dim)

  def zeros(prompt_keys: jax.Array) -> jax.Array:
    layers = len(prompt_keys)
    return jnp.zeros((layers, *shape) if layers > 1 else shape, prompt_keys.dtype)

  nothing = jax.tree.map(zeros, prefix.keys)
  return Cache(nothing, nothing, jnp.int32(0), capacity, prefix)


def as_prefix(cache: Cache, lengths_P: jax.Array) -> Prefix:
  """Makes the cache of a forward pass over prompts [P, S] the prefix of their groups."""

  def first_row(x: jax.Array) -> jax.Array:
    return x[:, :, :, 0]

  keys, values = jax.tree.map(first_row, (cache.keys, cache.values))
  return Prefix(keys, values, lengths_P)


def grow_cache(cache: Cache, capacity: int) -> Cache:
  """The same cache with another capacity, which must not be smaller than the one it has."""
  added = max(0, capacity - cache.slots)

  def pad(x: jax.Array) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, added), (0, 0)])

  keys, values = jax.tree.map(pad, (cache.keys, cache.values))
  return dataclasses.replace(cache, keys=keys, values=values, capacity=capacity)


def with_cache(config: ModelConfig, cache: Cache, window: int, memory: LayerMemory) -> Attend:
  """Attention of new tokens [B, T] to themselves and to the rows' earlier tokens in `cache`.

  Beside its output, it returns the stack's keys and values with the new ones in their slots.
  """
  K, E = config.num_kv_heads, config.head_dim

  def attend_with_cache(
    q_BTHE: jax.Array, k_BTKE: jax.Array, v_BTKE: jax.Array
  ) -> tuple[jax.Array, KeysAndValues]:
    B, T, H, _ = q_BTHE.shape
    P, _, G, _, _ = memory.own[0].shape[-5:]
    q_PKGRTE = q_BTHE.reshape(P, G, T, K, H // K, E).transpose(0, 3, 1, 4, 2, 5)

    def write(stack: jax.Array, new_BTKE: jax.Array) -> jax.Array:
      new = new_BTKE.reshape(P, G, T, K, E).transpose(0, 3, 1, 2, 4).astype(stack.dtype)
      start = _start(stack, memory.place, cache.length)
      new = new.reshape((1,) * (stack.ndim - 5) + new.shape)
      return _slots_last(jax.lax.dynamic_update_slice(stack, new, start), config)

    def read(stack: jax.Array) -> jax.Array:
      shape = (P, K, G, cache.capacity, E)
      if stack.shape == shape:
        return stack
      start = _start(stack, memory.place, 0)
      return jax.lax.dynamic_slice(stack, start, (1,) * (stack.ndim - 5) + shape).reshape(shape)

    stacks_of_own = write(memory.own[0], k_BTKE), write(memory.own[1], v_BTKE)
    place_T1 = cache.length + jnp.arange(T)[:, None]  # of the queries among the own tokens
    own_mask_TC, prefix_mask = own_mask(place_T1, cache.capacity, window), None
    if cache.prefix is not None:
      slots = memory.prefix[0].shape[-2]
      prefix_mask = prompt_mask(cache.prefix.lengths_P, slots, place_T1, window)
    own = read(stacks_of_own[0]), read(stacks_of_own[1])
    cap = config.attention_cap
    out = softmax_attention(q_PKGRTE, own, own_mask_TC, memory.prefix, prefix_mask, cap)
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(B, T, H, E), stacks_of_own

  return attend_with_cache


def to_pass(config: ModelConfig, cache: Cache) -> Pass:
  """The pass of new tokens that attend to themselves and to those in the cache."""

  def pairs(layers: Cache | Prefix) -> dict[str, KeysAndValues]:
    return {name: (keys, layers.values[name]) for name, keys in layers.keys.items()}

  attend = functools.partial(with_cache, config, cache)
  return Pass(attend, pairs(cache), pairs(cache.prefix) if cache.prefix else {})


def updated(cache: Cache, own: Mapping[str, KeysAndValues], tokens: int) -> Cache:
  """The cache after a pass of `to_pass` over rows of `tokens` new tokens."""
  keys, values = ({name: pair[i] for name, pair in own.items()} for i in (0, 1))
  return dataclasses.replace(cache, keys=keys, values=values, length=cache.length + tokens)


def of_rows(kept: Mapping[str, KeysAndValues], tokens: int) -> Cache:
  """The cache after a pass over rows of `tokens` tokens without one.

  Args:
    kept: Keys and values [L, B, T, K, E] of each stack.
    tokens: T.
  """

  def ordered(x_LBTKE: jax.Array) -> jax.Array:
    return x_LBTKE.transpose(0, 1, 3, 2, 4)[:, :, :, None]

  keys, values = ({name: ordered(pair[i]) for name, pair in kept.items()} for i in (0, 1))
  return Cache(keys, values, jnp.int32(tokens), tokens)


def _slots_last(stack: jax.Array, config: ModelConfig) -> jax.Array:
  """Fixes the order of a stack [..., C, E] in the memory of a TPU: the slots vary fastest.

  A TPU pads the axis that varies fastest to 128. If XLA may choose, it takes E, which is 64 in
  small models, and a second order for the other stack, and keeps copies in both.
  """
  if config.platform != "tpu" or config.head_dim % 128 == 0:
    return stack
  *outer, slots, element = range(stack.ndim)
  return with_layout_constraint(stack, Layout(major_to_minor=(*outer, element, slots)))


def _start(stack: jax.Array, layer: jax.Array, slot: jax.Array | int) -> list[jax.Array]:
  """The indices where a layer's slots lie in its stack, with or without the axis L."""
  return [jnp.int32(i) for i in (layer, 0, 0, 0, slot, 0)][-stack.ndim :]
