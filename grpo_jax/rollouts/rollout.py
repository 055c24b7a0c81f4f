"""Completions on the host, as arrays and as texts.

With an environment, a row also contains tokens that the environment wrote. There,
`Completions.sampled_PGT` is False, so that the loss excludes them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from flax import struct
import jax
import numpy as np

from grpo_jax.data.loader import PromptBatch
from grpo_jax.types import Completions, Images, Visual


class Branches(struct.PyTreeNode):
  """The rows to learn from, if a rollout may have several. P prompts have G rollouts each.

  Attributes:
    completions: The rows [P, B], as numpy arrays. The first G rows of a prompt are the first row of
      each of its rollouts. Unused rows are empty.
    rollout_PB: int32, the rollout of each row, whose reward the row has.
    turns_PB: object array of `Conversation`, None for empty rows.
  """

  completions: Completions
  rollout_PB: np.ndarray
  turns_PB: np.ndarray


class HarnessPrompts(struct.PyTreeNode):
  """The prompts of P groups that a harness chose: each is shared by the group's first calls.

  Attributes:
    prompts_PS: int32, right-padded.
    lengths_P: int32.
  """

  prompts_PS: np.ndarray
  lengths_P: np.ndarray

  @property
  def ids(self) -> list[list[int]]:
    """The token ids of each prompt."""
    return [row[:length].tolist() for row, length in zip(self.prompts_PS, self.lengths_P)]


class Rollouts(struct.PyTreeNode):
  """Completions of P prompts on the host.

  Attributes:
    completions: The completions, as numpy arrays.
    texts_PG: object array of str: the sampled text of each completion, without special tokens. With
      an environment, the policy's last turn. None in rows that other processes score.
    turns_PG: With an environment: object array of `Conversation`. Otherwise None.
    branches: With environment.branches above 1, the rows to learn from. Otherwise None, and the
      learner uses `completions`.
    asked: The prompts before the completions, if a harness chose them. Otherwise None.
  """

  completions: Completions
  texts_PG: np.ndarray
  turns_PG: np.ndarray | None = None
  branches: Branches | None = None
  asked: HarnessPrompts | None = None


def images_of(prompts: PromptBatch) -> Images | Visual | None:
  """Returns the images of a batch's prompts: encoded if possible, else as numpy arrays, or None."""
  if prompts.visual is not None:
    return prompts.visual
  return None if prompts.images is None else Images(*prompts.images)


def texts_of(
  completions: Completions, decode_text: Callable[[list[int]], str], rows: slice = slice(None)
) -> np.ndarray:
  """Decodes the sampled tokens of the prompts in `rows`, object array [P, G] of texts or None."""
  P, G = completions.lengths_PG.shape
  texts_PG = np.full((P, G), None, object)
  for p in range(P)[rows]:
    for g in range(G):
      texts_PG[p, g] = decode_text(sampled_ids(completions, p, g))
  return texts_PG


def last_turns(
  turns_PG: np.ndarray, rows: slice = slice(None), otherwise_PG: np.ndarray | None = None
) -> np.ndarray:
  """Returns the texts of the policy's last turns, object array [P, G].

  Args:
    turns_PG: object array of `Conversation` or None.
    rows: The prompts whose conversations are used.
    otherwise_PG: The texts for all other completions. None means None for each.
  """
  texts_PG = np.full(turns_PG.shape, None, object) if otherwise_PG is None else otherwise_PG.copy()
  for index in np.ndindex(turns_PG[rows].shape):
    if turns_PG[rows][index] is not None:
      texts_PG[rows][index] = turns_PG[rows][index].last  # `rows` is a slice, which makes a view
  return texts_PG


def sampled_ids(completions: Completions, p: int, g: int) -> list[int]:
  """Returns the token ids that the policy sampled in completion [p, g]."""
  return completions.tokens_PGT[p, g][completions.sampled_PGT[p, g]].tolist()


def take(tree: Any, rows: np.ndarray | slice) -> Any:
  """Selects the groups `rows` in every array of a tree, such as `Rollouts` or `Rewards`."""
  return jax.tree.map(lambda x: x[rows], tree)


def concatenate(trees: Sequence[Any]) -> Any:
  """Concatenates the groups of all trees."""
  if len(trees) == 1:
    return trees[0]
  return jax.tree.map(lambda *parts: np.concatenate(parts), *trees)
