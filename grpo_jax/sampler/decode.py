"""The decode loop. It takes a step function, a cache and a key, and knows no model."""

from collections.abc import Callable
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from grpo_jax.sampler.logits import Decoding, draws_per_token, sample_token
from grpo_jax.types import Completions

# step(cache, token_B, time) -> (logits_BV of the next token, cache)
Step = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]
# grow(cache, capacity) -> the cache with room for `capacity` tokens a row
Grow = Callable[[Any, int], Any]


class Rows(struct.PyTreeNode):
  """What the completion of each row is drawn from.

  Attributes:
    logits_BV: The logits that follow the prompts.
    uniforms_BTN: Uniform numbers in [0, 1), from `row_uniforms`.
    temperature_B: float32. Greedy decoding ignores it.
  """

  logits_BV: jax.Array
  uniforms_BTN: jax.Array
  temperature_B: jax.Array


class _Loop(struct.PyTreeNode):
  """The state of the loop."""

  time: jax.Array  # int32 scalar, tokens drawn so far
  token_B: jax.Array
  done_B: jax.Array
  lengths_B: jax.Array
  stopped_by_B: jax.Array
  tokens_BT: jax.Array
  logprobs_BT: jax.Array
  behavior_logprobs_BT: jax.Array
  cache: Any


def capacities(max_tokens: int) -> list[int]:
  """The sizes of the cache on the way to `max_tokens`.

  There are at most four. Each is double the one before. None is below 32 unless `max_tokens` is.
  """
  sizes = [max_tokens]
  while len(sizes) < 4 and sizes[-1] > 32:
    sizes.append(max(32, -(-sizes[-1] // 2)))
  return sizes[::-1]


def decode(
  step: Step, grow: Grow, cache: Any, rows: Rows, decoding: Decoding, group_size: int
) -> Completions:
  """Draws a completion for each row, and ends early when every row has stopped.

  Args:
    step: Computes the logits that follow token_B, token number `time` (from 0) of each row.
    grow: Gives the cache more room.
    cache: The cache after the prompts, with room for `capacities(max_tokens)[0]` tokens a row.
    rows: What each row is drawn from.
    decoding: Filters, stop ids and the longest completion T.
    group_size: G. The rows of a prompt are neighbours.
  """
  T = decoding.max_tokens

  def advance(loop: _Loop, logits_BV: jax.Array) -> _Loop:
    uniforms_BN = rows.uniforms_BTN[:, loop.time]
    drawn = sample_token(logits_BV, uniforms_BN, rows.temperature_B, decoding)
    return _append(loop, drawn, decoding)

  def body(loop: _Loop) -> _Loop:
    logits_BV, cache = step(loop.cache, loop.token_B, loop.time - 1)
    return advance(loop.replace(cache=cache), logits_BV)

  loop = advance(_start(len(rows.logits_BV), T, cache), rows.logits_BV)
  for capacity in capacities(T):
    loop = loop.replace(cache=grow(loop.cache, capacity))
    # The token that was drawn last needs no slot, because no step has read it yet.
    end = min(T, capacity + 1)

    def unfinished(loop: _Loop, end: int = end) -> jax.Array:
      return (loop.time < end) & ~loop.done_B.all()

    loop = jax.lax.while_loop(unfinished, body, loop)

  def group(x: jax.Array) -> jax.Array:
    return x.reshape(-1, group_size, *x.shape[1:])

  return Completions(
    tokens_PGT=group(loop.tokens_BT),
    lengths_PG=group(loop.lengths_B),
    sampled_PGT=group(jnp.arange(T) < loop.lengths_B[:, None]),
    logprobs_PGT=group(loop.logprobs_BT),
    behavior_logprobs_PGT=group(loop.behavior_logprobs_BT),
    stopped_by_PG=group(loop.stopped_by_B),
  )


def _append(
  loop: _Loop, drawn: tuple[jax.Array, jax.Array, jax.Array], decoding: Decoding
) -> _Loop:
  """Writes the drawn token of each row at `time`, for the rows that still go on."""
  token_B, logprob_B, behavior_B = drawn
  token_B = token_B.astype(jnp.int32)
  stop_ids = jnp.asarray(decoding.stop_ids, jnp.int32)
  going_B = ~loop.done_B
  stopped_B = going_B & (token_B[:, None] == stop_ids).any(-1)

  def put(out_BT: jax.Array, x_B: jax.Array) -> jax.Array:
    x_B = jnp.where(going_B, x_B, 0)
    return jax.lax.dynamic_update_index_in_dim(out_BT, x_B, loop.time, 1)

  return _Loop(
    time=loop.time + 1,
    token_B=token_B,
    done_B=loop.done_B | stopped_B,
    lengths_B=loop.lengths_B + going_B,
    stopped_by_B=jnp.where(stopped_B, token_B, loop.stopped_by_B),
    tokens_BT=put(loop.tokens_BT, token_B),
    logprobs_BT=put(loop.logprobs_BT, logprob_B),
    behavior_logprobs_BT=put(loop.behavior_logprobs_BT, behavior_B),
    cache=loop.cache,
  )


def row_uniforms(key: jax.Array, rows_B: jax.Array, max_tokens: int, vocabulary: int) -> jax.Array:
  """The uniform numbers of each row, float32 [B, T, N], N = draws_per_token(V).

  Row b draws with fold_in(key, rows_B[b]), so its tokens do not depend on the other rows.
  """
  shape = (max_tokens, draws_per_token(vocabulary))
  keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, rows_B)
  return jax.vmap(lambda row_key: jax.random.uniform(row_key, shape))(keys_B)


def _start(rows: int, max_tokens: int, cache: Any) -> _Loop:
  """The state before the first token."""
  return _Loop(
    time=jnp.int32(0),
    token_B=jnp.zeros(rows, jnp.int32),
    done_B=jnp.zeros(rows, bool),
    lengths_B=jnp.zeros(rows, jnp.int32),
    stopped_by_B=jnp.full(rows, -1, jnp.int32),
    tokens_BT=jnp.zeros((rows, max_tokens), jnp.int32),
    logprobs_BT=jnp.zeros((rows, max_tokens), jnp.float32),
    behavior_logprobs_BT=jnp.zeros((rows, max_tokens), jnp.float32),
    cache=cache,
  )
