"""Rollouts: prompts in, completions out, as arrays and as texts.

This is the one interface through which training, evaluation and `sample` use a policy. To sample
somewhere else, let `make_rollout` return another callable of this kind. With an environment, a row
also holds tokens that the environment wrote: `Completions.sampled_PGT` is False there, so that the
learner reads them and does not learn to write them.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any, Protocol

from flax import struct
import jax
import numpy as np

from grpo_jax.data.loader import PromptBatch
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.rollouts.talk import Talk, Talkers
from grpo_jax.run.run import Run
from grpo_jax.sampler.requests import Finished
from grpo_jax.sampler.sampling import Draws, settings_of, whole
from grpo_jax.sampler.stop import end_at
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


class Rollouts(struct.PyTreeNode):
  """Completions of P prompts on the host.

  Attributes:
    completions: As numpy arrays.
    texts_PG: object array of str: the sampled text of each completion, without the token that ended
      it where that is a special token. With an environment, the policy's last turn. Only the rows
      that this process scores are filled in, the others hold None.
    turns_PG: With an environment: object array of `Conversation`. Otherwise None.
    branches: With environment.branches above 1. Otherwise None, and the completions are learned.
  """

  completions: Completions
  texts_PG: np.ndarray
  turns_PG: np.ndarray | None = None
  branches: Branches | None = None


# Called with the numbers of some of the prompts, and their rollouts.
OnGroups = Callable[[list[int], Rollouts], None]


class Rollout(Protocol):
  """A way to complete prompts. All processes of a run call it together."""

  def __call__(
    self,
    params: Any,
    prompts: PromptBatch,
    key: jax.Array,
    temperature: float = 1.0,
    on_groups: OnGroups | None = None,
  ) -> Rollouts:
    """Completes each prompt G times.

    Args:
      params: The policy, as `Parameters.for_sampling` returns it, or a `Feed` of it.
      prompts: P prompts.
      key: The root of the random numbers.
      temperature: Of all prompts. Greedy rollouts ignore it.
      on_groups: Called with groups as soon as all their completions have ended, once for each
        prompt. A way of completing prompts that knows of none before the others need not call it.
    """


class Plays(Protocol):
  """What samples somewhere else. `rollouts.traced.Harness` is one."""

  def rollout(self, group_size: int, greedy: bool) -> Rollout:
    """Completes each prompt `group_size` times."""


class PolicyRollout:
  """Completions that the policy samples, alone or in turns with an environment."""

  def __init__(
    self,
    sampler: Callable[..., Iterator[Finished]],
    hosts: Hosts,
    decode_text: Callable[[list[int]], str],
    group_size: int,
    draws: Callable[[jax.Array, float], Draws],
    talkers: Talkers | None = None,
  ):
    """Completes each prompt `group_size` times.

    Args:
      sampler: What samples, as a `Sampler` does.
      hosts: The processes of the run.
      decode_text: Makes a text from token ids.
      group_size: G.
      draws: (key, temperature) -> how rows draw.
      talkers: What answers the policy, or None.
    """
    self._sample, self._hosts, self._decode_text = sampler, hosts, decode_text
    self._group_size, self._draws, self._talkers = group_size, draws, talkers

  def __call__(
    self,
    params: Any,
    prompts: PromptBatch,
    key: jax.Array,
    temperature: float = 1.0,
    on_groups: OnGroups | None = None,
  ) -> Rollouts:
    parts = []
    texts_PG = np.full((len(prompts.prompt_lengths_P), self._group_size), None, object)
    draws, talk = self._draws(key, temperature), None
    if self._talkers is not None:
      talk = Talk(self._talkers, prompts, self._group_size)
      limit = self._talkers.environments.settings.turn_tokens
      draws = draws._replace(reply=talk.reply, turn_tokens=limit)
    given = prompts.prompts_PS, prompts.prompt_lengths_P
    for part in self._sample(params, *given, self._group_size, draws, images=images_of(prompts)):
      parts.append(part)
      if on_groups is not None:
        # Each process has the texts of those groups of the part that it scores.
        own = self._hosts.own_rows(len(part.prompts))
        rollouts = self._rollouts(part.prompts, part.completions, talk, own)
        texts_PG[part.prompts] = rollouts.texts_PG
        on_groups(part.prompts, rollouts)
    completions, every = whole(parts), range(len(texts_PG))
    if on_groups is None:
      return self._rollouts(every, completions, talk, prompts.own)
    return Rollouts(completions, texts_PG, talk and talk.conversations(every))

  def _rollouts(
    self, prompts: Sequence[int], completions: Completions, talk: Talk | None, own: slice
  ) -> Rollouts:
    """The rollouts of some prompts, with the texts of the rows in `own` of them."""
    if talk is None:
      return Rollouts(completions, texts_of(completions, self._decode_text, own))
    turns_PG = talk.conversations(prompts)
    return Rollouts(completions, last_turns(turns_PG, own), turns_PG)


def make_rollout(
  run: Run,
  group_size: int,
  greedy: bool = False,
  max_tokens: int | None = None,
  at_once: int = 0,
  talkers: Talkers | Plays | None = None,
  *,
  keeps_experts: bool = False,
  remote: Callable[..., Iterator[Finished]] | None = None,
) -> Rollout:
  """What completes each prompt `group_size` times in training, in evaluation and in `sample`.

  Args:
    run: The run.
    group_size: G.
    greedy: Take the likeliest tokens.
    max_tokens: The longest completion. None means sampling.max_tokens.
    at_once: The most prompts in flight. 0 means all.
    talkers: What answers the policy, or plays with it, or None.
    keeps_experts: The completions have the experts of each token.
    remote: A `RemoteSampler`, which samples in other processes. None samples in this one.
  """
  if talkers is not None and not isinstance(talkers, Talkers):
    return talkers.rollout(group_size, greedy)
  sampler: Callable[..., Iterator[Finished]]
  if remote is not None:
    sampler = functools.partial(remote, keeps_experts=keeps_experts)
  else:
    sampler = run.programs.sampler(max_tokens, keeps_experts)
    if run.parameters.sampling.is_apart and jax.process_count() > 1:
      sampler = _OwnRows(sampler, run.hosts)
  sampling, decode = run.config.sampling, run.tokenizer.decode
  end = end_at(sampling.stop, decode) if sampling.stop else None

  def draws(key: jax.Array, temperature: float) -> Draws:
    settings = settings_of(sampling, 0.0 if greedy else temperature)
    return Draws(key, settings, end=end, at_once=at_once)

  return PolicyRollout(sampler, run.hosts, decode, group_size, draws, talkers)


class _OwnRows:
  """Samples this process's rows on its own devices, and gets those of the other processes.

  It is called as a `Sampler` is. All groups come together.
  """

  def __init__(self, sampler: Callable[..., Iterator[Finished]], hosts: Hosts):
    self._sampler, self._hosts = sampler, hosts

  def __call__(
    self,
    params: Any,
    prompts_PS: np.ndarray,
    lengths_P: np.ndarray,
    members: int,
    draws: Draws,
    images: Images | None = None,
  ) -> Iterator[Finished]:
    assert images is None  # check_apart refuses them
    own = self._hosts.own_rows(len(lengths_P))
    draws = draws._replace(
      first_prompt=draws.first_prompt + own.start, at_once=draws.at_once // jax.process_count()
    )
    drawn = whole(self._sampler(params, prompts_PS[own], lengths_P[own], members, draws))
    yield Finished([*range(len(lengths_P))], self._hosts.join_rows(drawn))


def hand_on(
  rollout: Rollout,
  params: Any,
  prompts: PromptBatch,
  key: jax.Array,
  temperature: float,
  on_groups: OnGroups,
) -> None:
  """Completes prompts and hands on every group once, if need be after all of them have ended.

  The arguments are those of a `Rollout`.
  """
  handed = False

  def hand(some: list[int], rollouts: Rollouts) -> None:
    nonlocal handed
    handed = True
    on_groups(some, rollouts)

  rollouts = rollout(params, prompts, key, temperature, on_groups=hand)
  if not handed:
    on_groups([*range(len(prompts.prompt_lengths_P))], rollouts)


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
