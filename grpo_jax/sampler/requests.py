"""The seam between those who want completions and those who sample them.

Requests go in: groups to draw. Rows come out when they end. A row whose request `pauses` keeps its
seat then, until it is told how it goes on. Tools, environments and whatever else chooses what is
drawn next live above this seam, so they work with every `GroupSampler`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from grpo_jax.sampler.flight import Prompts
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.types import Completions


class GroupRequest(NamedTuple):
  """A group to draw.

  Attributes:
    number: Names the group in all that comes back.
    prompts: Some prompts, of which this is one. Those of one object are computed together.
    place: Which of them it is.
    key: uint32, the data of the key that the random numbers come from.
    first_row: The number of the group's first row. Row r draws with fold_in(key, r).
    settings: How its rows draw, as numbers or arrays [G].
    turn_tokens: The most tokens that a row draws before it ends or pauses. 0 means as many as it
      may have.
    pauses: Whether a row that has ended waits for `GroupSampler.go_on`.
  """

  number: int
  prompts: Prompts
  place: int
  key: Any
  first_row: int
  settings: RowSettings = RowSettings()
  turn_tokens: int = 0
  pauses: bool = False


class Ended(NamedTuple):
  """A row that has ended, or that pauses.

  Attributes:
    prompt: The number of its group.
    member: Its number in the group.
    tokens: All tokens after the prompt, those of replies included.
    stopped_by: The stop id, or the last token of a text, that ended it. -1 where a limit did.
    room: How many more tokens the row may have.
  """

  prompt: int
  member: int
  tokens: list[int]
  stopped_by: int
  room: int


class Finished(NamedTuple):
  """Groups whose rows have all ended.

  Attributes:
    prompts: Their numbers.
    completions: Of these groups, as numpy arrays.
  """

  prompts: list[int]
  completions: Completions


class News(NamedTuple):
  """Everything that happened since the last time.

  Attributes:
    paused: Rows that wait for `GroupSampler.go_on`.
    finished: Groups whose rows have all ended. None is there twice.
    ended: How many rows have ended, those of groups that go on included. None if that is not known.
  """

  paused: Sequence[Ended] = ()
  finished: Sequence[Finished] = ()
  ended: int | None = None


class GroupSampler(Protocol):
  """Whoever samples: the devices of this process, or other processes. One thread calls it."""

  @property
  def draws(self) -> bool:
    """Whether a row can draw tokens before another reply comes."""

  def submit(self, requests: Sequence[GroupRequest]) -> None:
    """Groups wait for seats, in this order."""

  def go_on(self, number: int, member: int, tokens: Sequence[int] | None) -> None:
    """A row that pauses goes on with the tokens of a reply. None, or too many, end it."""

  def cancel(self) -> None:
    """Drops all groups, because nobody wants them any more."""

  def advance(self) -> News:
    """Samples on for a short while. Where no row can draw, it returns at once."""


# Rows that have ended -> for each of them the tokens with which it goes on, or None.
Reply = Callable[[list[Ended]], Sequence[Sequence[int] | None]]
