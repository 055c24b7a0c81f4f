"""The layers of the decoder, one after another.

`apply_in_turn` is the definition: a plain loop over layers. `apply_layers` computes the same, but
compiles less code. Where a pattern of layers repeats (see stacks.py), XLA loops over the
repetitions, and the loop body is `apply_in_turn` over the layers of one pattern.
"""

from collections.abc import Callable, Mapping
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.model.block import LayerInputs, LayerMemory, Shared, apply_layer
from grpo_jax.model.config import LayerKind, ModelConfig
from grpo_jax.model.mlps.experts import in_stacks
from grpo_jax.model.mlps.router import Routed
from grpo_jax.model.remat import policy_of
from grpo_jax.model.stacks import Segment, segments, sparse_stacks

# The largest number of layers that is compiled without a loop, by platform. TPUs always loop.
_MOST_UNROLLED_LAYERS = {"cpu": 4, "gpu": 32}


class State(NamedTuple):
  """The state that each layer passes to the next one.

  Attributes:
    x_BTD: The residual stream.
    cache: `Shared.cache`, into which the layers so far have written the new tokens.
    lent: Window -> the memory of the layer that lends keys and values to later layers with this
      window.
  """

  x_BTD: jax.Array
  cache: dict[str, Any]
  lent: dict[int, LayerMemory]


# apply(kind, layer, x_BTD, memory): `apply_layer` with `config` and `shared` bound.
ApplyLayer = Callable[..., tuple[jax.Array, Any, Routed | None]]
# Name of a stack -> (the arrays that the mixer keeps, None with a cache; the router's results).
LayerOutputs = dict[str, tuple[Any, Routed | None]]


def apply_in_turn(
  apply: ApplyLayer,
  kinds: Mapping[str, LayerKind],
  layers: Mapping[str, LayerInputs],
  state: State,
) -> tuple[State, LayerOutputs]:
  """Applies layers one after another. This defines what all loops of this file compute.

  Args:
    apply: `apply_layer` of this model and pass.
    kinds: Name of a layer's stack -> the kind of the layer, in the order of the layers.
    layers: Name of a layer's stack -> the inputs of the layer, in any order.
    state: The state after the previous layer.

  Returns:
    The state after the last layer, and each layer's outputs.
  """
  (x_BTD, cache, lent), outputs = state, {}
  for name, kind in kinds.items():
    layer = layers[name]
    if kind.keys == "borrowed":
      memory = lent[kind.window]
    else:
      memory = LayerMemory(cache.get(name), layer.place, layer.prefix)
    x_BTD, kept, routed = apply(kind, layer, x_BTD, memory)
    if kind.keys == "lent":
      lent = lent | {kind.window: memory._replace(stack=kept)}
    if name in cache:
      # `kept` is the whole stack with the new tokens, which belongs in the cache, not the outputs.
      cache, kept = cache | {name: kept}, None
    outputs[name] = kept, routed
  return State(x_BTD, cache, lent), outputs


class Outputs(NamedTuple):
  """The results of a pass through all layers.

  Attributes:
    x_BTD: The residual stream.
    cache: `Shared.cache` with the new tokens in it.
    kept: Without a cache: for each stack, the arrays [L, ...] that the mixers keep.
    routed: The experts and statistics of the sparse layers' routers, [B, L, ...], or None.
  """

  x_BTD: jax.Array
  cache: dict[str, Any]
  kept: dict[str, Any]
  routed: Routed | None


