"""A layer of the decoder, and the loops that apply all layers.

One loop for each segment, so that depth costs no compilation.
"""

from collections.abc import Callable
import itertools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp

from grpo_jax.model.config import LayerKind, ModelConfig
from grpo_jax.model.layer_embeddings import PerLayer
from grpo_jax.model.layers import RMSNorm
from grpo_jax.model.mixers import MIXERS
from grpo_jax.model.mixers.seen import Attend, Recur, Seen
from grpo_jax.model.mlps import MLPS
from grpo_jax.model.mlps.experts import in_stacks
from grpo_jax.model.mlps.router import Routed, Routes
from grpo_jax.model.rope import Rotation
from grpo_jax.model.stacks import Segment, segments, sparse_stacks

# By platform. TPUs keep the loop.
_MOST_UNROLLED_LAYERS = {"cpu": 4, "gpu": 32}


class Block(nn.Module):
  """A mixer such as attention, then an MLP or experts, each added to the residual stream.

  With `config.pre_norms` their inputs are normalised, and with `config.post_norms` their outputs.
  With `config.per_layer_dim`, embeddings for this layer are added, too.
  """

  config: ModelConfig
  kind: LayerKind

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    routes: Routes,
    seen: Seen,
    per_layer_BTN: jax.Array | None = None,
  ) -> tuple[jax.Array, Any, Routed | None]:
    """Applies the layer.

    Args:
      x_BTD: The residual stream.
      routes: The tokens that this layer's router counts, and the experts given to it (see
        `Routes`).
      seen: The rotary angles, and how tokens attend to earlier ones or recur from them.
      per_layer_BTN: The tokens' embeddings for this layer, or None (see `layer_embeddings.py`).

    Returns:
      The residual stream, what the mixer keeps, and what the router did or None.
    """
    c = self.config.of_layer(self.kind)

    def norm(name: str, x: jax.Array, is_on: bool) -> jax.Array:
      return RMSNorm(epsilon=c.norm_eps, dtype=c.dtype, name=name)(x) if is_on else x

    def added(x_BTD: jax.Array, norm_name: str, out_BTD: jax.Array) -> jax.Array:
      out_BTD = norm(norm_name, out_BTD, c.post_norms)
      if c.residual_multiplier != 1:
        out_BTD = out_BTD * c.residual_multiplier
      return x_BTD + out_BTD

    mixer = MIXERS[self.kind.mixer](c, name=self.kind.mixer)
    mixed_BTD, kept = mixer(norm("attention_norm", x_BTD, c.pre_norms), seen)
    x_BTD = added(x_BTD, "attention_post_norm", mixed_BTD)
    normed_BTD = norm("mlp_norm", x_BTD, c.pre_norms)
    mlp = MLPS[self.kind.mlp](c, name=self.kind.mlp)
    out_BTD, routed = mlp(normed_BTD, routes, x_BTD)
    x_BTD = added(x_BTD, "mlp_post_norm", out_BTD)
    if c.per_layer_dim:
      x_BTD = x_BTD + PerLayer(c, name="per_layer")(x_BTD, per_layer_BTN)
    if c.layer_scale:
      scale: jax.Array = self.param("layer_scale", nn.initializers.ones, ())
      # The factors of a checkpoint stay as they are. No optimizer moves them.
      x_BTD = x_BTD * jax.lax.stop_gradient(scale).astype(c.dtype)
    return x_BTD, kept, routed


class LayerMemory(NamedTuple):
  """The keys and values, or states, of earlier tokens that the mixer of one layer reads and writes.

  Attributes:
    own: The memory of the layer's whole stack, as in `Cache`: keys and values, or states. For a
      layer that borrows, it is the stack of the one that lends or, without a cache, the keys and
      values of the tokens.
    place: int32 scalar, the number of the layer in its stack.
    prefix: The layer's memory of the prompts, such as keys and values [P, K, S, E], or None.
  """

  own: Any
  place: jax.Array | None = None
  prefix: Any = None


class Pass(NamedTuple):
  """How the tokens of a pass learn of those before them.

  Attributes:
    attend: The window of a layer and its memory, which is None without `own` unless it borrows ->
      its attention.
    recur: Its memory -> its recurrence.
    own: For each stack, what the layers read and write, as in `Cache`.
    prefix: For each stack, what they only read: [L, ...].
  """

  attend: Callable[[int, LayerMemory | None], Attend]
  recur: Callable[[LayerMemory | None], Recur]
  own: dict[str, Any] = {}
  prefix: dict[str, Any] = {}


