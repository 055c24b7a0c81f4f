"""The interface between the code that wants completions and the samplers that draw them.

Requests for groups go in, and rows come out when they end. If its request says `pauses`, a row that
ends keeps its seat and waits for a reply. Tools and environments live above this interface, so they
work with every `GroupSampler`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from grpo_jax.sampler.flight import Prompts
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.types import Completions


class GroupRequest(NamedTuple):
  """A group to draw.

  Attributes:
    number: The number of the group in all answers.
    prompts: A set of prompts that has the group's prompt. A set is computed together.
    place: The index of the group's prompt in `prompts`.
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


class StoppedRow(NamedTuple):
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
    prompts: The numbers of the groups.
    completions: The completions of these groups, as numpy arrays.
  """

  prompts: list[int]
  completions: Completions


class News(NamedTuple):
  """The rows and groups that ended or paused since the last call.

  Attributes:
    paused: Rows that wait for `GroupSampler.go_on`.
    finished: Groups whose rows have all ended, each once.
    ended: How many rows have ended, rows of unfinished groups included. None if it is not known.
  """

  paused: Sequence[StoppedRow] = ()
  finished: Sequence[Finished] = ()
  ended: int | None = None


class GroupSampler(Protocol):
  """Samples groups on the devices of this process or in other processes. One thread calls it."""

  @property
  def draws(self) -> bool:
    """Whether a row can draw tokens before another reply comes."""

  def submit(self, requests: Sequence[GroupRequest]) -> None:
    """Queues groups for seats, in this order."""

  def go_on(self, number: int, member: int, tokens: Sequence[int] | None) -> None:
    """Lets a row that pauses go on with the tokens of a reply. None, or too many, end it."""

  def cancel(self) -> None:
    """Drops all groups."""

  def advance(self) -> News:
    """Samples on for a short while. Where no row can draw, it returns at once."""


# Maps rows that have ended to the tokens with which each goes on, or None.
Reply = Callable[[list[StoppedRow]], Sequence[Sequence[int] | None]]
