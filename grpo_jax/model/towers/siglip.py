"""SigLIP (2303.15343), the tower of Gemma 3 and, with other positions, of Idefics3 and SmolVLM.

Patches are ordered row by row, and each cell of a grid has a learned position. A visual token of
Gemma 3 is a projection of the mean of a block's patches. In Idefics3 (2408.12637), it is a
projection of all numbers of these patches.
"""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.layers import Dense
from grpo_jax.model.towers.layers import (
  TowerLayer,
  in_blocks,
  layer_norm,
  position_table,
  projected_patches,
  rms_norm,
  sizes_of,
)
from grpo_jax.model.towers.tower import Tower


class SiglipEmbed(nn.Module):
  """A linear projection of each patch, plus the learned position at its row and column.

  With `scaled`, the grid of positions covers each picture, whatever its size.
  """

  config: ModelConfig
  scaled: bool = False

  @nn.compact
  def __call__(self, patches_BNC: jax.Array, places_BN2: jax.Array) -> jax.Array:
    c, side = self.config, self.config.vision.grid
    x_BNW = projected_patches(c, patches_BNC, use_bias=True)
    places_BN2 = jnp.maximum(places_BN2, 0)  # padding, at -1, may read any position
    if self.scaled:
      places_BN2 = _scaled_places(places_BN2, side)
    table_PW = position_table(self, c)
    positions_BNW = table_PW[places_BN2[..., 0] * side + places_BN2[..., 1]]
    return x_BNW + positions_BNW.astype(x_BNW.dtype)


def _scaled_places(places_BN2: jax.Array, side: int) -> jax.Array:
  """The row and column in the grid of positions of each patch, if the picture covers the grid.

  The float32 arithmetic is that of transformers, because a patch may be exactly on a boundary.
  """
  step = 1 / side
  count = int(np.ceil((1 - step) / step))
  boundaries = (step + np.arange(count) * step).astype(np.float32)
  shares_BN2 = places_BN2 * (1 / sizes_of(places_BN2).astype(jnp.float32))
  shares_BN2 = jnp.minimum(shares_BN2, np.float32(1 - 1e-6))
  found = jnp.searchsorted(jnp.asarray(boundaries), shares_BN2.reshape(-1), side="right")
  return found.reshape(places_BN2.shape)


class SiglipPool(nn.Module):
  """The mean of the patches of each block, normalised and projected."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BNW: jax.Array, places_BN2: jax.Array) -> jax.Array:
    c = self.config
    x_BNW = layer_norm(c, "post_norm")(x_BNW)
    blocks = in_blocks(x_BNW, places_BN2, c.vision.merge).astype(jnp.float32)
    x_BMW = rms_norm(c, "norm")(blocks.mean(2).astype(x_BNW.dtype))
    return Dense(c, (c.embed_dim,), name="projection")(x_BMW)


class Shuffle(nn.Module):
  """A projection of all numbers of the patches of each block."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BNW: jax.Array, places_BN2: jax.Array) -> jax.Array:
    c, v = self.config, self.config.vision
    x_BNW = layer_norm(c, "post_norm")(x_BNW)
    blocks = in_blocks(x_BNW, places_BN2, v.merge)
    return Dense(c, (c.embed_dim,), name="projection")(blocks.reshape(*blocks.shape[:2], -1))


_LAYER = functools.partial(TowerLayer, norm=layer_norm, joined=False, gated=False)
SIGLIP = Tower(SiglipEmbed, _LAYER, SiglipPool)
IDEFICS3 = Tower(functools.partial(SiglipEmbed, scaled=True), _LAYER, Shuffle)