class Inputs(NamedTuple):
  """The inputs that all layers share, besides the residual stream.

  Attributes:
    rope: The rotary angles of the layers without a window.
    local_rope: The rotary angles of the layers with a window.
    per_layer_LBTN: The tokens' embeddings for each layer, or None.
    routes: The tokens that routers count, and the experts given to them (see `Routes`).
    levels_KBSD: The numbers added to the residual stream of the first S tokens after each of the
      first K layers, or None.
  """

  rope: Rotation
  local_rope: Rotation
  per_layer_LBTN: jax.Array | None = None
  routes: Routes = Routes()
  levels_KBSD: jax.Array | None = None


class Outputs(NamedTuple):
  """The results of a pass through all layers.

  Attributes:
    x_BTD: The residual stream.
    own: `Pass.own` after the pass.
    kept: For each stack, what its mixer keeps where there is no `own`.
    routed: The experts and statistics of the sparse layers' routers, [B, L, ...], or None.
  """

  x_BTD: jax.Array
  own: dict[str, Any]
  kept: dict[str, Any]
  routed: Routed | None


def apply_layers(
  params: Any, config: ModelConfig, x_BTD: jax.Array, inputs: Inputs, run: Pass, remat: str = ""
) -> Outputs:
  """Applies all layers.

  Args:
    params: The parameters, stacked as stacks.py describes.
    config: The model.
    x_BTD: The residual stream before the first layer.
    inputs: The inputs that all layers share.
    run: How tokens attend to earlier ones or recur from them, and the memory of a cache.
    remat: Which activations of a layer are saved for the backward pass: a name in
      jax.checkpoint_policies. The others are computed again. "" saves all.
  """
  own, kept, routed_parts = {}, {}, []
  lent: dict[int, LayerMemory] = {}  # by window
  given = _by_stack(config, inputs.routes.given)
  for segment in segments(config):
    stacks = {}
    for number, name in enumerate(segment.names, segment.first):
      kind, per_layer = config.kind(number), inputs.per_layer_LBTN
      stacks[name] = Stack(
        _layer(config, segment, number, inputs, run, remat),
        params[name],
        lent[kind.window] if kind.keys == "borrowed" else None,
        None if per_layer is None else per_layer[number : segment.end : segment.period],
        given.get(name),
      )
    # Only the first layers have a level. The others do not look for one.
    levels = inputs.levels_KBSD
    levels = None if levels is None or segment.first >= len(levels) else levels
    x_BTD, own_of, kept_of, routed = _apply_segment(config, segment, stacks, x_BTD, run, levels)
    own.update(own_of)
    kept.update(kept_of)
    for number, name in enumerate(segment.names, segment.first):
      if config.kind(number).keys == "lent":
        lent[config.kind(number).window] = _lent(name, own_of, kept_of, run)
    if routed is not None:
      routed_parts.append(routed)
  return Outputs(x_BTD, own, kept, _joined(routed_parts, jnp.concatenate, 1))


def _by_stack(config: ModelConfig, experts_BTY: jax.Array | None) -> dict[str, jax.Array]:
  """The experts of tokens as [L, B, T, U] for each stack that has experts."""
  if experts_BTY is None:
    return {}
  experts_BTLU = experts_BTY.reshape(*experts_BTY.shape[:2], -1, config.experts_per_token)
  return {
    name: jnp.moveaxis(experts_BTLU[:, :, jnp.array(places)], 2, 0)
    for name, places in sparse_stacks(config).items()
  }


def _joined(parts: list[Routed], join: Callable[..., jax.Array], axis: int) -> Routed | None:
  """Joins the results of several layers' routers, or returns None if there are none."""
  return jax.tree.map(lambda *arrays: join(arrays, axis), *parts) if parts else None


# layer(parameters, x_BTD, memory, per_layer_BTN, given experts, level_BSD) -> (x_BTD, what the
# mixer keeps, what the router did)
Layer = Callable[..., tuple[jax.Array, Any, Routed | None]]


class Stack(NamedTuple):
  """Equal layers of a segment.

  Attributes:
    layer: The function that computes one of them.
    params: The parameters of all, stacked.
    borrowed: The memory that their queries meet, or None if they have keys of their own.
    per_layer_LBTN: The tokens' embeddings for each of them, or None.
    given_LBTU: The experts that tokens go through in each of them, or None (see `Routes.given`).
  """

  layer: Layer
  params: Any
  borrowed: LayerMemory | None
  per_layer_LBTN: jax.Array | None
  given_LBTU: jax.Array | None


