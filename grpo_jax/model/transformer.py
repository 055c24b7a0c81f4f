"""The decoder as pure functions, through which the rest of the program uses it."""

import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.model import cached_pass, vision
from grpo_jax.model import rope as rope_lib
from grpo_jax.model.attention import Groups, in_groups, recur_in_groups
from grpo_jax.model.block import Block, LayerMemory, Shared
from grpo_jax.model.blocks import Outputs, apply_layers
from grpo_jax.model.cache import Cache
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.layer_embeddings import PerLayerInputs
from grpo_jax.model.layers import Head, RMSNorm, head_product
from grpo_jax.model.mixers.seen import Seen
from grpo_jax.model.mlps.router import Routes
from grpo_jax.model.on_devices import constrain
from grpo_jax.model.stacks import stacked
from grpo_jax.types import Routing, Visual

Params = Any  # nested dict of float32 arrays


def init(key: jax.Array, config: ModelConfig) -> Params:
  """Random float32 parameters."""
  # A single row cannot be split over devices.
  config = dataclasses.replace(config, rows=None, table=None, experts=None, attention="dense")
  return stacked(_Parts(config).init(key)["params"], config)


class _Parts(nn.Module):
  """The modules of a decoder, named as their parameters. Each layer has its own name."""

  config: ModelConfig

  def setup(self) -> None:
    c = self.config
    self.embed = nn.Embed(c.vocab_size, c.embed_dim)
    if c.per_layer_dim:
      self.per_layer = PerLayerInputs(c)
    self.layers = [Block(c, c.kind(layer)) for layer in range(c.num_layers)]
    if c.vision:
      self.vision = vision.TowerParts(c)
    self.final_norm = RMSNorm(epsilon=c.norm_eps, dtype=c.dtype)
    if c.labels:
      self.score = Head(c, c.labels, use_bias=c.labels > 1)
    elif not c.tie_embeddings:
      self.head = Head(c, c.vocab_size)

  def __call__(self) -> None:
    """Creates the parameters by calling each module once on a token of zeros.

    `_hidden` combines the modules to a pass.
    """
    c = self.config
    x_11D, token_11 = jnp.zeros((1, 1, c.embed_dim), c.dtype), jnp.zeros((1, 1), jnp.int32)
    self.embed(token_11)
    groups = Groups(jnp.ones(1, jnp.int32), prompt_slots=1)
    attend, recur = in_groups(c, groups), recur_in_groups(c, groups)(None)
    per_layer_L11N = self.per_layer(token_11, x_11D) if c.per_layer_dim else None
    # Parameters depend on shapes alone, so any angles and any window will do.
    for number, layer in enumerate(self.layers):
      kind = c.kind(number)
      rotated = c.rotary_dim or kind.head_dim
      rope = rope_lib.angles(
        token_11, rotated, theta=c.rope_theta, scaling=None, length=1, table=False
      )
      # A borrowing layer reads the keys and values of another layer: here, zeros.
      borrowed_11KE = jnp.zeros((1, 1, kind.num_kv_heads, kind.head_dim), c.dtype)
      memory = LayerMemory(stack=(borrowed_11KE, borrowed_11KE))
      no_window = 0
      seen = Seen(rope, attend(no_window, memory), recur, keys=kind.keys)
      per_layer_11N = None if per_layer_L11N is None else per_layer_L11N[number]
      layer(x_11D, Routes(), seen, per_layer_11N)
    self.final_norm(x_11D)
    if c.vision:
      self.vision()
    if c.labels:
      self.score(x_11D)
    elif not c.tie_embeddings:
      self.head(x_11D)


def _parts(params: Params, config: ModelConfig) -> Any:
  """The modules of a decoder with their parameters, except for the layers, which are stacked."""
  return _Parts(config).bind({"params": params})


def features(
  params: Params,
  config: ModelConfig,
  tokens_BT: jax.Array,
  positions_BT: jax.Array,
  cache: Cache | None = None,
  lengths_B: jax.Array | None = None,
  *,
  visual: Visual | None = None,
) -> tuple[jax.Array, Cache]:
  """Hidden states of a batch of token rows, for inference: no caller differentiates this.

  Each token attends to the tokens before it in its row and to those in the cache. Rows are
  right-padded, so no token has padding before it to attend to.

  Args:
    params: The parameters, with or without adapters.
    config: The model.
    tokens_BT: int32.
    positions_BT: int32, the position of each token in its text.
    cache: Earlier tokens of the rows, with free slots for these, or None.
    lengths_B: int32, how many of the T tokens each row has. The rest is padding, which recurrent
      layers must skip. None means no padding.
    visual: Image features that replace the embeddings of image tokens among each row's first
      tokens, or None. If it has positions, they replace those of these tokens.

  Returns:
    Final hidden states [B, T, D], and the cache with these tokens in it.
  """
  arguments = tokens_BT, positions_BT, cache, lengths_B
  hidden_BTD, cache, _ = routed_features(params, config, *arguments, visual=visual)
  return hidden_BTD, cache


