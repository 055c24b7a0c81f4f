"""Embeddings of each token for each layer, besides those of the first layer's input (Gemma 4).

They are the sum of a row of a separate table and a projection of the token's embedding. Each layer
gates its N numbers by the residual stream, and adds a projection of them to the residual stream.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.layers import ACTIVATIONS, Dense, RMSNorm
from grpo_jax.model.on_devices import constrain

# Path -> the axis of the mesh that splits each dimension (see parallel/sharding.py).
RULES = (
  (r"per_layer/embed/embedding", ("tensor", "fsdp")),
  (r"per_layer/projection/kernel", ("fsdp", "tensor")),
  (r"per_layer/norm/scale", (None,)),
)
LAYER_RULES = (
  (r"per_layer/in_proj/kernel", ("fsdp", None)),
  (r"per_layer/out_proj/kernel", (None, "fsdp")),
  (r"per_layer/norm/scale", (None,)),
)


class PerLayerInputs(nn.Module):
  """(norm(W x / sqrt(D)) + sqrt(N) table[token]) / sqrt(2), for each layer."""

  config: ModelConfig

  @nn.compact
  def __call__(self, tokens_BT: jax.Array, x_BTD: jax.Array) -> jax.Array:
    """Returns the embeddings of all layers, [L, B, T, N].

    Args:
      tokens_BT: int32.
      x_BTD: The tokens' embeddings, as the first layer reads them.
    """
    c = self.config
    L, N = c.num_layers, c.per_layer_dim
    table = nn.Embed(c.vocab_size, L * N, name="embed").embedding.astype(c.dtype)
    looked_up = constrain(table, c.table)[tokens_BT] * jnp.sqrt(N).astype(c.dtype)
    projected = Dense(c, (L * N,), name="projection")(x_BTD) * c.embed_dim**-0.5
    norm = RMSNorm(epsilon=c.norm_eps, dtype=c.dtype, name="norm")
    shape = *tokens_BT.shape, L, N
    inputs_BTLN = (norm(projected.reshape(shape)) + looked_up.reshape(shape)) * 2**-0.5
    return jnp.moveaxis(inputs_BTLN, 2, 0)


class PerLayer(nn.Module):
  """The term that a layer adds to the residual stream: norm(W (activation(V x) * inputs))."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x_BTD: jax.Array, inputs_BTN: jax.Array) -> jax.Array:
    """Returns [B, T, D].

    Args:
      x_BTD: The residual stream.
      inputs_BTN: The embeddings of `PerLayerInputs` for this layer.
    """
    c = self.config
    gate_BTN = Dense(c, (c.per_layer_dim,), name="in_proj")(x_BTD)
    gated_BTN = ACTIVATIONS[c.activation](gate_BTN, inputs_BTN)
    out_BTD = Dense(c, (c.embed_dim,), name="out_proj")(gated_BTN)
    return RMSNorm(epsilon=c.norm_eps, dtype=c.dtype, name="norm")(out_BTD)
