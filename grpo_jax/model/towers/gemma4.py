"""The tower of Gemma 4: pictures of any shape, whose blocks of patches become visual tokens.

Rows and columns have learned positions and rotate queries and keys: the column rotates the first
half of a head, the row the second. Norms come before and after attention and MLP.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.layers import Dense, RMSNorm
from grpo_jax.model.rope import Rotation, rotate
from grpo_jax.model.towers.attention import attend
from grpo_jax.model.towers.layers import ACTIVATIONS, in_blocks, projected_patches, rms_norm
from grpo_jax.model.towers.tower import Tower

_NO_LIMIT = float(np.finfo(np.float32).max)
_LIMITS = {  # the initial limits of inputs and outputs, to which they are clipped
  "input_min": -_NO_LIMIT,
  "input_max": _NO_LIMIT,
  "output_min": -_NO_LIMIT,
  "output_max": _NO_LIMIT,
}
# Path in the tower -> the axis of the mesh that splits each dimension (see parallel/sharding.py).
RULES = (
  (r".*/clip_\w+", ()),
  (r"merge/(token_bias|token_scale)", (None,)),
)


class Gemma4Embed(nn.Module):
  """A projection of each patch, plus the learned positions of its column and of its row."""

  config: ModelConfig

  @nn.compact
  def __call__(self, patches_BNC: jax.Array, places_BN2: jax.Array) -> jax.Array:
    c, v = self.config, self.config.vision
    x_BNW = projected_patches(c, 2 * (patches_BNC - 0.5), use_bias=False)
    shape = 2, v.positions, v.dim
    table_2QW = self.param("positions", nn.initializers.normal(0.02), shape)
    row_BN, column_BN = (jnp.maximum(places_BN2[..., i], 0) for i in range(2))
    positions_BNW = table_2QW[0][column_BN] + table_2QW[1][row_BN]
    is_patch_BN1 = places_BN2[..., :1] >= 0
    return x_BNW + jnp.where(is_patch_BN1, positions_BNW, 0).astype(x_BNW.dtype)


class Clipped(nn.Module):
  """A linear projection, whose inputs and outputs are clipped if `VisionShape.clipped`.

  The limits are not trained. `features` and `axes` are as in `Dense`.
  """

  config: ModelConfig
  features: tuple[int, ...]
  axes: int = 1

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    c = self.config

    def clip(x: jax.Array, name: str) -> jax.Array:
      if not c.vision.clipped:
        return x
      names = (f"{name}_min", f"{name}_max")
      limits = (self.param(f"clip_{x}", nn.initializers.constant(_LIMITS[x]), ()) for x in names)
      low, high = (jax.lax.stop_gradient(limit).astype(x.dtype) for limit in limits)
      return jnp.clip(x, low, high)

    out = Dense(c, self.features, axes=self.axes, name="linear")(clip(x, "input"))
    return clip(out, "output")


class Layer(nn.Module):
  """Attention, then a gated MLP, each between norms and added to the residual stream."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BNW: jax.Array, rope: Rotation | None, seen_BN: jax.Array) -> jax.Array:
    c = self.config
    mixed_BNW = Gemma4Attention(c, name="attention")(rms_norm(c, "norm1")(x_BNW), rope, seen_BN)
    x_BNW = x_BNW + rms_norm(c, "post_norm1")(mixed_BNW)
    out_BNW = Gemma4MLP(c, name="mlp")(rms_norm(c, "norm2")(x_BNW))
    return x_BNW + rms_norm(c, "post_norm2")(out_BNW)


class Gemma4Attention(nn.Module):
  """Softmax attention whose queries, keys and values are normalised. Scores are not scaled."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BNW: jax.Array, rope: Rotation | None, seen_BN: jax.Array) -> jax.Array:
    c, v = self.config, self.config.vision
    heads = v.num_heads, v.head_dim
    q_BNAE, k_BNAE, v_BNAE = (Clipped(c, heads, name=x)(x_BNW) for x in "qkv")
    q_BNAE, k_BNAE = rms_norm(c, "q_norm")(q_BNAE), rms_norm(c, "k_norm")(k_BNAE)
    q_BNAE, k_BNAE = _rotated(q_BNAE, rope), _rotated(k_BNAE, rope)
    v_BNAE = RMSNorm(epsilon=v.norm_eps, dtype=c.dtype, use_scale=False)(v_BNAE)
    out_BNAE = attend(c, q_BNAE, k_BNAE, v_BNAE, seen_BN)
    return Clipped(c, (v.dim,), axes=2, name="o")(out_BNAE)


def _rotated(x_BNAE: jax.Array, rope: Rotation) -> jax.Array:
  """Rotates the first half of each head by the column, and the second half by the row."""
  by_row, by_column = (Rotation(*parts) for parts in zip(*(jnp.split(x, 2, -1) for x in rope[:2])))
  first, second = jnp.split(x_BNAE, 2, axis=-1)
  return jnp.concatenate([rotate(first, by_column), rotate(second, by_row)], -1)


class Gemma4MLP(nn.Module):
  """down(activation(gate x) * up x)."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BNW: jax.Array) -> jax.Array:
    c, v = self.config, self.config.vision
    gate_BNI, up_BNI = (Clipped(c, (v.mlp_dim,), name=x)(x_BNW) for x in ("gate", "up"))
    return Clipped(c, (v.dim,), name="down")(ACTIVATIONS[v.activation](gate_BNI) * up_BNI)


class Gemma4Pool(nn.Module):
  """The mean of the patches of each block, normalised and projected."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BNW: jax.Array, places_BN2: jax.Array) -> jax.Array:
    c, v = self.config, self.config.vision
    # In float32, because the factor sqrt(W) makes the numbers large.
    blocks = in_blocks(x_BNW, places_BN2, v.merge).astype(jnp.float32)
    x_BMW = blocks.mean(2) * v.dim**0.5
    if v.standardised:
      bias_W = self.param("token_bias", nn.initializers.zeros, (v.dim,))
      scale_W = self.param("token_scale", nn.initializers.ones, (v.dim,))
      x_BMW = (x_BMW - jax.lax.stop_gradient(bias_W)) * jax.lax.stop_gradient(scale_W)
    norm = RMSNorm(epsilon=v.norm_eps, dtype=c.dtype, use_scale=False)
    return Dense(c, (c.embed_dim,), name="projection")(norm(x_BMW.astype(c.dtype)))


TOWER = Tower(Gemma4Embed, Layer, Gemma4Pool)