def routed_features(
  params: Params,
  config: ModelConfig,
  tokens_BT: jax.Array,
  positions_BT: jax.Array,
  cache: Cache | None = None,
  lengths_B: jax.Array | None = None,
  *,
  visual: Visual | None = None,
) -> tuple[jax.Array, Cache, jax.Array | None]:
  """Computes the results of `features`, and the experts that each token went through.

  The arguments are those of `features`: tokens, positions, earlier tokens, lengths and images.

  Returns:
    Final hidden states [B, T, D], the cache with these tokens in it, and the experts of each token,
    integers [B, T, Y] with `config.keeps_experts`, otherwise None.
  """
  c, (B, T) = config, tokens_BT.shape
  lengths_B = jnp.full(B, T, jnp.int32) if lengths_B is None else lengths_B
  if cache is not None:
    _refuse_pictures(c, visual)
    # Some scalings depend on the longest text. `length` makes all passes agree. Here T does not say
    # how long texts are, because the cache has earlier tokens.
    angles = _angles(c, vision.positions(visual, positions_BT), c.length or c.max_positions)
    shared = cached_pass.shared_inputs(c, cache, lengths_B, *angles)
    out = _hidden(params, c, tokens_BT, shared, visual=visual)
    return out.x_BTD, cached_pass.updated(cache, out.cache, T), _experts(c, out)
  groups = Groups(lengths_B, prompt_slots=T)
  attend = in_groups(c, groups, vision.pictures(c, visual, T), keep=True)
  positions = vision.positions(visual, positions_BT)
  if c.context > 1:  # each device computes the angles of its own tokens
    positions = constrain(positions, c.rows)
  angles = _angles(c, positions, c.length or T)
  shared = Shared(*angles, attend, recur_in_groups(c, groups, keep=True))
  out = _hidden(params, c, tokens_BT, shared, visual=visual)
  return out.x_BTD, cached_pass.of_rows(out.kept, T), _experts(c, out)


def _experts(config: ModelConfig, out: Outputs) -> jax.Array | None:
  """The experts of a pass [B, T, Y], or None where they were not kept."""
  if out.routed is None or out.routed.experts_BTU is None:
    return None
  experts_BTLU = out.routed.experts_BTU.swapaxes(1, 2).astype(config.experts_dtype)
  # With U as the last axis, a TPU would pad it to 128.
  return experts_BTLU.reshape(*experts_BTLU.shape[:2], -1)


def group_features(
  params: Params,
  config: ModelConfig,
  tokens_PN: jax.Array,
  groups: Groups,
  routes: Routes | None = None,
  remat: str = "",
  *,
  visual: Visual | None = None,
) -> tuple[jax.Array, Routing | None]:
  """Hidden states of prompts and of all their completions, in one pass and with a gradient.

  Args:
    params: The parameters, with or without adapters.
    config: The model.
    tokens_PN: int32, a prompt and its completions one after another, as `groups` describes.
    groups: The layout of prompts and completions.
    routes: The tokens that routers count, and the experts that replace their choices. None, or no
      `counted_BT`, skips the statistics.
    remat: Which activations are saved for the backward pass (see `apply_layers`).
    visual: Image features that replace the embeddings of image tokens in the prompts, or None.

  Returns:
    Final hidden states [P, N, D], and the routers' sums over the counted tokens of each group, or
    None without experts or statistics.
  """
  c, routes = config, routes or Routes()
  longest = c.length or groups.prompt_slots + groups.slots
  # A picture may take fewer positions than tokens. Then completions do not begin at `lengths_P`.
  next_P = groups.lengths_P if visual is None else visual.next_P
  positions = vision.positions(visual, groups.positions_from(next_P))
  if c.context > 1:  # each device computes the angles of its own tokens
    positions = constrain(positions, c.rows)
  angles = _angles(c, positions, longest)
  attend = in_groups(c, groups, vision.pictures(c, visual, groups.prompt_slots))
  shared = Shared(*angles, attend, recur_in_groups(c, groups), routes)
  out = _hidden(params, c, tokens_PN, shared, remat, visual=visual)
  return out.x_BTD, None if out.routed is None else out.routed.sums


def _hidden(
  params: Params,
  config: ModelConfig,
  tokens_BT: jax.Array,
  shared: Shared,
  remat: str = "",
  *,
  visual: Visual | None = None,
) -> Outputs:
  """Runs embedding, layers and final norm. `x_BTD` of the result are the final hidden states."""
  c, parts = config, _parts(params, config)
  table_VD = parts.embed.embedding.astype(c.dtype)
  x_BTD = constrain(constrain(table_VD, c.table)[tokens_BT], c.rows)
  if c.scale_embeddings:
    x_BTD = x_BTD * jnp.sqrt(c.embed_dim).astype(c.dtype)
  if c.embedding_multiplier != 1:
    x_BTD = x_BTD * c.embedding_multiplier
  if visual is not None:
    # Only text embeddings are scaled, so visual tokens are inserted after the scaling.
    x_BTD = constrain(vision.put(x_BTD, visual), c.rows)
    shared = shared._replace(levels_KBSD=vision.further_levels(visual, c.dtype))
  if c.per_layer_dim:
    if visual is not None:  # visual tokens have the layer embeddings of padding
      tokens_BT = vision.as_padding(tokens_BT, visual, c.vision.pad_id)
    shared = shared._replace(embeddings_LBTN=parts.per_layer(tokens_BT, x_BTD))
  out = apply_layers(params, c, x_BTD, shared, remat)
  return out._replace(x_BTD=parts.final_norm(out.x_BTD))


