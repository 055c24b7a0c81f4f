"""The interface between the code that wants completions and the samplers that draw them.

A caller submits requests for groups and receives rows when they end. If a request sets `pauses`, a
row that ends keeps its seat and waits for a reply. Tools and environments call this interface, so
they work with every `GroupSampler`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from grpo_jax.sampler.flight import Prompts
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.types import Completions


class GroupRequest(NamedTuple):
  """A request for a group: G completions of a prompt.

  Attributes:
    number: The caller's number for the group, which results repeat.
    prompts: A batch of prompts that contains the group's prompt. A batch is computed together.
    place: The index of the group's prompt in `prompts`.
    key: uint32, the data of the random key.
    first_row: The number of the group's first row. Row r draws with fold_in(key, r).
    settings: How the rows draw, as numbers or arrays [G].
    turn_tokens: The most tokens that a row draws before it ends or pauses. 0 means no limit but the
      row's longest completion.
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
  """A row that pauses until its reply.

  Attributes:
    prompt: The number of the row's group.
    member: The row's index in the group.
    tokens: All tokens after the prompt, including those of replies.
    stopped_by: The stop id, or the last token of a stop text, that ended the row. -1 if the row
      reached a limit.
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
    prompts: The numbers of the P groups.
    completions: Their completions in the same order, as numpy arrays.
  """

  prompts: list[int]
  completions: Completions


class News(NamedTuple):
  """The rows and groups that ended or paused since the last call.

  Attributes:
    paused: Rows that wait for `GroupSampler.go_on`.
    finished: Groups whose rows have all ended, each once.
    ended: How many rows have ended, including rows of unfinished groups. None if unknown.
  """

  paused: Sequence[StoppedRow] = ()
  finished: Sequence[Finished] = ()
  ended: int | None = None


class GroupSampler(Protocol):
  """Samples groups on the devices of this process or in other processes. One thread calls it."""

  @property
  def draws(self) -> bool:
    """Whether some row can draw tokens before the next reply arrives."""

  def submit(self, requests: Sequence[GroupRequest]) -> None:
    """Queues groups for seats, in this order."""

  def go_on(self, number: int, member: int, tokens: Sequence[int] | None) -> None:
    """Replies to a paused row with tokens. None, or more tokens than fit, ends the row."""

  def cancel(self) -> None:
    """Drops all groups."""

  def advance(self) -> News:
    """Decodes for a short while. Returns at once if no row can draw."""


# (paused rows) -> for each row, the tokens of its reply, or None to end the row.
Reply = Callable[[list[StoppedRow]], Sequence[Sequence[int] | None]]