def apply_layers(
  params: Any, config: ModelConfig, x_BTD: jax.Array, shared: Shared, remat: str = ""
) -> Outputs:
  """Applies all layers.

  Args:
    params: The parameters, stacked as stacks.py describes.
    config: The model.
    x_BTD: The residual stream before the first layer.
    shared: The inputs that all layers share.
    remat: Which activations of a layer are saved for the backward pass, which recomputes the
      others: a name in jax.checkpoint_policies, or "offload". "" saves all.
  """
  state, kept, routed = State(x_BTD, shared.cache, lent={}), {}, []
  for segment in segments(config):
    state, outputs = _apply_segment(params, config, segment, state, shared, remat)
    kept.update({name: outputs[name][0] for name in outputs if outputs[name][0] is not None})
    of_routers = [outputs[name][1] for name in segment.names if outputs[name][1] is not None]
    if of_routers:
      routed.append(jax.tree.map(_alternating, *of_routers))
  # The segments' sparse layers follow each other on axis 1.
  of_model = jax.tree.map(lambda *xs: jnp.concatenate(xs, 1), *routed) if routed else None
  return Outputs(state.x_BTD, state.cache, kept, of_model)


def _apply_segment(
  params: Any, config: ModelConfig, segment: Segment, state: State, shared: Shared, remat: str
) -> tuple[State, LayerOutputs]:
  """Applies the layers of a segment: a single layer, or an XLA loop over repetitions of a pattern.

  The loop slices each layer's inputs from its stack, and stacks the outputs of the layers. It
  carries the residual stream and the segment's entries of the cache from one repetition to the
  next. It does not carry lent memories: a lending layer is always a segment of its own, because no
  other layer has the same kind. `remat` is as in `apply_layers`.
  """
  kinds, stacks = {}, {}
  for number, name in enumerate(segment.names, segment.first):
    kinds[name] = config.kind(number)
    stacks[name] = _stack(params, config, segment, number, shared)
  unrolls = _unrolls(config, segment)
  apply = functools.partial(apply_layer, config, shared)
  if remat:
    policy = policy_of(remat)
    # XLA must not replace recomputed values by the original ones, or those would stay in memory.
    # A loop prevents that. Without a loop, `prevent_cse` must.
    is_loop = segment.count > 1 and not unrolls
    # The first argument, the kind of the layer, is no array.
    apply = jax.checkpoint(apply, policy=policy, prevent_cse=not is_loop, static_argnums=0)

  def apply_pattern(
    state: State, layers: dict[str, LayerInputs], place: jax.Array
  ) -> tuple[State, LayerOutputs]:
    """Applies the layers of repetition `place` of the pattern."""
    layers = {name: layer._replace(place=place) for name, layer in layers.items()}
    if shared.cache:  # when decoding, a TPU's kernel may read experts from the stack without a copy
      for name, layer in layers.items():
        params_of_layer = in_stacks(config, layer.params, stacks[name].params, place)
        layers[name] = layer._replace(params=params_of_layer)
    # A loop over a run copies the weights of the run. The copy is cheap beside an update, but
    # expensive beside the few tokens of a decoding step, which has a cache.
    if shared.cache or segment.count == 1 or not _loops_over_runs(config):
      return apply_in_turn(apply, kinds, layers, state)
    outputs: LayerOutputs = {}
    # A run is a sequence of layers of one kind within the pattern.
    for _, names in itertools.groupby(kinds, kinds.get):
      run = {name: kinds[name] for name in names}
      state, of_run = _apply_run(apply, run, layers, state)
      outputs.update(of_run)
    return state, outputs

  patterns = stacks, jnp.arange(segment.count)
  if segment.count == 1:
    state, outputs = apply_pattern(state, *jax.tree.map(lambda x: x[0], patterns))
    return state, jax.tree.map(lambda x: x[None], outputs)

  def body(carry: Any, pattern: Any) -> tuple[Any, LayerOutputs]:
    x_BTD, cache = carry
    after, outputs = apply_pattern(State(x_BTD, cache, state.lent), *pattern)
    return (after.x_BTD, after.cache), outputs

  cache = {name: state.cache[name] for name in stacks if name in state.cache}
  unroll = segment.count if unrolls else 1
  (x_BTD, cache), outputs = jax.lax.scan(body, (state.x_BTD, cache), patterns, unroll=unroll)
  return State(x_BTD, state.cache | cache, state.lent), outputs


