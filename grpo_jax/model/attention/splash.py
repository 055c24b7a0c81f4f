"""Attention by JAX's splash kernel for TPUs: linear in memory, skipping blocks nobody sees."""

from collections.abc import Callable
import functools
import math

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash
import jax.numpy as jnp
import numpy as np

from grpo_jax.model.attention.by_rows import AttendRows, by_rows, completions_by_rows
from grpo_jax.model.attention.view import View

BLOCKS = (128, 256, 512)  # how many queries, and keys, the kernel computes at a time
# The overhead of a block, in scores that take as long. A guess, not measured.
BLOCK_COST = 40_000


def make_attend_rows(interpret: bool = False) -> AttendRows:
  """Makes the attention of rows.

  A row has T queries, the keys of `past` earlier tokens, such as the prompt's, and T keys of its
  own. The kernel works in whole blocks of queries and of keys, so both are padded: before the past
  and after the row. So the last slot of the past stays next to the row's first, and the mask stays
  "no key after the query". The kernel skips the blocks that this mask hides entirely. Padding keys
  get another segment than the queries, which hides them.

  Args:
    interpret: Emulate the kernel, so that it runs on any platform. For tests.
  """

  def attend_rows(
    q_BTHE: jax.Array,
    k_BCKE: jax.Array,
    v_BCKE: jax.Array,
    is_token_BC: jax.Array | None,
    view: View,
  ) -> jax.Array:
    """Attention of rows, as `by_rows.AttendRows` describes it."""
    T, H = q_BTHE.shape[1:3]
    past = k_BCKE.shape[1] - T
    block = block_size(T, past)
    past_padding, padding = -past % block, -T % block
    # Padding goes before the past and after the row, so that none is between two tokens.
    sides = (past_padding, padding)
    q_BHTE = _pad(q_BTHE, (0, padding)).swapaxes(1, 2)
    k_BKCE = _pad(k_BCKE, sides).swapaxes(1, 2)
    v_BKCE = _pad(v_BCKE, sides).swapaxes(1, 2)
    kernel = _kernel(T + padding, past + past_padding, H, block, view, interpret)
    segments = None  # for prompts: no past, and the mask hides the padding after a row
    if is_token_BC is not None:
      # A query sees keys of its segment. All queries are in segment 1, as are all keys of tokens.
      segments_BC = _pad(is_token_BC.astype(jnp.int32), sides)
      segments = splash.SegmentIds(jnp.ones((len(q_BTHE), T + padding), jnp.int32), segments_BC)
    kernel = functools.partial(kernel, sinks=view.sinks_H)
    out_BHTE = jax.vmap(kernel)(q_BHTE, k_BKCE, v_BKCE, segments)
    return out_BHTE[:, :, :T].swapaxes(1, 2)

  return attend_rows


attend, attend_completions = by_rows(make_attend_rows()), completions_by_rows(make_attend_rows())


def _pad(x: jax.Array, sides: tuple[int, int]) -> jax.Array:
  return jnp.pad(x, [(0, 0), sides] + [(0, 0)] * (x.ndim - 2))


def block_size(T: int, past: int) -> int:
  """The block size in BLOCKS that makes T queries and `past` + T keys cheapest."""

  def cost(block: int) -> int:
    own, before = math.ceil(T / block), math.ceil(past / block)
    return (own * before + own * (own + 1) // 2) * (block**2 + BLOCK_COST)

  return min(BLOCKS, key=cost)


class _Causal(splash.LocalMask):
  """The library's mask, which returns a single bool for a block whose entries are all equal.

  The library reads every block of the mask to find those. A single bool is faster to compute.
  """

  def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
    queries, keys = index
    least_back = queries.start + self.offset - (keys.stop - 1)
    most_back = queries.stop - 1 + self.offset - keys.start
    before = self.window_size[0]
    if least_back >= 0 and (before is None or most_back <= before):
      return np.True_
    if most_back < 0 or (before is not None and least_back > before):
      return np.False_
    return super().__getitem__(index)


@functools.lru_cache
def mask_of(T: int, past: int, window: int) -> splash.LocalMask:
  """The mask of T queries and `past` + T keys. A window of 0 hides nothing."""
  before = window - 1 if window else None
  return _Causal((T, past + T), window_size=(before, 0), offset=past)


def _kernel(
  T: int, past: int, heads: int, block: int, view: View, interpret: bool
) -> Callable[..., jax.Array]:
  """Attention [H, T, E] of queries [H, T, E] to keys and values [K, past + T, E] of one row."""
  sizes = splash.BlockSizes(
    block_q=block,
    block_kv=block,
    block_q_dkv=block,
    block_kv_dkv=block,
    block_q_dq=block,
    block_kv_dq=block,
  )
  return splash.make_splash_mha(
    splash.MultiHeadMask([mask_of(T, past, view.hiding_window)] * heads),
    block_sizes=sizes,
    head_shards=1,  # the heads are already split over devices
    q_seq_shards=1,
    attn_logits_soft_cap=view.cap or None,
    interpret=interpret,
  )
