"""Multi-head latent attention (DeepSeek-V2 2405.04434, section 2.1): keys and values from a vector.

A token has a latent of a few hundred numbers, from which each head's key and value are computed,
and a short rotated key that all heads share. The cache keeps only these two. A pass without a cache
computes the keys and values of every token, which is cheaper for many queries. A pass with a cache
multiplies the queries with the key matrix instead, lets them attend to the latents as the keys and
values of a single head, and multiplies the result with the value matrix.
"""

import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.model.config import LayerKind, ModelConfig
from grpo_jax.model.kernels import Target, dequantised
from grpo_jax.model.layers import Dense, RMSNorm, einsum
from grpo_jax.model.mixers.seen import Kept, Seen
from grpo_jax.model.rope import Rotation, rotate

# Path in a layer -> the axis of the mesh that splits each dimension (see parallel/sharding.py).
RULES = (
  (r"latent/(q_a|kv_a)/kernel", ("fsdp", None)),
  (r"latent/(q_a|kv_a)/bias", (None,)),
  (r"latent/(q_a|kv_a)_norm/scale", (None,)),
  (r"latent/(q|q_b|kv_b)/kernel", ("fsdp", "tensor", None)),
  (r"latent/o/kernel", ("tensor", None, "fsdp")),
  (r"latent/o/bias", (None,)),
  (r"latent/(q|q_a|q_b|kv_a|kv_b)/lora_a", ("fsdp", None)),
  (r"latent/(q_a|kv_a)/lora_b", (None, None)),
  (r"latent/(q|q_b|kv_b)/lora_b", (None, "tensor", None)),
  (r"latent/o/lora_a", ("tensor", None, None)),
  (r"latent/o/lora_b", (None, "fsdp")),
)
# Path of a kernel in a layer -> the projection, which can have an adapter.
TARGETS = {
  "latent/q": Target(("q_proj",)),
  "latent/q_a": Target(("q_a_proj",)),
  "latent/q_b": Target(("q_b_proj",)),
  "latent/kv_a": Target(("kv_a_proj_with_mqa",)),
  "latent/kv_b": Target(("kv_b_proj",)),
  "latent/o": Target(("o_proj",), inputs=2),
}

_EPSILON = 1e-6  # of the norms of latents, whatever `norm_eps` is


def kept(config: ModelConfig, kind: LayerKind) -> Kept:
  """The layer keeps the latent and the rotated key of each token, as one vector."""
  del kind
  return Kept(of_token=((1, config.latent.rank + config.latent.rope_dim),))


