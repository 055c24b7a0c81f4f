"""The key/value cache: an explicit struct, in and out of `features`.

A row's keys lie in two parts: the prompt's, held once per group (`prefix`), and the row's own. Arrays are
[P, K, G, C, E] with the slots C next to E, which decode einsums read several times faster than slots-first.
"""

import jax
import jax.numpy as jnp
from flax import struct

from grpo_jax.model.config import ModelConfig

Layers = tuple[jax.Array, ...]  # one array per layer


@struct.dataclass
class Prefix:
  """What the G rows of a group share: their prompt's keys and values."""

  keys: Layers  # [P, K, S, E] per layer
  values: Layers  # [P, K, S, E]
  lengths_P: jax.Array  # int32, prompt tokens in use; slots after them are not attended to


@struct.dataclass
class Cache:
  """Rows are group-major: row p * G + g of a [B, T] input is keys[layer][p, :, g]."""

  keys: Layers  # [P, K, G, C, E] per layer; C may be 0
  values: Layers  # [P, K, G, C, E]
  length: jax.Array  # int32 scalar, slots of the rows' own that are in use
  prefix: Prefix | None = None

  @property
  def capacity(self) -> int:
    """C, the slots of a row's own."""
    return self.keys[0].shape[3]


def empty(config: ModelConfig, prefix: Prefix, group_size: int, capacity: int) -> Cache:
  """A cache of G rows to each prompt of `prefix`, with room for `capacity` tokens of their own."""
  P = prefix.lengths_P.shape[0]
  slots = jnp.zeros(
    (P, config.num_kv_heads, group_size, capacity, config.head_dim), prefix.keys[0].dtype
  )
  layers = (slots,) * config.num_layers
  return Cache(layers, layers, jnp.int32(0), prefix)


def share(cache: Cache, lengths_P: jax.Array) -> Prefix:
  """The cache of a forward over prompts [P, S] as the prefix of their groups."""
  squeeze = lambda layers: tuple(x[:, :, 0] for x in layers)
  return Prefix(squeeze(cache.keys), squeeze(cache.values), lengths_P)


def grow(cache: Cache, capacity: int) -> Cache:
  """The same cache with more room."""
  more = [(0, 0)] * 3 + [(0, capacity - cache.capacity), (0, 0)]
  pad = lambda layers: tuple(jnp.pad(x, more) for x in layers)
  return cache.replace(keys=pad(cache.keys), values=pad(cache.values))
