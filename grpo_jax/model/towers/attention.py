"""Attention within pictures, whose memory is linear in the patches where there are many.

The letters are those of layers.py: B pictures of N patches, A heads of size E. Q are queries.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.layers import einsum
from grpo_jax.model.on_devices import on_devices

MAX_SCORES = 2**25  # the scores that exist at a time: 128 MiB in float32
MAX_CHUNK = 512  # queries, where those of a picture do not fit at once


def attend(
  config: ModelConfig, q_BNAE: jax.Array, k_BNAE: jax.Array, v_BNAE: jax.Array, seen_BN: jax.Array
) -> jax.Array:
  """Softmax attention [B, N, A, E] of patches to the patches that have the same number.

  Args:
    config: The model, of which only `rows` is read, the sharding of activations.
    q_BNAE: The queries, scaled and rotated.
    k_BNAE: The keys.
    v_BNAE: The values.
    seen_BN: int32, the number of the window or picture that each patch belongs to. Padding has -1
      and sees only padding.
  """
  if config.rows is None:
    return _attend_pictures(q_BNAE, k_BNAE, v_BNAE, seen_BN)
  row_axes = config.rows.spec[0]
  heads = PartitionSpec(row_axes, None, config.axis_of(q_BNAE.shape[2]), None)
  # Each device attends within its own pictures and heads, so its loops exchange nothing.
  in_specs = heads, heads, heads, PartitionSpec(row_axes, None)
  attend_apart = on_devices(_attend_pictures, config.rows.mesh, in_specs, heads)
  return attend_apart(q_BNAE, k_BNAE, v_BNAE, seen_BN)


def _attend_pictures(
  q_BNAE: jax.Array, k_BNAE: jax.Array, v_BNAE: jax.Array, seen_BN: jax.Array
) -> jax.Array:
  """Attention within pictures, for as many pictures and queries at a time as MAX_SCORES allows."""
  B, N, A, _ = q_BNAE.shape
  # All queries of a picture are computed together if their scores fit, and otherwise a chunk of
  # them. A TPU's tile has 8 rows, hence at least 8.
  chunk = N if A * N * N <= MAX_SCORES else min(MAX_CHUNK, N, max(8, MAX_SCORES // (A * N)))
  fitting = max(1, MAX_SCORES // (A * N * chunk))
  if B <= fitting and chunk == N:  # all pictures at once, without a loop
    return jax.vmap(jax.checkpoint(_attend))(q_BNAE, k_BNAE, v_BNAE, seen_BN, seen_BN)
  # The number divides B, so that lax.map need not compile a smaller last batch, too.
  at_a_time = max(n for n in range(1, B + 1) if B % n == 0 and n <= fitting)

  def picture(of_picture: tuple[jax.Array, ...]) -> jax.Array:
    return _attend_picture(*of_picture, chunk=chunk)

  return jax.lax.map(picture, (q_BNAE, k_BNAE, v_BNAE, seen_BN), batch_size=at_a_time)


def _attend_picture(
  q_NAE: jax.Array, k_NAE: jax.Array, v_NAE: jax.Array, seen_N: jax.Array, chunk: int
) -> jax.Array:
  """Attention of one picture, in chunks of queries. The backward pass recomputes the scores."""
  N = len(seen_N)
  chunks = -(-N // chunk)
  padding = chunks * chunk - N
  q_NAE = jnp.pad(q_NAE, ((0, padding), (0, 0), (0, 0)))
  sees_N = jnp.pad(seen_N, (0, padding), mode="edge")  # without keys, padding would be NaN
  # The gradient of keys and values, to which each chunk adds, is summed in float32.
  keys_and_values = k_NAE.astype(jnp.float32), v_NAE.astype(jnp.float32)

  @jax.checkpoint
  def attend_chunk(of_chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
    q_QAE, sees_Q = of_chunk
    k, v = (x.astype(q_QAE.dtype) for x in keys_and_values)
    return _attend(q_QAE, k, v, sees_Q, seen_N)

  in_chunks = q_NAE.reshape(chunks, chunk, *q_NAE.shape[1:]), sees_N.reshape(chunks, chunk)
  return jax.lax.map(attend_chunk, in_chunks).reshape(q_NAE.shape)[:N]


def _attend(
  q_QAE: jax.Array, k_NAE: jax.Array, v_NAE: jax.Array, sees_Q: jax.Array, seen_N: jax.Array
) -> jax.Array:
  """The definition of attention: queries see the keys with the same number."""
  # The keys come first: XLA's CPU compiler cannot run the gradient of the other order in bfloat16.
  scores_AQN = einsum("nae,qae->aqn", k_NAE, q_QAE)
  scores_AQN = jnp.where(sees_Q[:, None] == seen_N, scores_AQN, -jnp.inf)
  largest_AQ1 = jax.lax.stop_gradient(scores_AQN.max(-1, keepdims=True))
  weights_AQN = jnp.exp(scores_AQN - largest_AQ1)
  total_QA1 = weights_AQN.sum(-1).T[..., None]
  out_QAE = einsum("aqn,nae->qae", weights_AQN.astype(q_QAE.dtype), v_NAE)
  return (out_QAE / total_QA1).astype(q_QAE.dtype)