def _stack(
  params: Any, config: ModelConfig, segment: Segment, number: int, shared: Shared
) -> LayerInputs:
  """The inputs, except `place`, of all layers of the stack whose first layer is layer `number`."""
  name, numbers = f"layers_{number}", slice(number, segment.end, segment.period)
  levels, embeddings_LBTN, experts_LBTU = shared.levels_KBSD, shared.embeddings_LBTN, None
  sparse = sparse_stacks(config)
  if shared.routes.given is not None and name in sparse:
    experts_BTY = shared.routes.given
    experts_BTLU = experts_BTY.reshape(*experts_BTY.shape[:2], -1, config.experts_per_token)
    experts_LBTU = jnp.moveaxis(experts_BTLU[:, :, jnp.array(sparse[name])], 2, 0)
  # Only the first layers add visual features. Later segments skip the lookup.
  has_levels = levels is not None and segment.first < len(levels)
  return LayerInputs(
    params=params[name],
    prefix=shared.prefix.get(name),
    embeddings_BTN=None if embeddings_LBTN is None else embeddings_LBTN[numbers],
    experts_BTU=experts_LBTU,
    number=jnp.arange(config.num_layers)[numbers] if has_levels else None,
  )


def _unrolls(config: ModelConfig, segment: Segment) -> bool:
  """Whether the loop over a segment is unrolled at compile time.

  On a CPU, a loop copies each layer's weights out of the stacks, and copies activations and
  gradients into and out of other stacks. With 4 layers of D = 128, an update took a sixth longer
  than unrolled. With 8 layers of D = 512, no difference was clear, and unrolled code took more than
  twice as long to compile. A GPU copies them, too, and first fills the stacks of activations with
  zeros: a quarter of the bytes of an update (experiments/LOG.md, 2026-11-26).
  `_MOST_UNROLLED_LAYERS` bounds the compilation time.
  """
  platform = config.platform or jax.default_backend()
  return segment.period * segment.count <= _MOST_UNROLLED_LAYERS.get(platform, 0)


def _loops_over_runs(config: ModelConfig) -> bool:
  """Whether each run of equal layers in a pattern becomes an inner loop.

  In Qwen3.5, three of every four layers are such a run. With an inner loop, the TPU compiler takes
  a fifth less time for an update (experiments/LOG.md, 2026-11-25). The loop copies the weights of
  the run, so it is not used while tokens are decoded, nor on a CPU.
  """
  return (config.platform or jax.default_backend()) != "cpu"


def _apply_run(
  apply: ApplyLayer,
  kinds: Mapping[str, LayerKind],
  layers: Mapping[str, LayerInputs],
  state: State,
) -> tuple[State, LayerOutputs]:
  """Applies layers of one kind, one after the other, without a cache. XLA loops over several.

  They neither lend nor borrow memories: a lending layer is a run by itself.
  """
  if len(kinds) == 1:
    return apply_in_turn(apply, kinds, layers, state)
  first, kind = next(iter(kinds.items()))  # each round calls its layer by the first one's name

  def body(x_BTD: jax.Array, layer: LayerInputs) -> tuple[jax.Array, Any]:
    before = state._replace(x_BTD=x_BTD)
    after, outputs = apply_in_turn(apply, {first: kind}, {first: layer}, before)
    return after.x_BTD, outputs[first]

  stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(layers[name] for name in kinds))
  x_BTD, outputs = jax.lax.scan(body, state.x_BTD, stacked)
  of_each = {name: jax.tree.map(lambda x, at=i: x[at], outputs) for i, name in enumerate(kinds)}
  return state._replace(x_BTD=x_BTD), of_each


def _alternating(*of_stacks: jax.Array) -> jax.Array:
  """Joins a pattern's arrays [layers of a stack, B, ...] to [B, layers, ...] in layer order."""
  together = jnp.stack(of_stacks, 1)
  return jnp.moveaxis(together.reshape(-1, *together.shape[2:]), 0, 1)
