"""The sampler's scheduler: takes requests for groups, decodes their rows and returns completions.

Rows are decoded in chunks, each of which is one call of a compiled program. Between two chunks,
rows that have ended leave, waiting groups take their seats, and the cache grows or shrinks. A row
that pauses keeps its seat and its cache while the others go on.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from grpo_jax import model
from grpo_jax.sampler import seats as seats_lib
from grpo_jax.sampler.filters import FILTERS
from grpo_jax.sampler.flight import Flight, NewRows, Resumed
from grpo_jax.sampler.guides import Guided
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.pieces import ArrivingPrompts
from grpo_jax.sampler.programs import FlightPrograms, most_rewound
from grpo_jax.sampler.requests import Finished, GroupRequest, News, StoppedRow
from grpo_jax.sampler.rows import Chunk, Drawn, Extras
from grpo_jax.sampler.seats import NOBODY, Grid
from grpo_jax.sampler.stop import End
from grpo_jax.types import Completions

# The most rounds of a chunk if the host looks for stop texts, or prompts wait for another piece.
_SOONEST_LOOK = 16
_MOST_ROUNDS = 2**30  # the cache counts its rounds in an int32


class Feed(Protocol):
  """Weights that may change while rows are decoded."""

  def __call__(self) -> tuple[model.Params, int]:
    """Returns the weights for the next chunk, and their version."""


class Pace(NamedTuple):
  """Grids and sizes of decoding. They affect speed and memory, but no token.

  Attributes:
    grid: The first grid.
    smaller: The grids that rows move into when few are left and no group waits.
    slots: The sizes of the cache, in slots per row, through which it grows.
    prompts_at_once: How many queued prompts are computed together.
    prompt_piece: The most tokens of a prompt that are computed between two chunks while rows draw.
      0 computes whole prompts.
    shards: How many shards of the mesh hold different rows.
    in_order: Whether free seats go to the oldest groups first, for an endless stream of groups. If
      not, a group's members follow each other at one place, so that its prompt is stored once.
  """

  grid: Grid
  smaller: tuple[Grid, ...]
  slots: tuple[int, ...]
  prompts_at_once: int
  shards: int
  in_order: bool = False
  prompt_piece: int = 0


class SeatRounds(NamedTuple):
  """Counts how many seats were used in the rounds of all chunks.

  Attributes:
    used: How often a seat drew a token in a round, or took one from a reply.
    all: The number of seats, summed over all rounds.
  """

  used: int = 0
  all: int = 0

  @property
  def idle(self) -> float:
    """The share of seats without a token, over all rounds. NaN before the first round."""
    return 1 - self.used / self.all if self.all else float("nan")


def by_row(settings: RowSettings, prompts: int, members: int) -> RowSettings:
  """Broadcasts settings to float32 or int32 arrays [prompts * members]. None stays None."""

  def per_row(setting: Any, is_integer: bool) -> np.ndarray | None:
    if setting is None:
      return None
    dtype = np.int32 if is_integer else np.float32
    return np.broadcast_to(np.asarray(setting, dtype), (prompts, members)).reshape(-1)

  values = settings.filter_values
  as_rows = RowSettings(
    temperature=per_row(settings.temperature, is_integer=False),
    min_tokens=per_row(settings.min_tokens, is_integer=True),
    max_tokens=per_row(settings.max_tokens, is_integer=True),
  )
  # `off` has the type of the filter's values.
  return as_rows.with_filters(
    {name: per_row(x, isinstance(FILTERS[name].off, int)) for name, x in values.items()}
  )


class Stream:
  """A `GroupSampler` on devices of this process.

  Groups are stored in host arrays [X, G, ...]. x is the index of a group there, which later groups
  reuse, and x * G + g the number of a row. `Seats` calls x the prompt p.

  A round writes a slot of the cache for all rows, also for those that pause. Rolling moves the
  tokens of a paused row to the slots written last, where the row needs them when it resumes (see
  model/cache.py). After a chunk, all paused rows are rolled before the next one.

  Attributes:
    seat_rounds: How well the seats were used since the stream was made.
    is_kept_full: Whether other groups will be submitted, so that rows do not move into fewer seats.
  """

  def __init__(
    self,
    programs: FlightPrograms,
    feed: Feed,
    pace: Pace,
    members: int,
    end: End | None = None,
    keeps_versions: bool = False,
    guide: Callable[[], Guided] | None = None,
  ):
    """Starts without groups.

    Args:
      programs: The compiled programs.
      feed: Returns the weights for each chunk.
      pace: Grids and sizes of decoding.
      members: G, the completions of every group.
      end: Cuts rows at stop texts. None: no text ends rows.
      keeps_versions: Whether completions record the version of the weights that drew each token.
      guide: Makes the `Guided` of a new row, which restricts its tokens, or None. Rows with a
        `Guided` must not pause.
    """
    self._guide = guide
    self._programs, self._feed, self._pace, self._end = programs, feed, pace, end
    self._members, self._keeps_versions = members, keeps_versions
    self._fill = seats_lib.fill_places_in_order if pace.in_order else seats_lib.fill_places
    self.seat_rounds, self.is_kept_full = SeatRounds(), pace.in_order
    self._forget()

  def _forget(self) -> None:
    """Drops all groups and their arrays."""
    members = self._members
    self._seats = seats_lib.no_one(0, members, self._pace.grid, self._pace.shards)
    self._flight: Flight | None = None  # the rows and their cache on the devices. None at first
    self._has_rolled = True  # False after a chunk with paused rows, until they are rolled
    self._rounds = 0  # since the cache counted from 0
    self._requests: dict[int, GroupRequest] = {}  # by index x
    self._prompts = ArrivingPrompts(
      self._programs,
      self._requests,
      self._keep_experts,
      self._pace.prompts_at_once,
      self._pace.prompt_piece,
    )
    self._place_of: dict[int, int] = {}  # `GroupRequest.number` -> x
    self._free = list[int]()  # unused indices x
    self._going_X = np.zeros(0, int)  # rows of each group that have not ended
    self._ended_rows = 0  # how many `advance` has not reported yet
    self._ready = list[int]()  # indices x of finished groups that `advance` has not returned yet
    self._paused: dict[int, int] = {}  # number of a paused row -> its seat
    self._guides: dict[int, Guided] = {}  # of the rows in flight, by row number
    # (number of a row, tokens of its reply, or None to end it), for the next `advance`
    self._replies: list[tuple[int, Sequence[int] | None]] = []
    self._drawn: Completions | None = None  # of all groups, made for the first one
    self._settings: RowSettings  # arrays [X * G], made with `_drawn`
    self._keys_X2 = np.zeros((0, 0), np.uint32)  # `GroupRequest.key` of each group
    self._first_X = np.zeros(0, np.int32)  # `GroupRequest.first_row` of each group
    self._limits_XG = np.zeros((0, members), int)  # the most tokens of each row
    self._is_given = np.zeros((0, 0, 0), bool)  # [X, G, T], True for tokens of replies
    self._turn_XG = np.zeros((0, members), int)  # index of the first token after the last reply

  @property
  def draws(self) -> bool:
    if self._rows_draw:
      return True
    return seats_lib.can_sit(self._seats, self._fill, self._pace.prompts_at_once)

  @property
  def _rows_draw(self) -> bool:
    """Whether a row has a seat and does not pause."""
    return int((self._seats.row_NQ != NOBODY).sum()) > len(self._paused)

  @property
  def _has_room(self) -> bool:
    """Whether the caller could fill free seats at once by submitting more groups."""
    return self.is_kept_full and self._seats.all_seated and (self._seats.row_NQ == NOBODY).any()

  def submit(self, requests: Sequence[GroupRequest]) -> None:
    for request in requests:
      if not self._free:
        # Extends the arrays by twice their length, so that they are seldom copied.
        self._add_groups(max(len(requests), 2 * len(self._going_X)), request)
      x = self._free.pop(0)
      self._requests[x], self._place_of[request.number] = request, x
      # `_limits_XG` limits whole rows, and `_settings` limits only the first turn.
      T, limits = self._programs.decoding.max_tokens, request.settings.max_tokens
      self._limits_XG[x] = T if limits is None else np.minimum(limits, T)
      new_settings = by_row(self._row_settings(request), 1, self._members)
      rows = slice(x * self._members, (x + 1) * self._members)
      leaves, new_leaves = jax.tree.leaves(self._settings), jax.tree.leaves(new_settings)
      for all_rows, new in zip(leaves, new_leaves, strict=True):
        all_rows[rows] = new
      self._keys_X2[x], self._first_X[x] = request.key, request.first_row
      self._going_X[x], self._turn_XG[x] = self._members, 0
      empty = self._empty_completions(1, request)
      for array, empty_array in zip(jax.tree.leaves(self._drawn), jax.tree.leaves(empty)):
        array[x] = empty_array[0]  # overwrites the tokens of an earlier group x
      self._is_given[x] = False
      seats_lib.wait(self._seats, x)

  def go_on(self, number: int, member: int, tokens: Sequence[int] | None) -> None:
    self._replies.append((self._place_of[number] * self._members + member, tokens))

  def cancel(self) -> None:
    self._forget()

  def advance(self) -> News:
    G = self._members
    self._take_replies()
    paused: list[StoppedRow] = []
    if self.draws:
      params, version = self._feed()
      self._place_prompts(params)
      stopped = self._draw_chunk(params, version)
      pausing = [row for row in stopped if self._requests[row // G].pauses]
      paused = [self._stopped_row(row) for row in pausing]
      self._count_ended([row for row in stopped if not self._requests[row // G].pauses])
    ready, groups = self._ready, len(self._requests)
    # At least a quarter of the groups in flight is returned at a time, because the caller spends
    # time on each call. With free seats, groups are returned at once, so that the caller can submit
    # others. The same holds if no row draws: the caller's next step depends on what it gets now.
    is_few = 4 * len(ready) < min(groups, self._pace.grid.places) and not self._has_room
    ended_rows, self._ended_rows = self._ended_rows, 0
    if not ready or (is_few and self.draws):
      return News(paused, ended=ended_rows)
    self._ready = []
    return News(paused, [self._take_finished(sorted(ready))], ended_rows)

  def _take_replies(self) -> None:
    """Resumes rows with their replies, or ends them. Rolls the cache of all other paused rows.

    All rows write their next token into the same slot (see model/cache.py). So the cached tokens of
    a paused row must move by as many slots as rounds have passed, whether it resumes now or not.
    """
    T, replies = self._programs.decoding.max_tokens, dict(self._replies)
    self._replies = []
    if not replies and self._has_rolled:
      return
    self._has_rolled = True
    R = self._seats.row_NQ.size
    resumed = Resumed(
      is_resumed_R=np.zeros(R, bool),
      kept_R=np.ones(R, np.int32),
      token_R=np.zeros(R, np.int32),
      given_RT=np.full((R, T), -1, np.int32),
      limit_R=np.full(R, T, np.int32),
    )
    ended = list[int]()
    for row, seat in self._paused.items():
      x, g = divmod(row, self._members)
      length, limit = int(self._drawn.lengths_PG[x, g]), int(self._limits_XG[x, g])
      reply = replies.get(row, ())  # () if none has come yet. None ends the row
      if row in replies and (reply is None or length + len(reply) >= limit):
        ended.append(row)
        continue
      reply_slots = slice(length, length + len(reply))
      # Without a reply, the row's cache is rolled, and the row goes on pausing.
      resumed.is_resumed_R[seat], resumed.kept_R[seat] = True, length
      resumed.token_R[seat] = self._drawn.tokens_PGT[x, g, length - 1]
      resumed.given_RT[seat, reply_slots] = reply
      turn_tokens = self._requests[x].turn_tokens or T
      resumed.limit_R[seat] = min(reply_slots.stop + turn_tokens, limit)
      if row in replies:
        self._is_given[x, g, reply_slots] = True
        self._turn_XG[x, g] = reply_slots.stop
    for row in replies:
      seat = self._paused.pop(row)
      if row in ended:
        seats_lib.leave(self._seats, [seat])
    self._count_ended(ended)
    if resumed.is_resumed_R.any():
      self._flight = self._programs.resume(self._flight, resumed)

  def _count_ended(self, rows: Sequence[int]) -> None:
    """Records that rows have ended. A group is ready to be returned once all its rows have."""
    self._ended_rows += len(rows)
    for row in rows:
      self._guides.pop(row, None)
      x = row // self._members
      self._going_X[x] -= 1
      if not self._going_X[x]:
        self._ready.append(x)

  def _draw_chunk(self, params: model.Params, version: int) -> list[int]:
    """Assigns seats, decodes a chunk and stores its tokens.

    Returns:
      The numbers of the rows that have ended or paused in the chunk. Paused rows keep their seats.
    """
    is_new_R = self._take_seats()
    row_R = self._seats.row_NQ.reshape(-1).copy()
    taken_R = row_R != NOBODY
    longest = int(self._drawn.lengths_PG.reshape(-1)[row_R[taken_R]].max())
    chunk = self._with_room(longest)
    if self._end is not None:
      soonest = np.int32(self._rounds_to_look(is_new_R))
      chunk = chunk._replace(rounds=min(chunk.rounds, soonest))
    extras = None
    if self._guide is not None:
      # A mask is valid for one token, so no row draws two in a chunk. New rows draw theirs without
      # a round, and would draw another in a round: then they draw alone.
      most = np.int32(0 if is_new_R.any() else 1)
      chunk, extras = chunk._replace(rounds=min(chunk.rounds, most)), self._allowed_tokens(row_R)
    going_R = taken_R.copy()
    going_R[list(self._paused.values())] = False
    x_R, g_R = np.divmod(np.where(taken_R, row_R, 0), self._members)
    # The entries of free seats are not read: they are those of row 0 or, by NOBODY, of the last.
    new = NewRows(
      is_new_R=is_new_R,
      key_R2=self._keys_X2[x_R],
      number_R=(self._first_X[x_R] + g_R).astype(np.int32),
      settings=jax.tree.map(lambda x: x[row_R], self._settings),
    )
    arguments: tuple[Any, ...] = params, self._flight, new, going_R, chunk
    if extras is not None:  # for jax.jit, None would be another program than the one without it
      arguments = *arguments, extras
    self._flight, *arrays = self._programs.chunk(*arguments)
    drawn, goes_on_R = jax.device_get(arrays)
    self._count_seats(drawn, chunk)
    self._append_drawn(row_R, drawn, is_new_R, version)
    if self._guide is not None:
      goes_on_R = self._without_full_grammars(row_R, drawn, goes_on_R)
    if self._end is not None:
      goes_on_R = goes_on_R & ~self._cut_at_texts(row_R, drawn, self._end)
    stopped = np.flatnonzero(going_R & ~goes_on_R)  # seats of rows that have ended or paused
    rows = row_R[stopped].tolist()
    pauses = np.array([self._requests[row // self._members].pauses for row in rows], bool)
    self._paused |= {row: seat for row, seat, waits in zip(rows, stopped.tolist(), pauses) if waits}
    # A row that paused in this chunk is rolled, too: `most_rewound` allows for one chunk.
    self._has_rolled = not self._paused
    seats_lib.leave(self._seats, stopped[~pauses])
    return rows

  def _take_seats(self) -> np.ndarray:
    """Assigns free seats to waiting rows, and moves all rows into fewer seats if few are left.

    Returns:
      bool [R], True for seats that have a new row.
    """
    seats = self._seats
    new_rows = seats_lib.take_seats(seats, self._prompts.closed)
    move = None if self.is_kept_full else seats_lib.move_together(seats, self._pace.smaller)
    if move is not None:
      self._flight = self._programs.move(self._flight, move.rows_NQ, move.places_N)
      self._prompts.clear()  # all rows have seats, at other places
      seat_of = {row: seat for seat, row in enumerate(seats.row_NQ.reshape(-1).tolist())}
      self._paused = {row: seat_of[row] for row in self._paused}
    return np.isin(seats.row_NQ.reshape(-1), new_rows)

  def _rounds_to_look(self, is_new_R: np.ndarray) -> int:
    """The most rounds before the host must look for stop texts."""
    can_pause = any(request.pauses for request in self._requests.values())
    if not can_pause or not self._flight.cache.states:
      return _SOONEST_LOOK
    # A paused row resumes after the last token of the stop text. A recurrent state cannot drop
    # later tokens, so the host looks after every token. New rows draw one without a round.
    return 0 if is_new_R.any() else 1

  def _allowed_tokens(self, row_R: np.ndarray) -> Extras:
    """The masks of tokens that the rows may draw next. Free seats may draw all tokens."""
    words = -(-self._programs.vocabulary // 32)
    allowed_RW = np.full((len(row_R), words), -1, np.int32)  # -1: all 32 bits are set
    for bits_W, row in zip(allowed_RW, row_R.tolist(), strict=True):
      if row != NOBODY:
        if row not in self._guides:
          self._guides[row] = self._guide()
        self._guides[row].fill(bits_W)
    return Extras(allowed_RW=allowed_RW)

  def _without_full_grammars(
    self, row_R: np.ndarray, drawn: Drawn, goes_on_R: np.ndarray
  ) -> np.ndarray:
    """Passes the drawn tokens to the rows' guides.

    Returns:
      goes_on_R, but False for rows whose grammar has become too large to take another token.
    """
    goes_on_R = goes_on_R.copy()
    for seat in np.flatnonzero(drawn.is_drawn_RN.any(1) & goes_on_R):
      tokens = drawn.tokens_RN[seat, drawn.is_drawn_RN[seat]].tolist()
      goes_on_R[seat] = self._guides[int(row_R[seat])].take(tokens)
    return goes_on_R

  def _count_seats(self, drawn: Drawn, chunk: Chunk) -> None:
    """Adds the rounds of a chunk to `seat_rounds`."""
    in_rounds_RN = drawn.is_drawn_RN[:, 1:]  # new rows draw their first token without a round
    rounds = int(in_rounds_RN.any(0).sum())
    self._rounds += int(chunk.rounds)
    used, seats = self.seat_rounds
    self.seat_rounds = SeatRounds(
      used + int(in_rounds_RN.sum()), seats + rounds * len(in_rounds_RN)
    )

  def _place_prompts(self, params: model.Params) -> None:
    """Assigns free places to waiting prompts, and computes the prompts there."""
    seats, batch, prompts = self._seats, self._pace.prompts_at_once, self._prompts
    arrivals = self._fill(seats, batch)
    if self._flight is None and not seats.queue:
      # All prompts have a place. The remaining places get copies for members that wait.
      arrivals = [*arrivals, *self._fill(seats, batch)]
    if self._flight is None:
      any_R = np.zeros(seats.grid.rows, int)  # the values of the settings are not read
      settings = jax.tree.map(lambda x: x[any_R], self._settings)
      self._flight, arrivals = prompts.begin(
        arrivals, seats, slots=self._pace.slots[0], params=params, settings=settings
      )
      self._rounds = 0
    prompts.add(arrivals, seats.prompt_N)
    # Rows that draw, or could draw now, wait for one piece alone.
    draws = self._rows_draw or seats_lib.can_sit_now(seats, prompts.closed)
    self._flight = prompts.compute(self._flight, params, draws)

  def _keep_experts(self, x: int, first: int, experts_UY: np.ndarray) -> None:
    """Stores the experts of the prompt tokens of group x, from token number `first` on."""
    self._drawn.prompt_experts_PSY[x, first : first + len(experts_UY)] = experts_UY

  def _with_room(self, longest: int) -> Chunk:
    """Makes room in the cache for the next tokens, and decides when the chunk ends.

    If seats can be refilled, or rows can move into fewer seats, the chunk ends early for that.

    Args:
      longest: The most tokens that a row in flight has drawn.
    """
    T, seats, smaller = self._programs.decoding.max_tokens, self._seats, self._pace.smaller
    written = max(longest - 1, 0)  # the token that was drawn last has no slot yet
    slots = self._flight.cache.slots
    # `grow` lets the cache count its rounds from 0 again, so it is also called before the int32
    # overflows.
    is_full = slots == written and slots < T
    if is_full or self._rounds > _MOST_ROUNDS:
      slots = next(size for size in self._pace.slots if size > written)
      self._flight, self._rounds = self._programs.grow(self._flight, slots), 0
    # A chunk's first column is for the tokens that new rows draw without a round.
    rounds = min(self._programs.columns - 1, slots - written)
    if self._paused:  # a row can be rolled by so many slots, but one round is always due
      rounds = min(rounds, max(1, most_rewound(self._programs.columns)))
    if self._prompts.closed:  # their seats are free until the last piece
      rounds = min(rounds, _SOONEST_LOOK)
    going = int((seats.row_NQ != NOBODY).sum()) - len(self._paused)
    if self._has_room:  # the first row that ends may finish a group, which others replace
      ended = 0
    elif not seats.all_seated or self.is_kept_full:
      ended = int(seats_lib.IDLE_SHARE * seats.grid.rows)
    else:  # until the rows that still draw fit into the largest smaller grid, or have ended
      next_rows = max((grid.rows for grid in smaller if grid.rows < seats.grid.rows), default=0)
      # A chunk ends once more than `ended` rows have ended, hence the 1.
      ended = max(0, going - next_rows - 1) if next_rows else going
    return Chunk(np.int32(rounds), np.int32(ended))

  def _append_drawn(
    self, row_R: np.ndarray, drawn: Drawn, is_new_R: np.ndarray, version: int
  ) -> None:
    """Appends the tokens of a chunk to the completions of its rows.

    row_R is the number of the row in each seat, or NOBODY. is_new_R is True for new rows.
    """
    out = self._drawn
    seat, column = np.nonzero(drawn.is_drawn_RN)  # entry i belongs to token i of the chunk
    x, g = np.divmod(row_R[seat], self._members)  # its group and member
    # Column 0 has the first tokens of new rows. Other rows draw their first one in column 1.
    token = out.lengths_PG[x, g] + column - 1 + is_new_R[seat]
    for kept, new in (
      (out.tokens_PGT, drawn.tokens_RN),
      (out.logprobs_PGT, drawn.logprobs_RN),
      (out.behavior_logprobs_PGT, drawn.behavior_logprobs_RN),
    ):
      kept[x, g, token] = new[seat, column]
    out.sampled_PGT[x, g, token] = ~self._is_given[x, g, token]
    if out.versions_PGT is not None:
      out.versions_PGT[x, g, token] = version
    if out.experts_PGTY is not None:
      # A round reads the previous token and draws the next, so its experts belong to the former.
      # A first token is drawn from the prompt, whose experts are stored elsewhere.
      is_later = column > 0
      before = x[is_later], g[is_later], token[is_later] - 1
      out.experts_PGTY[before] = drawn.experts_RNY[seat[is_later], column[is_later]]
    drew = np.flatnonzero(drawn.is_drawn_RN.any(1))
    x, g = np.divmod(row_R[drew], self._members)
    out.lengths_PG[x, g] += drawn.is_drawn_RN.sum(1)[drew]
    out.stopped_by_PG[x, g] = drawn.stopped_by_R[drew]

  def _cut_at_texts(self, row_R: np.ndarray, drawn: Drawn, end: End) -> np.ndarray:
    """Cuts rows after stop texts. Returns bool [R], True for rows that were cut."""
    counts_R = drawn.is_drawn_RN.sum(1)
    is_cut = [
      count > 0 and self._cut_at_text(row, count, end) for row, count in zip(row_R, counts_R)
    ]
    return np.array(is_cut, bool)

  def _cut_at_text(self, row: int, new: int, end: End) -> bool:
    """Cuts a row after a stop text that it wrote since its last reply. Returns whether it did.

    Args:
      row: The number of the row.
      new: How many of the row's tokens are from this chunk.
      end: (the row's tokens since its last reply, how many of them were checked in earlier chunks)
        -> how many it keeps, or None if there is no stop text.
    """
    out, (x, g) = self._drawn, divmod(row, self._members)
    length, start = int(out.lengths_PG[x, g]), int(self._turn_XG[x, g])
    turn = out.tokens_PGT[x, g, start:length].tolist()
    kept = end(turn, max(0, length - new - start)) if turn else None
    if kept is None:
      return False
    kept += start  # `end` counts from the start of the turn
    for x_PGT in (out.tokens_PGT, out.logprobs_PGT, out.behavior_logprobs_PGT, out.sampled_PGT):
      x_PGT[x, g, kept:] = 0
    if out.experts_PGTY is not None:  # as if no round had read the last kept token
      out.experts_PGTY[x, g, kept - 1 :] = -1
    out.lengths_PG[x, g], out.stopped_by_PG[x, g] = kept, out.tokens_PGT[x, g, kept - 1]
    return True

  def _stopped_row(self, row: int) -> StoppedRow:
    out, at = self._drawn, divmod(row, self._members)
    length = int(out.lengths_PG[at])
    return StoppedRow(
      prompt=self._requests[at[0]].number,
      member=at[1],
      tokens=out.tokens_PGT[at][:length].tolist(),
      stopped_by=int(out.stopped_by_PG[at]),
      room=int(self._limits_XG[at]) - length,
    )

  def _take_finished(self, xs: list[int]) -> Finished:
    """Removes the finished groups with indices `xs`, and returns their completions."""
    numbers = [self._requests.pop(x).number for x in xs]
    for number in numbers:
      del self._place_of[number]
    completions = jax.tree.map(lambda array: array[xs], self._drawn)
    self._free = sorted(self._free + xs)
    if not self._requests:
      self._forget()  # the cache is large, and an update may need its memory
    return Finished(numbers, completions)

  def _add_groups(self, more: int, like: GroupRequest) -> None:
    """Extends the host arrays by `more` groups, whose prompts and settings are shaped as `like`."""
    old, G, T = len(self._going_X), self._members, self._programs.decoding.max_tokens
    empty, settings = self._empty_completions(more, like), by_row(self._row_settings(like), more, G)
    if self._drawn is None:
      self._drawn, self._settings = empty, settings
      self._keys_X2 = np.zeros((more, len(like.key)), np.uint32)
      self._is_given = np.zeros((more, G, T), bool)
    else:
      joined = jax.tree.map(lambda *x: np.concatenate(x), self._drawn, empty)
      self._drawn = joined
      self._settings = jax.tree.map(lambda *x: np.concatenate(x), self._settings, settings)
      # np.resize repeats old keys, which `submit` overwrites.
      self._keys_X2 = np.resize(self._keys_X2, (old + more, len(like.key)))
      self._is_given = np.concatenate([self._is_given, np.zeros((more, G, T), bool)])
    self._settings = jax.tree.map(np.array, self._settings)  # copies: broadcast views are read-only
    self._first_X = np.append(self._first_X, np.zeros(more, np.int32))
    self._going_X = np.append(self._going_X, np.zeros(more, int))
    self._limits_XG = np.append(self._limits_XG, np.zeros((more, G), int), 0)
    self._turn_XG = np.append(self._turn_XG, np.zeros((more, G), int), 0)
    self._free = [*self._free, *range(old, old + more)]
    seats_lib.widen(self._seats, old + more)

  def _row_settings(self, request: GroupRequest) -> RowSettings:
    """The settings of a group's rows, with `max_tokens` limited to the first turn."""
    T, settings = self._programs.decoding.max_tokens, request.settings
    if not request.turn_tokens:
      return settings
    most = T if settings.max_tokens is None else np.minimum(settings.max_tokens, T)
    return settings.replace(max_tokens=np.minimum(most, request.turn_tokens))

  def _empty_completions(self, groups: int, like: GroupRequest) -> Completions:
    """Makes empty completions for `groups` groups with the shapes of `like`."""
    X, G, T = groups, self._members, self._programs.decoding.max_tokens
    return Completions(
      tokens_PGT=np.zeros((X, G, T), np.int32),
      lengths_PG=np.zeros((X, G), np.int32),
      sampled_PGT=np.zeros((X, G, T), bool),
      logprobs_PGT=np.zeros((X, G, T), np.float32),
      behavior_logprobs_PGT=np.zeros((X, G, T), np.float32),
      stopped_by_PG=np.full((X, G), -1, np.int32),
      experts_PGTY=self._programs.no_experts(X, G, T),
      prompt_experts_PSY=self._programs.no_experts(X, like.prompts.tokens_nS.shape[1]),
      versions_PGT=np.zeros((X, G, T), np.int32) if self._keeps_versions else None,
    )
