"""One call of a sampler: its prompts, its rows that come and go, and what they have drawn."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from grpo_jax import model
from grpo_jax.sampler import seats as seats_lib
from grpo_jax.sampler.flight import Flight, NewRows, Prompts, Resumed
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.programs import FlightPrograms
from grpo_jax.sampler.rows import Chunk, Drawn
from grpo_jax.sampler.seats import NOBODY, Grid
from grpo_jax.sampler.stop import End
from grpo_jax.types import Completions

# Of RowSettings, as arrays.
_DTYPES = {
  "temperature": np.float32,
  "top_k": np.int32,
  "top_p": np.float32,
  "min_p": np.float32,
  "min_tokens": np.int32,
  "max_tokens": np.int32,
}
_SOONEST_LOOK = 16  # tokens after which the host looks for texts that end a row


class Finished(NamedTuple):
  """Groups whose completions have all ended.

  Attributes:
    prompts: The numbers of their prompts in the call.
    completions: Of these prompts, as numpy arrays.
  """

  prompts: list[int]
  completions: Completions


class Feed(Protocol):
  """Weights that may change while rows are decoded."""

  def __call__(self) -> tuple[model.Params, int]:
    """The weights of the next chunk, and their version."""


class Ended(NamedTuple):
  """A row that has ended.

  Attributes:
    prompt: The number of its prompt in the call.
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


# Rows that have ended -> for each of them the tokens with which it goes on, or None.
Reply = Callable[[list[Ended]], Sequence[Sequence[int] | None]]


class Draws(NamedTuple):
  """What the tokens of a call are drawn with.

  Attributes:
    key: The root of the random numbers.
    settings: Temperature, filters and limits: numbers, or arrays that broadcast to [P, G].
    first_prompt: The number of the first prompt.
    end: Ends rows at texts, as `sampler.stop.end_at` returns it, or None.
    reply: Says how rows that have ended go on: with the tokens of an environment, for example. It
      is asked between two chunks, for all rows at once that have just ended. A row whose reply
      leaves no room for another token has ended. None means that none goes on. In a run of several
      processes, it must say the same on each.
    turn_tokens: The most tokens that a row draws before it is asked for its reply. 0 means as many
      as the row may have.
    at_once: The most prompts in flight, a multiple of the mesh's row shards. 0 means all.
  """

  key: jax.Array
  settings: RowSettings = RowSettings()
  first_prompt: int = 0
  end: End | None = None
  reply: Reply | None = None
  turn_tokens: int = 0
  at_once: int = 0


class Pace(NamedTuple):
  """How rows are decoded. It changes no token.

  Attributes:
    grid: The seats at first.
    smaller: The grids that rows move into when few are left.
    slots: The sizes of the cache that it grows through.
    prompts_at_once: How many prompts that waited for a place are computed together.
    shards: The parts of the mesh that hold different rows.
  """

  grid: Grid
  smaller: tuple[Grid, ...]
  slots: tuple[int, ...]
  prompts_at_once: int
  shards: int


def by_row(settings: RowSettings, prompts: int, members: int) -> RowSettings:
  """The settings as arrays of all rows [P * G], float32 or int32."""

  def rows(name: str, dtype: Any) -> np.ndarray | None:
    setting = getattr(settings, name)
    if setting is None:
      return None
    return np.broadcast_to(np.asarray(setting, dtype), (prompts, members)).reshape(-1)

  return RowSettings(**{name: rows(name, dtype) for name, dtype in _DTYPES.items()})