def _refuse_pictures(config: ModelConfig, visual: Visual | None) -> None:
  """Raises ValueError for pictures that need attention in both directions: a cache is causal."""
  if visual is not None and config.vision.both_ways:
    raise ValueError(
      "images whose tokens attend in both directions cannot be added to a cache:"
      " put them into its first pass"
    )


def _angles(
  config: ModelConfig, positions_BT: jax.Array, longest: int
) -> tuple[rope_lib.Rotation, rope_lib.Rotation]:
  """The rotary angles of the layers without a window, and of those with one.

  Both are the same unless the layers with a window have a separate base
  (`ModelConfig.local_rope_theta`).

  Args:
    config: The shape of the model.
    positions_BT: int32, the positions of the tokens, or [B, T, 3] with positions on three axes.
    longest: The largest number of positions of a row. Some scalings depend on it.
  """
  if positions_BT.ndim == 3:
    return _angles_of_axes(config, positions_BT, longest)
  c = config
  from_table = bool(c.length)  # only a bounded run can have a table of all positions
  local_dim = c.rotary_dim or c.head_dim
  global_dim = c.global_head_dim or local_dim
  rope = rope_lib.angles(
    positions_BT, global_dim, c.rope_theta, c.rope_scaling, longest, from_table
  )
  if c.query_growth:  # scales up queries beyond the length of pretraining
    original = c.rope_scaling.original_positions
    scale_BT = rope_lib.query_scale(positions_BT, c.query_growth, original)
    rope = rope._replace(query_scale_BT=scale_BT)
  if not c.local_rope_theta:
    return rope, rope
  local = rope_lib.angles(
    positions_BT, local_dim, c.local_rope_theta, c.local_rope_scaling, longest, from_table
  )
  return rope, local


def _angles_of_axes(
  config: ModelConfig, positions_BT3: jax.Array, longest: int
) -> tuple[rope_lib.Rotation, rope_lib.Rotation]:
  """`_angles` for tokens with positions on three axes. Each pair is rotated by one of the axes."""
  B, T, axes = positions_BT3.shape
  v, (rope, _) = config.vision, _angles(config, positions_BT3.reshape(B, T * axes), longest)
  rope = jax.tree.map(lambda x: x.reshape(B, T, axes, -1), rope)
  pairs = rope_lib.axes_of_pairs(v.rope_sections, v.rope_interleaved, rope.cos.shape[-1])
  by_axis = rope_lib.by_axis(rope, pairs)
  return by_axis, by_axis


def unembed(params: Params, config: ModelConfig, hidden_BTD: jax.Array) -> jax.Array:
  """Logits [..., V], float32, from hidden states [..., D]."""
  parts = _parts(params, config)
  if config.tie_embeddings:
    table_VD = parts.embed.embedding.astype(config.dtype)
    logits = head_product(config, "nd,vd->nv", hidden_BTD, table_VD)
  else:
    logits = parts.head(hidden_BTD)
  if config.logit_divisor != 1:
    logits = logits / config.logit_divisor
  return config.logit_cap * jnp.tanh(logits / config.logit_cap) if config.logit_cap else logits


def score(params: Params, config: ModelConfig, hidden_BTD: jax.Array) -> jax.Array:
  """A reward model's score at each token, float32 [...], from hidden states [..., D].

  With one label, the score is its value. With two, it is the probability of the second.
  """
  labels = _parts(params, config).score(hidden_BTD)
  return labels[..., 0] if config.labels == 1 else jax.nn.softmax(labels)[..., 1]


def forward(
  params: Params,
  config: ModelConfig,
  tokens_BT: jax.Array,
  positions_BT: jax.Array,
  cache: Cache | None = None,
  lengths_B: jax.Array | None = None,
  *,
  visual: Visual | None = None,
) -> tuple[jax.Array, Cache]:
  """Logits [B, T, V] (float32) of the token that follows each token, and the updated cache.

  Args:
    params: The parameters, with or without adapters.
    config: The model.
    tokens_BT: int32.
    positions_BT: int32, the position of each token in its text.
    cache: Earlier tokens of the rows, with free slots for these, or None.
    lengths_B: int32, how many of the T tokens each row has. None means all.
    visual: As in `features`.
  """
  arguments = tokens_BT, positions_BT, cache, lengths_B
  hidden_BTD, cache = features(params, config, *arguments, visual=visual)
  return unembed(params, config, hidden_BTD), cache
