"""The tower of Qwen3-VL (2511.21631) and Qwen3.5.

Learned positions are resampled to each picture's grid. Rows and columns rotate queries and keys.
Neighbouring patches become one visual token. In Qwen3-VL, the outputs of some layers become further
levels of visual tokens.
"""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.towers.layers import (
  Merger,
  TowerLayer,
  layer_norm,
  position_table,
  projected_patches,
  sizes_of,
)
from grpo_jax.model.towers.tower import Tower


class Qwen3VLEmbed(nn.Module):
  """A linear projection of each patch, plus the resampled learned position."""

  config: ModelConfig

  @nn.compact
  def __call__(self, patches_BNC: jax.Array, places_BN2: jax.Array) -> jax.Array:
    c = self.config
    x_BNW = projected_patches(c, patches_BNC, use_bias=True)
    positions_BNW = resampled(position_table(self, c), c.vision.grid, places_BN2)
    return x_BNW + positions_BNW.astype(x_BNW.dtype)


def resampled(table_PW: jax.Array, side: int, places_BN2: jax.Array) -> jax.Array:
  """Interpolates a side x side grid of positions bilinearly at each patch: [B, N, W].

  The corner patches of each picture get the corners of the grid.
  """
  steps_B12 = (side - 1) / jnp.maximum(sizes_of(places_BN2) - 1, 1).astype(jnp.float32)
  source_BN2 = jnp.maximum(places_BN2, 0) * steps_B12
  first_BN2 = jnp.floor(source_BN2)
  share_BN2 = source_BN2 - first_BN2
  first_BN2 = first_BN2.astype(jnp.int32)
  second_BN2 = jnp.minimum(first_BN2 + 1, side - 1)

  def row(rows_BN: jax.Array) -> jax.Array:
    """Interpolates between the two nearest columns, in the given rows of the grid."""
    left, right = (table_PW[rows_BN * side + x[..., 1]] for x in (first_BN2, second_BN2))
    return left + share_BN2[..., 1:] * (right - left)

  top, bottom = row(first_BN2[..., 0]), row(second_BN2[..., 0])
  return top + share_BN2[..., :1] * (bottom - top)


TOWER = Tower(
  Qwen3VLEmbed,
  functools.partial(TowerLayer, norm=layer_norm, joined=True, gated=False),
  functools.partial(Merger, norm=layer_norm),
  functools.partial(Merger, norm=layer_norm, norm_after=True),
)
