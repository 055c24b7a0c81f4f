"""A `GroupSampler` that lets an external engine draw the rows."""

from collections.abc import Sequence
import dataclasses
import hashlib
import queue
from typing import Any, NamedTuple, Protocol

import numpy as np

from grpo_jax.engine.drawn import DrawnFile, GroupTerms, Recorded, RecordedTurn, name_of
from grpo_jax.engine.server import Ask, DrawnTokens
from grpo_jax.engine.servers import RowRequest, Servers
from grpo_jax.sampler.requests import Finished, GroupRequest, News, StoppedRow
from grpo_jax.sampler.stop import End
from grpo_jax.sampler.stream import Feed
from grpo_jax.settings import RunFailed
from grpo_jax.types import Completions

_MOMENT = 0.02  # seconds that `advance` waits for rows if replies to other rows may come meanwhile
_WHILE = 0.25  # seconds that `advance` waits for rows if rows never pause for a reply


class Rules(NamedTuple):
  """The limits and stops that all rows of a run share.

  Attributes:
    tokens: T, the token limit of a completion.
    vocabulary: The vocabulary size. Token ids are smaller.
    stop_ids: Tokens that end a row.
    stop: Texts that end a row.
    end: Finds where one of these texts ends in token ids: see `end_at`. None without texts.
  """

  tokens: int
  vocabulary: int
  stop_ids: tuple[int, ...]
  stop: tuple[str, ...] = ()
  end: End | None = None


@dataclasses.dataclass(eq=False)
class _Group:
  """A group in flight.

  Attributes:
    request: The request for the group.
    prompt: The token ids of the prompt.
    version: The version of the weights that draw the group.
    asked: The digest of the group's `GroupTerms`.
    rows: The G rows.
    left: How many rows have not ended.
  """

  request: GroupRequest
  prompt: list[int]
  version: int
  asked: str
  rows: list["_Row"] = dataclasses.field(default_factory=list)
  left: int = 0


@dataclasses.dataclass(eq=False)
class _Row:
  """A row of a group in flight.

  Attributes:
    group: The group.
    member: The index of the row in the group.
    temperature: The sampling temperature.
    limit: The token limit of the row, replies included and the prompt excluded.
    known: The recorded turns. They replace turns that a server would draw.
    turns: The turns so far.
    tokens: The token ids after the prompt, replies included.
    logprobs: The log-prob of each of these tokens, 0 in a reply.
    is_sampled: For each of these tokens, whether the policy drew it.
    stopped_by: The token that ended the last turn, as in `Completions.stopped_by_PG`.
  """

  group: _Group
  member: int
  temperature: float
  limit: int
  known: list[RecordedTurn]
  turns: list[RecordedTurn] = dataclasses.field(default_factory=list)
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  is_sampled: list[bool] = dataclasses.field(default_factory=list)
  stopped_by: int = -1


class ServersAndRecord(Protocol):
  """The servers and the record of a run, as `connect.ExternalEngine` provides them.

  Attributes:
    servers: The servers that draw. None if all groups are in the record.
    record: The record of drawn groups.
  """

  servers: Servers | None
  record: DrawnFile

  def weights(self, params: Any) -> Any:
    """Writes weights for the servers. Returns the same object for the same weights."""


