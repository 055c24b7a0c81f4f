"""The decoder as pure functions, through which the rest of the program uses it."""

import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.model import cache as cache_lib
from grpo_jax.model import rope as rope_lib
from grpo_jax.model.attention import Groups, in_groups
from grpo_jax.model.block import Block
from grpo_jax.model.cache import Cache
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.layers import einsum
from grpo_jax.model.scan import Inputs, Outputs, Pass, apply_layers, constrain
from grpo_jax.model.stacks import stacked
from grpo_jax.types import Routing

Params = Any  # nested dict of float32 arrays


def init(key: jax.Array, config: ModelConfig) -> Params:
  """Random float32 parameters."""
  # A single row cannot be split over devices.
  config = dataclasses.replace(config, rows=None, table=None, experts=None)
  return stacked(_SingleLayers(config).init(key)["params"], config)


class _SingleLayers(nn.Module):
  """Makes the parameters of a decoder, with an entry for each layer."""

  config: ModelConfig

  @nn.compact
  def __call__(self) -> None:
    c = self.config
    nn.Embed(c.vocab_size, c.embed_dim, name="embed")(jnp.zeros((1, 1), jnp.int32))
    x_11D = jnp.zeros((1, 1, c.embed_dim), c.dtype)
    rope = rope_lib.angles(jnp.zeros((1, 1), jnp.int32), c.head_dim, c.rope_theta, None, 1, False)
    for layer in range(c.num_layers):
      Block(c, layer in c.sparse_layers, _no_attention, name=f"layers_{layer}")(
        x_11D, None, rope, None
      )
    if c.labels:
      _ScoreHead(c, name="score")()
    elif not c.tie_embeddings:
      _Head(c, name="head")()
    nn.RMSNorm(name="final_norm")(x_11D)


def _no_attention(
  q_BTHE: jax.Array, k_BTKE: jax.Array, v_BTKE: jax.Array, memory: None
) -> tuple[jax.Array, None]:
  del k_BTKE, v_BTKE, memory
  return q_BTHE, None


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


def features(
  params: Params,
  config: ModelConfig,
  tokens_BT: jax.Array,
  positions_BT: jax.Array,
  cache: Cache | None = None,
) -> tuple[jax.Array, Cache]:
  """Hidden states of a batch of token rows, without a gradient.

  Each token attends to the tokens before it in its row and to those in the cache. Rows are
  right-padded, so no token has padding before it to attend to.

  Args:
    params: The parameters, with or without adapters.
    config: The model.
    tokens_BT: int32.
    positions_BT: int32, the position of each token in its text.
    cache: Earlier tokens of the rows, with free slots for these, or None.

  Returns:
    Final hidden states [B, T, D], and the cache with the keys and values of these tokens appended.
  """
  c, T = config, tokens_BT.shape[1]
  if cache is not None:
    # Angles for the longest text there can be, so that a computation with the cache and one without
    # it agree.
    angles = _angles(c, positions_BT, c.length or c.max_positions)
    out = _apply(params, c, tokens_BT, Inputs(*angles, None), cache_lib.to_pass(c, cache))
    return _final_norm(params, c, out.x_BTD), cache_lib.updated(cache, out.own, T)
  groups = Groups(jnp.full(len(tokens_BT), T, jnp.int32), prompt_slots=T)
  run = Pass(in_groups(c, groups, keep=True))
  out = _apply(params, c, tokens_BT, Inputs(*_angles(c, positions_BT, c.length or T), None), run)
  return _final_norm(params, c, out.x_BTD), cache_lib.of_rows(out.kept, T)


def group_features(
  params: Params,
  config: ModelConfig,
  tokens_PN: jax.Array,
  groups: Groups,
  counted_PN: jax.Array | None = None,
  remat: str = "",
) -> tuple[jax.Array, Routing | None]:
  """Hidden states of prompts and of all their completions, in one pass and with a gradient.

  Args:
    params: The parameters, with or without adapters.
    config: The model.
    tokens_PN: int32, a prompt and its completions one after another, as `groups` describes.
    groups: Where prompts and completions lie.
    counted_PN: The routers' statistics count a token where this is not 0. It does not change the
      hidden states. None skips the statistics.
    remat: Which activations are saved for the backward pass (see `apply_layers`).

  Returns:
    Final hidden states [P, N, D], and sums over the counted tokens of each group, or None for a
    model without experts.
  """
  c = config
  longest = c.length or groups.prompt_slots + groups.slots
  inputs = Inputs(*_angles(c, groups.positions, longest), counted_PN)
  out = _apply(params, c, tokens_PN, inputs, Pass(in_groups(c, groups)), remat)
  return _final_norm(params, c, out.x_BTD), out.routing


def _apply(
  params: Params,
  config: ModelConfig,
  tokens_BT: jax.Array,
  inputs: Inputs,
  run: Pass,
  remat: str = "",
) -> Outputs:
  """Embedding and layers."""
  c = config
  table_VD = params["embed"]["embedding"].astype(c.dtype)
  x_BTD = constrain(constrain(table_VD, c.table)[tokens_BT], c.rows)
  if c.scale_embeddings:
    x_BTD = x_BTD * jnp.sqrt(c.embed_dim).astype(c.dtype)
  return apply_layers(params, c, x_BTD, inputs, run, remat)


def _final_norm(params: Params, config: ModelConfig, x_BTD: jax.Array) -> jax.Array:
  norm: Any = nn.RMSNorm(epsilon=config.norm_eps, dtype=config.dtype)
  return norm.apply({"params": params["final_norm"]}, x_BTD)


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
