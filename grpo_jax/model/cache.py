"""What rows keep of their tokens: a struct that `features` takes and returns updated.

Layers with attention keep keys and values of every token. Layers that recur keep a state of fixed
size for each row, which begins as a copy of its prompt's.

The keys and values that a row attends to lie in two parts. The prompt's part is held once for the
whole group, in `Prefix`. The other part holds the row's own tokens. Arrays are [L, P, K, G, C, E]
with the layers of a stack (see stacks.py) on the first axis. The slots C lie next to E, because the
einsums of decoding read this order several times faster than an order with the slots first.

Rows come and go, so each has a length of its own. Yet all rows write their next token into the same
slot, one further with every pass and back to the first after the last. What a slot holds then
depends on its age alone: a row sees the slots that are younger than its own length. A slot for each
row would need a scatter, where this needs one slice.

The row's own part has no axis L where a stack has one layer. On one device it also has no axis P, K
or G of length 1. On a CPU, XLA would compute the write of a new token a second time to drop such an
axis, and copy the cache for that (experiments/LOG.md, 2026-11-25).
"""

from collections.abc import Mapping
import functools
from typing import Any

from flax import struct
import jax
from jax.experimental.layout import Layout, with_layout_constraint
import jax.numpy as jnp

from grpo_jax.model.attention import decode
from grpo_jax.model.attention.softmax import Int8, Own, Scoring, as_int8, softmax_attention
from grpo_jax.model.blocks import LayerMemory, Pass
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.mixers.seen import Attend, KeysAndValues, Recur, Scan

PerStack = dict[str, Any]  # one array for each stack of layers, or one `Int8`


class Prefix(struct.PyTreeNode):
  """What the layers keep of the prompts, which the G rows of a group share.

  Attributes:
    keys: [L, P, K, S, E] for each stack with attention.
    values: [L, P, K, S, E] for each of them, except where the keys are the values, too.
    lengths_P: int32, how many tokens each prompt has. Slots after them are not attended to.
    states: Arrays [L, P, ...] for each stack that recurs, after the prompts' last tokens.
  """

  keys: PerStack
  values: PerStack
  lengths_P: jax.Array
  states: PerStack = struct.field(default_factory=dict)

  @property
  def slots(self) -> int:
    """S, the number of slots for a prompt."""
    return next(iter(self.keys.values())).shape[-2]


class Cache(struct.PyTreeNode):
  """The cache of all layers. Rows are ordered by group: number p * G + g is row g of prompt p.

  Attributes:
    keys: [L, P, K, G, C, E] for each stack, without the axis L if it is 1 and without those of P, K
      and G that are not in `axes`. With `config.cache_dtype`, each is an `Int8`.
    values: The same.
    time: int32 scalar, how many tokens were written. Token number n lies in slot n modulo C.
    lengths_PG: int32, how many of the tokens written last are a row's own. At most C.
    prefix: The prompts of the groups, or None where the rows share no prompt.
    axes: Which of P, K and G are axes of the keys and values, in this order.
    states: Arrays [L, P, G, ...] for each stack that recurs, after the rows' last tokens.
  """

  keys: PerStack
  values: PerStack
  time: jax.Array
  lengths_PG: jax.Array
  prefix: Prefix | None = None
  states: PerStack = struct.field(default_factory=dict)
  axes: str = struct.field(pytree_node=False, default="PKG")

  @property
  def slots(self) -> int:
    """C, the number of slots for a row's own tokens."""
    return jax.tree.leaves(self.keys)[0].shape[-2]


def empty_cache(config: ModelConfig, prefix: Prefix, group_size: int, slots: int) -> Cache:
  """A cache for G rows per prompt of `prefix`, without any tokens of their own yet.

  Args:
    config: The model.
    prefix: The prompts, as `as_prefix` returns them.
    group_size: G, the rows of each prompt.
    slots: C, the slots for each row's own tokens.
  """
  P = prefix.lengths_P.shape[0]
  has_heads = any(keys.shape[2] > 1 for keys in prefix.keys.values())
  axes = _axes(config, P, group_size, has_heads)

  def zeros(of_prompts: jax.Array) -> jax.Array | Int8:
    L, _, K, _, E = of_prompts.shape
    shape = (L,) if L > 1 else ()
    whole = jnp.zeros((*shape, P, K, group_size, slots, E), of_prompts.dtype)
    stack = _without_axes(whole, axes)
    if not config.cache_dtype:
      return stack
    # Not as_int8: the compiler would round all the zeros itself, which took it seconds a stack.
    scales = jnp.zeros((*stack.shape[:-1], 1), jnp.float32)
    return Int8(stack.astype(jnp.int8), scales)

  def of_rows(state: jax.Array) -> jax.Array:
    return jnp.repeat(state[:, :, None], group_size, axis=2)

  keys, values = jax.tree.map(zeros, (prefix.keys, prefix.values))
  states, lengths_PG = jax.tree.map(of_rows, prefix.states), jnp.zeros((P, group_size), jnp.int32)
  return Cache(keys, values, jnp.int32(0), lengths_PG, prefix, states, axes)


