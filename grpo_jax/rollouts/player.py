"""Plays groups: a sampler draws their rows, and tools and environments answer the rows' turns.

A row that waits for an answer does not stop the others. But the player waits a moment for quick
answers, so that the same rows are decoded together in every run and results repeat to the last bit.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from grpo_jax.data.loader import PromptBatch
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.pending import SOON
from grpo_jax.rollouts.rollout import Rollouts, last_turns, texts_of
from grpo_jax.rollouts.talk import Talk, Talkers
from grpo_jax.sampler.flight import Prompts
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.requests import GroupRequest, GroupSampler


class Opened(NamedTuple):
  """A group to play.

  Attributes:
    number: The number of the group.
    prompts: A batch of prompts that contains the group's prompt.
    place: The index of the group's prompt in `prompts`.
    key: The root of the random numbers.
    row: Completion g draws with fold_in(key, row * G + g).
    temperature: The sampling temperature.
    version: After how many GRPO steps the weights are with which the group begins.
    example: The index of the prompt's example in the data. -1 if it is not known.
  """

  number: int
  prompts: PromptBatch
  place: int
  key: jax.Array
  row: int
  temperature: float = 1.0
  version: int = 0
  example: int = -1


class Played(NamedTuple):
  """Groups whose completions have all ended.

  Attributes:
    numbers: The numbers of the groups.
    rollouts: The rollouts of the groups, in the order of `numbers`. Each process has texts only for
      the groups that it scores, `Hosts.own_rows`.
  """

  numbers: list[int]
  rollouts: Rollouts


class GroupPlayer(Protocol):
  """Plays groups. All processes of a run call it together.

  Attributes:
    ended: How many completions have ended since the player was created.
  """

  ended: int

  def submit(self, groups: Sequence[Opened]) -> None:
    """Queues groups in this order."""

  def advance(self) -> list[Played]:
    """Continues for a short while. Returns groups that have ended, each only once."""

  def cancel(self) -> None:
    """Drops all groups."""


class PolicyPlayer:
  """Plays groups with a `GroupSampler`, and with tools and environments if there are any."""

  def __init__(
    self,
    sampler: GroupSampler,
    prompts_of: Callable[[PromptBatch], Prompts],
    settings_at: Callable[[float], RowSettings],
    members: int,
    decode_text: Callable[[list[int]], str],
    hosts: Hosts,
    *,
    talkers: Talkers | None = None,
  ):
    """Creates the player without groups.

    Args:
      sampler: Draws the rows.
      prompts_of: Converts a batch of prompts for `GroupRequest.prompts`.
      settings_at: Returns the sampling settings of rows at a temperature.
      members: G, the number of completions per group.
      decode_text: Decodes token ids to a text.
      hosts: The processes of the run.
      talkers: The tools and environments that answer the policy, or None.
    """
    self.sampler = sampler
    self._prompts_of, self._settings_at, self._members = prompts_of, settings_at, members
    self._decode_text, self._hosts, self._talkers = decode_text, hosts, talkers
    self._talk = None if talkers is None else Talk(talkers, members)
    self._latest: tuple[PromptBatch, Prompts] | None = None  # (batch, its `Prompts`)
    self.ended = 0

  def submit(self, groups: Sequence[Opened]) -> None:
    self.sampler.submit([self._request(group) for group in groups])
    if self._talk is not None:
      for group in groups:
        self._talk.begin(group.number, group.prompts, group.place)

  def advance(self) -> list[Played]:
    """Passes answers to paused rows, lets the sampler draw, and asks for answers to new turns."""
    if self._talk is not None and self._talk.waits:
      for number, member, tokens in self._talk.answers(SOON, until_one=not self.sampler.draws):
        self.sampler.go_on(number, member, tokens)
    news = self.sampler.advance()
    if self._talk is not None:
      self._talk.ask(news.paused)
    finished = sum(one.completions.lengths_PG.size for one in news.finished)
    self.ended += finished if news.ended is None else news.ended
    return [self._played(one.prompts, one.completions) for one in news.finished]

  def cancel(self) -> None:
    self.sampler.cancel()
    if self._talkers is not None:
      self._talk = Talk(self._talkers, self._members)

  def _request(self, group: Opened) -> GroupRequest:
    """Makes the sampler's request for a group. Groups of one batch share the converted prompts."""
    if self._latest is None or self._latest[0] is not group.prompts:
      self._latest = group.prompts, self._prompts_of(group.prompts)
    turn_tokens = 0
    if self._talkers is not None:
      turn_tokens = self._talkers.environments.settings.turn_tokens
    return GroupRequest(
      number=group.number,
      prompts=self._latest[1],
      place=group.place,
      key=np.asarray(jax.random.key_data(group.key)),
      first_row=group.row * self._members,
      settings=self._settings_at(group.temperature),
      turn_tokens=turn_tokens,
      pauses=self._talk is not None,
    )

  def _played(self, numbers: list[int], completions: Any) -> Played:
    """Adds texts and conversations to the completions of groups that have ended."""
    own = self._hosts.own_rows(len(numbers))
    if self._talk is None:
      return Played(numbers, Rollouts(completions, texts_of(completions, self._decode_text, own)))
    turns_PG = self._talk.take(numbers)
    return Played(numbers, Rollouts(completions, last_turns(turns_PG, own), turns_PG))


# (params, prompts, key, temperature) -> the rollouts of all of these prompts.
WholeBatch = Callable[[Any, PromptBatch, jax.Array, float], Rollouts]


class BatchPlayer:
  """Plays groups with a function that completes whole batches. They are submitted as whole batches.

  `complete` completes all prompts of a batch. `feed` returns the weights and their version.
  """

  def __init__(self, complete: WholeBatch, feed: Callable[[], tuple[Any, int]]):
    self._complete, self._feed = complete, feed
    self._waiting: list[Opened] = []
    self.ended = 0

  def submit(self, groups: Sequence[Opened]) -> None:
    self._waiting += groups

  def advance(self) -> list[Played]:
    """Completes the oldest batch in the queue, with the current weights."""
    if not self._waiting:
      return []
    first = self._waiting[0]
    batch = [group for group in self._waiting if group.prompts is first.prompts]
    assert [group.place for group in batch] == [*range(len(first.prompts.prompt_lengths_P))]
    self._waiting = self._waiting[len(batch) :]
    # A step's batches share a key. 2**30 keeps theirs apart from those of rows, fold_in(key, row).
    key = first.key if first.row == 0 else jax.random.fold_in(first.key, 2**30 + first.row)
    rollouts = self._complete(self._feed()[0], first.prompts, key, first.temperature)
    self.ended += rollouts.completions.lengths_PG.size
    return [Played([group.number for group in batch], rollouts)]

  def cancel(self) -> None:
    self._waiting = []
