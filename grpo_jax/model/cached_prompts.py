"""Prompts in the cache: how they get there, are joined with rows' tokens, and are replaced."""

import functools

import jax
import jax.numpy as jnp

from grpo_jax.model.cache import Cache, PerStack, Prefix, take_prompts, with_axes
from grpo_jax.model.config import ModelConfig
from grpo_jax.model.stacks import stacks


def as_prefix(cache: Cache, lengths_P: jax.Array) -> Prefix:
  """Turns the cache of a forward pass over prompts [P, S] into the prefix of their groups."""

  def first_row(x: jax.Array) -> jax.Array:
    return x[:, :, :, 0]

  keys, values = jax.tree.map(first_row, (cache.keys, cache.values))
  states = jax.tree.map(lambda x: x[:, :, 0], cache.states)
  return Prefix(keys, values, lengths_P, states, cache.slots)


def within_windows(config: ModelConfig, prefix: Prefix, slots: int) -> Prefix:
  """Cuts the prefix of layers with a window to the last tokens of each prompt.

  Completions see no earlier tokens there. With a window below S, the stack then has n = window
  slots, of which the first holds token max(length - n, 0) of the prompt.

  If a mesh splits the slots, n and S are rounded up to a multiple of its devices, and prompts are
  padded, or their padding is cut, to the slots of the flight that they belong to.

  Args:
    config: The model.
    prefix: Prompts, with one slot for each of their S tokens.
    slots: The number of tokens of the longest prompt in the flight.
  """
  shards = config.slot_shards

  def last(name: str, x_LPKSE: jax.Array) -> jax.Array:
    """The last tokens of the prompts in a stack, whose layers all have the same window."""
    window, S = config.kind(numbers[name][0]).window, x_LPKSE.shape[3]
    n = -(-min(window or slots, slots) // shards) * shards
    if slots <= n < S:  # all tokens of the prompts, without padding
      return x_LPKSE[:, :, :, :n]
    if n < S:
      first_P = jnp.maximum(prefix.lengths_P - n, 0)
      from_PS = first_P[:, None] + jnp.arange(n)
      return jnp.take_along_axis(x_LPKSE, from_PS[None, :, None, :, None], axis=3)
    if shards == 1:
      return x_LPKSE
    return jnp.pad(x_LPKSE, [(0, 0)] * 3 + [(0, n - S), (0, 0)])

  numbers = stacks(config)
  keys = {name: last(name, x) for name, x in prefix.keys.items()}
  values = {name: last(name, x) for name, x in prefix.values.items()}
  return prefix.replace(keys=keys, values=values, slots=slots)


def rows_as_prefix(cache: Cache, lengths_P: jax.Array) -> Prefix:
  """Turns the rows of a cache into prompts: the prompt that all rows share, then the row's tokens.

  Args:
    cache: A cache of one prompt and P rows that have just filled their slots, so that slot c has
      token c of the row.
    lengths_P: int32, how many tokens each new prompt has, including the shared ones.
  """

  def joined(shared: jax.Array, of_rows: jax.Array) -> jax.Array:
    """Appends the rows' slots to those of the shared prompt, [L, 1, K, S, E], in each row."""
    of_rows = with_axes(of_rows, cache.axes)
    # The stack of a single layer lacks the axis L. The cache has one prompt, hence the 0.
    rows_LKPCE = (of_rows if of_rows.ndim == 6 else of_rows[None])[:, 0]
    rows_LPKCE = rows_LKPCE.transpose(0, 2, 1, 3, 4)
    shape = (*rows_LPKCE.shape[:3], *shared.shape[-2:])
    return jnp.concatenate([jnp.broadcast_to(shared, shape), rows_LPKCE], axis=-2)

  prefix = cache.prefix
  keys, values = jax.tree.map(joined, (prefix.keys, prefix.values), (cache.keys, cache.values))
  states = jax.tree.map(lambda x: x[:, 0], cache.states)
  return Prefix(keys, values, lengths_P, states, prefix.slots + cache.slots)


def rows_as_prompts(cache: Cache, own_P: jax.Array, passes_P: jax.Array) -> Prefix:
  """Appends the tokens of each prompt's row to the prompt. The number of slots S stays.

  With it, prompts are completed whose beginnings were computed before. The endpoint also keeps the
  texts of rows that ended, in case later requests begin with them (sampler/prefixes.py).

  A stack with fewer slots than the longer prompt has tokens keeps the last tokens, as in
  `within_windows`.

  Args:
    cache: A cache of P prompts with one row each, not rounded to int8.
    own_P: int32, how many tokens of each row to append. States cannot drop tokens: they are those
      after all tokens of the row.
    passes_P: int32, how many tokens were written to the cache after the last appended one.
  """
  prefix = cache.prefix
  lengths_P = prefix.lengths_P + own_P

  def joined(prompt_LPKSE: jax.Array, row: jax.Array) -> jax.Array:
    """Joins a stack of the prompts and that of the rows to [L, P, K, S, E]."""
    row = with_axes(row, cache.axes)
    # The stack of a single layer lacks the axis L. Each prompt has one row, hence the 0.
    row_LPKCE = (row if row.ndim == 6 else row[None])[:, :, :, 0]
    S, C = prompt_LPKSE.shape[3], row_LPKCE.shape[3]
    # Slot s of the result has token number token_PS[p, s] of the longer prompt: one of its last S.
    token_PS = jnp.maximum(lengths_P - S, 0)[:, None] + jnp.arange(S)
    is_of_row_PS = token_PS >= prefix.lengths_P[:, None]
    # The slots that hold this token now: the old prompt has its own last S tokens in its slots, and
    # the last appended token of a row was written `passes_P` passes before the newest one.
    slot_of_prompt_PS = token_PS - jnp.maximum(prefix.lengths_P - S, 0)[:, None]
    slot_of_row_PS = ((cache.time - passes_P - lengths_P)[:, None] + token_PS) % C
    # A slot of the prompt may be out of range where the token is the row's: `where` ignores it.
    take = jax.vmap(functools.partial(jnp.take, axis=2, mode="clip"), (1, 0), 1)
    return jnp.where(
      is_of_row_PS[None, :, None, :, None],
      take(row_LPKCE, slot_of_row_PS),
      take(prompt_LPKSE, slot_of_prompt_PS),
    )

  keys, values = jax.tree.map(joined, (prefix.keys, prefix.values), (cache.keys, cache.values))
  states = jax.tree.map(lambda x: x[:, :, 0], cache.states)
  return prefix.replace(keys=keys, values=values, lengths_P=lengths_P, states=states)


def put_prompts(prefix: Prefix, places_N: jax.Array, prompts: Prefix) -> Prefix:
  """Replaces some prompts of a prefix.

  Args:
    prefix: P prompts.
    places_N: int32, which prompt each new one replaces. One whose entry is P or more is left
      out.
    prompts: N prompts, padded to at most S tokens. Slots after these keep old keys and values,
      which are masked.
  """

  def put(old: jax.Array, new: jax.Array) -> jax.Array:
    return old.at[:, places_N, :, : new.shape[-2]].set(new, mode="drop")

  def put_state(old: jax.Array, new: jax.Array) -> jax.Array:
    return old.at[:, places_N].set(new, mode="drop")

  keys, values = jax.tree.map(put, (prefix.keys, prefix.values), (prompts.keys, prompts.values))
  states = jax.tree.map(put_state, prefix.states, prompts.states)
  lengths_P = prefix.lengths_P.at[places_N].set(prompts.lengths_P, mode="drop")
  return prefix.replace(keys=keys, values=values, lengths_P=lengths_P, states=states)


def copy_prompts(prefix: Prefix, from_P: jax.Array) -> Prefix:
  """Copies prompts in place: prompt p becomes prompt from_P[p], which stays as it is.

  Only prompts that change are read and written.
  """
  changes_P = from_P != jnp.arange(len(from_P))
  first_P = jnp.argsort(~changes_P)  # those that change come first

  def copy(i: jax.Array, arrays: tuple[PerStack, ...]) -> tuple[PerStack, ...]:
    p = first_P[i]

    def copy_one(x: jax.Array) -> jax.Array:
      source = jax.lax.dynamic_slice_in_dim(x, from_P[p], 1, axis=1)
      return jax.lax.dynamic_update_slice_in_dim(x, source, p, axis=1)

    return jax.tree.map(copy_one, arrays)

  arrays = prefix.keys, prefix.values, prefix.states
  keys, values, states = jax.lax.fori_loop(0, changes_P.sum(), copy, arrays)
  return prefix.replace(keys=keys, values=values, lengths_P=prefix.lengths_P[from_P], states=states)


def add_to_prompts(cache: Cache, places_n: jax.Array, own_n: jax.Array) -> Prefix:
  """Adds tokens to some prompts of `cache.prefix`, in place where the prompts have all slots.

  Args:
    cache: The rows are the tokens to add: n rows of n prompts that they continue, not rounded to
      int8. The prefix has all P prompts, and as `lengths_P` how many tokens each has before.
    places_n: int32, the prompt that each row continues. Rows with P or more are left out.
    own_n: int32, how many of its tokens each row adds.
  """
  prefix = cache.prefix
  before = take_prompts(prefix, jnp.minimum(places_n, len(prefix.lengths_P) - 1))
  padding_n = cache.slots - own_n
  # What is not read below is not computed.
  joined = rows_as_prompts(cache.replace(prefix=before), own_n, padding_n)

  def added(old: PerStack, joined: PerStack, rows: PerStack) -> PerStack:
    new = dict[str, jax.Array]()
    for name, x_LPKSE in old.items():
      if x_LPKSE.shape[3] < prefix.slots:  # the last tokens, which all move
        new[name] = x_LPKSE.at[:, places_n].set(joined[name], mode="drop")
        continue
      row = with_axes(rows[name], cache.axes)
      rows_LnKUE = (row if row.ndim == 6 else row[None])[:, :, :, 0]
      new[name] = _with_tokens(x_LPKSE, rows_LnKUE, places_n, before.lengths_P, own_n)
    return new

  states = jax.tree.map(
    lambda old, new: old.at[:, places_n].set(new, mode="drop"), prefix.states, joined.states
  )
  return prefix.replace(
    keys=added(prefix.keys, joined.keys, cache.keys),
    values=added(prefix.values, joined.values, cache.values),
    lengths_P=prefix.lengths_P.at[places_n].set(joined.lengths_P, mode="drop"),
    states=states,
  )


def _with_tokens(
  x_LPKSE: jax.Array,
  rows_LnKUE: jax.Array,
  places_n: jax.Array,
  known_n: jax.Array,
  own_n: jax.Array,
) -> jax.Array:
  """Writes the first `own_n` of U tokens of each row into the slots after `known_n`."""
  (L, P, K, S, E), U = x_LPKSE.shape, rows_LnKUE.shape[3]
  width = min(S, U)

  def write(i: jax.Array, x_LPKSE: jax.Array) -> jax.Array:
    place, known = jnp.minimum(places_n[i], P - 1), known_n[i]
    # Near the end of S slots, the slice begins before the first new token.
    first = jnp.minimum(known, S - width)
    at, sizes = (0, place, 0, first, 0), (L, 1, K, width, E)
    row_LKUE = jax.lax.dynamic_index_in_dim(rows_LnKUE, i, 1, keepdims=False)
    moved = jnp.roll(row_LKUE, known - first, axis=2)[:, None, :, :width]
    slot_W = first + jnp.arange(width)
    is_new_W = (slot_W >= known) & (slot_W < known + own_n[i]) & (places_n[i] < P)
    old = jax.lax.dynamic_slice(x_LPKSE, at, sizes)
    return jax.lax.dynamic_update_slice(x_LPKSE, jnp.where(is_new_W[:, None], moved, old), at)

  return jax.lax.fori_loop(0, len(places_n), write, x_LPKSE)
