"""The layers of the decoder, one after another.

`apply_in_turn` is the definition: a plain loop over layers. `apply_layers` computes the same with
less to compile. Where a pattern of layers repeats (see stacks.py), XLA loops over its repetitions,
and the body of that loop is `apply_in_turn` over the layers of one pattern.
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

# The most layers that are compiled without a loop, by platform. TPUs keep the loop.
_MOST_UNROLLED_LAYERS = {"cpu": 4, "gpu": 32}


class State(NamedTuple):
  """The results of a layer that the layers after it read.

  Attributes:
    x_BTD: The residual stream.
    cache: `Shared.cache`, with the new tokens in the stacks of the layers so far.
    lent: For each window, the memory of the layer that lends its keys and values to later ones.
  """

  x_BTD: jax.Array
  cache: dict[str, Any]
  lent: dict[int, LayerMemory]


# apply(kind, layer, x_BTD, memory): `apply_layer` of a model and a pass.
ApplyLayer = Callable[..., tuple[jax.Array, Any, Routed | None]]
# For each layer, the arrays that its mixer keeps where there is no cache, and its router's results.
LayerOutputs = dict[str, tuple[Any, Routed | None]]


def apply_in_turn(
  apply: ApplyLayer,
  kinds: Mapping[str, LayerKind],
  layers: Mapping[str, LayerInputs],
  state: State,
) -> tuple[State, LayerOutputs]:
  """Applies layers one after another. This is the definition of what all loops here compute.

  Args:
    apply: `apply_layer` of this model and pass.
    kinds: The kinds of the layers in their order, by the names of their stacks.
    layers: The inputs of the layers, by the names of their stacks in any order.
    state: The results of the layers before them.
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
      # The mixer kept its stack, with the new tokens in it.
      cache, kept = cache | {name: kept}, None
    outputs[name] = kept, routed
  return State(x_BTD, cache, lent), outputs


class Outputs(NamedTuple):
  """The results of a pass through all layers.

  Attributes:
    x_BTD: The residual stream.
    cache: `Shared.cache` with the new tokens in it.
    kept: For each stack, the arrays that its mixers keep where there is no cache: [L, ...].
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
    remat: Which activations of a layer are saved for the backward pass: a name in
      jax.checkpoint_policies. The others are computed again. "" saves all.
  """
  state, kept, routed = State(x_BTD, shared.cache, lent={}), {}, []
  for segment in segments(config):
    state, outputs = _apply_segment(params, config, segment, state, shared, remat)
    kept.update({name: outputs[name][0] for name in outputs if outputs[name][0] is not None})
    of_routers = [outputs[name][1] for name in segment.names if outputs[name][1] is not None]
    if of_routers:
      routed.append(jax.tree.map(_alternating, *of_routers))
  together = jax.tree.map(lambda *xs: jnp.concatenate(xs, 1), *routed) if routed else None
  return Outputs(state.x_BTD, state.cache, kept, together)


