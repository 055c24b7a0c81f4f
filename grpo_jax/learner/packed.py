"""Avoids the computation of padding: packs completions, and sorts groups by their tokens.

The number of slots in which a group's tokens are computed is part of the shapes, so there are only
a few sizes. The micro-batches with most tokens come first. The host reads how many slots each
needs, and by_slots.py compiles a program for a size when that size first occurs.
"""

from typing import NamedTuple, TypeVar

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import masked
from grpo_jax.types import Batch

Tree = TypeVar("Tree")
_FEWEST_SLOTS = 128
# The most programs for one update. A compiler for an accelerator takes a minute for a large model.
_SIZES_ON_CPU, _SIZES = 16, 4
_NOTHING = -1  # in place of a number of slots, if no token is in the loss


class Parts(struct.PyTreeNode):
  """A batch in micro-batches, those with most tokens first.

  Attributes:
    batch: The batch as arrays [M, m, ...], M micro-batches of m prompts.
    order_P: int32, the index in the original batch of each prompt.
    needed_M: int32, how many slots the micro-batch's group with most tokens needs. -1 means that no
      group of the micro-batch has a token in the loss. Such micro-batches come last.
  """

  batch: Batch
  order_P: jax.Array
  needed_M: jax.Array


class PackedSegment(NamedTuple):
  """Consecutive micro-batches that are computed in equally many slots.

  Attributes:
    slots: The slots of a group's completions in the stream. 0 means rows of T.
    first: The number of the first micro-batch.
    end: The number of the last micro-batch, plus 1.
  """

  slots: int
  first: int
  end: int


def lengths(mask_PGT: jax.Array) -> jax.Array:
  """int32 [P, G]: how many tokens each completion has up to its last token in the loss."""
  ends = jnp.arange(1, mask_PGT.shape[-1] + 1)
  return jnp.where(mask_PGT != 0, ends, 0).max(-1)


def row_slots(tokens: int, platform: str) -> int:
  """How many slots the layers compute for a row of T completion tokens.

  The last token predicts nothing, so T - 1 are enough. A TPU or GPU stores arrays in tiles, and T
  is usually a multiple of their size. There, rows of T are slices of the stream without a copy,
  while shorter rows would be copied.
  """
  return tokens if platform in ("tpu", "gpu") and tokens > 1 else tokens - 1


def slot_sizes(completions: int, tokens: int, platform: str) -> list[int]:
  """The numbers of slots in which G completions of T tokens can be computed, ascending.

  They are multiples of a sixteenth (on accelerators a quarter) of all slots, or of 128 if that is
  more. The last number is 0, which means rows of T, for groups whose completions are all long.
  """
  full = completions * row_slots(tokens, platform)
  step = max(-(-full // (_SIZES_ON_CPU if platform == "cpu" else _SIZES)), _FEWEST_SLOTS)
  return [*range(step, full, step), 0]


def segments(needed_M: np.ndarray, sizes: list[int]) -> list[PackedSegment]:
  """Chooses for each micro-batch the fewest slots that hold its groups.

  Args:
    needed_M: `Parts.needed_M`, descending.
    sizes: The numbers of slots to choose from, as `slot_sizes` returns them.

  Returns:
    Segments in the order of the micro-batches. Micro-batches without a token are left out.
  """
  found: list[PackedSegment] = []
  for number, needed in enumerate(needed_M):
    if needed == _NOTHING:
      break
    slots = next((size for size in sizes if size >= needed), 0)
    if found and found[-1].slots == slots:
      found[-1] = found[-1]._replace(end=number + 1)
    else:
      found.append(PackedSegment(slots, number, number + 1))
  return found


def needed_slots(mask_PGT: jax.Array) -> jax.Array:
  """int32 [P]: how many slots a group's completions need, or -1 without a token in the loss."""
  lengths_PG = lengths(mask_PGT)
  inputs_P = jnp.maximum(lengths_PG - 1, 0).sum(1)  # the last token predicts nothing
  return jnp.where((lengths_PG > 0).any(1), inputs_P, _NOTHING)


def in_parts(batch: Batch, micro_batch: int) -> Parts:
  """Splits a batch into micro-batches of groups with similar numbers of tokens.

  `micro_batch` is the number of prompts of a micro-batch. 0 makes one micro-batch.
  """
  P = len(batch.prompts_PS)
  M = P // (micro_batch or P)
  needed_P = needed_slots(batch.mask_PGT)
  order_P = jnp.arange(P)
  if M > 1:  # `split_batch` then puts groups with similar numbers of tokens into one part
    order_P = jnp.argsort(-needed_P).reshape(M, -1).T.ravel()
    batch = jax.tree.map(lambda x: x[order_P], batch)
  needed_M = split_batch(needed_P[order_P], micro_batch).max(1)
  return Parts(split_batch(batch, micro_batch), order_P, needed_M)


def real_tokens(batch: Batch) -> jax.Array:
  """How many tokens the layers would compute without padding, for groups with loss tokens."""
  needed_P = needed_slots(batch.mask_PGT)
  return masked.total(batch.prompt_lengths_P + needed_P, needed_P >= 0)


def split_batch(batch: Tree, size: int) -> Tree:
  """Splits every array [P, ...] of a tree to [P / size, size, ...]. Size 0 makes one part.

  Part m of M takes the prompts m, m + M, m + 2 M, ..., so that each device already holds a share of
  every part.
  """

  def split(x: jax.Array) -> jax.Array:
    return x.reshape(size or x.shape[0], -1, *x.shape[1:]).swapaxes(0, 1)

  return jax.tree.map(split, batch)


def joined(parts: Tree) -> Tree:
  """The inverse of `split_batch`."""
  return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), parts)