def _lent(name: str, own: dict[str, Any], kept: dict[str, Any], run: Pass) -> LayerMemory:
  """The memory of the only layer of this stack, which lends it, after the pass reached it."""
  if name not in own:
    return LayerMemory(jax.tree.map(lambda x: x[0], kept[name]))
  prefix = jax.tree.map(lambda x: x[0], run.prefix.get(name))
  return LayerMemory(own[name], jnp.int32(0), prefix)


def _layer(
  config: ModelConfig, segment: Segment, number: int, inputs: Inputs, run: Pass, remat: str
) -> Layer:
  """The layer of this number as a function of its parameters."""
  kind = config.kind(number)
  block = Block(config, kind)
  rope = (inputs.local_rope if kind.window else inputs.rope) if kind.rotated else None

  def layer(
    params: Any,
    x_BTD: jax.Array,
    memory: LayerMemory | None,
    per_layer_BTN: jax.Array | None,
    given_BTU: jax.Array | None,
    level_BSD: jax.Array | None,
  ) -> tuple[jax.Array, Any, Routed | None]:
    attend, recur = run.attend(kind.window, memory), run.recur(memory)
    seen = Seen(rope, attend, recur, bool(run.own), kind.keys)
    routes = inputs.routes.replace(given=given_BTU)
    out: Any = block.apply({"params": params}, x_BTD, routes, seen, per_layer_BTN)
    x_BTD = out[0]
    if level_BSD is not None:
      x_BTD = x_BTD.at[:, : level_BSD.shape[1]].add(level_BSD)
    return constrain(x_BTD, config.rows), *out[1:]

  if not remat:
    return layer
  policy = getattr(jax.checkpoint_policies, remat)
  # A loop keeps XLA from sharing the recomputed values with the first ones. Without a loop,
  # something else must.
  is_loop = segment.count > 1 and not _is_unrolled(config, segment)
  return jax.checkpoint(layer, policy=policy, prevent_cse=not is_loop)


def _is_unrolled(config: ModelConfig, segment: Segment) -> bool:
  """Whether the loop over a segment is compiled as straight code.

  On a CPU, a loop copies the weights of each layer out of their stacks, and activations and
  gradients into and out of others. With 4 layers of D = 128, an update took a sixth longer. With 8
  of D = 512, no difference was clear, and straight code took more than twice as long to compile.
  A GPU copies them, too, and first fills the stacks of activations with zeros: a quarter of the
  bytes of an update (experiments/LOG.md, 2026-11-26). Hence the limits, which bound compilation.
  """
  platform = config.platform or jax.default_backend()
  return segment.period * segment.count <= _MOST_UNROLLED_LAYERS.get(platform, 0)


def _loops_over_runs(config: ModelConfig) -> bool:
  """Whether equal layers that follow each other in a pattern are a loop within the pattern's.

  Of four layers of Qwen3.5, three follow each other: as a loop, the TPU compiler takes a fifth less
  time for an update (experiments/LOG.md, 2026-11-25). Their weights are copied for the loop, so not
  while tokens are decoded, nor on a CPU.
  """
  return (config.platform or jax.default_backend()) != "cpu"


def _runs(config: ModelConfig, segment: Segment) -> list[list[str]]:
  """The names of a pattern's stacks, with those of equal neighbours together."""
  numbers = dict(enumerate(segment.names, segment.first))
  groups = itertools.groupby(numbers, config.kind)
  return [[numbers[number] for number in group] for _, group in groups]


def _apply_run(
  stack: Stack, x_BTD: jax.Array, told: list[tuple[Any, ...]]
) -> tuple[jax.Array, list[Any]]:
  """Applies equal layers, one after another, in a loop.

  Args:
    stack: The first of their stacks.
    x_BTD: The residual stream.
    told: For each of them its parameters, embeddings, given experts and level.

  Returns:
    The residual stream, and for each layer what its mixer keeps and what its router did.
  """

  def layer(x_BTD: jax.Array, of_layer: tuple[Any, ...]) -> tuple[jax.Array, Any]:
    params, *others = of_layer
    x_BTD, *out = stack.layer(params, x_BTD, stack.borrowed, *others)
    return x_BTD, out

  x_BTD, outs = jax.lax.scan(layer, x_BTD, jax.tree.map(lambda *parts: jnp.stack(parts), *told))
  return x_BTD, [jax.tree.map(lambda x, at=i: x[at], outs) for i in range(len(told))]


