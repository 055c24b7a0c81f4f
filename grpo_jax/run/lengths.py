"""Cuts a batch to the length of its longest completion, in a few sizes."""

from typing import Any

import jax
import numpy as np

from grpo_jax.learner.packed import halvings

_SHORTEST = 64


def sizes(max_tokens: int) -> list[int]:
  """The lengths to which completions are cut, ascending. Each is about double the one before.

  They are few, because the programs of a step are compiled for each of them.
  """
  return halvings(max_tokens, _SHORTEST)


def cut(tree: Any, lengths_PG: np.ndarray, max_tokens: int) -> Any:
  """Arrays [P, G, T] of a tree, cut to the smallest size that holds every completion.

  Args:
    tree: Arrays of the host. Those of fewer than three dimensions stay as they are.
    lengths_PG: How many tokens each completion has.
    max_tokens: T.
  """
  longest = max(1, int(lengths_PG.max()))
  size = next(size for size in sizes(max_tokens) if size >= longest)

  def cut_array(x: Any) -> Any:
    has_tokens = np.ndim(x) == 3 and x.shape[-1] == max_tokens
    return x[..., :size] if has_tokens else x

  return jax.tree.map(cut_array, tree)
