"""Splits the prompts of a sampling call into parts, each of which one sampler process draws."""

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
RowOfPart = tuple[int, int]  # (index of the prompt in the part, index of the row in its group)


@dataclasses.dataclass
class DrawnPart:
  """A part of a sampling call: some prompts, which one process draws.

  If the process leaves, another process draws the part again from its start. It must draw the same
  tokens, so it gets the same replies.

  Attributes:
    prompts: The numbers of the part's prompts in the call.
    weights: The weights with which to draw them.
    fields: The fields of the draw message.
    arrays: The arrays of the draw message.
    answer: The sizes that answers must have.
    call: The queue to which groups, paused rows, or the error that ends the call are appended.
    missing: The prompts that have not arrived, as indices in the part.
    refused: How many processes were disconnected because of bad answers to this part.
    replies: All replies to each row so far, as (length of the row before the reply, tokens of the
      reply, or None to end the row).
    asked: The lengths of rows whose reply was requested and has not arrived.
    turns: How many times each row has paused in the current process.
    answers: Replies that were not sent to the current process yet, as [prompt, member, tokens].
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
    """Records that a row of `length` tokens pauses. Queues the reply if a former process got it.

    Returns:
      Whether the caller must request a reply.

    Raises:
      BadMessage: The row cannot pause now, or at another length than in the former process.
    """
    # The row has paused `turn` times in this process. `known` has replies to any process, by turn.
    turn, known = self.turns.get(row, 0), self.replies.setdefault(row, [])
    # A row pauses again only after the reply to its last pause, and never after one that ended it.
    if turn > len(known) or (known and turn == len(known) and known[-1][1] is None):
      raise BadMessage("it sent a row that pauses, and that had paused or ended before")
    if turn == len(known) and row[0] not in self.missing:
      raise BadMessage("it sent a row that pauses after its group had ended")
    self.turns[row] = turn + 1
    if turn < len(known):  # a former process paused here and got this reply
      if known[turn][0] != length:
        raise BadMessage("it draws other tokens than the process before it did")
      self.answers.append([*row, known[turn][1]])
      return False
    is_new = row not in self.asked  # else a former process paused here, and the reply is to come
    self.asked[row] = length
    return is_new

  def reply(self, row: RowOfPart, tokens: Sequence[int] | None) -> None:
    """Records the reply to a paused row and queues it for the process. None ends the row."""
    known = self.replies[row]
    known.append((self.asked.pop(row), None if tokens is None else [*tokens]))
    if self.turns.get(row, 0) == len(known):
      self.answers.append([*row, known[-1][1]])

  def begin_again(self) -> None:
    """Prepares for another process, which draws the part from its start."""
    self.turns, self.answers = {}, []


class GivesParts(Protocol):
  """Distributes parts to processes, as `learner.RemoteSampler` does."""

  def next(self, call: Arrivals, seconds: float) -> Finished | list[StoppedRow] | None:
    """Waits up to `seconds` for ended groups or paused rows of a call. None if there are none."""

  def reply(self, part: DrawnPart, row: RowOfPart, tokens: Sequence[int] | None) -> None:
    """Replies to a paused row of a part with tokens. None ends the row."""

  def drop(self, parts: Sequence[DrawnPart]) -> None:
    """Drops parts, for which no caller waits any more."""


class RemoteCall:
  """A call in which processes complete prompts.

  Attributes:
    left: The number of prompts whose groups have not arrived.
  """

  def __init__(self, hub: GivesParts, call: Arrivals, parts: Sequence[DrawnPart]):
    """`hub` appends the groups and paused rows of `parts` to `call`."""
    self._hub, self._call, self._parts = hub, call, parts
    self.left = sum(len(part.prompts) for part in parts)

  def next(self, seconds: float) -> Finished | list[StoppedRow] | None:
    """Waits up to `seconds` for ended groups or paused rows. None if there are none.

    Raises:
      SamplingClosed: The run has ended, or should stop while no process samples.
      RunFailed: Sampling has failed.
    """
    arrived = self._hub.next(self._call, seconds)
    if isinstance(arrived, Finished):
      self.left -= len(arrived.prompts)
    return arrived

  def reply(self, prompt: int, member: int, tokens: Sequence[int] | None) -> None:
    """Replies to a paused row of prompt `prompt` in the call with tokens. None ends the row."""
    part = next(part for part in self._parts if prompt in part.prompts)
    self._hub.reply(part, (part.prompts.index(prompt), member), tokens)

  def close(self) -> None:
    """Drops the prompts that have not arrived."""
    self._hub.drop(self._parts)