def _level(levels_KBSD: jax.Array | None, number: jax.Array) -> jax.Array | None:
  """The level added after the layer of this number: 0 after the last one that has a level."""
  if levels_KBSD is None:
    return None
  last = len(levels_KBSD) - 1
  level_BSD = levels_KBSD[jnp.minimum(number, last)]
  return jnp.where(number <= last, level_BSD, 0)


def _levels_of(
  segment: Segment, place: jax.Array, levels_KBSD: jax.Array | None
) -> dict[str, jax.Array | None]:
  """`_level` of the layers of one pattern of a segment, by the names of their stacks."""
  numbers = enumerate(segment.names, segment.first)
  return {name: _level(levels_KBSD, first + segment.period * place) for first, name in numbers}


def _apply_segment(
  config: ModelConfig,
  segment: Segment,
  stacks: dict[str, Stack],
  x_BTD: jax.Array,
  run: Pass,
  levels_KBSD: jax.Array | None = None,
) -> Outputs:
  """Applies the layers of a segment, which are given by the names of their stacks."""
  is_decoding = bool(run.own)
  runs = [[name] for name in stacks]
  if not is_decoding and segment.count > 1 and _loops_over_runs(config):
    runs = _runs(config, segment)

  def apply_one(
    name: str, x_BTD: jax.Array, own: Any, prefix: Any, place: jax.Array, of_layer: Any, *told: Any
  ) -> tuple[jax.Array, Any, Routed | None]:
    stack, memory = stacks[name], stacks[name].borrowed
    if name in own:
      memory = LayerMemory(own[name], place, prefix.get(name))
    if is_decoding:
      of_layer = in_stacks(config, of_layer, stack.params, place)
    return stack.layer(of_layer, x_BTD, memory, *told)

  def pattern(carry: Any, of_pattern: Any) -> tuple[Any, Any]:
    (x_BTD, own), (params, prefix, per_layer, given, place) = carry, of_pattern
    own, routed_parts, level_of = dict(own), [], _levels_of(segment, place, levels_KBSD)
    kept: dict[str, Any] = {}
    for names in runs:
      told = [
        (params[name], per_layer.get(name), given.get(name), level_of[name]) for name in names
      ]
      if len(names) > 1:
        x_BTD, outs = _apply_run(stacks[names[0]], x_BTD, told)
      else:
        x_BTD, *out = apply_one(names[0], x_BTD, own, prefix, place, *told[0])
        outs = [out]
      for name, (rest, routed) in zip(names, outs, strict=True):
        if rest is not None:
          (own if name in own else kept)[name] = rest
        if routed is not None:
          routed_parts.append(routed)
    return (x_BTD, own), (kept, _joined(routed_parts, jnp.stack, 0))

  def of_segment(by_stack: Any) -> Any:
    return {name: by_stack[name] for name in stacks if by_stack.get(name) is not None}

  params = {name: stack.params for name, stack in stacks.items()}
  per_layer = of_segment({name: stack.per_layer_LBTN for name, stack in stacks.items()})
  given = of_segment({name: stack.given_LBTU for name, stack in stacks.items()})
  carry = x_BTD, of_segment(run.own)
  of_patterns = params, of_segment(run.prefix), per_layer, given, jnp.arange(segment.count)
  if segment.count == 1:
    (x_BTD, own), out = pattern(carry, jax.tree.map(lambda x: x[0], of_patterns))
    kept, routed = jax.tree.map(lambda x: x[None], out)
  else:
    unroll = segment.count if _is_unrolled(config, segment) else 1
    (x_BTD, own), (kept, routed) = jax.lax.scan(pattern, carry, of_patterns, unroll=unroll)

  return Outputs(x_BTD, own, kept, jax.tree.map(_in_order, routed))


def _in_order(x: jax.Array) -> jax.Array:
  """[patterns, sparse layers of a pattern, B, ...] -> [B, layers, ...]"""
  return jnp.moveaxis(x.reshape(-1, *x.shape[2:]), 0, 1)


def constrain(x: jax.Array, sharding: jax.sharding.NamedSharding | None) -> jax.Array:
  """Fixes the sharding of an activation.

  If XLA may choose, it splits activations along D, as fsdp splits the weights, and gathers all
  their rows on every device.
  """
  return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)
