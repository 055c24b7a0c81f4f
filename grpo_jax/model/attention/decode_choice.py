"""Decides whether decoding uses the kernel of decode.py."""

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.mixers import kept_by_layers

SLOTS = 128  # the kernel reads only caches whose number of slots is a multiple of this


def fits(config: ModelConfig) -> bool:
  """Whether the kernel can read the model's cache: on a TPU, whose lanes the heads fill.

  It reads all slots of a row on one device.
  """
  vectors = (vector for kept in kept_by_layers(config) for vector in kept.of_token)
  is_whole = config.slot_shards == 1
  return config.platform == "tpu" and is_whole and all(size % 128 == 0 for _, size in vectors)
