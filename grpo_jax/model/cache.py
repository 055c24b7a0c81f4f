"""The key/value cache: a struct that `features` takes as an argument and returns updated.

The keys and values that a row attends to lie in two parts. The prompt's part is held once for the
whole group, in `Prefix`. The other part holds the row's own tokens. Arrays are [P, K, G, C, E]: the
slots C lie next to E, because the einsums of decoding read this order several times faster than an
order with the slots first.
"""

import dataclasses

from flax import struct
import jax
import jax.numpy as jnp

from grpo_jax.model.config import ModelConfig

PerLayer = tuple[jax.Array, ...]  # one array for each layer
KeysAndValues = tuple[jax.Array, jax.Array]


@struct.dataclass
class Prefix:
  """The keys and values of the prompts, which the G rows of a group share.

  Attributes:
    keys: [P, K, S, E] for each layer.
    values: [P, K, S, E] for each layer.
    lengths_P: int32, how many tokens each prompt has. Slots after them are not attended to.
  """

  keys: PerLayer
  values: PerLayer
  lengths_P: jax.Array


@struct.dataclass
class LayerCache:
  """The cache of one layer: what its attention reads besides the new tokens.

  Attributes:
    own: Keys and values [P, K, G, C, E] of the rows' own earlier tokens.
    length: int32 scalar, how many of the C slots are in use.
    prefix: Keys and values [P, K, S, E] of the prompts, or None.
    prefix_lengths_P: int32, how many tokens each prompt has, or None.
  """

  own: KeysAndValues
  length: jax.Array
  prefix: KeysAndValues | None
  prefix_lengths_P: jax.Array | None


@struct.dataclass
class Cache:
  """The cache of all layers. Rows are ordered by group: row p * G + g is `keys[layer][p, :, g]`.

  Attributes:
    keys: [P, K, G, C, E] for each layer. C may be 0.
    values: [P, K, G, C, E] for each layer.
    length: int32 scalar, how many of the C slots are in use.
    prefix: The prompts of the groups, or None where the rows share no prompt.
  """

  keys: PerLayer
  values: PerLayer
  length: jax.Array
  prefix: Prefix | None = None

  @property
  def capacity(self) -> int:
    """C, the number of slots for a row's own tokens."""
    return self.keys[0].shape[3]

  def layer(self, index: int) -> LayerCache:
    """The cache of layer `index`."""
    own = self.keys[index], self.values[index]
    if self.prefix is None:
      return LayerCache(own, self.length, None, None)
    prefix = self.prefix.keys[index], self.prefix.values[index]
    return LayerCache(own, self.length, prefix, self.prefix.lengths_P)


def without_slots(config: ModelConfig, rows: int) -> Cache:
  """A cache that holds nothing: each of the `rows` attends only to its own tokens of this call."""
  no_slots = jnp.zeros((rows, config.num_kv_heads, 1, 0, config.head_dim), config.dtype)
  layers = (no_slots,) * config.num_layers
  return Cache(layers, layers, jnp.int32(0))


def empty(config: ModelConfig, prefix: Prefix, group_size: int, capacity: int) -> Cache:
  """A cache for G rows per prompt of `prefix`, without any tokens of their own yet.

  Args:
    config: The model.
    prefix: The prompts, as `share` returns them.
    group_size: G, the rows of each prompt.
    capacity: C, the slots for each row's own tokens.
  """
  P = prefix.lengths_P.shape[0]
  shape = (P, config.num_kv_heads, group_size, capacity, config.head_dim)
  layers = (jnp.zeros(shape, prefix.keys[0].dtype),) * config.num_layers
  return Cache(layers, layers, jnp.int32(0), prefix)


def share(cache: Cache, lengths_P: jax.Array) -> Prefix:
  """Makes the cache of a forward pass over prompts [P, S] the prefix of their groups."""

  def first_row(layers: PerLayer) -> PerLayer:
    return tuple(layer[:, :, 0] for layer in layers)

  return Prefix(first_row(cache.keys), first_row(cache.values), lengths_P)


def grow(cache: Cache, capacity: int) -> Cache:
  """The same cache with `capacity` slots, which must not be fewer than it has."""
  new_slots = (0, capacity - cache.capacity)
  widths = [(0, 0), (0, 0), (0, 0), new_slots, (0, 0)]

  def pad(layers: PerLayer) -> PerLayer:
    return tuple(jnp.pad(layer, widths) for layer in layers)

  return dataclasses.replace(cache, keys=pad(cache.keys), values=pad(cache.values))