def begin_rows(cache: Cache, begins_PG: jax.Array) -> Cache:
  """The cache with the prompts' states in the rows that begin. Their keys and values are hidden."""

  def begun(own: jax.Array, of_prompt: jax.Array) -> jax.Array:
    begins = begins_PG.reshape(*begins_PG.shape, *[1] * (own.ndim - 3))
    return jnp.where(begins, of_prompt[:, :, None], own)

  if not cache.states:
    return cache

  def begin(states: PerStack) -> PerStack:
    return jax.tree.map(begun, states, cache.prefix.states)

  # Most chunks have no new rows. The states alone go through the condition: keys and values would
  # be copied.
  states = jax.lax.cond(begins_PG.any(), begin, lambda states: states, cache.states)
  return cache.replace(states=states)


def slots_step(config: ModelConfig) -> int:
  """The slots of a cache are to be a multiple of this, so that decoding reads them by a kernel."""
  return decode.SLOTS if decode.fits(config) else 1


def as_prefix(cache: Cache, lengths_P: jax.Array) -> Prefix:
  """Makes the cache of a forward pass over prompts [P, S] the prefix of their groups."""

  def first_row(x: jax.Array) -> jax.Array:
    return x[:, :, :, 0]

  keys, values = jax.tree.map(first_row, (cache.keys, cache.values))
  states = jax.tree.map(lambda x: x[:, :, 0], cache.states)
  return Prefix(keys, values, lengths_P, states)


def rows_as_prefix(cache: Cache, lengths_P: jax.Array) -> Prefix:
  """Makes the rows of a cache the prompts of groups: what they share, and their own tokens.

  Args:
    cache: Of one prompt and P rows that have filled their slots.
    lengths_P: int32, how many tokens each prompt has with those that all share.
  """

  def whole(shared: jax.Array, own: jax.Array) -> jax.Array:
    own = _with_axes(own, cache.axes)
    own_LKPCE = (own if own.ndim == 6 else own[None])[:, 0]
    own_LPKCE = own_LKPCE.transpose(0, 2, 1, 3, 4)
    shape = (*own_LPKCE.shape[:3], *shared.shape[-2:])
    return jnp.concatenate([jnp.broadcast_to(shared, shape), own_LPKCE], axis=-2)

  prefix = cache.prefix
  keys, values = jax.tree.map(whole, (prefix.keys, prefix.values), (cache.keys, cache.values))
  states = jax.tree.map(lambda x: x[:, 0], cache.states)
  return Prefix(keys, values, lengths_P, states)


def with_slots(cache: Cache, slots: int) -> Cache:
  """The cache with another number of slots, at least as many as the longest row has tokens."""
  kept = min(cache.slots, slots)
  # The last tokens are kept, and lie in the order of their age.
  first = jnp.maximum(cache.time - kept, 0)
  from_C = (first + jnp.arange(kept)) % cache.slots

  def own(stack: jax.Array) -> jax.Array:
    ordered = jnp.take(stack, from_C, axis=-2)
    return jnp.pad(ordered, [(0, 0)] * (stack.ndim - 2) + [(0, slots - kept), (0, 0)])

  keys, values = jax.tree.map(own, (cache.keys, cache.values))
  return cache.replace(keys=keys, values=values, time=jnp.minimum(cache.time, kept))


