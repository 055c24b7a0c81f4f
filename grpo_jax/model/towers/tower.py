"""The record of the modules that make up a vision tower."""

from collections.abc import Callable
from typing import NamedTuple

from flax import linen as nn

from grpo_jax.model.config import ModelConfig

MakePart = Callable[[ModelConfig], nn.Module]


class Tower(NamedTuple):
  """The modules of a vision tower, each made by a function of the model's config.

  B counts pictures, N their patches, and W is the tower's width.

  Attributes:
    embed: embed(patches_BNC, places_BN2) -> x_BNW, the input of the first layer.
    layer: layer(x_BNW, rope, seen_BN) -> x_BNW. A patch sees patches with its number in `seen_BN`.
    merge: merge(x_BNW, places_BN2) -> the visual tokens [B, N / merge^2, D].
    level: As `merge`, for a further level, which is added after a decoder layer. None: no levels.
  """

  embed: MakePart
  layer: MakePart
  merge: MakePart
  level: MakePart | None = None
