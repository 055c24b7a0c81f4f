"""Computes as many tokens as the loss has: packs completions, and sorts groups by their tokens.

The slots in which a group's tokens are computed are a shape, so there are only a few sizes. On a
CPU, a program holds the code for each of them, and every micro-batch takes the smallest one on the
device. The compilers for accelerators take too long for that. There, the host chooses one size for
the whole batch, and a program is compiled when its size first occurs.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.types import Batch

_FEWEST_SLOTS = 128


def lengths(mask_PGT: jax.Array) -> jax.Array:
  """int32 [P, G]: how many tokens of each completion there are up to the last one in the loss."""
  ends = jnp.arange(1, mask_PGT.shape[-1] + 1)
  return jnp.where(mask_PGT != 0, ends, 0).max(-1)


def row_slots(tokens: int, platform: str) -> int:
  """The slots in which the layers compute a row of T completion tokens.

  The last token predicts nothing, so T - 1 are enough. A TPU or GPU holds arrays in tiles, and the
  usual T is a multiple of these: there, rows of T are parts of a stream, where shorter ones would
  be copied.
  """
  return tokens if platform in ("tpu", "gpu") and tokens > 1 else tokens - 1


def slot_sizes(completions: int, in_row: int) -> list[int | None]:
  """The numbers of slots that G completions can be computed in, ascending.

  They are multiples of an eighth of all slots, or of 128 if that is more. None, the last one, means
  rows of `in_row` slots. It suits groups whose completions are all long.
  """
  full = completions * in_row
  step = max(-(-full // 8), _FEWEST_SLOTS)
  return [*range(step, full, step), None]


def slots_of_batch(lengths_PG: np.ndarray, tokens: int, platform: str) -> int | None:
  """`Batch.slots` for completions of these lengths, on the host.

  Args:
    lengths_PG: How many tokens each completion has.
    tokens: T.
    platform: That of the mesh.

  Returns:
    None on a CPU, so that each micro-batch takes its own. Otherwise the smallest of `slot_sizes`
    that holds every group, or 0 for rows of T.
  """
  if platform == "cpu":
    return None
  needed = int(np.maximum(lengths_PG - 1, 0).sum(1).max())
  sizes = slot_sizes(lengths_PG.shape[1], row_slots(tokens, platform))
  return next((size for size in sizes if size is not None and size >= needed), 0)


def with_fewest_slots(function: Callable[[Batch], Any], batch: Batch) -> Any:
  """function(batch) with as few slots as hold the tokens of the loss.

  The function must not be differentiated: all sizes would keep their activations.
  """
  _, G, T = batch.completions_PGT.shape
  if batch.slots is not None:
    return function(batch)
  sizes = slot_sizes(G, T - 1)
  branches = [functools.partial(_with_slots, function, size) for size in sizes]
  if len(branches) == 1:
    return branches[0](batch)
  return jax.lax.switch(_size_index(batch.mask_PGT, sizes), branches, batch)


def _with_slots(function: Callable[[Batch], Any], slots: int | None, batch: Batch) -> Any:
  return function(batch.replace(slots=slots))


def _size_index(mask_PGT: jax.Array, sizes: list[int | None]) -> jax.Array:
  """Which of the sizes is the smallest one that holds each group's tokens."""
  needed = _inputs(lengths(mask_PGT)).sum(1).max()
  return (needed > jnp.array(sizes[:-1])).sum()


def _inputs(lengths_PG: jax.Array) -> jax.Array:
  """How many tokens of each completion predict another one."""
  return jnp.maximum(lengths_PG - 1, 0)


def computed_tokens(batch: Batch) -> jax.Array:
  """How many tokens `with_fewest_slots` computes, prompts with their padding included."""
  P, G, T = batch.completions_PGT.shape
  if batch.slots is not None:
    return P * (batch.prompts_PS.shape[1] + (batch.slots or G * T))
  sizes = slot_sizes(G, T - 1)
  counts = jnp.array([G * (T - 1) if size is None else size for size in sizes])
  slots = counts[_size_index(batch.mask_PGT, sizes)] if len(sizes) > 1 else counts[0]
  return P * (batch.prompts_PS.shape[1] + slots)


def real_tokens(batch: Batch) -> jax.Array:
  """How many tokens a computation without padding would take."""
  return batch.prompt_lengths_P.sum() + _inputs(lengths(batch.mask_PGT)).sum()


def sorted_by_tokens(batch: Batch, micro_batch: int) -> tuple[Batch, jax.Array | None]:
  """The batch in an order in which `split_batch` puts groups with equally many tokens together.

  The parts with the most tokens come first, and those without a token in the loss last.

  Returns:
    The batch, and where each of its prompts was. None if there is one part.
  """
  P = len(batch.prompts_PS)
  parts = P // (micro_batch or P)
  if parts == 1:
    return batch, None
  order_P = jnp.argsort(-lengths(batch.mask_PGT).sum(1))
  # Part m takes the prompts m, m + parts, m + 2 parts, ...
  order_P = order_P.reshape(parts, micro_batch).T.ravel()
  return jax.tree.map(lambda x: x[order_P], batch), order_P


def sizes_vary(batch: Batch, micro_batch: int) -> bool:
  """Whether the slots of a part depend on which groups it has."""
  _, G, T = batch.completions_PGT.shape
  return micro_batch > 1 and batch.slots is None and len(slot_sizes(G, T - 1)) > 1
