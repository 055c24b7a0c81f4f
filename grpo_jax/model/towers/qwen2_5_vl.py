"""The tower of Qwen2.5-VL (2502.13923).

In most layers, a patch sees only the patches of its window. Rows and columns rotate queries and
keys. Neighbouring patches become one visual token.
"""

import functools

from flax import linen as nn
import jax

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.towers.layers import Merger, TowerLayer, projected_patches, rms_norm
from grpo_jax.model.towers.tower import Tower


class Qwen25VLEmbed(nn.Module):
  """A linear projection of each patch."""

  config: ModelConfig

  @nn.compact
  def __call__(self, patches_BNC: jax.Array, places_BN2: jax.Array) -> jax.Array:
    del places_BN2
    return projected_patches(self.config, patches_BNC, use_bias=False)


TOWER = Tower(
  Qwen25VLEmbed,
  functools.partial(TowerLayer, norm=rms_norm, joined=True, gated=True),
  functools.partial(Merger, norm=rms_norm),
)
