"""How the layers of a model exchange tokens along `context`, and how many bytes, for a plan."""

from collections import Counter
import math

import jax.numpy as jnp

from grpo_jax.model.attention.choose import KERNELS
from grpo_jax.model.attention.context import LONG, SplitAttention, cheapest
from grpo_jax.model.attention.groups import attention_of
from grpo_jax.model.config import LayerKind, ModelConfig


def exchanges_in_words(config: ModelConfig) -> str:
  """Lines that say over how many devices a text is split, and what each kind of layer sends."""
  layers = Counter(_sent_by(config, config.kind(layer)) for layer in range(config.num_layers))
  lines = [f"  {number} of the layers: {words}" for words, number in layers.items()]
  return "\n".join([f"a text lies on {config.context} devices. In a forward pass,", *lines])


def _sent_by(config: ModelConfig, kind: LayerKind) -> str:
  """Describes what a layer of this kind sends in a forward pass."""
  if kind.mixer == "delta":
    sent = recurrence_bytes(config)
    return f"the delta rule by all-to-all sends {sent / 1e3:,.1f} KB for each token of a device"
  of = split_attention(config, kind)
  exchange = cheapest(of)
  window = f" of a window of {kind.window}" if kind.window else ""
  text = f", in texts of {LONG:,}" if exchange.needs_window else ""
  return (
    f"attention{window} by {exchange.name} sends {exchange.bytes_sent(of) / 1e3:,.1f} KB for each"
    f" token of a device{text}: together, they compute {exchange.heads(of)} heads in place of"
    f" {of.heads}"
  )


def split_attention(config: ModelConfig, kind: LayerKind) -> SplitAttention:
  """The sizes of the attention of a kind of layer, with the heads of one device."""
  heads, keys, size = config.num_heads, kind.num_kv_heads, kind.head_dim
  if kind.mixer == "latent":  # each head has a key and a value, padded to one size
    keys, size = heads, max(size, config.latent.value_dim)
  if config.axis_of(heads):
    tensor = config.rows.mesh.shape["tensor"]
    heads, keys = heads // tensor, math.lcm(keys, tensor) // tensor
  item = jnp.dtype(config.dtype).itemsize
  pictures = config.sees_both_ways(kind.window)
  has_kernel = attention_of(config)[0] in KERNELS
  return SplitAttention(heads, keys, size, item, config.context, kind.window, has_kernel, pictures)


def recurrence_bytes(config: ModelConfig) -> float:
  """The bytes that a device sends for each of its tokens, in the forward pass of `GatedDelta`."""
  of, devices = config.delta, config.context
  in_float32 = 2 * of.value_heads + of.value_heads * of.value_dim  # decay, strength and outputs
  of_token = jnp.dtype(config.dtype).itemsize * of.channels + 4 * in_float32
  tensor = config.rows.mesh.shape["tensor"]
  divisible = -(-of.key_heads // (tensor * devices)) * tensor * devices
  return of_token * divisible / of.key_heads / tensor * (devices - 1) / devices
