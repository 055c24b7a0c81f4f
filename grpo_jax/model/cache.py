"""The KV cache: keys, values and recurrent states of the rows' tokens. `features` updates it.

Attention layers keep the keys and values of every token. Recurrent layers keep a state of fixed
size for each row, which starts as a copy of its prompt's state.

A row attends to its prompt and to its own tokens. `Prefix` holds the prompt's keys and values once
for the whole group. `Cache` holds the rows' own tokens, [L, P, K, G, C, E], with the layers of a
stack (see stacks.py) on the first axis. The slots C are next to E, because the einsums of decoding
read this order several times faster than an order with the slots first.

Rows start and end at different times, so each has its own length. Yet all rows write their next
token into the same slot, which advances by one with every pass and wraps around after the last.
The age of a slot thus tells whose it is: a row attends to the slots that are younger than its own
length. One slot per row would need a scatter, while a common slot needs one slice update.

Layers with a window need few slots, whatever the length of a row: their slots are a ring buffer of
the newest tokens (see `ring_slots`). Of the prompts, they keep the last tokens.

The arrays of `Cache` have no axis L where a stack has one layer. On one device they also have no
axis P, K or G of length 1. To drop such an axis, XLA on a CPU would compute the write of a new
token twice, and copy the cache for that (experiments/LOG.md, 2026-11-25).
"""

import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from grpo_jax.model.attention import decode_choice
from grpo_jax.model.attention.softmax import Int8
from grpo_jax.model.config import SLOTS_AXIS, ModelConfig
from grpo_jax.model.stacks import stacks

PerStack = dict[str, Any]  # one array for each stack of layers, or one `Int8`


class Prefix(struct.PyTreeNode):
  """The keys, values and states of the prompts, which the G rows of a group share.

  Attributes:
    keys: [L, P, K, S, E] for each stack with attention. A stack with fewer slots than S has the
      keys of each prompt's last tokens (see `within_windows`).
    values: The values, in the form of `keys`. Stacks whose keys are also the values have none.
    lengths_P: int32, how many tokens each prompt has. Attention masks the slots after them.
    states: Arrays [L, P, ...] for each recurrent stack: the states after the prompts' last tokens.
    slots: S, the largest number of tokens of a prompt.
  """

  keys: PerStack
  values: PerStack
  lengths_P: jax.Array
  states: PerStack
  slots: int = struct.field(pytree_node=False)


class Cache(struct.PyTreeNode):
  """The cache of all layers. Rows are ordered by group: number p * G + g is row g of prompt p.

  Attributes:
    keys: [L, P, K, G, C, E] for each stack, without the axis L if it is 1 and without the axes P, K
      and G that `axes` does not name. With `config.cache_dtype`, each is an `Int8`. C is `slots`,
      or less for a stack with a window.
    values: The values, in the form of `keys`.
    time: int32 scalar, how many tokens were written. Token number n is in slot n modulo C.
    lengths_PG: int32, how many of the most recently written tokens belong to the row. At most
      `slots`.
    prefix: The prompts of the groups, or None where the rows share no prompt.
    states: Arrays [L, P, G, ...] for each recurrent stack: the states after the rows' last tokens.
    slots: The largest number of tokens of a row, its prompt not included.
    rewind: The largest number of slots by which `roll_rows` may move a row's tokens. None allows
      any number, and passes of several tokens: then layers with a window have all slots, too.
    axes: Which of P, K and G are axes of the keys and values, in this order.
  """

  keys: PerStack
  values: PerStack
  time: jax.Array
  lengths_PG: jax.Array
  prefix: Prefix | None = None
  states: PerStack = struct.field(default_factory=dict)
  slots: int = struct.field(pytree_node=False, kw_only=True)
  rewind: int | None = struct.field(pytree_node=False, default=None)
  axes: str = struct.field(pytree_node=False, default="PKG")


