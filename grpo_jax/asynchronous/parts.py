"""Prompts that sampler processes draw: a part for each process, with the replies of its rows."""

from collections import deque
from collections.abc import Sequence
import dataclasses
from typing import Any, Protocol

import numpy as np

from grpo_jax.asynchronous import contents
from grpo_jax.asynchronous.messages import BadMessage
from grpo_jax.asynchronous.versions import Weights
from grpo_jax.sampler.requests import Finished, StoppedRow
from grpo_jax.settings import RunFailed

Arrivals = deque[Finished | list[StoppedRow] | RunFailed]
RowOfPart = tuple[int, int]  # the prompt in its part, and the member


@dataclasses.dataclass
class DrawnPart:
  """Some prompts of a call, which one process draws.

  Attributes:
    prompts: Their numbers in the call.
    weights: The weights that draw them.
    fields: The fields of the message that asks for the part.
    arrays: The arrays of this message.
    answer: The sizes that the answer must have.
    call: Gets the groups that were drawn, or the error that ended the call.
    missing: The prompts that have not arrived, as numbers in the part.
    refused: How many processes were sent away for bad answers to this part.
    replies: For each row, (its length before, the tokens of the reply or None) of its replies so
      far, so that another process can draw it again.
    asked: The lengths of the rows whose reply was asked for and has not come.
    turns: How many times each row has paused in the process that draws now.
    answers: Replies that were not sent to this process yet, as [prompt, member, tokens].
  """

  prompts: list[int]
  weights: Weights
  fields: dict[str, Any]
  arrays: dict[str, np.ndarray]
  answer: contents.PartRequest
  call: Arrivals
  missing: set[int]
  refused: int = 0
  replies: dict[RowOfPart, list[tuple[int, list[int] | None]]] = dataclasses.field(
    default_factory=dict
  )
  asked: dict[RowOfPart, int] = dataclasses.field(default_factory=dict)
  turns: dict[RowOfPart, int] = dataclasses.field(default_factory=dict)
  answers: list[list[Any]] = dataclasses.field(default_factory=list)

  def paused(self, row: RowOfPart, length: int) -> bool:
    """Takes note that a row waits for a reply.

    Returns:
      Whether the reply must be asked for. A known reply is sent again.

    Raises:
      BadMessage: The row cannot pause there.
    """
    turn, known = self.turns.get(row, 0), self.replies.setdefault(row, [])
    if turn > len(known) or (known and turn == len(known) and known[-1][1] is None):
      raise BadMessage("it sent a row that pauses, and that had paused or ended before")
    if turn == len(known) and row[0] not in self.missing:
      raise BadMessage("it sent a row that pauses after its group had ended")
    self.turns[row] = turn + 1
    if turn < len(known):
      if known[turn][0] != length:
        raise BadMessage("it draws other tokens than the process before it did")
      self.answers.append([*row, known[turn][1]])
      return False
    is_new = row not in self.asked
    self.asked[row] = length
    return is_new

  def reply(self, row: RowOfPart, tokens: Sequence[int] | None) -> None:
    """Takes the reply with which a row goes on."""
    known = self.replies[row]
    known.append((self.asked.pop(row), None if tokens is None else [*tokens]))
    if self.turns.get(row, 0) == len(known):
      self.answers.append([*row, known[-1][1]])

  def begin_again(self) -> None:
    """Lets another process draw the part from its start."""
    self.turns, self.answers = {}, []


class GivesParts(Protocol):
  """Gives parts to processes. `learner.RemoteSampler` is one."""

  def next(self, call: Arrivals, seconds: float) -> Finished | list[StoppedRow] | None:
    """Waits up to `seconds` for groups of a call that have ended, or for rows that pause."""

  def reply(self, part: DrawnPart, row: RowOfPart, tokens: Sequence[int] | None) -> None:
    """A row of a part goes on with these tokens, or has ended."""

  def drop(self, parts: Sequence[DrawnPart]) -> None:
    """Drops parts: no caller waits for them any more."""


class RemoteCall:
  """Prompts that processes complete together.

  Attributes:
    left: How many prompts have not arrived.
  """

  def __init__(self, hub: GivesParts, call: Arrivals, parts: Sequence[DrawnPart]):
    """`call` gets the groups and rows of `parts`."""
    self._hub, self._call, self._parts = hub, call, parts
    self.left = sum(len(part.prompts) for part in parts)

  def next(self, seconds: float) -> Finished | list[StoppedRow] | None:
    """Waits up to `seconds` for groups that have ended, or for rows that pause.

    Raises:
      SamplingClosed: Nothing will come.
      RunFailed: The weights are not finite, so that nothing can be drawn with them.
    """
    arrived = self._hub.next(self._call, seconds)
    if isinstance(arrived, Finished):
      self.left -= len(arrived.prompts)
    return arrived

  def reply(self, prompt: int, member: int, tokens: Sequence[int] | None) -> None:
    """A row that pauses goes on with these tokens. None ends it."""
    part = next(part for part in self._parts if prompt in part.prompts)
    self._hub.reply(part, (part.prompts.index(prompt), member), tokens)

  def close(self) -> None:
    """Drops the prompts that have not arrived."""
    self._hub.drop(self._parts)