class SamplingCall:
  """The prompts of a call, and what has been drawn so far. It decodes once."""

  def __init__(
    self,
    programs: FlightPrograms,
    params: model.Params | Feed,
    prompts: Prompts,
    members: int,
    draws: Draws,
  ):
    self._programs, self._prompts = programs, prompts
    self._feed: Feed | None = params if callable(params) else None
    self._params, self._version = params, 0
    self._members, self._draws = members, draws
    P, G, T = len(prompts.lengths_n), members, programs.decoding.max_tokens
    limits = draws.settings.max_tokens
    self._limits_PG = np.broadcast_to(T if limits is None else np.minimum(limits, T), (P, G))
    self._turn_tokens = draws.turn_tokens or T
    settings = draws.settings
    if draws.turn_tokens:
      settings = settings.replace(max_tokens=np.minimum(self._limits_PG, draws.turn_tokens))
    self._settings = by_row(settings, P, G)
    self._drawn = Completions(
      tokens_PGT=np.zeros((P, G, T), np.int32),
      lengths_PG=np.zeros((P, G), np.int32),
      sampled_PGT=np.zeros((P, G, T), bool),
      logprobs_PGT=np.zeros((P, G, T), np.float32),
      behavior_logprobs_PGT=np.zeros((P, G, T), np.float32),
      stopped_by_PG=np.full((P, G), -1, np.int32),
      experts_PGTY=programs.no_experts(P, G, T),
      prompt_experts_PSY=programs.no_experts(*prompts.tokens_nS.shape),
      versions_PGT=np.zeros((P, G, T), np.int32) if self._feed else None,
    )
    self._is_given = np.zeros((P, G, T), bool)  # tokens of replies
    self._turn_PG = np.zeros((P, G), int)  # where the tokens after the last reply begin

  def run(self, pace: Pace) -> Iterator[Finished]:
    """Decodes all rows. See `Sampler`."""
    P, G = self._drawn.lengths_PG.shape
    seats = seats_lib.no_one(P, G, pace.grid, pace.shards)
    going_P, ready = np.full(P, G), list[int]()
    flight: Flight | None = None
    while going_P.any():
      if self._feed is not None:
        self._params, self._version = self._feed()
      flight = self._settle(flight, seats, pace)
      flight, ended = self._chunk(flight, seats, pace)
      np.subtract.at(going_P, ended // G, 1)
      ready += [p for p in np.unique(ended // G).tolist() if not going_P[p]]
      # Not one by one, because what follows costs time for each call.
      if ready and (4 * len(ready) >= min(P, pace.grid.places) or not going_P.any()):
        yield self._finished(sorted(ready))
        ready = []

  def _chunk(self, flight: Flight, seats: seats_lib.Seats, pace: Pace) -> tuple[Flight, np.ndarray]:
    """Takes seats, moves together, decodes a chunk, and leaves the seats of what has ended.

    Returns:
      The flight and the numbers of the rows that have ended.
    """
    draws = self._draws
    is_new = np.zeros(self._drawn.lengths_PG.size + 1, bool)  # the last stands for NOBODY
    is_new[seats_lib.take_seats(seats)] = True
    move = seats_lib.move_together(seats, pace.smaller)
    if move is not None:
      flight = self._programs.move(flight, move.rows_NQ, move.places_N)
    row_R = seats.row_NQ.reshape(-1).copy()
    longest = int(self._drawn.lengths_PG.reshape(-1)[row_R[row_R != NOBODY]].max())
    flight, chunk = self._with_room(flight, pace, longest, seats)
    if draws.end is not None:
      soonest = _SOONEST_LOOK
      if flight.cache.states and draws.reply is not None:
        # A row goes on after its last token. A state cannot drop those that were drawn after it, so
        # the host looks after each. New rows draw one without a round.
        soonest = 0 if is_new[row_R].any() else 1
      chunk = chunk._replace(rounds=min(chunk.rounds, np.int32(soonest)))
    new = NewRows(
      is_new_R=is_new[row_R],
      number_R=(draws.first_prompt * self._members + row_R).astype(np.int32),
      settings=jax.tree.map(lambda x: x[row_R], self._settings),
    )
    taken_R = row_R != NOBODY
    flight, *seen = self._programs.chunk(self._params, flight, draws.key, new, taken_R, chunk)
    drawn, goes_on_R = jax.device_get(seen)
    self._keep(row_R, drawn, new.is_new_R)
    if draws.end is not None:
      counts_R = drawn.is_drawn_RN.sum(1)
      cut = [self._cut(row_R[seat], counts_R[seat], draws.end) for seat in np.flatnonzero(counts_R)]
      goes_on_R = goes_on_R.copy()
      goes_on_R[np.flatnonzero(counts_R)[cut]] = False
    ended = np.flatnonzero(taken_R & ~goes_on_R)
    if draws.reply is not None and len(ended):
      flight, ended = self._resume(flight, row_R, ended, draws.reply)
    seats_lib.leave(seats, ended)
    return flight, row_R[ended]

  def _resume(
    self, flight: Flight, row_R: np.ndarray, ended: np.ndarray, reply: Reply
  ) -> tuple[Flight, np.ndarray]:
    """Rows go on with the tokens of their replies.

    Args:
      flight: The rows.
      row_R: Who sits in each seat.
      ended: The seats of the rows that have ended.
      reply: Asked for them.

    Returns:
      The flight, and the seats of those that have ended for good.
    """
    out, T = self._drawn, self._programs.decoding.max_tokens
    asked = [divmod(int(row), self._members) for row in row_R[ended]]
    replies = reply([self._ended(row) for row in asked])
    resumed = Resumed(
      np.zeros(len(row_R), bool),
      np.ones(len(row_R), np.int32),
      np.zeros(len(row_R), np.int32),
      np.full((len(row_R), T), -1, np.int32),
      np.full(len(row_R), T, np.int32),
    )
    for seat, row, tokens in zip(ended, asked, replies, strict=True):
      length = int(out.lengths_PG[row])
      if tokens is None or length + len(tokens) >= self._limits_PG[row]:
        continue
      after = slice(length, length + len(tokens))
      resumed.is_resumed_R[seat], resumed.kept_R[seat] = True, length
      resumed.token_R[seat] = out.tokens_PGT[row][length - 1]
      resumed.given_RT[seat, after] = tokens
      resumed.limit_R[seat] = min(after.stop + self._turn_tokens, self._limits_PG[row])
      self._is_given[row][after], self._turn_PG[row] = True, after.stop
    if resumed.is_resumed_R.any():
      flight = self._programs.resume(flight, resumed)
    return flight, ended[~resumed.is_resumed_R[ended]]

  def _ended(self, row: tuple[int, int]) -> Ended:
    out, length = self._drawn, int(self._drawn.lengths_PG[row])
    return Ended(
      *row,
      out.tokens_PGT[row][:length].tolist(),
      int(out.stopped_by_PG[row]),
      int(self._limits_PG[row]) - length,
    )

  def _settle(self, flight: Flight | None, seats: seats_lib.Seats, pace: Pace) -> Flight:
    """Prompts take free places."""
    N, shards = seats.grid.places, pace.shards
    batch = pace.prompts_at_once
    arrivals = seats_lib.fill_places(seats, batch)
    if flight is None:
      n = -(-len(arrivals) // shards) * shards
      numbers = np.arange(n) % len(arrivals)
      # The places that are left get copies, for members that wait.
      copies = seats_lib.fill_places(seats)
      prompt_N = None
      if n != N or copies:
        prompt_N = np.maximum(seats.prompt_N, 0)
      any_R = np.zeros(pace.grid.rows, int)
      settings = jax.tree.map(lambda x: x[any_R], self._settings)
      first = self._some(numbers), prompt_N, settings
      flight, experts = self._programs.begin(pace.grid, pace.slots[0], self._params, *first)
      self._keep_prompts(numbers, experts)
      return flight
    new = [arrival for arrival in arrivals if arrival.copied_from == NOBODY]
    for start in range(0, len(new), batch):
      some = new[start : start + batch]
      numbers = np.array([arrival.prompt for arrival in some])[np.arange(batch) % len(some)]
      places = np.full(batch, N)
      places[: len(some)] = [arrival.place for arrival in some]
      flight, experts = self._programs.arrive(flight, self._params, self._some(numbers), places)
      self._keep_prompts(numbers, experts)
    if len(new) < len(arrivals):
      from_N = np.arange(N)
      for arrival in arrivals:
        if arrival.copied_from != NOBODY:
          from_N[arrival.place] = from_N[arrival.copied_from]
      flight = self._programs.copy(flight, from_N)
    return flight

  def _keep_prompts(self, numbers: np.ndarray, experts: jax.Array | None) -> None:
    """Keeps the experts of the tokens of prompts, where there are any."""
    if experts is not None:
      self._drawn.prompt_experts_PSY[numbers] = jax.device_get(experts)

  def _some(self, numbers: np.ndarray) -> Prompts:
    """Prompts by their numbers."""
    if np.array_equal(numbers, np.arange(len(self._prompts.lengths_n))):
      return self._prompts
    return jax.tree.map(lambda x: x[numbers], self._prompts)

  def _with_room(
    self, flight: Flight, pace: Pace, longest: int, seats: seats_lib.Seats
  ) -> tuple[Flight, Chunk]:
    """A cache with room for the next tokens, and how many of them to draw.

    Args:
      flight: The rows.
      pace: Has the sizes of the cache.
      longest: The most tokens that a row in flight has drawn.
      seats: Who sits where.
    """
    T = self._programs.decoding.max_tokens
    # The token that was drawn last has no slot yet. A new row draws its first without a round.
    written = max(longest - 1, 0)
    slots = flight.cache.slots
    if slots == written and slots < T:
      slots = next(size for size in pace.slots if size > written)
      flight = self._programs.grow(flight, slots)
    rounds = min(self._programs.columns - 1, slots - written)
    going = int((seats.row_NQ != NOBODY).sum())
    if not seats.all_seated:
      ended = int(seats_lib.IDLE_SHARE * seats.grid.rows)
    else:
      next_rows = max(
        (grid.rows for grid in pace.smaller if grid.rows < seats.grid.rows), default=0
      )
      ended = max(0, going - next_rows - 1) if next_rows else going
    return flight, Chunk(np.int32(rounds), np.int32(ended))

  def _keep(self, row_R: np.ndarray, drawn: Drawn, is_new_R: np.ndarray) -> None:
    """Puts the tokens of a chunk behind those that the rows have drawn before."""
    out = self._drawn
    seat, column = np.nonzero(drawn.is_drawn_RN)
    p, g = np.divmod(row_R[seat], self._members)
    # The first column is for new rows.
    token = out.lengths_PG[p, g] + column - 1 + is_new_R[seat]
    for kept, new in (
      (out.tokens_PGT, drawn.tokens_RN),
      (out.logprobs_PGT, drawn.logprobs_RN),
      (out.behavior_logprobs_PGT, drawn.behavior_logprobs_RN),
    ):
      kept[p, g, token] = new[seat, column]
    out.sampled_PGT[p, g, token] = ~self._is_given[p, g, token]
    if out.versions_PGT is not None:
      out.versions_PGT[p, g, token] = self._version
    if out.experts_PGTY is not None:
      has = column > 0  # before a row's first token lies its prompt
      before = p[has], g[has], token[has] - 1
      out.experts_PGTY[before] = drawn.experts_RNY[seat[has], column[has]]
    taken = np.flatnonzero(row_R != NOBODY)
    p, g = np.divmod(row_R[taken], self._members)
    out.lengths_PG[p, g] += drawn.is_drawn_RN.sum(1)[taken]
    out.stopped_by_PG[p, g] = drawn.stopped_by_R[taken]

  def _cut(self, row: int, new: int, end: End) -> bool:
    """Cuts a row where a text ends it. Returns whether one did.

    Args:
      row: The row.
      new: How many of its tokens are new.
      end: Finds the end.
    """
    out, (p, g) = self._drawn, divmod(row, self._members)
    length, start = int(out.lengths_PG[p, g]), int(self._turn_PG[p, g])
    own = out.tokens_PGT[p, g, start:length].tolist()
    kept = end(own, max(0, length - new - start)) if own else None
    if kept is None:
      return False
    kept += start
    for x_PGT in (out.tokens_PGT, out.logprobs_PGT, out.behavior_logprobs_PGT, out.sampled_PGT):
      x_PGT[p, g, kept:] = 0
    if out.experts_PGTY is not None:
      out.experts_PGTY[p, g, kept - 1 :] = -1
    out.lengths_PG[p, g], out.stopped_by_PG[p, g] = kept, out.tokens_PGT[p, g, kept - 1]
    return True

  def _finished(self, prompts: list[int]) -> Finished:
    return Finished(prompts, jax.tree.map(lambda x: x[prompts], self._drawn))