def _apply_segment(
  params: Any, config: ModelConfig, segment: Segment, state: State, shared: Shared, remat: str
) -> tuple[State, LayerOutputs]:
  """Applies the layers of a segment: a layer by itself, or a loop of XLA over patterns of layers.

  The loop slices the inputs of each layer from those of its stack, and stacks its outputs. From one
  pattern to the next it carries the residual stream and the segment's part of the cache, but not
  the memories that are lent: a layer that lends is the only one of its kind, so by itself.
  """
  kinds, stacks = {}, {}
  for number, name in enumerate(segment.names, segment.first):
    kinds[name] = config.kind(number)
    stacks[name] = _stack(params, config, segment, number, shared)
  unrolls = _unrolls(config, segment)  # where a loop would copy weights and activations
  apply = functools.partial(apply_layer, config, shared)
  if remat:
    policy = policy_of(remat)
    # A loop keeps XLA from sharing the recomputed values with the first ones. Without a loop,
    # something else must.
    is_loop = segment.count > 1 and not unrolls
    apply = jax.checkpoint(apply, policy=policy, prevent_cse=not is_loop, static_argnums=0)

  def apply_pattern(
    state: State, layers: dict[str, LayerInputs], place: jax.Array
  ) -> tuple[State, LayerOutputs]:
    layers = {name: layer._replace(place=place) for name, layer in layers.items()}
    if shared.cache:  # a TPU's kernel may read experts in their stack, without a copy
      for name, layer in layers.items():
        params_of_layer = in_stacks(config, layer.params, stacks[name].params, place)
        layers[name] = layer._replace(params=params_of_layer)
    # A loop copies the weights of its layers. That is little beside an update, and much beside the
    # few tokens that are decoded with a cache.
    if shared.cache or segment.count == 1 or not _loops_over_runs(config):
      return apply_in_turn(apply, kinds, layers, state)
    outputs: LayerOutputs = {}
    # A run is layers of one kind that follow each other in the pattern.
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
  """The inputs of all layers of the stack whose first layer has this number, except `place`."""
  name, in_model = f"layers_{number}", slice(number, segment.end, segment.period)
  levels, embeddings_LBTN, experts_LBTU = shared.levels_KBSD, shared.embeddings_LBTN, None
  sparse = sparse_stacks(config)
  if shared.routes.given is not None and name in sparse:
    experts_BTY = shared.routes.given
    experts_BTLU = experts_BTY.reshape(*experts_BTY.shape[:2], -1, config.experts_per_token)
    experts_LBTU = jnp.moveaxis(experts_BTLU[:, :, jnp.array(sparse[name])], 2, 0)
  # Only the first layers have a level. The segments after them do not look for one.
  has_levels = levels is not None and segment.first < len(levels)
  return LayerInputs(
    params=params[name],
    prefix=shared.prefix.get(name),
    embeddings_BTN=None if embeddings_LBTN is None else embeddings_LBTN[in_model],
    experts_BTU=experts_LBTU,
    number=jnp.arange(config.num_layers)[in_model] if has_levels else None,
  )


def _unrolls(config: ModelConfig, segment: Segment) -> bool:
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
  """Whether a run, equal layers that follow each other in a pattern, is a loop in the pattern's.

  Of four layers of Qwen3.5, three follow each other: as a loop, the TPU compiler takes a fifth less
  time for an update (experiments/LOG.md, 2026-11-25). Their weights are copied for the loop, so not
  while tokens are decoded, nor on a CPU.
  """
  return (config.platform or jax.default_backend()) != "cpu"


def _apply_run(
  apply: ApplyLayer,
  kinds: Mapping[str, LayerKind],
  layers: Mapping[str, LayerInputs],
  state: State,
) -> tuple[State, LayerOutputs]:
  """Applies a run: equal layers that follow each other, without a cache. Several are a loop."""
  if len(kinds) == 1:
    return apply_in_turn(apply, kinds, layers, state)
  first, kind = next(iter(kinds.items()))

  def body(x_BTD: jax.Array, layer: LayerInputs) -> tuple[jax.Array, Any]:
    before = state._replace(x_BTD=x_BTD)
    after, outputs = apply_in_turn(apply, {first: kind}, {first: layer}, before)
    return after.x_BTD, outputs[first]

  stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(layers[name] for name in kinds))
  x_BTD, outputs = jax.lax.scan(body, state.x_BTD, stacked)
  of_each = {name: jax.tree.map(lambda x, at=i: x[at], outputs) for i, name in enumerate(kinds)}
  return state._replace(x_BTD=x_BTD), of_each


def _alternating(*of_stacks: jax.Array) -> jax.Array:
  """The arrays [layers of a stack, B, ...] of a pattern's stacks as [B, layers, ...], in order."""
  together = jnp.stack(of_stacks, 1)
  return jnp.moveaxis(together.reshape(-1, *together.shape[2:]), 0, 1)
