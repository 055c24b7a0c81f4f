"""The bytes of a cache, from what each layer keeps of a token and of a row."""

from typing import NamedTuple

import jax.numpy as jnp

from grpo_jax.model.cache import ring_slots
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.mixers import kept_by_layers


class CacheBytes(NamedTuple):
  """The bytes of a cache on a device that holds a share of the heads and slots, and all rows.

  Attributes:
    place: The bytes of each prompt.
    row: The bytes of each row, without its prompt.
  """

  place: float
  row: float


def cache_bytes(
  config: ModelConfig, prompt_slots: int, slots: int, rewind: int | None = None
) -> CacheBytes:
  """Computes the bytes of each prompt and of each row in a cache.

  Args:
    config: The model. The axis `tensor` of its mesh splits heads, where it divides them, and the
      axis `slots` splits slots.
    prompt_slots: S.
    slots: As in `Cache`.
    rewind: As in `Cache`.
  """
  item = jnp.dtype(config.dtype).itemsize
  place = row = 0.0
  for layer, kept in enumerate(kept_by_layers(config)):
    window = config.kind(layer).window
    own_slots = -(-ring_slots(config, window, slots, rewind) // config.slot_shards)
    of_prompt = min(prompt_slots, window) if window else prompt_slots
    of_prompt = -(-of_prompt // config.slot_shards)
    for heads, size in kept.of_token:
      share = heads * _share(config, heads)
      place += share * of_prompt * size * item
      # A byte for each number, and a scale of four bytes for a vector.
      row += share * own_slots * (size + 4 if config.cache_dtype else size * item)
    for heads, state in kept.of_row:  # a row starts as a copy of its prompt's state
      place += _share(config, heads) * state
      row += _share(config, heads) * state
  return CacheBytes(place, row)


def _share(config: ModelConfig, heads: int) -> float:
  """The share of `heads` that a device holds: all of them where `tensor` does not divide them."""
  return 1 / config.rows.mesh.shape["tensor"] if config.axis_of(heads) else 1.0
