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
  """The rows to learn from, where a rollout may have several. P prompts have G rollouts each.

  Attributes:
    completions: The rows [P, B], as numpy arrays. The first G of a prompt are the first rows of its
      rollouts. Rows that are not needed are empty.
    rollout_PB: int32, the rollout that each row belongs to. The row has the reward of this rollout.
    turns_PB: object array of `Conversation`, None where a row is empty.
  """

  completions: Completions
  rollout_PB: np.ndarray
  turns_PB: np.ndarray


class HarnessPrompts(struct.PyTreeNode):
  """The prompts of P groups that a harness chose: the ones that its first calls sent.

  Attributes:
    prompts_PS: int32, right-padded.
    lengths_P: int32.
  """

  prompts_PS: np.ndarray
  lengths_P: np.ndarray

  @property
  def ids(self) -> list[list[int]]:
    """The token ids of each prompt."""
    return [own[:length].tolist() for own, length in zip(self.prompts_PS, self.lengths_P)]


class Rollouts(struct.PyTreeNode):
  """Completions of P prompts on the host.

  Attributes:
    completions: The completions, as numpy arrays.
    texts_PG: object array of str: the sampled text of each completion, without the token that ended
      it where that is a special token. With an environment, the policy's last turn. Only the rows
      that this process scores are filled in, the others hold None.
    turns_PG: With an environment: object array of `Conversation`. Otherwise None.
    branches: With environment.branches above 1, the rows to learn from. Otherwise None, and the
      completions themselves are learned.
    asked: The prompts that the completions follow, if these are not the data's. Otherwise None.
  """

  completions: Completions
  texts_PG: np.ndarray
  turns_PG: np.ndarray | None = None
  branches: Branches | None = None
  asked: HarnessPrompts | None = None


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
  """The policy's last turns in the conversations in `rows`, object array [P, G] of texts.

  Args:
    turns_PG: object array of `Conversation`, None where one is not known.
    rows: The prompts to take.
    otherwise_PG: The texts of all other rows. None means no text.
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
