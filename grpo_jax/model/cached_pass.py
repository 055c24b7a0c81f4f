"""A pass over new tokens that reads a cache and writes the tokens into it."""

from collections.abc import Mapping
import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax.model.attention import View, after_prompts, decode_choice
from grpo_jax.model.attention.softmax import Int8, Own, Scoring, as_int8, softmax_attention
from grpo_jax.model.block import LayerMemory, Shared
from grpo_jax.model.cache import Cache, Prefix, slots_step, with_axes, without_axes
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.layouts import in_order
from grpo_jax.model.mixers.seen import Attend, KeysAndValues, Recur, Scan
from grpo_jax.model.rope import Rotation


def with_cache(config: ModelConfig, cache: Cache, window: int, memory: LayerMemory) -> Attend:
  """Makes a layer's attention of new tokens [B, T] to themselves and the rows' tokens in `cache`.

  Besides its output, the attention returns the keys and values of the layer's stack with the new
  ones in their slots. For a layer that borrows keys and values it returns None, because the lending
  layer has already written them. `window` is as in `View`, and `memory` is the layer's.
  """

  def attend_with_cache(
    q_BTHE: jax.Array,
    k_BTKE: jax.Array | None,
    v_BTKE: jax.Array | None,
    sinks_H: jax.Array | None = None,
  ) -> tuple[jax.Array, KeysAndValues | None]:
    """A `seen.Attend`. Without keys and values, the layer borrows those of another layer."""
    (B, T, H, E), (P, G) = q_BTHE.shape, cache.lengths_PG.shape
    # R = H // K query heads share each of the K heads of keys.
    K, _, C, _ = with_axes(jax.tree.leaves(memory.stack)[0], cache.axes).shape[-4:]  # of keys
    q_PKGRTE = q_BTHE.reshape(P, G, T, K, H // K, E).transpose(0, 3, 1, 4, 2, 5)

    def put(stack: jax.Array, new: jax.Array) -> jax.Array:
      """Writes the T new tokens of this layer into the slots that follow the last written one."""
      # The index of the layer in the stack. Empty if the stack is of one layer and has no axis L.
      layer = [memory.place][: stack.ndim - new.ndim]
      new = new.reshape((1,) * len(layer) + new.shape)
      start = [*layer, *[0] * len(cache.axes), cache.time % C, 0]
      return _slots_last(jax.lax.dynamic_update_slice(stack, new, start), config, cache.axes)

    def by_kernel(q_PKGRTE: jax.Array, own: KeysAndValues, prefix_mask: Any) -> jax.Array:
      """Attention [P, K, G, R, E] by the decoding kernel, for T = 1."""
      whole = jax.tree.map(lambda x: with_axes(x, cache.axes), own)
      whole = jax.tree.map(lambda x: x if x.ndim == 6 else x[None], whole)  # with the axis L
      decode, visible_PG = _kernel(), cache.lengths_PG + 1
      # A row sees its own tokens, the new one included, as far back as the window reaches.
      visible_PG = jnp.minimum(visible_PG, window) if window else visible_PG
      tokens = decode.OwnTokens(whole, memory.place, cache.time, visible_PG)
      mask = None if prefix_mask is None else prefix_mask[..., 0, :]
      return decode.attention(config, q_PKGRTE[..., 0, :], tokens, prefix, mask, sinks_H)

    def write(stack: Any, new_BTKE: jax.Array) -> Any:
      """Writes new keys or values in the form of the stack: an array, or the two of an `Int8`."""
      new = new_BTKE.reshape(P, G, T, K, E).transpose(0, 3, 1, 2, 4)
      new = without_axes(new, cache.axes)
      new = as_int8(new) if isinstance(stack, Int8) else new.astype(stack.dtype)
      return jax.tree.map(put, stack, new)

    def of_layer(stack: jax.Array) -> jax.Array:
      if stack.ndim == len(cache.axes) + 2:  # a stack of one layer has no axis L
        return stack
      return jax.lax.dynamic_index_in_dim(stack, memory.place, 0, keepdims=False)

    stacks_of_own, written = memory.stack, None  # for a layer that borrows
    if k_BTKE is not None:
      values = None if v_BTKE is None else write(memory.stack[1], v_BTKE)
      stacks_of_own = written = write(memory.stack[0], k_BTKE), values
    prefix = _both(memory.prefix) if cache.prefix is not None else None
    prefix_mask = _prefix_mask(cache, T, prefix[0].shape[-2], window) if prefix else None
    # The kernel computes one new token of each row, and reads whole blocks of slots.
    if T == 1 and decode_choice.fits(config) and C % slots_step(config) == 0:
      out = by_kernel(q_PKGRTE, _both(stacks_of_own), prefix_mask)
      return out.transpose(0, 2, 1, 3, 4).reshape(B, 1, H, E), written
    # A pass that fills all slots is the first one of the rows, so they see all of its tokens.
    is_first = T == C > 1 and prefix is not None and not config.cache_dtype
    if is_first and (attend := after_prompts(config)) is not None:
      own_keys, own_values = jax.tree.map(of_layer, _both(stacks_of_own))
      keys, values = (
        _joined(x, own, cache.axes) for x, own in zip(prefix, (own_keys, own_values), strict=True)
      )
      S = prefix[0].shape[-2]
      lengths_P = jnp.minimum(cache.prefix.lengths_P, S)  # a stack with a window has the last S
      settings = dict(window=window, cap=config.attention_cap, sinks_H=sinks_H, rows=config.rows)
      view = View(S, G, T, **settings)
      out = attend(q_BTHE.reshape(P, G * T, H, E), keys, values, lengths_P, view)
      return out.reshape(B, T, H, E), written
    mask = _own_mask(cache, T, C, window)
    keys, values = jax.tree.map(of_layer, _both(stacks_of_own))
    own, scoring = Own(keys, values, cache.axes.lower()), Scoring(config.attention_cap, sinks_H)
    out = softmax_attention(q_PKGRTE, own, mask, prefix, prefix_mask, scoring)
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(B, T, H, E), written

  return attend_with_cache


def _joined(prompt_PKSE: jax.Array, own: jax.Array, axes: str) -> jax.Array:
  """[P, S + G * T, K, E]: keys or values of prompts, and those of their rows. `own` has `axes`."""
  own_PKGTE = with_axes(own, axes)
  P, K, _, _, E = own_PKGTE.shape
  own_PNKE = own_PKGTE.transpose(0, 2, 3, 1, 4).reshape(P, -1, K, E)
  return jnp.concatenate([prompt_PKSE.swapaxes(1, 2), own_PNKE], 1)


def _both(pair: tuple[Any, Any]) -> tuple[Any, Any]:
  """Keys and values. In `pair`, values of None mean that the keys are the values, too."""
  keys, values = pair
  return keys, keys if values is None else values


def recur_with_cache(cache: Cache, lengths_B: jax.Array, memory: LayerMemory) -> Recur:
  """Makes a layer's recurrence of new tokens [B, T] that starts from the rows' states in `cache`.

  Besides its output, the recurrence returns the states of the layer's stack, in which those of this
  layer are the states after the new tokens.

  Args:
    cache: The cache.
    lengths_B: int32, how many of the T tokens each row has. Padding follows.
    memory: The states of the layer's stack.
  """
  P, G = cache.lengths_PG.shape

  def recur(scan: Scan, weights: Any, inputs_BT: Any, empty: Any) -> tuple[Any, Any]:
    del empty  # every row has a state in the cache
    T = jax.tree.leaves(inputs_BT)[0].shape[1]

    def state_of_rows(stack: jax.Array) -> jax.Array:
      layer = jax.lax.dynamic_index_in_dim(stack, memory.place, 0, keepdims=False)
      return layer.reshape(P * G, *layer.shape[2:])

    def with_states(stack: jax.Array, new_B: jax.Array) -> jax.Array:
      layer = new_B.reshape(P, G, *new_B.shape[1:]).astype(stack.dtype)
      return jax.lax.dynamic_update_index_in_dim(stack, layer, memory.place, 0)

    is_token_BT = jnp.arange(T) < lengths_B[:, None]
    out, state_B = scan(weights, inputs_BT, jax.tree.map(state_of_rows, memory.stack), is_token_BT)
    return out, jax.tree.map(with_states, memory.stack, state_B)

  return recur


def shared_inputs(
  config: ModelConfig, cache: Cache, lengths_B: jax.Array, rope: Rotation, local_rope: Rotation
) -> Shared:
  """Builds the inputs of all layers for new tokens that also read the tokens in the cache.

  Args:
    config: The model.
    cache: The cache.
    lengths_B: int32, how many new tokens each row has.
    rope: The rotary angles of the layers without a window.
    local_rope: The rotary angles of the layers with a window.
  """

  def pairs(layers: Cache | Prefix) -> dict[str, KeysAndValues]:
    """For each stack, its keys and its values, or None where the keys are the values, too."""
    return {name: (keys, layers.values.get(name)) for name, keys in layers.keys.items()}

  return Shared(
    rope,
    local_rope,
    attend=functools.partial(with_cache, config, cache),
    recur=functools.partial(recur_with_cache, cache, lengths_B),
    cache=pairs(cache) | cache.states,
    prefix=pairs(cache.prefix) if cache.prefix else {},
  )


def updated(cache: Cache, stacks: Mapping[str, Any], tokens: int) -> Cache:
  """The cache after a pass over `tokens` new tokens per row, which returned `stacks`."""
  keys = {name: stacks[name][0] for name in cache.keys}
  values = {name: stacks[name][1] for name in cache.values}
  states = {name: stacks[name] for name in cache.states}
  time, lengths_PG = cache.time + tokens, cache.lengths_PG + tokens
  return cache.replace(keys=keys, values=values, time=time, lengths_PG=lengths_PG, states=states)


def of_rows(kept: Mapping[str, Any], tokens: int) -> Cache:
  """Builds a cache from a pass that ran without one. Each row becomes a prompt's only row.

  Args:
    kept: For each stack, what its layers kept: keys and values [L, B, T, K, E], or arrays
      [L, B, ...] of states.
    tokens: T, the tokens of each row. Padding counts as tokens here, so callers of `as_prefix` also
      give it the lengths.
  """

  def ordered(x_LBTKE: jax.Array) -> jax.Array:
    """[L, B, T, K, E] -> [L, P, K, G, C, E] with P = B, G = 1 and C = T."""
    return x_LBTKE.transpose(0, 1, 3, 2, 4)[:, :, :, None]

  # Attention layers keep a pair (keys, values). Recurrent layers keep a struct.
  pairs = {name: pair for name, pair in kept.items() if isinstance(pair, tuple)}
  keys = {name: ordered(keys) for name, (keys, _) in pairs.items()}
  values = {name: ordered(values) for name, (_, values) in pairs.items() if values is not None}
  recurring = {name: state for name, state in kept.items() if name not in pairs}
  states = jax.tree.map(lambda x: x[:, :, None], recurring)  # [L, P, G = 1, ...]
  B = jax.tree.leaves(kept)[0].shape[1]
  lengths_PG = jnp.full((B, 1), tokens, jnp.int32)
  return Cache(keys, values, jnp.int32(tokens), lengths_PG, states=states, slots=tokens)


def _own_mask(cache: Cache, tokens: int, slots: int, window: int) -> jax.Array:
  """[P, 1, G, 1, T, C]: which slots the new tokens see. They are in their slots already.

  Args:
    cache: The cache before the pass. A pass of several tokens must not wrap around.
    tokens: T.
    slots: C.
    window: As in `View`.
  """
  number_T1 = jnp.arange(tokens)[:, None]
  # How many tokens ago each slot was written. Slots older than the row's first token are not the
  # row's.
  age_TC = (cache.time + number_T1 - jnp.arange(slots)) % slots
  mask = age_TC <= cache.lengths_PG[:, None, :, None, None, None] + number_T1
  return mask & (age_TC < window) if window else mask


def _prefix_mask(cache: Cache, tokens: int, slots: int, window: int) -> jax.Array:
  """[P, 1, 1 or G, 1, 1 or T, S]: which tokens of the prompts the new tokens see."""
  slots_S, lengths_P = jnp.arange(slots), cache.prefix.lengths_P[:, None, None, None, None, None]
  mask = slots_S < lengths_P
  if window:
    # The numbers of the new tokens in their rows, and of the prompts' tokens in their prompts.
    number = cache.lengths_PG[:, None, :, None, None, None] + jnp.arange(tokens)[:, None]
    number_in_prompt = slots_S + jnp.maximum(lengths_P - slots, 0)  # see `within_windows`
    mask &= lengths_P + number - number_in_prompt < window
  return mask


def _slots_last(stack: jax.Array, config: ModelConfig, axes: str) -> jax.Array:
  """Constrains the memory layout of a stack [..., C, E] on a TPU: the slots vary fastest.

  A TPU pads the axis that varies fastest to 128. Left to choose, XLA takes E, which is 64 in small
  models, and another layout for the other stack, and keeps copies in both layouts. `axes` is
  `Cache.axes`.
  """
  if config.platform != "tpu" or stack.shape[-1] % 128 == 0:
    return stack
  *outer, slots, element = range(stack.ndim)
  spec = PartitionSpec()
  if not config.on_one_device:
    of_axis = {"P": config.rows.spec[0], "K": None, "G": None}
    first = stack.ndim - 2 - len(axes)  # the number of the first of `axes`, which precede C and E
    if "K" in axes:
      of_axis["K"] = config.axis_of(stack.shape[first + axes.index("K")])
    of_slots = config.slots_axis(stack.shape[slots])
    spec = PartitionSpec(*[None] * first, *(of_axis[axis] for axis in axes), of_slots)
  return in_order(stack, (*outer, element, slots), config.rows, spec)


def _kernel() -> ModuleType:
  """Imports decode.py, only where its kernel fits, because other platforms cannot use it."""
  from grpo_jax.model.attention import decode

  return decode