def take_rows(config: ModelConfig, cache: Cache, rows_PG: jax.Array, prompts_P: jax.Array) -> Cache:
  """A cache of chosen rows.

  Args:
    config: The model.
    cache: A cache with a prefix.
    rows_PG: int32 [P', G'], the numbers p * G + g of the rows to take.
    prompts_P: int32 [P'], which prompt of the prefix each new group has.
  """
  rows_N, (P, G) = rows_PG.reshape(-1), rows_PG.shape
  axes = _axes(config, P, G, "K" in cache.axes)

  def own(stack: jax.Array) -> jax.Array:
    *L, _, K, _, C, E = (whole := _with_axes(stack, cache.axes)).shape
    x = jnp.moveaxis(whole, -3, -4).reshape(*L, -1, K, C, E)
    x = jnp.take(x, rows_N, axis=len(L)).reshape(*L, P, G, K, C, E)
    return _without_axes(jnp.moveaxis(x, -4, -3), axes)

  keys, values = jax.tree.map(own, (cache.keys, cache.values))
  lengths_PG = cache.lengths_PG.reshape(-1)[rows_PG]
  prefix = take_prompts(cache.prefix, prompts_P)

  def taken(state: jax.Array) -> jax.Array:
    L, _, _, *rest = state.shape
    return jnp.take(state.reshape(L, -1, *rest), rows_PG, axis=1)

  states = jax.tree.map(taken, cache.states)
  return Cache(keys, values, cache.time, lengths_PG, prefix, states, axes)


def roll_rows(cache: Cache, by_PG: jax.Array) -> Cache:
  """The cache with each row's tokens as many slots further, round the end.

  A row that paused, or that drops its last tokens, has its own tokens in the slots written last
  again. A state cannot drop tokens: it stays.
  """
  P, G = by_PG.shape
  from_PGC = (jnp.arange(cache.slots) - by_PG[..., None]) % cache.slots

  def own(stack: jax.Array) -> jax.Array:
    whole = _with_axes(stack, cache.axes)
    index = from_PGC.reshape(*[1] * (whole.ndim - 5), P, 1, G, cache.slots, 1)
    return _without_axes(jnp.take_along_axis(whole, index, axis=-2), cache.axes)

  keys, values = jax.tree.map(own, (cache.keys, cache.values))
  return cache.replace(keys=keys, values=values)


def take_prompts(prefix: Prefix, from_P: jax.Array) -> Prefix:
  """The prefix with prompt from_P[p] at each place p."""

  def take(x: jax.Array) -> jax.Array:
    return jnp.take(x, from_P, axis=1)

  keys, values, states = jax.tree.map(take, (prefix.keys, prefix.values, prefix.states))
  return Prefix(keys, values, prefix.lengths_P[from_P], states)


def put_prompts(prefix: Prefix, places_N: jax.Array, prompts: Prefix) -> Prefix:
  """The prefix with other prompts in some places.

  Args:
    prefix: P prompts.
    places_N: int32, the place of each new prompt. One that is P or more is left out.
    prompts: N prompts, padded to at most S tokens. What lies in the slots after them is not read.
  """

  def put(old: jax.Array, new: jax.Array) -> jax.Array:
    return old.at[:, places_N, :, : new.shape[-2]].set(new, mode="drop")

  def put_state(old: jax.Array, new: jax.Array) -> jax.Array:
    return old.at[:, places_N].set(new, mode="drop")

  keys, values = jax.tree.map(put, (prefix.keys, prefix.values), (prompts.keys, prompts.values))
  states = jax.tree.map(put_state, prefix.states, prompts.states)
  lengths_P = prefix.lengths_P.at[places_N].set(prompts.lengths_P, mode="drop")
  return Prefix(keys, values, lengths_P, states)


