"""Decides whether decoding uses the kernel of decode.py."""

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.mixers import kept_by_layers

SLOTS = 128  # the kernel reads only caches with a multiple of so many slots on each device


def fits(config: ModelConfig) -> bool:
  """Whether the kernel can read the model's cache: on a TPU, whose lanes the heads fill."""
  vectors = (vector for kept in kept_by_layers(config) for vector in kept.of_token)
  return config.platform == "tpu" and all(size % 128 == 0 for _, size in vectors)
