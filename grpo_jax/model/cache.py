"""The memory that rows have of their tokens: a struct that `features` takes and returns updated.

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

Layers with a window need few slots, whatever the length of a row: their slots are a ring that holds
the newest tokens alone (see `ring_slots`). Of the prompts, they keep the last tokens.

The row's own part has no axis L where a stack has one layer. On one device it also has no axis P, K
or G of length 1. On a CPU, XLA would compute the write of a new token a second time to drop such an
axis, and copy the cache for that (experiments/LOG.md, 2026-11-25).
"""

import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from grpo_jax.model.attention import decode_choice
from grpo_jax.model.attention.softmax import Int8
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.stacks import stacks

PerStack = dict[str, Any]  # one array for each stack of layers, or one `Int8`


class Prefix(struct.PyTreeNode):
  """The memory that layers have of the prompts, which the G rows of a group share.

  Attributes:
    keys: [L, P, K, S, E] for each stack with attention. A stack with fewer slots than S has those
      of each prompt's last tokens (see `within_windows`).
    values: The same for each of them, except where the keys are the values, too.
    lengths_P: int32, how many tokens each prompt has. Slots after them are not attended to.
    states: Arrays [L, P, ...] for each stack that recurs, after the prompts' last tokens.
    slots: S, the most tokens that a prompt may have.
  """

  keys: PerStack
  values: PerStack
  lengths_P: jax.Array
  states: PerStack
  slots: int = struct.field(pytree_node=False)


