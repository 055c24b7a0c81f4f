"""The record that describes a vision tower by its parts."""

from collections.abc import Callable
from typing import NamedTuple

from flax import linen as nn

from grpo_jax.model.config import ModelConfig

MakePart = Callable[[ModelConfig], nn.Module]


class Tower(NamedTuple):
  """The parts of a vision tower. B counts pictures, N their patches, W is the tower's width.

  Attributes:
    embed: embed(patches_BNC, places_BN2) -> x_BNW, what patches are before the first layer.
    layer: layer(x_BNW, rope, seen_BN) -> x_BNW. A patch sees those with its number in `seen_BN`.
    merge: merge(x_BNW, places_BN2) -> the visual tokens [B, N / merge^2, D].
    level: The same for a further level, whose tokens join the decoder later. None without levels.
  """

  embed: MakePart
  layer: MakePart
  merge: MakePart
  level: MakePart | None = None
