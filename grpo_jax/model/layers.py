"""The decoder's layers (Flax Linen, params only). Shapes: the legend of grpo_jax/types.py."""
import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn
import numpy as np

from grpo_jax.model.config import ModelConfig


def rope_angles(positions_BT: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
  """cos and sin [B, T, E/2] of rotary position embedding (Su et al. 2104.09864), float32.

  Looked up in a table of max_positions rows: computed, XLA would do it again in every head of every layer.
  """
  frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim)
  angles = np.arange(config.max_positions, dtype=np.float32)[:, None] * frequencies.astype(np.float32)
  return jnp.asarray(np.cos(angles))[positions_BT], jnp.asarray(np.sin(angles))[positions_BT]


def rotate(x_BTHE: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Rotates the pairs (i, i + E/2) of every head, the order of Hugging Face checkpoints."""
  cos, sin = (r[:, :, None, :] for r in rope)
  first, second = jnp.split(x_BTHE.astype(jnp.float32), 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTHE.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """jnp.einsum of two operands of one dtype to float32, whose gradient is computed in the operands' dtype.

  Left alone, the gradient of a bfloat16 product with a float32 result is two products in float32.
  """
  return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _einsum_backward(equation, operands, dz):
  return jax.vjp(functools.partial(jnp.einsum, equation), *operands)[1](dz.astype(operands[0].dtype))


einsum.defvjp(lambda equation, x, y: (einsum(equation, x, y), (x, y)), _einsum_backward)


def attend(q_PKGRTE, own, own_mask_TC, prefix, prefix_mask_PS):
  """Softmax attention over [shared prompt | own tokens], with one normaliser for both parts.

  own: keys and values [P, K, G, C, E]; prefix: keys and values [P, K, S, E] or None. Returns [P, K, G, R, T, E].
  """
  q = q_PKGRTE / math.sqrt(q_PKGRTE.shape[-1])
  scores = [jnp.where(own_mask_TC, einsum("pkgrte,pkgce->pkgrtc", q, own[0]), -jnp.inf)]
  if prefix:
    mask = prefix_mask_PS[:, None, None, None, None, :]
    scores.append(jnp.where(mask, einsum("pkgrte,pkse->pkgrts", q, prefix[0]), -jnp.inf))
  # Every query sees at least its own token, so the maximum is finite.
  top = jax.lax.stop_gradient(jnp.max(jnp.stack([s.max(-1) for s in scores]), 0))[..., None]
  weights = [jnp.exp(s - top) for s in scores]
  total = sum(w.sum(-1, keepdims=True) for w in weights)
  out = einsum("pkgrtc,pkgce->pkgrte", weights[0].astype(q.dtype), own[1])
  if prefix:
    out = out + einsum("pkgrts,pkse->pkgrte", weights[1].astype(q.dtype), prefix[1])
  return (out / total).astype(q.dtype)


@jax.custom_vjp
def matmul(x_NI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
  """x @ kernel, with a gradient that transposes the smaller operand.

  Left alone, XLA's CPU compiler fuses the transposition of the larger one with the elementwise code that made it, and
  reads that with a stride (experiments/LOG.md, 2026-11-21).
  """
  return x_NI @ kernel_IO


def _matmul_backward(saved, dy_NO):
  x_NI, kernel_IO = saved
  dy_NO = jax.lax.optimization_barrier(dy_NO)
  dkernel = x_NI.T @ dy_NO if x_NI.shape[1] <= dy_NO.shape[1] else (dy_NO.T @ x_NI).T
  return dy_NO @ kernel_IO.T, dkernel


matmul.defvjp(lambda x_NI, kernel_IO: (x_NI @ kernel_IO, (x_NI, kernel_IO)), _matmul_backward)


def _dot_general(x, kernel, dimension_numbers, **_):
  """`matmul` in the form that flax's DenseGeneral calls: the last axes of x with the first ones of the kernel."""
  axes = len(dimension_numbers[0][0])
  inner = math.prod(kernel.shape[:axes])
  out = matmul(x.reshape(-1, inner), kernel.reshape(inner, -1))
  return out.reshape(*x.shape[:x.ndim - axes], *kernel.shape[axes:])


class Attention(nn.Module):
  """Grouped-query attention over a row's own tokens and, with a prefix, its prompt's."""
  config: ModelConfig

  @nn.compact
  def __call__(self, x_BTD, rope, own, length, prefix, prefix_mask_PS):
    c, (B, T, _) = self.config, x_BTD.shape
    K, R, E = c.num_kv_heads, c.queries_per_kv, c.head_dim
    P = B if prefix is None else prefix[0].shape[0]
    project = lambda name, heads: nn.DenseGeneral((heads, E), use_bias=c.qkv_bias, dtype=c.dtype, name=name,
                                                     dot_general=_dot_general)(x_BTD)
    q_BTHE, k_BTKE, v_BTKE = rotate(project("q", c.num_heads), rope), rotate(project("k", K), rope), project("v", K)
    q_PKGRTE = q_BTHE.reshape(P, B // P, T, K, R, E).transpose(0, 3, 1, 4, 2, 5)
    new = [x.reshape(P, B // P, T, K, E).transpose(0, 3, 1, 2, 4) for x in (k_BTKE, v_BTKE)]
    if own[0].shape[3]:
      new = [jax.lax.dynamic_update_slice_in_dim(o, n, length, axis=3) for o, n in zip(own, new)]
    own_mask_TC = jnp.arange(new[0].shape[3]) <= length + jnp.arange(T)[:, None]
    out = attend(q_PKGRTE, new, own_mask_TC, prefix, prefix_mask_PS)
    out_BTHE = out.transpose(0, 2, 4, 1, 3, 5).reshape(B, T, c.num_heads, E)
    return nn.DenseGeneral(c.embed_dim, axis=(-2, -1), use_bias=False, dtype=c.dtype, name="o",
                           dot_general=_dot_general)(out_BTHE), new


class MLP(nn.Module):
  """SwiGLU (Shazeer 2002.05202): down(silu(gate x) * up x)."""
  config: ModelConfig

  @nn.compact
  def __call__(self, x_BTD):
    c = self.config
    dense = lambda name, features: nn.DenseGeneral(features, use_bias=False, dtype=c.dtype, name=name,
                                                  dot_general=_dot_general)
    return dense("down", c.embed_dim)(nn.silu(dense("gate", c.mlp_dim)(x_BTD)) * dense("up", c.mlp_dim)(x_BTD))


class Block(nn.Module):
  """Pre-norm attention and MLP, each added to the stream. Returns the stream and the layer's keys and values."""
  config: ModelConfig

  @nn.compact
  def __call__(self, x_BTD, *context):
    norm = lambda name: nn.RMSNorm(epsilon=self.config.norm_eps, dtype=self.config.dtype, name=name)
    attended, own = Attention(self.config, name="attention")(norm("attention_norm")(x_BTD), *context)
    x_BTD = x_BTD + attended
    return x_BTD + MLP(self.config, name="mlp")(norm("mlp_norm")(x_BTD)), own
