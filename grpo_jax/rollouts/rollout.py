"""Completions on the host, as arrays and as texts.

With an environment, a row also holds tokens that the environment wrote: `Completions.sampled_PGT`
is False there, so that the learner reads them and does not learn to write them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from flax import struct
import jax
import numpy as np

from grpo_jax.data.loader import PromptBatch
from grpo_jax.types import Completions, Images, Visual


class Branches(struct.PyTreeNode):
  """The rows that are learned from G rollouts of each of P prompts, where these are not the same.

  Attributes:
    completions: [P, B], as numpy arrays. The first G are those of the rollouts. Rows that are not
      needed are empty.
    rollout_PB: int32, the number of the rollout that each row belongs to, whose reward it has.
    turns_PB: object array of `Conversation`, None where a row is empty.
  """

  completions: Completions
  rollout_PB: np.ndarray
  turns_PB: np.ndarray


class Asked(struct.PyTreeNode):
  """The prompts of P groups where a harness chose them: what its first calls sent.

  Attributes:
    prompts_PS: int32, right-padded.
    lengths_P: int32.
  """

  prompts_PS: np.ndarray
  lengths_P: np.ndarray

  @property
  def ids(self) -> list[list[int]]:
    """Of each prompt."""
    return [own[:length].tolist() for own, length in zip(self.prompts_PS, self.lengths_P)]


class Rollouts(struct.PyTreeNode):
  """Completions of P prompts on the host.

  Attributes:
    completions: As numpy arrays.
    texts_PG: object array of str: the sampled text of each completion, without the token that ended
      it where that is a special token. With an environment, the policy's last turn. Only the rows
      that this process scores are filled in, the others hold None.
    turns_PG: With an environment: object array of `Conversation`. Otherwise None.
    branches: With environment.branches above 1. Otherwise None, and the completions are learned.
    asked: What the completions follow, where that is not the prompts of the data. Otherwise None.
  """

  completions: Completions
  texts_PG: np.ndarray
  turns_PG: np.ndarray | None = None
  branches: Branches | None = None
  asked: Asked | None = None


def images_of(prompts: PromptBatch) -> Images | Visual | None:
  """The images of a batch's prompts: encoded, or as numpy arrays. None if it has none."""
  if prompts.visual is not None:
    return prompts.visual
  return None if prompts.images is None else Images(*prompts.images)


def texts_of(
  completions: Completions, decode_text: Callable[[list[int]], str], rows: slice = slice(None)
) -> np.ndarray:
  """The sampled tokens of the completions in `rows` as texts, object array [P, G]."""
  P, G = completions.lengths_PG.shape
  texts_PG = np.full((P, G), None, object)
  for p in range(P)[rows]:
    for g in range(G):
      texts_PG[p, g] = decode_text(sampled_ids(completions, p, g))
  return texts_PG


def last_turns(
  turns_PG: np.ndarray, rows: slice = slice(None), otherwise_PG: np.ndarray | None = None
) -> np.ndarray:
  """What the policy wrote last in the conversations in `rows`, object array [P, G] of texts.

  Args:
    turns_PG: object array of `Conversation`, None where one is not known.
    rows: Of the prompts.
    otherwise_PG: The texts in their place.
  """
  texts_PG = np.full(turns_PG.shape, None, object) if otherwise_PG is None else otherwise_PG.copy()
  for index in np.ndindex(turns_PG[rows].shape):
    if turns_PG[rows][index] is not None:
      texts_PG[rows][index] = turns_PG[rows][index].last
  return texts_PG


def sampled_ids(completions: Completions, p: int, g: int) -> list[int]:
  """The token ids that the policy sampled in completion [p, g]."""
  return completions.tokens_PGT[p, g][completions.sampled_PGT[p, g]].tolist()


def take(tree: Any, rows: np.ndarray | slice) -> Any:
  """The same groups of every array of a tree: of `Rollouts`, `Rewards` or both."""
  return jax.tree.map(lambda x: x[rows], tree)


def concatenate(trees: Sequence[Any]) -> Any:
  """The groups of all trees, one after the other."""
  if len(trees) == 1:
    return trees[0]
  return jax.tree.map(lambda *parts: np.concatenate(parts), *trees)
