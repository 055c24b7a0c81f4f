"""The decode loop. It takes a step function, a cache and a key, not a model."""

from typing import Any, Callable

import jax
import jax.numpy as jnp
from flax import struct

from grpo_jax.config import Sampling
from grpo_jax.sampler.logits import draws_per_token, sample_token
from grpo_jax.types import Completions

Step = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]


@struct.dataclass
class _Loop:
  time: jax.Array  # int32 scalar, tokens drawn so far
  token_B: jax.Array
  done_B: jax.Array
  out: Completions  # [B, T] and [B]
  cache: Any


def capacities(max_tokens: int) -> list[int]:
  """The cache's sizes on the way to `max_tokens`: at most four, each double the one before, none below 32."""
  sizes = [max_tokens]
  while len(sizes) < 4 and sizes[-1] > 32:
    sizes.append(max(32, -(-sizes[-1] // 2)))
  return sizes[::-1]


def decode(
  step: Step,
  grow: Callable[[Any, int], Any],
  cache: Any,
  logits_PV: jax.Array,
  key: jax.Array,
  first_row: jax.Array | int = 0,
  *,
  group_size: int,
  sampling: Sampling,
) -> Completions:
  """Draws G completions of each prompt; ends early when every row has.

  step(cache, tokens_B, time) -> (logits_BV, cache): what follows tokens [P * G], the rows' time-th ones; the cache
  comes with room for `capacities(max_tokens)[0]` tokens a row, and grow(cache, n) makes room for n.
  logits_PV: what follows each prompt. Row b draws with fold_in(key, first_row + b), whatever the other rows do.
  """
  P, (B, T) = logits_PV.shape[0], (logits_PV.shape[0] * group_size, sampling.max_tokens)
  stop_ids = jnp.asarray(sampling.stop_ids, jnp.int32)
  keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, first_row + jnp.arange(B))
  uniforms_BTN = jax.vmap(
    lambda k: jax.random.uniform(k, (T, draws_per_token(logits_PV.shape[1])))
  )(keys_B)

  def advance(loop: _Loop, logits_BV) -> _Loop:
    """Draws the token at `time` for the rows still going."""
    token_B, logprob_B, sampling_logprob_B = sample_token(
      logits_BV, uniforms_BTN[:, loop.time], sampling
    )
    token_B, going_B = token_B.astype(jnp.int32), ~loop.done_B
    stopped_B = going_B & (token_B[:, None] == stop_ids).any(-1)
    put = lambda out_BT, x_B: jax.lax.dynamic_update_index_in_dim(
      out_BT, jnp.where(going_B, x_B, 0), loop.time, 1
    )
    out = Completions(
      put(loop.out.tokens_PGT, token_B),
      loop.out.lengths_PG + going_B,
      put(loop.out.logprobs_PGT, logprob_B),
      put(loop.out.sampling_logprobs_PGT, sampling_logprob_B),
      jnp.where(stopped_B, token_B, loop.out.stopped_by_PG),
    )
    return _Loop(loop.time + 1, token_B, loop.done_B | stopped_B, out, loop.cache)

  def body(loop: _Loop) -> _Loop:
    logits_BV, cache = step(loop.cache, loop.token_B, loop.time - 1)
    return advance(loop.replace(cache=cache), logits_BV)

  zeros = lambda dtype: jnp.zeros((B, T), dtype)
  out = Completions(
    zeros(jnp.int32),
    jnp.zeros(B, jnp.int32),
    zeros(jnp.float32),
    zeros(jnp.float32),
    jnp.full(B, -1, jnp.int32),
  )
  loop = _Loop(jnp.int32(0), jnp.zeros(B, jnp.int32), jnp.zeros(B, bool), out, cache)
  loop = advance(loop, jnp.repeat(logits_PV, group_size, axis=0))
  for capacity in capacities(T):
    loop = loop.replace(cache=grow(loop.cache, capacity))
    going = lambda loop, capacity=capacity: (loop.time < min(T, capacity + 1)) & ~loop.done_B.all()
    loop = jax.lax.while_loop(going, body, loop)
  return jax.tree.map(lambda x: x.reshape(P, group_size, *x.shape[1:]), loop.out)
