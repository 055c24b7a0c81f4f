"""Grouped-query softmax attention, of all earlier tokens or of those in a window."""

import math
from typing import Any

from flax import linen as nn
import jax

from grpo_jax.model.config import LayerKind, ModelConfig
from grpo_jax.model.kernels import Target
from grpo_jax.model.layers import Dense, RMSNorm, merged
from grpo_jax.model.mixers.seen import Kept, Seen
from grpo_jax.model.rope import rotate

# Path in a layer -> the axis of the mesh that splits each dimension (see parallel/sharding.py).
RULES = (
  (r"attention/[qk]_norm/scale", (None,)),
  (r"attention/[qk]_norm/scale", ("tensor", None)),  # of all heads together
  (r"attention/sinks", ("tensor",)),
  (r"attention/[qkv]/kernel", ("fsdp", "tensor", None)),
  (r"attention/[qkv]/bias", ("tensor", None)),
  (r"attention/o/kernel", ("tensor", None, "fsdp")),
  (r"attention/o/bias", (None,)),
  (r"attention/[qkv]/lora_a", ("fsdp", None)),
  (r"attention/[qkv]/lora_b", (None, "tensor", None)),
  (r"attention/o/lora_a", ("tensor", None, None)),
  (r"attention/o/lora_b", (None, "fsdp")),
)
# Path of a kernel in a layer -> the projection, which can have an adapter.
TARGETS = {
  "attention/q": Target(("q_proj", "qkv_proj")),
  "attention/k": Target(("k_proj", "qkv_proj")),
  "attention/v": Target(("v_proj", "qkv_proj")),
  "attention/o": Target(("o_proj",), inputs=2),
}


def kept(config: ModelConfig, kind: LayerKind) -> Kept:
  """The layer keeps a key and a value of each token, unless it borrows another layer's."""
  del config
  heads = kind.num_kv_heads, kind.head_dim
  return Kept() if kind.keys == "borrowed" else Kept(of_token=(heads, heads))


class Attention(nn.Module):
  """The projections of grouped-query attention. `Seen.attend` computes the attention itself."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array, seen: Seen) -> tuple[jax.Array, Any]:
    """Returns the output [B, T, D], and the keys and values to keep (see `seen.Attend`), if any."""
    c, rope = self.config, seen.rope
    # Reshaped once, so that the backward pass keeps one array for all projections.
    rows = merged(c, x_BTD)

    def project(name: str, heads: int, head_dim: int = c.head_dim) -> jax.Array:
      out_NHE = Dense(c, (heads, head_dim), use_bias=c.qkv_bias, name=name)(rows)
      return out_NHE.reshape(*x_BTD.shape[:-1], heads, head_dim)

    def rotated_norm(name: str, x: jax.Array) -> jax.Array:
      """Normalises queries or keys (see `ModelConfig.qk_norm`), then rotates them."""
      if c.qk_norm:
        axes = (-2, -1) if c.qk_norm == "all" else -1
        norm = RMSNorm(
          epsilon=c.norm_eps, dtype=c.dtype, reduction_axes=axes, feature_axes=axes, name=name
        )
        x = norm(x)
      return x if rope is None else rotate(x, rope)

    if c.output_gate:
      q_and_gate = project("q", c.num_heads, 2 * c.head_dim)
      q_BTHE, gate_BTHE = q_and_gate[..., : c.head_dim], q_and_gate[..., c.head_dim :]
    else:
      q_BTHE, gate_BTHE = project("q", c.num_heads), None
    q_BTHE = rotated_norm("q_norm", q_BTHE)
    k_BTKE = v_BTKE = None
    if seen.keys != "borrowed":
      k_BTKE = project("k", c.num_kv_heads)
      v_BTKE = k_BTKE if c.keys_as_values else project("v", c.num_kv_heads)
      k_BTKE = rotated_norm("k_norm", k_BTKE)
    if c.value_norm and v_BTKE is not None:
      v_BTKE = RMSNorm(epsilon=c.norm_eps, dtype=c.dtype, use_scale=False)(v_BTKE)
    if c.query_multiplier:
      q_BTHE = q_BTHE * c.query_multiplier
    else:
      q_BTHE = q_BTHE / math.sqrt(c.query_scalar or c.head_dim)
    if rope is not None and rope.query_scale_BT is not None:
      q_BTHE = q_BTHE * rope.query_scale_BT[..., None, None].astype(c.dtype)
    sinks_H = None
    if c.attention_sinks:
      sinks_H = self.param("sinks", nn.initializers.zeros, (c.num_heads,))
    out_BTHE, kept = seen.attend(q_BTHE, k_BTKE, v_BTKE, sinks_H)
    if seen.keys == "lent" and kept is None:
      kept = k_BTKE, v_BTKE  # for the layers that borrow them
    if gate_BTHE is not None:
      out_BTHE = out_BTHE * nn.sigmoid(gate_BTHE)
    return Dense(c, (c.embed_dim,), axes=2, use_bias=c.o_bias, name="o")(out_BTHE), kept
