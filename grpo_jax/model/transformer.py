"""The decoder, and the functions through which the rest of the program sees it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from grpo_jax.model import rope as rope_lib
from grpo_jax.model.cache import Cache
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.experts import Experts
from grpo_jax.model.layers import MLP, Attention, einsum
from grpo_jax.types import Routing

Params = Any  # nested dict of float32 arrays


class Block(nn.Module):
  """Pre-norm attention and MLP or experts, each added to the stream. Returns it, the layer's keys and values, and routing."""

  config: ModelConfig
  window: int
  sparse: bool

  @nn.compact
  def __call__(self, x_BTD, counted_BT, *context):
    norm = lambda name, x: nn.RMSNorm(
      epsilon=self.config.norm_eps, dtype=self.config.dtype, name=name
    )(x)
    post = norm if self.config.post_norms else lambda name, x: x
    attended, own = Attention(self.config, self.window, name="attention")(
      norm("attention_norm", x_BTD), *context
    )
    x_BTD = x_BTD + post("attention_post_norm", attended)
    normed_BTD, routing = norm("mlp_norm", x_BTD), None
    if self.sparse:
      fed_BTD, routing = Experts(self.config, name="experts")(normed_BTD, counted_BT)
    else:
      fed_BTD = MLP(self.config, name="mlp")(normed_BTD)
    return x_BTD + post("mlp_post_norm", fed_BTD), own, routing


class Transformer(nn.Module):
  """Embedding, L blocks, final norm; the head is a parameter here and applied by `unembed`."""

  config: ModelConfig
  remat: bool = False

  @nn.compact
  def __call__(self, tokens_BT, positions_BT, cache: Cache | None, counted_BT=None):
    c, (B, T) = self.config, tokens_BT.shape
    length, prefix = jnp.int32(0), None
    empty = jnp.zeros((B, c.num_kv_heads, 1, 0, c.head_dim), c.dtype)
    own = [(empty, empty)] * c.num_layers
    if cache is not None:
      own, length, prefix = list(zip(cache.keys, cache.values)), cache.length, cache.prefix
    # Angles for the longest text there can be: what is computed with the cache and without must agree.
    longest = c.length or (T if cache is None else c.max_positions)
    angles = lambda theta, scaling: rope_lib.angles(
      positions_BT, c.head_dim, theta, scaling, longest, bool(c.length)
    )
    rope = angles(c.rope_theta, c.rope_scaling)
    local_rope = angles(c.local_rope_theta, None) if c.local_rope_theta else rope
    # Left free, XLA splits activations along D, as the weights are over fsdp, and gathers all their rows everywhere.
    keep = lambda x, where: x if where is None else jax.lax.with_sharding_constraint(x, where)
    table_VD = nn.Embed(c.vocab_size, c.embed_dim, name="embed").embedding.astype(c.dtype)
    x_BTD = keep(keep(table_VD, c.table)[tokens_BT], c.rows)
    if c.scale_embeddings:
      x_BTD = x_BTD * jnp.sqrt(c.embed_dim).astype(c.dtype)
    new, routings, block = [], [], nn.remat(Block) if self.remat else Block
    for i in range(c.num_layers):
      shared = None if prefix is None else (prefix.keys[i], prefix.values[i])
      x_BTD, layer, routing = block(c, c.window(i), i in c.sparse_layers, name=f"layers_{i}")(
        x_BTD,
        counted_BT,
        local_rope if c.window(i) else rope,
        own[i],
        length,
        shared,
        prefix and prefix.lengths_P,
      )
      x_BTD = keep(x_BTD, c.rows)
      new.append(layer)
      routings += [] if routing is None else [routing]
    if c.labels:
      _Scores(c, name="score")()
    elif not c.tie_embeddings:
      _Head(c, name="head")()
    keys, values = zip(*new)
    x_BTD = nn.RMSNorm(epsilon=c.norm_eps, dtype=c.dtype, name="final_norm")(x_BTD)
    stacked = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *routings) if routings else None
    return x_BTD, Cache(keys, values, length + T, prefix), stacked


class _Head(nn.Module):
  config: ModelConfig

  @nn.compact
  def __call__(self):
    shape = self.config.embed_dim, self.config.vocab_size
    return self.param("kernel", nn.initializers.lecun_normal(), shape)


class _Scores(nn.Module):
  config: ModelConfig

  @nn.compact
  def __call__(self):
    D, N = self.config.embed_dim, self.config.labels
    self.param("kernel", nn.initializers.lecun_normal(), (D, N))
    if N > 1:
      self.param("bias", nn.initializers.zeros, (N,))


def init(key: jax.Array, config: ModelConfig) -> Params:
  """Random float32 parameters."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  config = dataclasses.replace(
    config, rows=None, table=None, experts=None
  )  # one row cannot be split
  return Transformer(config).init(key, tokens, tokens, None)["params"]


def features(
  params: Params,
  config: ModelConfig,
  tokens_BT: jax.Array,
  positions_BT: jax.Array,
  cache: Cache | None = None,
  remat: bool = False,
) -> tuple[jax.Array, Cache]:
  """Final hidden states [B, T, D] and the cache with these tokens' keys and values appended.

  Without a cache, a token attends to those before it in its row. With one, also to the cache's. Rows are right-padded:
  what is computed at padding is never seen by a token before it.
  """
  return Transformer(config, remat).apply({"params": params}, tokens_BT, positions_BT, cache)[:2]


def routed_features(
  params: Params,
  config: ModelConfig,
  tokens_BT: jax.Array,
  positions_BT: jax.Array,
  counted_BT: jax.Array,
  cache: Cache | None = None,
  remat: bool = False,
) -> tuple[jax.Array, Cache, Routing | None]:
  """`features`, and what the routers did with the tokens where counted_BT is not 0; None for a model without experts."""
  return Transformer(config, remat).apply(
    {"params": params}, tokens_BT, positions_BT, cache, counted_BT
  )


def unembed(params: Params, config: ModelConfig, hidden_BTD: jax.Array) -> jax.Array:
  """Logits [..., V], float32."""
  if config.tie_embeddings:
    weights, equation = params["embed"]["embedding"], "...d,vd->...v"
  else:
    weights, equation = params["head"]["kernel"], "...d,dv->...v"
  logits = einsum(equation, hidden_BTD, weights.astype(config.dtype))
  return config.logit_cap * jnp.tanh(logits / config.logit_cap) if config.logit_cap else logits


def score(params: Params, config: ModelConfig, hidden_BTD: jax.Array) -> jax.Array:
  """Of a reward model, at each token [...], float32: its one label, or of two the probability of the second."""
  head = params["score"]
  labels = einsum("...d,dn->...n", hidden_BTD, head["kernel"].astype(config.dtype))
  return labels[..., 0] if config.labels == 1 else jax.nn.softmax(labels + head["bias"])[..., 1]


def forward(
  params: Params,
  config: ModelConfig,
  tokens_BT: jax.Array,
  positions_BT: jax.Array,
  cache: Cache | None = None,
) -> tuple[jax.Array, Cache]:
  """Logits [B, T, V] (float32, of the token after each) and the cache; see `features`."""
  hidden_BTD, cache = features(params, config, tokens_BT, positions_BT, cache)
  return unembed(params, config, hidden_BTD), cache
