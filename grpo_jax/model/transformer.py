"""The decoder, and the functions through which the rest of the program uses it."""

import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.model import rope as rope_lib
from grpo_jax.model.block import Block
from grpo_jax.model.cache import Cache, without_slots
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.layers import einsum
from grpo_jax.types import Routing

Params = Any  # nested dict of float32 arrays


class Transformer(nn.Module):
  """Embedding, L blocks and the final norm.

  The parameters of the head are made here, too. `unembed` or `score` applies them.
  """

  config: ModelConfig
  remat: bool = False

  @nn.compact
  def __call__(
    self,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    cache: Cache | None,
    counted_BT: jax.Array | None = None,
  ) -> tuple[jax.Array, Cache, Routing | None]:
    """Returns hidden states [B, T, D], the updated cache, and the routing of the sparse layers."""
    c = self.config
    B, T = tokens_BT.shape
    # Angles for the longest text there can be, so that a computation with the cache and one without
    # it agree.
    longest = c.length or (T if cache is None else c.max_positions)
    rope, local_rope = _angles(c, positions_BT, longest)
    cache = without_slots(c, B) if cache is None else cache

    table_VD = nn.Embed(c.vocab_size, c.embed_dim, name="embed").embedding.astype(c.dtype)
    x_BTD = _constrain(_constrain(table_VD, c.table)[tokens_BT], c.rows)
    if c.scale_embeddings:
      x_BTD = x_BTD * jnp.sqrt(c.embed_dim).astype(c.dtype)

    block = nn.remat(Block) if self.remat else Block
    keys, values, routings = [], [], []
    for i in range(c.num_layers):
      layer = block(c, c.window(i), i in c.sparse_layers, name=f"layers_{i}")
      layer_rope = local_rope if c.window(i) else rope
      x_BTD, own, routing = layer(x_BTD, counted_BT, layer_rope, cache.layer(i))
      x_BTD = _constrain(x_BTD, c.rows)
      keys.append(own[0])
      values.append(own[1])
      if routing is not None:
        routings.append(routing)

    if c.labels:
      _ScoreHead(c, name="score")()
    elif not c.tie_embeddings:
      _Head(c, name="head")()
    x_BTD = nn.RMSNorm(epsilon=c.norm_eps, dtype=c.dtype, name="final_norm")(x_BTD)
    new_cache = Cache(tuple(keys), tuple(values), cache.length + T, cache.prefix)
    return x_BTD, new_cache, _stack_layers(routings)


def _angles(
  config: ModelConfig, positions_BT: jax.Array, longest: int
) -> tuple[rope_lib.CosSin, rope_lib.CosSin]:
  """The rotary angles of the layers without a window, and of those with one."""
  c, from_table = config, bool(config.length)
  rope = rope_lib.angles(
    positions_BT, c.head_dim, c.rope_theta, c.rope_scaling, longest, from_table
  )
  if not c.local_rope_theta:
    return rope, rope
  local = rope_lib.angles(positions_BT, c.head_dim, c.local_rope_theta, None, longest, from_table)
  return rope, local


def _constrain(x: jax.Array, sharding: jax.sharding.NamedSharding | None) -> jax.Array:
  """Fixes the sharding of an activation.

  If XLA may choose, it splits activations along D, as fsdp splits the weights, and gathers all
  their rows on every device.
  """
  return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def _stack_layers(routings: list[Routing]) -> Routing | None:
  """Stacks the statistics of the sparse layers on axis 1. None without sparse layers."""
  if not routings:
    return None
  return jax.tree.map(lambda *layers: jnp.stack(layers, axis=1), *routings)


class _Head(nn.Module):
  """The parameters of a language model's head."""

  config: ModelConfig

  @nn.compact
  def __call__(self) -> None:
    D, V = self.config.embed_dim, self.config.vocab_size
    self.param("kernel", nn.initializers.lecun_normal(), (D, V))


class _ScoreHead(nn.Module):
  """The parameters of a reward model's head."""

  config: ModelConfig

  @nn.compact
  def __call__(self) -> None:
    D, N = self.config.embed_dim, self.config.labels
    self.param("kernel", nn.initializers.lecun_normal(), (D, N))
    if N > 1:
      self.param("bias", nn.initializers.zeros, (N,))


def init(key: jax.Array, config: ModelConfig) -> Params:
  """Random float32 parameters."""
  token_11 = jnp.zeros((1, 1), jnp.int32)
  # A single row cannot be split over devices.
  config = dataclasses.replace(config, rows=None, table=None, experts=None)
  return Transformer(config).init(key, token_11, token_11, None)["params"]


def features(
  params: Params,
  config: ModelConfig,
  tokens_BT: jax.Array,
  positions_BT: jax.Array,
  cache: Cache | None = None,
  remat: bool = False,
) -> tuple[jax.Array, Cache]:
  """Hidden states of a batch of token rows.

  Each token attends to the tokens before it in its row and to those in the cache. Rows are
  right-padded, so no token has padding before it to attend to.

  Args:
    params: The parameters, with or without adapters.
    config: The model.
    tokens_BT: int32.
    positions_BT: int32, the position of each token in its text.
    cache: Earlier tokens of the rows, or None.
    remat: Recompute activations in the backward pass to save memory.

  Returns:
    Final hidden states [B, T, D], and the cache with the keys and values of these tokens appended.
  """
  model: Any = Transformer(config, remat)
  hidden_BTD, new_cache, _ = model.apply({"params": params}, tokens_BT, positions_BT, cache)
  return hidden_BTD, new_cache


def routed_features(
  params: Params,
  config: ModelConfig,
  tokens_BT: jax.Array,
  positions_BT: jax.Array,
  counted_BT: jax.Array,
  cache: Cache | None = None,
  remat: bool = False,
) -> tuple[jax.Array, Cache, Routing | None]:
  """`features` with statistics of the routers. Takes its six parameters and one more.

  Args:
    params: This and the other parameters are as in `features`.
    config: The model.
    tokens_BT: int32.
    positions_BT: int32.
    counted_BT: The statistics count a token where this is not 0, so that callers can leave out
      padding. It does not change the hidden states.
    cache: Earlier tokens of the rows, or None.
    remat: Recompute activations in the backward pass.

  Returns:
    What `features` returns, and sums over the counted tokens of each row. The sums are None for a
    model without experts.
  """
  model: Any = Transformer(config, remat)
  return model.apply({"params": params}, tokens_BT, positions_BT, cache, counted_BT)


def unembed(params: Params, config: ModelConfig, hidden_BTD: jax.Array) -> jax.Array:
  """Logits [..., V], float32, from hidden states [..., D]."""
  if config.tie_embeddings:
    weights, equation = params["embed"]["embedding"], "...d,vd->...v"
  else:
    weights, equation = params["head"]["kernel"], "...d,dv->...v"
  logits = einsum(equation, hidden_BTD, weights.astype(config.dtype))
  return config.logit_cap * jnp.tanh(logits / config.logit_cap) if config.logit_cap else logits


def score(params: Params, config: ModelConfig, hidden_BTD: jax.Array) -> jax.Array:
  """The score [...], float32, that a reward model gives at each token of hidden states [..., D].

  With one label, the score is its value. With two, it is the probability of the second.
  """
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
  """Logits [B, T, V] (float32) of the token that follows each token, and the updated cache.

  The arguments are those of `features`.
  """
  hidden_BTD, cache = features(params, config, tokens_BT, positions_BT, cache)
  return unembed(params, config, hidden_BTD), cache