def ring_slots(config: ModelConfig, window: int, slots: int, rewind: int | None) -> int:
  """Returns C, the number of slots, for the layers with this window.

  A pass writes a token and then reads it and the window - 1 tokens before it, so `window` slots are
  enough for a row that never pauses. A row may pause while other rows go on: each pass then writes
  a slot that is not the row's. It may also drop its last tokens. `roll_rows` later moves the row's
  tokens over these slots, which are at most `rewind`. Until then, the cache must hold them and the
  window - 1 older tokens that the row's next pass reads: window - 1 + rewind slots.

  Args:
    config: The model.
    window: How many tokens a token attends to, itself included. 0 means all earlier tokens.
    slots: As in `Cache`.
    rewind: As in `Cache`.
  """
  if not window or rewind is None:
    return slots
  step = slots_step(config)
  return min(slots, -(-max(window, window - 1 + rewind) // step) * step)


def _slots_of_stacks(config: ModelConfig, slots: int, rewind: int | None) -> dict[str, int]:
  """Name of each stack -> C, the number of its slots."""
  return {
    name: ring_slots(config, config.kind(numbers[0]).window, slots, rewind)
    for name, numbers in stacks(config).items()
  }


def empty_cache(
  config: ModelConfig, prefix: Prefix, group_size: int, slots: int, rewind: int | None = None
) -> Cache:
  """Creates a cache for G rows of each prompt in `prefix`. The rows have no tokens of their own.

  Args:
    config: The model.
    prefix: The prompts, as `as_prefix` returns them.
    group_size: G, the rows of each prompt.
    slots: As in `Cache`.
    rewind: As in `Cache`.
  """
  P = prefix.lengths_P.shape[0]
  has_heads = any(keys.shape[2] > 1 for keys in prefix.keys.values())
  axes = _axes(config, P, group_size, has_heads)
  slots_of = _slots_of_stacks(config, slots, rewind)

  def zeros(name: str, of_prompts: jax.Array) -> jax.Array | Int8:
    """The rows' empty stack of this name, in the form of that of the prompts, [L, P, K, S, E]."""
    L, _, K, _, E = of_prompts.shape
    shape = (L,) if L > 1 else ()  # a stack of one layer has no axis L
    whole = jnp.zeros((*shape, P, K, group_size, slots_of[name], E), of_prompts.dtype)
    stack = without_axes(whole, axes)
    if not config.cache_dtype:
      return stack
    # Not as_int8: the compiler would evaluate it for all the zeros, which took seconds per stack.
    scales = jnp.zeros((*stack.shape[:-1], 1), jnp.float32)
    return Int8(stack.astype(jnp.int8), scales)

  def of_rows(state: jax.Array) -> jax.Array:
    return jnp.repeat(state[:, :, None], group_size, axis=2)

  return Cache(
    keys={name: zeros(name, x) for name, x in prefix.keys.items()},
    values={name: zeros(name, x) for name, x in prefix.values.items()},
    time=jnp.int32(0),
    lengths_PG=jnp.zeros((P, group_size), jnp.int32),
    prefix=prefix,
    states=jax.tree.map(of_rows, prefix.states),
    slots=slots,
    rewind=rewind,
    axes=axes,
  )


def begin_rows(cache: Cache, begins_PG: jax.Array) -> Cache:
  """Copies the prompts' states into the rows that begin, where `begins_PG` is True.

  Old keys and values of these rows may stay: attention masks them by `Cache.lengths_PG`.
  """

  def begun(of_rows: jax.Array, of_prompts: jax.Array) -> jax.Array:
    """Updates an array of states, [L, P, G, ...], from that of the prompts, [L, P, ...]."""
    begins = begins_PG.reshape(*begins_PG.shape, *[1] * (of_rows.ndim - 3))
    return jnp.where(begins, of_prompts[:, :, None], of_rows)

  if not cache.states:  # attention layers need no copy: rows read the prompt in `Cache.prefix`
    return cache

  def begin(states: PerStack) -> PerStack:
    return jax.tree.map(begun, states, cache.prefix.states)

  # Most calls begin no rows, hence the condition. Only the states go through it, because it would
  # copy keys and values.
  states = jax.lax.cond(begins_PG.any(), begin, lambda states: states, cache.states)
  return cache.replace(states=states)


def slots_step(config: ModelConfig) -> int:
  """The number of which `Cache.slots` should be a multiple, for the decoding kernel or the mesh."""
  return config.slot_shards * (decode_choice.SLOTS if decode_choice.fits(config) else 1)


def with_slots(config: ModelConfig, cache: Cache, slots: int) -> Cache:
  """Changes the number of slots, to at least as many as the longest row has tokens.

  `Cache.time` becomes at most the old and the new number of slots, as if no more tokens had been
  written. So the next token comes right after the rows' tokens, in all stacks.
  """
  time = jnp.minimum(cache.time, min(cache.slots, slots))
  slots_of = _slots_of_stacks(config, slots, cache.rewind)

  def resized(old_stack: jax.Array, C: int) -> jax.Array:
    # How many tokens ago each new slot was written by the new `time`, and the old slot of that age.
    age_C = (time - 1 - jnp.arange(C)) % C
    old_slot_C = (cache.time - 1 - age_C) % old_stack.shape[-2]
    # New slots that are older than all old ones get any token, because no row sees them.
    return jnp.take(old_stack, old_slot_C, axis=-2)

  def all_resized(old: PerStack) -> PerStack:
    # An `Int8` has two arrays: numbers and scales.
    return {
      name: jax.tree.map(functools.partial(resized, C=slots_of[name]), stack)
      for name, stack in old.items()
    }

  return cache.replace(
    keys=all_resized(cache.keys), values=all_resized(cache.values), time=time, slots=slots
  )


def take_rows(config: ModelConfig, cache: Cache, rows_PG: jax.Array, prompts_P: jax.Array) -> Cache:
  """Selects rows of a cache, and arranges them in new groups.

  Args:
    config: The model.
    cache: A cache with a prefix.
    rows_PG: int32 [P', G'], the numbers p * G + g of the rows to take.
    prompts_P: int32 [P'], the prompt of the prefix that each new group has.
  """
  rows_N, (P, G) = rows_PG.reshape(-1), rows_PG.shape
  axes = _axes(config, P, G, "K" in cache.axes)

  def taken(stack: jax.Array) -> jax.Array:
    # P and G become neighbours, and then one axis, whose indices are the numbers of rows.
    whole = with_axes(stack, cache.axes)
    *L, _, K, _, C, E = whole.shape  # `L` is an empty list where the stack has no axis L
    x = jnp.moveaxis(whole, -3, -4).reshape(*L, -1, K, C, E)
    x = jnp.take(x, rows_N, axis=len(L)).reshape(*L, P, G, K, C, E)
    return without_axes(jnp.moveaxis(x, -4, -3), axes)

  keys, values = jax.tree.map(taken, (cache.keys, cache.values))
  lengths_PG = cache.lengths_PG.reshape(-1)[rows_PG]
  prefix = take_prompts(cache.prefix, prompts_P)

  def taken_state(state: jax.Array) -> jax.Array:
    L, _, _, *rest = state.shape
    return jnp.take(state.reshape(L, -1, *rest), rows_PG, axis=1)

  states = jax.tree.map(taken_state, cache.states)
  return cache.replace(
    keys=keys, values=values, lengths_PG=lengths_PG, prefix=prefix, states=states, axes=axes
  )


def roll_rows(cache: Cache, by_PG: jax.Array, shards: int = 1) -> Cache:
  """Moves each row's tokens forward by `by_PG` slots, at most `cache.rewind`, wrapping around.

  A row that paused, or that drops its last tokens, then has its tokens in the most recently written
  slots again. Recurrent states stay, because a state cannot drop tokens.

  Args:
    cache: The cache, or a device's part of it within a shard_map.
    by_PG: int32, the number of slots for each row.
    shards: How many devices split the slots of a row, `ModelConfig.slot_shards`. Each gets the
      slots before its own from the devices before it.
  """
  P, G = by_PG.shape
  if cache.rewind == 0:  # no row has a slot to move over
    return cache
  if shards > 1 and cache.rewind is None:
    raise ValueError("tokens move by any number of slots only where a device has all of them")

  def slots_before(whole: jax.Array) -> jax.Array:
    """The `cache.rewind` slots [..., rewind, E] before those of this device, oldest first."""
    C, left, parts = whole.shape[-2], cache.rewind, list[jax.Array]()
    for distance in range(1, -(-left // C) + 1):
      count = min(C, left)
      newest = jax.lax.slice_in_dim(whole, C - count, C, axis=-2)
      to_next = [(place, (place + distance) % shards) for place in range(shards)]
      parts.insert(0, jax.lax.ppermute(newest, SLOTS_AXIS, to_next))
      left -= count
    return jnp.concatenate(parts, -2)

  def rolled(stack: jax.Array) -> jax.Array:
    whole = with_axes(stack, cache.axes)
    C = whole.shape[-2]
    if shards > 1:
      from_PGC = cache.rewind + jnp.arange(C) - by_PG[..., None]
      whole = jnp.concatenate([slots_before(whole), whole], -2)
    else:
      from_PGC = (jnp.arange(C) - by_PG[..., None]) % C
    index = from_PGC.reshape(*[1] * (whole.ndim - 5), P, 1, G, C, 1)
    return without_axes(jnp.take_along_axis(whole, index, axis=-2), cache.axes)

  keys, values = jax.tree.map(rolled, (cache.keys, cache.values))
  return cache.replace(keys=keys, values=values)


def take_prompts(prefix: Prefix, from_P: jax.Array, one_by_one: bool = False) -> Prefix:
  """Selects prompts: prompt p of the result is prompt from_P[p].

  Args:
    prefix: The prompts.
    from_P: int32.
    one_by_one: Copies each prompt with an instruction of its own. A TPU gathers several long ones
      in small parts, and reads them many times (experiments/LOG.md, 2026-11-30).
  """

  def take(x: jax.Array) -> jax.Array:
    if not one_by_one:
      return jnp.take(x, from_P, axis=1)

    def copy(p: jax.Array, taken: jax.Array) -> jax.Array:
      one = jax.lax.dynamic_slice_in_dim(x, from_P[p], 1, axis=1)
      return jax.lax.dynamic_update_slice_in_dim(taken, one, p, axis=1)

    empty = jnp.zeros((x.shape[0], len(from_P), *x.shape[2:]), x.dtype)
    return jax.lax.fori_loop(0, len(from_P), copy, empty)

  keys, values, states = jax.tree.map(take, (prefix.keys, prefix.values, prefix.states))
  lengths_P = prefix.lengths_P[from_P]
  return prefix.replace(keys=keys, values=values, lengths_P=lengths_P, states=states)


def _axes(config: ModelConfig, prompts: int, group_size: int, has_heads: bool) -> str:
  """`Cache.axes` for these numbers of prompts and rows. `has_heads`: a stack has several K."""
  needed = {"P": prompts > 1, "K": has_heads, "G": group_size > 1}
  return "".join(axis for axis in needed if needed[axis] or not config.on_one_device)


def with_axes(stack: jax.Array, axes: str) -> jax.Array:
  """Expands a stack that has only `axes` of P, K and G to [..., P, K, G, C, E]."""
  return jnp.expand_dims(stack, _dropped(axes))


def without_axes(whole: jax.Array, axes: str) -> jax.Array:
  """The inverse of `with_axes`."""
  return jnp.squeeze(whole, _dropped(axes))


def _dropped(axes: str) -> tuple[int, ...]:
  """The axes of [..., P, K, G, C, E] that are not in `axes`, as negative indices."""
  return tuple(place - 5 for place, axis in enumerate("PKG") if axis not in axes)
