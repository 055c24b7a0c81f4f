"""One layer of the decoder: a mixer such as attention, then an MLP or experts."""

from collections.abc import Callable
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
from grpo_jax.model.mlps.router import Routed, Routes
from grpo_jax.model.on_devices import constrain
from grpo_jax.model.remat import named_input
from grpo_jax.model.rope import Rotation


class Block(nn.Module):
  """A mixer such as attention, then an MLP or experts, each added to the residual stream.

  With `config.pre_norms` the inputs of both are normalised, and with `config.post_norms` the
  outputs. With `config.per_layer_dim`, the layer also adds the token's embedding for this layer.
  """

  config: ModelConfig
  kind: LayerKind

  @nn.compact
  def __call__(
    self,
    x_BTD: jax.Array,
    routes: Routes,
    seen: Seen,
    embeddings_BTN: jax.Array | None = None,
  ) -> tuple[jax.Array, Any, Routed | None]:
    """Applies the layer.

    Args:
      x_BTD: The residual stream.
      routes: The tokens that this layer's router counts, and the experts that replace its choice.
      seen: The rotary angles, and the attention or recurrence that reads earlier tokens.
      embeddings_BTN: The tokens' embeddings for this layer, or None (see `layer_embeddings.py`).

    Returns:
      The residual stream, the keys and values or states that the mixer keeps for later tokens (see
      `apply_layer`), and the router's results or None.
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
    # In some families, router and experts read the residual stream, each through its own norm.
    out_BTD, routed = mlp(normed_BTD, routes, x_BTD)
    x_BTD = added(x_BTD, "mlp_post_norm", out_BTD)
    if c.per_layer_dim:
      x_BTD = x_BTD + PerLayer(c, name="per_layer")(x_BTD, embeddings_BTN)
    if c.layer_scale:
      scale: jax.Array = self.param("layer_scale", nn.initializers.ones, ())
      # The factor is a constant of the checkpoint: it is not trained.
      x_BTD = x_BTD * jax.lax.stop_gradient(scale).astype(c.dtype)
    return x_BTD, kept, routed


class LayerMemory(NamedTuple):
  """The keys and values, or states, of earlier tokens that the mixer of one layer reads and writes.

  Attributes:
    stack: The keys and values, or states, of all layers of the layer's stack, as in `Cache`, or
      None without a cache. A layer that borrows keys and values has the lending layer's stack or,
      without a cache, the keys and values that the lending layer computed.
    place: int32 scalar, the index of the layer in its stack.
    prefix: The prompts' keys and values [P, K, S, E] in this layer, or None.
  """

  stack: Any
  place: jax.Array | None = None
  prefix: Any = None


class LayerInputs(NamedTuple):
  """The arrays of one layer or, with a leading axis of layers, of a whole stack.

  Attributes:
    params: The parameters of the layer's `Block`.
    place: int32 scalar, the index of the layer in its stack.
    prefix: `LayerMemory.prefix`.
    embeddings_BTN: The tokens' embeddings for this layer, or None.
    experts_BTU: `Routes.given` for this layer, or None.
    number: int32 scalar, the index of the layer in the model, or None where no visual features are
      added (see `Shared.levels_KBSD`).
  """

  params: Any
  place: jax.Array | None = None
  prefix: Any = None
  embeddings_BTN: jax.Array | None = None
  experts_BTU: jax.Array | None = None
  number: jax.Array | None = None


class Shared(NamedTuple):
  """The inputs of a pass that all layers share.

  Attributes:
    rope: The rotary angles of the layers without a window.
    local_rope: The rotary angles of the layers with a window.
    attend: (window, memory) -> the attention of a layer with this window and memory.
    recur: (memory) -> the recurrence of a layer with this memory.
    routes: The tokens that routers count, and the experts that replace their choices.
    cache: For each stack, the memory of earlier tokens that its layers read and write, as in
      `Cache`. Empty without a cache.
    prefix: For each stack, the memory of the prompts, which its layers only read: [L, ...].
    embeddings_LBTN: The tokens' embeddings for each layer, or None.
    levels_KBSD: Visual features that are added to the residual stream of the first S tokens after
      each of the first K layers (DeepStack), or None.
  """

  rope: Rotation
  local_rope: Rotation
  attend: Callable[[int, LayerMemory], Attend]
  recur: Callable[[LayerMemory], Recur]
  routes: Routes = Routes()
  cache: dict[str, Any] = {}
  prefix: dict[str, Any] = {}
  embeddings_LBTN: jax.Array | None = None
  levels_KBSD: jax.Array | None = None


def apply_layer(
  config: ModelConfig,
  shared: Shared,
  kind: LayerKind,
  layer: LayerInputs,
  x_BTD: jax.Array,
  memory: LayerMemory,
) -> tuple[jax.Array, Any, Routed | None]:
  """Applies one layer.

  Args:
    config: The model.
    shared: The inputs that all layers share.
    kind: The kind of the layer.
    layer: The arrays of this layer.
    x_BTD: The residual stream before the layer.
    memory: The earlier tokens' keys and values, or states, in this layer.

  Returns:
    The residual stream, the arrays that the mixer keeps, and the router's results or None. With a
    cache, the mixer keeps `memory.stack` with the new tokens in it. Without one, it keeps the keys
    and values of the tokens or the states after them, or None where nobody reads them later.
  """
  rope = (shared.local_rope if kind.window else shared.rope) if kind.rotated else None
  attend, recur = shared.attend(kind.window, memory), shared.recur(memory)
  seen = Seen(rope, attend, recur, bool(shared.cache), kind.keys)
  routes = shared.routes.replace(given=layer.experts_BTU)
  block = Block(config, kind)
  x_BTD = named_input(x_BTD)  # for learner.remat_policy=offload
  out: Any = block.apply({"params": layer.params}, x_BTD, routes, seen, layer.embeddings_BTN)
  x_BTD, kept, routed = out
  if layer.number is not None:
    # Pictures are in prompts, which come first.
    level_BSD = _level(shared.levels_KBSD, layer.number)
    x_BTD = x_BTD.at[:, : level_BSD.shape[1]].add(level_BSD)
  return constrain(x_BTD, config.rows), kept, routed


def _level(levels_KBSD: jax.Array, number: jax.Array) -> jax.Array:
  """The visual features that are added after layer `number`, or 0 after the first K layers."""
  last = len(levels_KBSD) - 1
  level_BSD = levels_KBSD[jnp.minimum(number, last)]
  return jnp.where(number <= last, level_BSD, 0)
