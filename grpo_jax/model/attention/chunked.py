"""Attention in plain JAX whose memory is linear in the tokens, for any platform.

A row's queries are computed a chunk at a time, and the backward pass recomputes the scores of each
chunk. Each chunk reads all its keys from memory, so a kernel is faster where there is one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_jax.model.attention.by_rows import by_rows, completions_by_rows
from grpo_jax.model.attention.softmax import Own, Scoring, softmax_attention
from grpo_jax.model.attention.view import View

MAX_CHUNK = 512  # queries
MAX_SCORES = 2**25  # the scores that exist at a time: 128 MiB in float32
SPANS = 4  # A row's queries form SPANS spans. Each span skips the keys that only later spans see.


def _attend_rows(
  q_BTHE: jax.Array,
  k_BCKE: jax.Array,
  v_BCKE: jax.Array,
  is_token_BC: jax.Array | None,
  view: View,
) -> jax.Array:
  """Attention of rows, as `by_rows.AttendRows` describes it."""
  B, T, H, _ = q_BTHE.shape
  C = k_BCKE.shape[1]
  # The scores of one chunk of queries, [H, chunk, keys], should be at most MAX_SCORES numbers. If
  # they are fewer, several rows are computed together. Their number divides B, so that lax.map need
  # not compile a smaller last batch, too. A TPU's tile has 8 rows, hence chunks of multiples of 8.
  queries = MAX_SCORES // (H * _keys_of_chunk(min(T, MAX_CHUNK), C, view))
  chunk = min(T, MAX_CHUNK, max(8, queries // 8 * 8))
  rows = MAX_SCORES // (H * chunk * _keys_of_chunk(chunk, C, view))
  rows_at_a_time = max(n for n in range(1, B + 1) if B % n == 0 and n <= max(1, rows))

  def attend_row(row: tuple[jax.Array, ...]) -> jax.Array:
    q_THE, k_CKE, v_CKE, keys_C = row
    return _attend_row(q_THE, k_CKE, v_CKE, keys_C, chunk, view)

  # The array that decides which keys a query sees: pictures, or else whether a key is a token.
  keys_BC = view.pictures_PS
  if keys_BC is None:
    keys_BC = jnp.ones((B, C), bool) if is_token_BC is None else is_token_BC
  return jax.lax.map(attend_row, (q_BTHE, k_BCKE, v_BCKE, keys_BC), batch_size=rows_at_a_time)


def _keys_of_chunk(chunk: int, C: int, view: View) -> int:
  """How many keys the queries of one chunk see, at most."""
  if not view.hiding_window or view.pictures_PS is not None:
    return C
  return min(C, view.hiding_window + chunk - 1)


def _attend_row(
  q_THE: jax.Array,
  k_CKE: jax.Array,
  v_CKE: jax.Array,
  keys_C: jax.Array,
  chunk: int,
  view: View,
) -> jax.Array:
  """Attention [T, H, E] of one row, in chunks of queries. `keys_C` is as in `_chunk_attention`."""
  T, H, E = q_THE.shape
  C = k_CKE.shape[0]
  chunks = -(-T // chunk)
  padded = jnp.pad(q_THE, ((0, chunks * chunk - T), (0, 0), (0, 0)))
  # The barrier makes the starts depend on the row. Otherwise JAX would compute the masks of all
  # chunks, [T, C], once for all rows, and keep them in memory.
  q_NQHE, starts_N = jax.lax.optimization_barrier(
    (padded.reshape(chunks, chunk, H, E), jnp.arange(chunks) * chunk)
  )
  # The gradient of keys and values, to which each chunk adds, is summed in float32.
  keys_and_values = k_CKE.astype(jnp.float32), v_CKE.astype(jnp.float32)
  outs = []
  # A window already limits a chunk's keys. With pictures, a query sees keys of later spans, too.
  spans = min(chunks, 1 if view.hiding_window or view.pictures_PS is not None else SPANS)
  for span in range(spans):
    first, end = chunks * span // spans, chunks * (span + 1) // spans
    seen = min(C, C - T + end * chunk)  # the keys up to that of the span's last query
    k, v = (x[:seen] for x in keys_and_values)
    attend_chunk = jax.checkpoint(_chunk_attention(k, v, keys_C[:seen], C - T, view))
    outs.append(jax.lax.map(attend_chunk, (q_NQHE[first:end], starts_N[first:end])))
  return jnp.concatenate(outs).reshape(chunks * chunk, H, E)[:T]


def _chunk_attention(
  k_CKE: jax.Array, v_CKE: jax.Array, keys_C: jax.Array, past: int, view: View
) -> Callable[[tuple[jax.Array, jax.Array]], jax.Array]:
  """Returns a function (q_QHE, number of the first query) -> attention [Q, H, E] of the chunk.

  Args:
    k_CKE: float32, the row's keys.
    v_CKE: float32, the row's values.
    keys_C: False at the keys that no query sees, or `view.pictures_PS` of the row.
    past: How many keys come before the key of query 0.
    view: The window and the cap.
  """

  def attend_chunk(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
    q_QHE, start = chunk
    Q, H, E = q_QHE.shape
    C, K, _ = k_CKE.shape
    width = _keys_of_chunk(Q, C, view)
    # The last chunk may end in padding, which sees the same keys as the last query.
    place_Q = jnp.minimum(past + start + jnp.arange(Q), C - 1)
    # The chunk reads `width` keys, from the first that its first query sees to its last query's.
    first_key = jnp.clip(past + start - view.hiding_window + 1, 0, C - width) if width < C else 0

    def in_reach(x: jax.Array) -> jax.Array:
      return jax.lax.dynamic_slice_in_dim(x, first_key, width)

    # How many tokens before the query each key is. Later keys are hidden, except its picture's.
    back_QC = place_Q[:, None] - (first_key + jnp.arange(width))
    if view.pictures_PS is None:
      mask_QC = (back_QC >= 0) & in_reach(keys_C)
    else:
      picture_Q1 = keys_C[place_Q][:, None]  # with pictures, all C keys are in reach
      mask_QC = (back_QC >= 0) | ((picture_Q1 >= 0) & (picture_Q1 == keys_C))
    if view.hiding_window:
      mask_QC = mask_QC & (back_QC < view.hiding_window)
    own = Own(
      *(in_reach(x).astype(q_QHE.dtype).transpose(1, 0, 2)[None, :, None] for x in (k_CKE, v_CKE))
    )
    q_PKGRQE = q_QHE.reshape(1, 1, Q, K, H // K, E).transpose(0, 3, 1, 4, 2, 5)
    out = softmax_attention(q_PKGRQE, own, mask_QC, None, None, Scoring(view.cap, view.sinks_H))
    return out.transpose(0, 2, 4, 1, 3, 5).reshape(Q, H, E)

  return attend_chunk


attend, attend_completions = by_rows(_attend_rows), completions_by_rows(_attend_rows)
