"""Rollouts: prompts in, completions out, as arrays and as texts.

This is the one interface through which training, evaluation and `sample` use a policy. To add the
turns of an environment, or to sample somewhere else, let `make_rollout` return another callable of
this kind. A row may then hold tokens that the environment wrote: `Completions.sampled_PGT` is False
there, so that the learner reads them and does not learn to write them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flax import struct
import jax
import numpy as np

from grpo_jax.data.loader import PromptBatch
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.programs.run import Run
from grpo_jax.programs.sampling import Sampler
from grpo_jax.types import Completions


class Rollouts(struct.PyTreeNode):
  """Completions of P prompts on the host.

  Attributes:
    completions: As numpy arrays.
    texts_PG: object array of str: the sampled text of each completion, without the token that ended
      it where that is a special token. Only the rows that this process scores are filled in, the
      others hold None.
  """

  completions: Completions
  texts_PG: np.ndarray


class Rollout(Protocol):
  """A way to complete prompts. All processes of a run call it together."""

  def __call__(
    self,
    params: Any,
    prompts: PromptBatch,
    key: jax.Array,
    temperature: float = 1.0,
    first_prompt: int = 0,
  ) -> Rollouts:
    """Completes each prompt G times.

    Args:
      params: The policy, as `Parameters.for_sampling` returns it.
      prompts: P prompts.
      key: The root of the random numbers.
      temperature: Of all prompts. Greedy rollouts ignore it.
      first_prompt: The number of the first prompt. Completion [p, g] depends on the key and on
        (first_prompt + p, g), and not on how prompts are batched.
    """


class PolicyRollout:
  """One completion per row, sampled by the policy alone."""

  def __init__(self, sampler: Sampler, hosts: Hosts, decode_text: Callable[[list[int]], str]):
    """`sampler` is compiled. `decode_text` makes a text from token ids."""
    self._sample = sampler
    self._hosts = hosts
    self._decode_text = decode_text

  def __call__(
    self,
    params: Any,
    prompts: PromptBatch,
    key: jax.Array,
    temperature: float = 1.0,
    first_prompt: int = 0,
  ) -> Rollouts:
    temperature_P = np.full(len(prompts.prompt_lengths_P), temperature, np.float32)
    arrays = self._hosts.put((prompts.prompts_PS, prompts.prompt_lengths_P, temperature_P))
    prompts_PS, lengths_P, temperature_P = arrays
    sampled = self._sample(params, prompts_PS, lengths_P, key, temperature_P, first_prompt)
    completions = self._hosts.fetch(sampled)
    texts_PG = texts_of(completions, self._decode_text, prompts.own)
    return Rollouts(completions=completions, texts_PG=texts_PG)


def make_rollout(
  run: Run, group_size: int, greedy: bool = False, max_tokens: int | None = None
) -> Rollout:
  """What completes each prompt `group_size` times in training, in evaluation and in `sample`."""
  sampler = run.programs.sampler(group_size, greedy, max_tokens)
  return PolicyRollout(sampler, run.hosts, run.tokenizer.decode)


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