class Cache(struct.PyTreeNode):
  """The cache of all layers. Rows are ordered by group: number p * G + g is row g of prompt p.

  Attributes:
    keys: [L, P, K, G, C, E] for each stack, without the axis L if it is 1 and without those of P, K
      and G that are not in `axes`. With `config.cache_dtype`, each is an `Int8`. Each stack has a C
      of its own: `slots`, or less with a window.
    values: The values, in arrays like those of the keys.
    time: int32 scalar, how many tokens were written. Token number n lies in slot n modulo C.
    lengths_PG: int32, how many of the tokens written last are a row's own. At most `slots`.
    prefix: The prompts of the groups, or None where the rows share no prompt.
    states: Arrays [L, P, G, ...] for each stack that recurs, after the rows' last tokens.
    slots: The most own tokens that a row may have.
    rewind: The most slots by which `roll_rows` moves a row's tokens. None means any number, and
      that passes may have several tokens: then layers with a window have all slots, too.
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
  """C of the layers with a window.

  A pass writes a token and then reads it and the window - 1 before it, so a window of slots is
  enough for a row that goes on. One that ends stays while others go on. Each pass then writes a
  slot that is not its own, until it is rolled back by as many slots, and by those of the tokens
  that it drops. Before its next pass, the window - 1 tokens that it will read lie behind `rewind`
  slots. Together these are window - 1 + rewind.

  Args:
    config: The model.
    window: How many tokens a token attends to, itself included. 0 means all earlier tokens.
    slots: The most own tokens that a row may have.
    rewind: The most slots by which a row's tokens are moved. None means any number.
  """
  if not window or rewind is None:
    return slots
  step = slots_step(config)
  return min(slots, -(-max(window, window - 1 + rewind) // step) * step)


def _slots_of_stacks(config: ModelConfig, slots: int, rewind: int | None) -> dict[str, int]:
  """C of each stack."""
  return {
    name: ring_slots(config, config.kind(numbers[0]).window, slots, rewind)
    for name, numbers in stacks(config).items()
  }


def empty_cache(
  config: ModelConfig, prefix: Prefix, group_size: int, slots: int, rewind: int | None = None
) -> Cache:
  """A cache for G rows per prompt of `prefix`, without any tokens of their own yet.

  Args:
    config: The model.
    prefix: The prompts, as `as_prefix` returns them.
    group_size: G, the rows of each prompt.
    slots: The most own tokens that a row may have.
    rewind: The most slots by which a row's tokens are moved. None means any number.
  """
  P = prefix.lengths_P.shape[0]
  has_heads = any(keys.shape[2] > 1 for keys in prefix.keys.values())
  axes = _axes(config, P, group_size, has_heads)

  C = _slots_of_stacks(config, slots, rewind)

  def zeros(name: str, of_prompts: jax.Array) -> jax.Array | Int8:
    L, _, K, _, E = of_prompts.shape
    shape = (L,) if L > 1 else ()
    whole = jnp.zeros((*shape, P, K, group_size, C[name], E), of_prompts.dtype)
    stack = without_axes(whole, axes)
    if not config.cache_dtype:
      return stack
    # Not as_int8: the compiler would round all the zeros itself, which took it seconds a stack.
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
  return decode_choice.SLOTS if decode_choice.fits(config) else 1


def as_prefix(cache: Cache, lengths_P: jax.Array) -> Prefix:
  """Makes the cache of a forward pass over prompts [P, S] the prefix of their groups."""

  def first_row(x: jax.Array) -> jax.Array:
    return x[:, :, :, 0]

  keys, values = jax.tree.map(first_row, (cache.keys, cache.values))
  states = jax.tree.map(lambda x: x[:, :, 0], cache.states)
  return Prefix(keys, values, lengths_P, states, cache.slots)


def within_windows(config: ModelConfig, prefix: Prefix) -> Prefix:
  """The prefix with the tokens that completions see: with a window, the last ones of each prompt.

  A stack of n slots has token max(length - n, 0) of each prompt in its first slot.
  """

  def last(name: str, x_LPKSE: jax.Array) -> jax.Array:
    window, S = config.kind(numbers[name][0]).window, x_LPKSE.shape[3]
    if not window or window >= S:
      return x_LPKSE
    first_P = jnp.maximum(prefix.lengths_P - window, 0)
    from_PS = first_P[:, None] + jnp.arange(window)
    return jnp.take_along_axis(x_LPKSE, from_PS[None, :, None, :, None], axis=3)

  numbers = stacks(config)
  keys = {name: last(name, x) for name, x in prefix.keys.items()}
  values = {name: last(name, x) for name, x in prefix.values.items()}
  return prefix.replace(keys=keys, values=values)


def rows_as_prefix(cache: Cache, lengths_P: jax.Array) -> Prefix:
  """Makes the rows of a cache the prompts of groups: what they share, and their own tokens.

  Args:
    cache: A cache of one prompt and P rows that have filled their slots.
    lengths_P: int32, how many tokens each prompt has with those that all share.
  """

  def whole(shared: jax.Array, own: jax.Array) -> jax.Array:
    own = with_axes(own, cache.axes)
    own_LKPCE = (own if own.ndim == 6 else own[None])[:, 0]
    own_LPKCE = own_LKPCE.transpose(0, 2, 1, 3, 4)
    shape = (*own_LPKCE.shape[:3], *shared.shape[-2:])
    return jnp.concatenate([jnp.broadcast_to(shared, shape), own_LPKCE], axis=-2)

  prefix = cache.prefix
  keys, values = jax.tree.map(whole, (prefix.keys, prefix.values), (cache.keys, cache.values))
  states = jax.tree.map(lambda x: x[:, 0], cache.states)
  return Prefix(keys, values, lengths_P, states, prefix.slots + cache.slots)


def rows_as_prompts(cache: Cache, own_P: jax.Array, passes_P: jax.Array) -> Prefix:
  """Joins each prompt and the tokens of its row to one longer prompt, which has as many slots.

  A stack with fewer slots than the longer prompt has tokens gets the last ones, as in
  `within_windows`.

  Args:
    cache: A cache of P prompts with one row each, not rounded to int8.
    own_P: int32, how many tokens of each row are taken. States are those after all of its tokens.
    passes_P: int32, how many tokens were written after the last one that is taken.
  """
  prefix = cache.prefix
  lengths_P = prefix.lengths_P + own_P

  def joined(prompt_LPKSE: jax.Array, row: jax.Array) -> jax.Array:
    row = with_axes(row, cache.axes)
    row_LPKCE = (row if row.ndim == 6 else row[None])[:, :, :, 0]
    S, C = prompt_LPKSE.shape[3], row_LPKCE.shape[3]
    # Slot s of the result has token number token_PS[p, s] of the longer prompt: one of its last S.
    token_PS = jnp.maximum(lengths_P - S, 0)[:, None] + jnp.arange(S)
    is_of_row_PS = token_PS >= prefix.lengths_P[:, None]
    # Where that token lies now: the shorter prompt has its own last S tokens here, and the last
    # token that is taken of a row was written `passes_P` passes before the newest.
    slot_of_prompt_PS = token_PS - jnp.maximum(prefix.lengths_P - S, 0)[:, None]
    slot_of_row_PS = ((cache.time - passes_P - lengths_P)[:, None] + token_PS) % C
    # A slot of the prompt may be out of range where the token is of the row. It is not used there.
    take = jax.vmap(functools.partial(jnp.take, axis=2, mode="clip"), (1, 0), 1)
    return jnp.where(
      is_of_row_PS[None, :, None, :, None],
      take(row_LPKCE, slot_of_row_PS),
      take(prompt_LPKSE, slot_of_prompt_PS),
    )

  keys, values = jax.tree.map(joined, (prefix.keys, prefix.values), (cache.keys, cache.values))
  states = jax.tree.map(lambda x: x[:, :, 0], cache.states)
  return prefix.replace(keys=keys, values=values, lengths_P=lengths_P, states=states)


def with_slots(config: ModelConfig, cache: Cache, slots: int) -> Cache:
  """The cache with another number of slots, at least as many as the longest row has tokens.

  It counts as if fewer tokens had been written (`Cache.time`): as many as fit both numbers of
  slots. So the next token comes right after the rows' tokens, in all stacks.
  """
  time = jnp.minimum(cache.time, min(cache.slots, slots))
  slots_of = _slots_of_stacks(config, slots, cache.rewind)

  def resized(old_stack: jax.Array, C: int) -> jax.Array:
    # How many tokens ago each new slot was written, by the new count, and the old slot of that age.
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
    *L, _, K, _, C, E = (whole := with_axes(stack, cache.axes)).shape
    x = jnp.moveaxis(whole, -3, -4).reshape(*L, -1, K, C, E)
    x = jnp.take(x, rows_N, axis=len(L)).reshape(*L, P, G, K, C, E)
    return without_axes(jnp.moveaxis(x, -4, -3), axes)

  keys, values = jax.tree.map(own, (cache.keys, cache.values))
  lengths_PG = cache.lengths_PG.reshape(-1)[rows_PG]
  prefix = take_prompts(cache.prefix, prompts_P)

  def taken(state: jax.Array) -> jax.Array:
    L, _, _, *rest = state.shape
    return jnp.take(state.reshape(L, -1, *rest), rows_PG, axis=1)

  states = jax.tree.map(taken, cache.states)
  return cache.replace(
    keys=keys, values=values, lengths_PG=lengths_PG, prefix=prefix, states=states, axes=axes
  )


def roll_rows(cache: Cache, by_PG: jax.Array) -> Cache:
  """The cache with each row's tokens as many slots further, round the end: at most `cache.rewind`.

  A row that paused, or that drops its last tokens, has its own tokens in the slots written last
  again. A state cannot drop tokens: it stays.
  """
  P, G = by_PG.shape

  def own(stack: jax.Array) -> jax.Array:
    whole = with_axes(stack, cache.axes)
    C = whole.shape[-2]
    from_PGC = (jnp.arange(C) - by_PG[..., None]) % C
    index = from_PGC.reshape(*[1] * (whole.ndim - 5), P, 1, G, C, 1)
    return without_axes(jnp.take_along_axis(whole, index, axis=-2), cache.axes)

  keys, values = jax.tree.map(own, (cache.keys, cache.values))
  return cache.replace(keys=keys, values=values)


def take_prompts(prefix: Prefix, from_P: jax.Array) -> Prefix:
  """The prefix with prompt from_P[p] at each place p."""

  def take(x: jax.Array) -> jax.Array:
    return jnp.take(x, from_P, axis=1)

  keys, values, states = jax.tree.map(take, (prefix.keys, prefix.values, prefix.states))
  lengths_P = prefix.lengths_P[from_P]
  return prefix.replace(keys=keys, values=values, lengths_P=lengths_P, states=states)


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
  return prefix.replace(keys=keys, values=values, lengths_P=lengths_P, states=states)


def _axes(config: ModelConfig, prompts: int, group_size: int, has_heads: bool) -> str:
  """`Cache.axes` of so many rows. `has_heads`: some stack has several heads of keys."""
  needed = {"P": prompts > 1, "K": has_heads, "G": group_size > 1}
  return "".join(axis for axis in needed if needed[axis] or not config.on_one_device)


def with_axes(stack: jax.Array, axes: str) -> jax.Array:
  """A stack [..., P, K, G, C, E] from one that has only some of P, K and G."""
  return jnp.expand_dims(stack, _dropped(axes))


def without_axes(whole: jax.Array, axes: str) -> jax.Array:
  """The inverse of `with_axes`."""
  return jnp.squeeze(whole, _dropped(axes))


def _dropped(axes: str) -> tuple[int, ...]:
  """Which axes of [..., P, K, G, C, E] are not in `axes`, counted from the last."""
  return tuple(place - 5 for place, axis in enumerate("PKG") if axis not in axes)