class LatentAttention(nn.Module):
  """Attention whose keys and values come from latents. `Seen.attend` computes the attention."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array, seen: Seen) -> tuple[jax.Array, Any]:
    """Returns the output [B, T, D], and the keys and values to keep (see `seen.Attend`), if any."""
    c, shape = self.config, self.config.latent
    q_BTHE = self._queries(x_BTD, seen.rope)
    latent_BTN, key_BT1E = self._latents(x_BTD, seen.rope)
    # One vector of each token is kept, as key and as value. None stands for values like the keys.
    to_keep = jnp.concatenate([latent_BTN[:, :, None], key_BT1E], axis=-1)
    up = _Up(c, name="kv_b")()
    up_keys, up_values = up[..., : shape.key_dim], up[..., shape.key_dim :]
    if seen.is_cached:
      plain, rotated = q_BTHE[..., : shape.key_dim], q_BTHE[..., shape.key_dim :]
      plain = einsum("bthe,nhe->bthn", plain, up_keys).astype(c.dtype)
      mean, kept = seen.attend(jnp.concatenate([plain, rotated], -1), to_keep, None)
      mean_latents = mean[..., : shape.rank]
      out = einsum("bthn,nhe->bthe", mean_latents, up_values).astype(c.dtype)
    else:
      keys = einsum("btn,nhe->bthe", latent_BTN, up_keys).astype(c.dtype)
      values = einsum("btn,nhe->bthe", latent_BTN, up_values).astype(c.dtype)
      rotated = jnp.broadcast_to(key_BT1E, (*keys.shape[:-1], shape.rope_dim))
      keys = jnp.concatenate([keys, rotated], -1)
      size = max(c.head_dim, shape.value_dim)  # attention takes heads of one size E
      padded = (_padded(x, size) for x in (q_BTHE, keys, values))
      out, kept = seen.attend(*padded, kept=(to_keep, None))
      out = out[..., : shape.value_dim]
    return Dense(c, (c.embed_dim,), axes=2, use_bias=c.o_bias, name="o")(out), kept

  def _queries(self, x_BTD: jax.Array, rope: Rotation) -> jax.Array:
    """The scaled queries [B, T, H, E], of which the last `rope_dim` numbers are rotated."""
    c, shape = self.config, self.config.latent
    heads = c.num_heads, c.head_dim
    if shape.query_rank:
      down = Dense(c, (shape.query_rank,), use_bias=c.qkv_bias, name="q_a")(x_BTD)
      down = RMSNorm(epsilon=_EPSILON, dtype=c.dtype, name="q_a_norm")(down)
      q_BTHE = Dense(c, heads, name="q_b")(down)
    else:
      q_BTHE = Dense(c, heads, name="q")(x_BTD)
    plain, rotated = q_BTHE[..., : shape.key_dim], q_BTHE[..., shape.key_dim :]
    q_BTHE = jnp.concatenate([plain, self._rotate(rotated, rope)], axis=-1)
    return q_BTHE * _query_scale(c)

  def _latents(self, x_BTD: jax.Array, rope: Rotation) -> tuple[jax.Array, jax.Array]:
    """The latents [B, T, N], and the rotated keys [B, T, 1, rope_dim] that all heads share."""
    c, shape = self.config, self.config.latent
    size = shape.rank + shape.rope_dim
    down = Dense(c, (size,), use_bias=c.qkv_bias, name="kv_a")(x_BTD)
    latent = RMSNorm(epsilon=_EPSILON, dtype=c.dtype, name="kv_a_norm")(down[..., : shape.rank])
    return latent, self._rotate(down[:, :, None, shape.rank :], rope)

  def _rotate(self, x_BTHE: jax.Array, rope: Rotation) -> jax.Array:
    """Rotates pairs of numbers: neighbours if `interleaved`, or else numbers half a head apart."""
    if self.config.latent.interleaved:
      # Reorders queries and keys alike, so that their products stay the same.
      pairs = x_BTHE.reshape(*x_BTHE.shape[:-1], -1, 2)
      x_BTHE = jnp.swapaxes(pairs, -1, -2).reshape(x_BTHE.shape)
    return rotate(x_BTHE, rope)


class _Up(nn.Module):
  """The matrix [rank, H, key_dim + value_dim] from latents to keys and values, with its adapter."""

  config: ModelConfig

  @nn.compact
  def __call__(self) -> jax.Array:
    c, shape = self.config, self.config.latent
    size = shape.rank, c.num_heads, shape.key_dim + shape.value_dim
    kernel = self.param("kernel", nn.initializers.lecun_normal(in_axis=0, out_axis=(1, 2)), size)
    kernel = dequantised(kernel, c.dtype)
    if not self.has_variable("params", "lora_a"):
      return kernel
    a: jax.Array = self.get_variable("params", "lora_a").astype(c.dtype)
    b: jax.Array = self.get_variable("params", "lora_b").astype(c.dtype)
    return kernel + c.lora.scale * jnp.tensordot(a, b, 1)


def _query_scale(config: ModelConfig) -> float:
  """The factor of queries: 1 / sqrt(E), times YaRN's factor where the model scales positions."""
  scaling, scale = config.rope_scaling, 1 / math.sqrt(config.head_dim)
  if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
    return scale
  return scale * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2


def _padded(x: jax.Array, size: int) -> jax.Array:
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])