class EngineGroups:
  """A `GroupSampler` that lets servers draw rows, or reads them from the record of a run."""

  def __init__(self, hub: ServersAndRecord, feed: Feed, members: int, rules: Rules):
    """Creates the sampler. It draws nothing yet.

    Args:
      hub: The servers and the record.
      feed: Returns the current weights and their version.
      members: G, the number of rows per group.
      rules: The limits and stops of all rows.
    """
    self._hub, self._feed, self._members, self._rules = hub, feed, members, rules
    self._forget()

  def _forget(self) -> None:
    self._waiting: list[GroupRequest] = []
    self._groups: dict[int, _Group] = {}
    self._rows_of: dict[RowRequest, _Row] = {}
    self._known: list[_Row] = []  # rows whose next turn is in the record
    self._done: queue.SimpleQueue[tuple[RowRequest, DrawnTokens]] = queue.SimpleQueue()
    self._current: Any = None  # the weights of all groups in flight
    self._ended = 0
    self._finished: list[_Group] = []

  @property
  def draws(self) -> bool:
    return bool(self._waiting or self._rows_of or self._known)

  def submit(self, requests: Sequence[GroupRequest]) -> None:
    self._waiting += requests

  def go_on(self, number: int, member: int, tokens: Sequence[int] | None) -> None:
    """Adds a reply to a paused row and starts the next turn. None or a long reply ends the row."""
    row = self._groups[number].rows[member]
    reply = None if tokens is None else [*tokens]
    row.turns[-1] = row.turns[-1]._replace(reply=reply)
    if reply is None or len(row.tokens) + len(reply) >= row.limit:
      self._end_row(row)
      return
    self._append(row, reply, [0.0] * len(reply), is_sampled=False)
    if row.known and self._reply_before(row) != reply:
      row.known = []  # a tool or environment replied differently this time
    self._start_turn(row)

  def cancel(self) -> None:
    if self._rows_of:
      self._hub.servers.drop([*self._rows_of])
    self._forget()

  def advance(self) -> News:
    """Starts queued groups, and adds the turns that the record has or that servers have drawn."""
    self._begin()
    paused = list[StoppedRow]()
    known, self._known = self._known, []
    for row in known:
      turn = row.known[len(row.turns)]
      paused += self._add_turn(row, turn.tokens, turn.logprobs)
    if self._rows_of and not known:  # recorded turns need no wait for servers
      pauses = any(group.request.pauses for group in self._groups.values())
      for job, drawn in self._hub.servers.next(self._done, _MOMENT if pauses else _WHILE):
        row = self._rows_of.pop(job)
        paused += self._add_turn(row, *self._cut(row, drawn))
    ended, self._ended = self._ended, 0
    finished, self._finished = self._finished, []
    return News(paused, [self._as_finished(finished)] if finished else [], ended)

  def _begin(self) -> None:
    """Starts the queued groups, unless groups with other weights are in flight at the servers."""
    if not self._waiting:
      return
    params, version = self._feed()
    weights = self._hub.weights(params)
    if self._groups and weights is not self._current:  # the servers draw with one version at a time
      return
    self._current, requests, self._waiting = weights, self._waiting, []
    for request in requests:
      group = self._opened(request, version)
      self._groups[request.number] = group
      for row in group.rows:
        self._start_turn(row)

  def _opened(self, request: GroupRequest, version: int) -> _Group:
    """Creates a group with its rows, and with their recorded turns if the group was drawn before.

    Raises:
      RunFailed: The group was recorded with another prompt or other settings.
    """
    prompts, G, T = request.prompts, self._members, self._rules.tokens
    length = int(prompts.lengths_n[request.place])
    prompt = np.asarray(prompts.tokens_nS)[request.place][:length].tolist()
    settings, rules = request.settings, self._rules
    # Settings are numbers for all rows, or arrays [G].
    limits = T if settings.max_tokens is None else settings.max_tokens
    limits_G = np.minimum(np.broadcast_to(np.asarray(limits), G), T)
    temperature_G = np.broadcast_to(np.asarray(settings.temperature), G)
    terms = GroupTerms(
      prompt,
      temperature_G.tolist(),
      limits_G.tolist(),
      request.turn_tokens,
      rules.stop_ids,
      rules.stop,
      rules.vocabulary,
    )
    recorded = self._hub.record.find(name_of(request, G), version, terms)
    group = _Group(request, prompt, version, terms.digest(), left=G)
    for g in range(G):
      known = list(recorded.rows[g]) if recorded is not None else []
      group.rows.append(_Row(group, g, float(temperature_G[g]), int(limits_G[g]), known))
    return group

  def _start_turn(self, row: _Row) -> None:
    """Starts a row's next turn: from the record if it has the turn, or else at a server."""
    if len(row.turns) < len(row.known):
      self._known.append(row)
      return
    if self._hub.servers is None:
      raise RunFailed(
        "config key rollout.replay: a tool or environment answers otherwise than it did in the run"
        " that is replayed, so what the policy wrote after that is not known"
      )
    most, request = row.limit - len(row.tokens), row.group.request  # `most` tokens in this turn
    if request.turn_tokens:  # 0 means no limit of its own for a turn
      most = min(most, request.turn_tokens)
    prompt = row.group.prompt + row.tokens
    rules = self._rules
    ask = Ask(prompt, most, row.temperature, _seed(row), rules.stop_ids, rules.stop)
    # Several samplers may share the servers and use the same numbers, so `id(self)` is in the key.
    job = RowRequest(ask, (id(self), request.number), self._done)
    self._rows_of[job] = row
    # All servers may be gone by now, or another sampler may have brought them other weights.
    # Otherwise this returns at once.
    self._hub.servers.use(self._current)
    self._hub.servers.submit(job)

  def _cut(self, row: _Row, drawn: DrawnTokens) -> tuple[list[int], list[float]]:
    """Cuts a turn after the first stop id or stop text, where the server may have gone on.

    Returns the tokens that are left and their log-probs.

    Raises:
      RunFailed: A token is outside the vocabulary, or the engine stopped at a token that is no end.
    """
    tokens, logprobs, end = drawn.tokens, drawn.logprobs, self._rules.end
    if max(tokens) >= self._rules.vocabulary:
      raise RunFailed(
        f"the engine drew token {max(tokens)}, and the model has {self._rules.vocabulary}: it"
        " serves another model"
      )
    to_id = next((n for n, id in enumerate(tokens, 1) if id in self._rules.stop_ids), None)
    to_text = end(tokens, 0) if end is not None else None
    ends = [count for count in (to_id, to_text) if count is not None]
    if ends:
      return tokens[: min(ends)], logprobs[: min(ends)]
    if drawn.has_stopped:
      raise RunFailed(
        f"the engine ended a row at token {tokens[-1]}, which ends none here: it has another"
        " tokenizer, or settings that python -m grpo_jax.engine --print does not write"
      )
    return tokens, logprobs

  def _add_turn(self, row: _Row, tokens: list[int], logprobs: list[float]) -> list[StoppedRow]:
    """Adds a drawn or recorded turn to a row. Returns [the row] if it pauses, or else []."""
    self._append(row, tokens, logprobs, is_sampled=True)
    row.turns.append(RecordedTurn(tokens, logprobs))
    has_text = self._rules.end is not None and self._rules.end(tokens, 0) is not None
    row.stopped_by = tokens[-1] if has_text or tokens[-1] in self._rules.stop_ids else -1
    if not row.group.request.pauses:
      self._end_row(row)
      return []
    room = row.limit - len(row.tokens)
    number = row.group.request.number
    return [StoppedRow(number, row.member, [*row.tokens], row.stopped_by, room)]

  def _append(
    self, row: _Row, tokens: list[int], logprobs: list[float], *, is_sampled: bool
  ) -> None:
    row.tokens += tokens
    row.logprobs += logprobs
    row.is_sampled += [is_sampled] * len(tokens)

  def _reply_before(self, row: _Row) -> list[int] | None:
    """Returns the recorded reply to the row's latest turn, or None."""
    last = len(row.turns) - 1
    return row.known[last].reply if last < len(row.known) else None

  def _end_row(self, row: _Row) -> None:
    """Counts a row that has ended. After the last row, records the group as finished."""
    group = row.group
    self._ended, group.left = self._ended + 1, group.left - 1
    if not group.left:
      # A group whose turns all came from the record is not written again.
      if not all(row.known == row.turns for row in group.rows):
        turns = [row.turns for row in group.rows]
        name = name_of(group.request, self._members)
        self._hub.record.add(name, Recorded(group.version, group.asked, turns))
      self._finished.append(self._groups.pop(group.request.number))

  def _as_finished(self, groups: Sequence[_Group]) -> Finished:
    """Returns the completions of finished groups as padded arrays."""
    shape = len(groups), self._members, self._rules.tokens
    tokens_PGT, sampled_PGT = np.zeros(shape, np.int32), np.zeros(shape, bool)
    logprobs_PGT, behavior_PGT = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    lengths_PG, stopped_by_PG = np.zeros(shape[:2], np.int32), np.zeros(shape[:2], np.int32)
    for p, group in enumerate(groups):
      for row in group.rows:
        at, count = (p, row.member), len(row.tokens)
        tokens_PGT[at][:count], sampled_PGT[at][:count] = row.tokens, row.is_sampled
        logprobs_PGT[at][:count] = np.minimum(row.logprobs, 0)  # rounding may put one above 0
        # Servers draw without filters (`run/checks.py` refuses them), so the behaviour log-prob of
        # a token is its log-prob. A greedy choice has probability 1, so there it is 0.
        behavior_PGT[at] = logprobs_PGT[at] if row.temperature else 0
        lengths_PG[at], stopped_by_PG[at] = count, row.stopped_by
    completions = Completions(
      tokens_PGT=tokens_PGT,
      lengths_PG=lengths_PG,
      sampled_PGT=sampled_PGT,
      logprobs_PGT=logprobs_PGT,
      behavior_logprobs_PGT=behavior_PGT,
      stopped_by_PG=stopped_by_PG,
    )
    return Finished([group.request.number for group in groups], completions)


def _seed(row: _Row) -> int:
  """Returns a 56-bit seed for a row's next turn. It differs between rows and between turns."""
  request = row.group.request
  words = *np.asarray(request.key).tolist(), request.first_row + row.member, len(row.tokens)
  return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:7], "big")
