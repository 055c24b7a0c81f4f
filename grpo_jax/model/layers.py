"""The decoder's layers (Flax Linen, params only). Shapes: the legend of grpo_jax/types.py."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.lora import dequantised
from grpo_jax.model.rope import rotate

ACTIVATIONS = {"silu": nn.silu, "gelu_tanh": functools.partial(nn.gelu, approximate=True)}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """jnp.einsum of two operands of one dtype to float32, whose gradient is computed in the operands' dtype.

  Left alone, the gradient of a bfloat16 product with a float32 result is two products in float32.
  """
  return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _einsum_backward(equation, operands, dz):
  return jax.vjp(functools.partial(jnp.einsum, equation), *operands)[1](
    dz.astype(operands[0].dtype)
  )


einsum.defvjp(lambda equation, x, y: (einsum(equation, x, y), (x, y)), _einsum_backward)


def attend(q_PKGRTE, own, own_mask, prefix, prefix_mask, cap=0.0):
  """Softmax attention over [shared prompt | own tokens], with one normaliser for both parts. Queries are scaled already.

  own: keys and values [P, K, G, C, E]; prefix: keys and values [P, K, S, E] or None. Masks broadcast to the scores
  [P, K, G, R, T, C] and [P, K, G, R, T, S]. Returns [P, K, G, R, T, E].
  """
  capped = lambda scores: cap * jnp.tanh(scores / cap) if cap else scores
  score = lambda equation, keys, mask: jnp.where(
    mask, capped(einsum(equation, q_PKGRTE, keys)), -jnp.inf
  )
  scores = [score("pkgrte,pkgce->pkgrtc", own[0], own_mask)]
  if prefix:
    scores.append(score("pkgrte,pkse->pkgrts", prefix[0], prefix_mask))
  # Every query sees at least its own token, so the maximum is finite.
  top = jax.lax.stop_gradient(jnp.max(jnp.stack([s.max(-1) for s in scores]), 0))[..., None]
  weights = [jnp.exp(s - top) for s in scores]
  total = sum(w.sum(-1, keepdims=True) for w in weights)
  out = einsum("pkgrtc,pkgce->pkgrte", weights[0].astype(q_PKGRTE.dtype), own[1])
  if prefix:
    out = out + einsum("pkgrts,pkse->pkgrte", weights[1].astype(q_PKGRTE.dtype), prefix[1])
  return (out / total).astype(q_PKGRTE.dtype)


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


class Dense(nn.Module):
  """The last `axes` axes of x times a kernel, in config.dtype; plus its adapter's product where it has one."""

  config: ModelConfig
  features: tuple[int, ...]
  axes: int = 1
  use_bias: bool = False

  @nn.compact
  def __call__(self, x):
    c, inputs = self.config, x.shape[x.ndim - self.axes :]
    wide, narrow = math.prod(inputs), math.prod(self.features)
    flat = lambda key, shape: nn.initializers.lecun_normal()(key, (wide, narrow)).reshape(shape)
    kernel = dequantised(self.param("kernel", flat, (*inputs, *self.features)), c.dtype)
    x_NI = x.reshape(-1, wide).astype(c.dtype)
    out = matmul(x_NI, kernel.reshape(wide, narrow))
    if self.has_variable("params", "lora_a"):
      a, b = (self.get_variable("params", name).astype(c.dtype) for name in ("lora_a", "lora_b"))
      out = out + c.lora.scale * matmul(matmul(x_NI, a.reshape(wide, -1)), b.reshape(-1, narrow))
    out = out.reshape(*x.shape[: x.ndim - self.axes], *self.features)
    return (
      out + self.param("bias", nn.initializers.zeros_init(), self.features).astype(c.dtype)
      if self.use_bias
      else out
    )


class Attention(nn.Module):
  """Grouped-query attention over a row's own tokens and, with a prefix, its prompt's."""

  config: ModelConfig
  window: int

  @nn.compact
  def __call__(self, x_BTD, rope, own, length, prefix, prefix_lengths_P):
    c, (B, T, _) = self.config, x_BTD.shape
    K, R, E = c.num_kv_heads, c.queries_per_kv, c.head_dim
    P = B if prefix is None else prefix[0].shape[0]
    project = lambda name, heads: Dense(c, (heads, E), use_bias=c.qkv_bias, name=name)(x_BTD)
    norm = lambda name, x: (
      nn.RMSNorm(epsilon=c.norm_eps, dtype=c.dtype, name=name)(x) if c.qk_norm else x
    )
    q_BTHE = rotate(norm("q_norm", project("q", c.num_heads)), rope)
    k_BTKE, v_BTKE = rotate(norm("k_norm", project("k", K)), rope), project("v", K)
    q_PKGRTE = q_BTHE.reshape(P, B // P, T, K, R, E).transpose(0, 3, 1, 4, 2, 5) / math.sqrt(
      c.query_scalar or E
    )
    new = [x.reshape(P, B // P, T, K, E).transpose(0, 3, 1, 2, 4) for x in (k_BTKE, v_BTKE)]
    if own[0].shape[3]:
      new = [jax.lax.dynamic_update_slice_in_dim(o, n, length, axis=3) for o, n in zip(own, new)]
    place_T1, prefix_mask = (
      length + jnp.arange(T)[:, None],
      None,
    )  # of the queries among their row's own tokens
    back_TC = place_T1 - jnp.arange(new[0].shape[3])
    own_mask_TC = (back_TC >= 0) & (back_TC < self.window) if self.window else back_TC >= 0
    if prefix is not None:
      slots_S = jnp.arange(prefix[0].shape[2])
      prefix_mask = slots_S < prefix_lengths_P[:, None, None]
      if self.window:
        prefix_mask &= prefix_lengths_P[:, None, None] + place_T1 - slots_S < self.window
      prefix_mask = prefix_mask[:, None, None, None]
    out = attend(q_PKGRTE, new, own_mask_TC, prefix, prefix_mask, c.attention_cap)
    out_BTHE = out.transpose(0, 2, 4, 1, 3, 5).reshape(B, T, c.num_heads, E)
    return Dense(c, (c.embed_dim,), axes=2, name="o")(out_BTHE), new


class MLP(nn.Module):
  """Gated: down(activation(gate x) * up x) (Shazeer 2002.05202)."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BTD):
    c = self.config
    dense = lambda name, features, x: Dense(c, (features,), name=name)(x)
    gate = ACTIVATIONS[c.activation](dense("gate", c.mlp_dim, x_BTD))
    return dense("down", c.embed_dim, gate * dense("up", c.mlp_dim, x_BTD))