def with_cache(config: ModelConfig, cache: Cache, window: int, memory: LayerMemory) -> Attend:
  """Attention of new tokens [B, T] to themselves and to the rows' earlier tokens in `cache`.

  Beside its output, it returns the stack's keys and values with the new ones in their slots. It
  returns None where the layer borrows keys and values: then they are in their slots already.
  """

  def attend_with_cache(
    q_BTHE: jax.Array,
    k_BTKE: jax.Array | None,
    v_BTKE: jax.Array | None,
    sinks_H: jax.Array | None = None,
  ) -> tuple[jax.Array, KeysAndValues | None]:
    (B, T, H, E), (P, G) = q_BTHE.shape, cache.lengths_PG.shape
    K = _with_axes(jax.tree.leaves(memory.own)[0], cache.axes).shape[-4]
    q_PKGRTE = q_BTHE.reshape(P, G, T, K, H // K, E).transpose(0, 3, 1, 4, 2, 5)

    def put(stack: jax.Array, new: jax.Array) -> jax.Array:
      layer = [memory.place][: stack.ndim - new.ndim]
      new = new.reshape((1,) * len(layer) + new.shape)
      start = [*layer, *[0] * len(cache.axes), cache.time % cache.slots, 0]
      return _slots_last(jax.lax.dynamic_update_slice(stack, new, start), config, E)

    def by_kernel(q_PKGRTE: jax.Array, own: KeysAndValues, prefix_mask: Any) -> jax.Array:
      whole = jax.tree.map(lambda x: _with_axes(x, cache.axes), own)
      whole = jax.tree.map(lambda x: x if x.ndim == 6 else x[None], whole)
      visible_PG = cache.lengths_PG + 1
      visible_PG = jnp.minimum(visible_PG, window) if window else visible_PG
      tokens = decode.OwnTokens(whole, memory.place, cache.time, visible_PG)
      mask = None if prefix_mask is None else prefix_mask[..., 0, :]
      return decode.attention(config, q_PKGRTE[..., 0, :], tokens, prefix, mask, sinks_H)

    def write(stack: Any, new_BTKE: jax.Array) -> Any:
      new = new_BTKE.reshape(P, G, T, K, E).transpose(0, 3, 1, 2, 4)
      new = _without_axes(new, cache.axes)
      new = as_int8(new) if isinstance(stack, Int8) else new.astype(stack.dtype)
      return jax.tree.map(put, stack, new)

    def read(stack: jax.Array) -> jax.Array:
      if stack.ndim == len(cache.axes) + 2:
        return stack
      return jax.lax.dynamic_index_in_dim(stack, memory.place, 0, keepdims=False)

    stacks_of_own, written = memory.own, None
    if k_BTKE is not None:
      values = None if v_BTKE is None else write(memory.own[1], v_BTKE)
      stacks_of_own = written = write(memory.own[0], k_BTKE), values
    prefix = _both(memory.prefix) if cache.prefix is not None else None
    prefix_mask = _prefix_mask(cache, T, prefix[0].shape[-2], window) if prefix else None
    if T == 1 and decode.fits(config) and cache.slots % decode.SLOTS == 0:
      out = by_kernel(q_PKGRTE, _both(stacks_of_own), prefix_mask)
      return out.transpose(0, 2, 1, 3, 4).reshape(B, 1, H, E), written
    mask = _own_mask(cache, T, window)
    keys, values = jax.tree.map(read, _both(stacks_of_own))
    own, scoring = Own(keys, values, cache.axes.lower()), Scoring(config.attention_cap, sinks_H)
    out = softmax_attention(q_PKGRTE, own, mask, prefix, prefix_mask, scoring)
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(B, T, H, E), written

  return attend_with_cache


def _both(pair: tuple[Any, Any]) -> tuple[Any, Any]:
  """Keys and values, of which the keys may be the values, too."""
  keys, values = pair
  return keys, keys if values is None else values


def recur_with_cache(cache: Cache, lengths_B: jax.Array, memory: LayerMemory) -> Recur:
  """The recurrence of new tokens [B, T] from the rows' states in `cache`.

  Beside its output, it returns the stack's states with those after the new tokens.

  Args:
    cache: The cache.
    lengths_B: int32, how many of the T tokens each row has.
    memory: The states.
  """
  P, G = cache.lengths_PG.shape

  def recur(scan: Scan, inputs_BT: Any, empty: Any) -> tuple[Any, Any]:
    del empty
    T = jax.tree.leaves(inputs_BT)[0].shape[1]

    def read(stack: jax.Array) -> jax.Array:
      layer = jax.lax.dynamic_index_in_dim(stack, memory.place, 0, keepdims=False)
      return layer.reshape(P * G, *layer.shape[2:])

    def write(stack: jax.Array, new_B: jax.Array) -> jax.Array:
      layer = new_B.reshape(P, G, *new_B.shape[1:]).astype(stack.dtype)
      return jax.lax.dynamic_update_index_in_dim(stack, layer, memory.place, 0)

    is_token_BT = jnp.arange(T) < lengths_B[:, None]
    out, state_B = scan(inputs_BT, jax.tree.map(read, memory.own), is_token_BT)
    return out, jax.tree.map(write, memory.own, state_B)

  return recur


def to_pass(config: ModelConfig, cache: Cache, lengths_B: jax.Array) -> Pass:
  """The pass of new tokens that attend to themselves and to those in the cache.

  Args:
    config: The model.
    cache: The cache.
    lengths_B: int32, how many new tokens each row has.
  """

  def pairs(layers: Cache | Prefix) -> dict[str, KeysAndValues]:
    return {name: (keys, layers.values.get(name)) for name, keys in layers.keys.items()}

  attend = functools.partial(with_cache, config, cache)
  recur = functools.partial(recur_with_cache, cache, lengths_B)
  own = pairs(cache) | cache.states
  return Pass(attend, recur, own, pairs(cache.prefix) if cache.prefix else {})


def updated(cache: Cache, own: Mapping[str, Any], tokens: int) -> Cache:
  """The cache after a pass of `to_pass` over rows of `tokens` new tokens."""
  keys = {name: own[name][0] for name in cache.keys}
  values = {name: own[name][1] for name in cache.values}
  states = {name: own[name] for name in cache.states}
  time, lengths_PG = cache.time + tokens, cache.lengths_PG + tokens
  return cache.replace(keys=keys, values=values, time=time, lengths_PG=lengths_PG, states=states)


def of_rows(kept: Mapping[str, Any], tokens: int) -> Cache:
  """The cache after a pass over rows of `tokens` tokens without one.

  Args:
    kept: Of each stack, keys and values [L, B, T, K, E], or arrays [L, B, ...] of states.
    tokens: T.
  """

  def ordered(x_LBTKE: jax.Array) -> jax.Array:
    return x_LBTKE.transpose(0, 1, 3, 2, 4)[:, :, :, None]

  # Attention keeps a pair, and a layer that recurs a struct.
  pairs = {name: pair for name, pair in kept.items() if isinstance(pair, tuple)}
  keys = {name: ordered(keys) for name, (keys, _) in pairs.items()}
  values = {name: ordered(values) for name, (_, values) in pairs.items() if values is not None}
  recurring = {name: state for name, state in kept.items() if name not in pairs}
  states = jax.tree.map(lambda x: x[:, :, None], recurring)
  B = jax.tree.leaves(kept)[0].shape[1]
  lengths_PG = jnp.full((B, 1), tokens, jnp.int32)
  return Cache(keys, values, jnp.int32(tokens), lengths_PG, states=states)


def _own_mask(cache: Cache, tokens: int, window: int) -> jax.Array:
  """[P, 1, G, 1, T, C]: which slots the rows' new tokens see. They are written before.

  Args:
    cache: Before the pass. A pass of several tokens must not go past the last slot.
    tokens: T.
    window: As in `View`.
  """
  place_T1 = jnp.arange(tokens)[:, None]
  age_TC = (cache.time + place_T1 - jnp.arange(cache.slots)) % cache.slots
  mask = age_TC <= cache.lengths_PG[:, None, :, None, None, None] + place_T1
  return mask & (age_TC < window) if window else mask


def _prefix_mask(cache: Cache, tokens: int, slots: int, window: int) -> jax.Array:
  """[P, 1, 1 or G, 1, 1 or T, S]: which tokens of the prompts the new tokens see."""
  slots_S, lengths_P = jnp.arange(slots), cache.prefix.lengths_P[:, None, None, None, None, None]
  mask = slots_S < lengths_P
  if window:
    place = cache.lengths_PG[:, None, :, None, None, None] + jnp.arange(tokens)[:, None]
    mask &= lengths_P + place - slots_S < window
  return mask


def _slots_last(stack: jax.Array, config: ModelConfig, head_dim: int) -> jax.Array:
  """Fixes the order of a stack [..., C, E] in the memory of a TPU: the slots vary fastest.

  A TPU pads the axis that varies fastest to 128. If XLA may choose, it takes E, which is 64 in
  small models, and a second order for the other stack, and keeps copies in both.
  """
  if config.platform != "tpu" or head_dim % 128 == 0:
    return stack
  *outer, slots, element = range(stack.ndim)
  return with_layout_constraint(stack, Layout(major_to_minor=(*outer, element, slots)))


def _axes(config: ModelConfig, prompts: int, group_size: int, has_heads: bool) -> str:
  """`Cache.axes` of so many rows. `has_heads`: some stack has several heads of keys."""
  needed = {"P": prompts > 1, "K": has_heads, "G": group_size > 1}
  return "".join(axis for axis in needed if needed[axis] or not config.on_one_device)


def _with_axes(stack: jax.Array, axes: str) -> jax.Array:
  """A stack [..., P, K, G, C, E] from one that has only some of P, K and G."""
  return jnp.expand_dims(stack, _dropped(axes))


def _without_axes(whole: jax.Array, axes: str) -> jax.Array:
  """The inverse of `_with_axes`."""
  return jnp.squeeze(whole, _dropped(axes))


def _dropped(axes: str) -> tuple[int, ...]:
  """Which axes of [..., P, K, G, C, E] are not in `axes`, counted from the last."""
  return tuple(place - 5 for place, axis in enumerate("PKG") if axis not in axes)
