"""Who sits where: assigns the rows of groups to the seats that are decoded together. Pure Python.

The seats are a grid [N, Q] with one prompt for each of the N places, whose members take its Q
seats one after another. So a prompt is computed once and held once, however many members it has.
When nobody waits any more and few seats are taken, the rows that are left move together into a
smaller grid. There, a prompt may have several places.

The places may be split over shards, such as the devices of a mesh. Rows never leave their shard.
"""

from collections import deque
from collections.abc import Iterable, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np

# Rows that have ended keep their seats until they are this share of all, if others wait for them.
IDLE_SHARE = 0.1
NOBODY = -1


class Grid(NamedTuple):
  """N places for prompts, with Q seats each."""

  places: int
  seats: int

  @property
  def rows(self) -> int:
    """The rows that are decoded together."""
    return self.places * self.seats


def first_grid(prompts: int, members: int, rows: int = 0, shards: int = 1) -> Grid:
  """The seats that a call begins with.

  Args:
    prompts: P, a multiple of `shards`.
    members: G.
    rows: The most rows in flight. 0 means all.
    shards: The parts that the places are split into.

  Returns:
    A seat for every row. Or, where those are too many, one place for each prompt or, if even those
    are too many, as many places of one seat as there may be.
  """
  if not rows or rows >= prompts * members:
    return Grid(prompts, members)
  seats = max(1, rows // prompts)
  return Grid(max(1, rows // seats // shards) * shards, seats)


class Move(NamedTuple):
  """Rows that change their seats.

  Attributes:
    grid: The new grid [N', Q'].
    rows_NQ: int [N', Q'], the old seat n * Q + q of each new seat. Where nobody sits, the first of
      the shard.
    places_N: int [N'], the old place of each new place's prompt. Where there is none, the first of
      the shard.
  """

  grid: Grid
  rows_NQ: np.ndarray
  places_N: np.ndarray


@dataclasses.dataclass
class Seats:
  """The rows in flight, and those that wait.

  Attributes:
    grid: The seats that there are.
    shards: D, the parts with equally many places that rows stay in.
    members: G, the members of each prompt.
    prompt_N: int, the prompt at each place, or NOBODY.
    row_NQ: int, the row p * G + g in each seat, or NOBODY.
    waiting_P: int, the number of each prompt's first member that has not had a seat yet.
    queue: The prompts that have had no place yet, in their order.
    in_order: The prompts of which members may wait, the oldest first.
  """

  grid: Grid
  shards: int
  members: int
  prompt_N: np.ndarray
  row_NQ: np.ndarray
  waiting_P: np.ndarray
  queue: deque[int]
  in_order: list[int]

  @property
  def all_seated(self) -> bool:
    """Whether no row waits for a seat."""
    return bool((self.waiting_P == self.members).all())


def no_one(prompts: int, members: int, grid: Grid, shards: int = 1) -> Seats:
  """Empty seats, for which all rows of P prompts wait."""
  return Seats(
    grid=grid,
    shards=shards,
    members=members,
    prompt_N=np.full(grid.places, NOBODY),
    row_NQ=np.full(grid, NOBODY),
    waiting_P=np.zeros(prompts, int),
    queue=deque(range(prompts)),
    in_order=list(range(prompts)),
  )


def widen(seats: Seats, prompts: int) -> None:
  """Makes room for so many prompts, of which the new ones do not wait."""
  more = prompts - len(seats.waiting_P)
  seats.waiting_P = np.append(seats.waiting_P, np.full(more, seats.members))


def wait(seats: Seats, prompt: int) -> None:
  """All members of a prompt wait, after those that wait already.

  Its number may be that of a prompt whose members have all left. That one's places are free.
  """
  seats.prompt_N[seats.prompt_N == prompt] = NOBODY
  seats.in_order = [p for p in seats.in_order if p != prompt]
  seats.waiting_P[prompt] = 0
  seats.queue.append(prompt)
  seats.in_order.append(prompt)


def leave(seats: Seats, rows: Iterable[int]) -> None:
  """Frees the seats of rows that have ended, by the numbers n * Q + q of the seats."""
  seats.row_NQ.reshape(-1)[list(rows)] = NOBODY


class Arrival(NamedTuple):
  """A prompt that gets a place: a new one, or one that has a place already."""

  place: int
  prompt: int
  copied_from: int = NOBODY


def fill_places(seats: Seats, batch: int = 1) -> list[Arrival]:
  """Gives free places to prompts: first to those that come next, then to those with most waiting.

  Args:
    seats: The seats.
    batch: Prompts that come next wait until they are so many, or the last.
  """
  has_row_N = (seats.row_NQ != NOBODY).any(1)
  has_more_N = (seats.prompt_N != NOBODY) & (seats.waiting_P[seats.prompt_N] < seats.members)
  seats.prompt_N[~has_row_N & ~has_more_N] = NOBODY
  free = np.flatnonzero(seats.prompt_N == NOBODY).tolist()
  left = len(seats.queue)
  if left:
    new = min(len(free), left)
    if new < min(batch, left):
      return []
    arrivals = [Arrival(place, seats.queue.popleft()) for place in free[:new]]
    for arrival in arrivals:
      seats.prompt_N[arrival.place] = arrival.prompt
    return arrivals
  arrivals = []
  if not seats.all_seated:
    for place in free:
      source = _most_wanted(seats, place)
      if source != NOBODY:
        seats.prompt_N[place] = seats.prompt_N[source]
        arrivals.append(Arrival(place, int(seats.prompt_N[source]), source))
  return arrivals


def fill_places_in_order(seats: Seats, batch: int = 1) -> list[Arrival]:
  """Gives each free place to the oldest prompt whose members find no free seat.

  Args:
    seats: The seats.
    batch: Not read: a free seat costs more than a prompt that is computed with few others.
  """
  del batch
  free_N = (seats.row_NQ == NOBODY).sum(1)
  has_row_N = free_N < seats.grid.seats
  wanting_P = seats.members - seats.waiting_P
  np.subtract.at(wanting_P, seats.prompt_N[has_row_N], free_N[has_row_N])
  for place in np.flatnonzero(~has_row_N & (seats.prompt_N != NOBODY)).tolist():
    prompt = seats.prompt_N[place]
    if wanting_P[prompt] > 0:
      wanting_P[prompt] -= seats.grid.seats
    else:
      seats.prompt_N[place] = NOBODY
  has_place_N = seats.prompt_N != NOBODY
  arrivals: list[Arrival] = []
  seats.in_order = [p for p in seats.in_order if seats.waiting_P[p] < seats.members]
  for place in np.flatnonzero(~has_place_N).tolist():
    prompt = next((p for p in seats.in_order if wanting_P[p] > 0), NOBODY)
    if prompt == NOBODY:
      break
    shard = _shards_of(seats, np.arange(seats.grid.places)) == _shards_of(seats, place)
    same = np.flatnonzero(shard & (seats.prompt_N == prompt))
    arrivals.append(Arrival(place, prompt, int(same[0]) if len(same) else NOBODY))
    seats.prompt_N[place] = prompt
    wanting_P[prompt] -= seats.grid.seats
    if prompt in seats.queue:
      seats.queue.remove(prompt)
  return arrivals


def _most_wanted(seats: Seats, place: int) -> int:
  """A place in the same shard whose prompt has most members that find no free seat, or NOBODY."""
  shard = _shards_of(seats, np.arange(seats.grid.places)) == _shards_of(seats, place)
  here = np.flatnonzero(shard & (seats.prompt_N != NOBODY))
  if not len(here):
    return NOBODY
  prompts_N = np.maximum(seats.prompt_N, 0)
  free_N = (seats.row_NQ == NOBODY).sum(1) * (seats.prompt_N != NOBODY)
  free_P = np.bincount(prompts_N, free_N, len(seats.waiting_P))
  wanting = (seats.members - seats.waiting_P - free_P)[seats.prompt_N[here]]
  return int(here[np.argmax(wanting)]) if wanting.max() > 0 else NOBODY


def _shards_of(seats: Seats, places: np.ndarray | int) -> np.ndarray | int:
  return places // (seats.grid.places // seats.shards)


def take_seats(seats: Seats) -> list[int]:
  """Seats the members that wait for a free seat at their prompt's place. Returns their rows."""
  taken: list[int] = []
  if seats.all_seated:
    return taken
  has_free_N = (seats.row_NQ == NOBODY).any(1) & (seats.prompt_N != NOBODY)
  for n in np.flatnonzero(has_free_N).tolist():
    p = int(seats.prompt_N[n])
    first = int(seats.waiting_P[p])
    free = np.flatnonzero(seats.row_NQ[n] == NOBODY)[: seats.members - first]
    rows = p * seats.members + first + np.arange(len(free))
    seats.row_NQ[n, free] = rows
    seats.waiting_P[p] += len(free)
    taken += rows.tolist()
  return taken


def move_together(seats: Seats, grids: Sequence[Grid]) -> Move | None:
  """Moves the rows into the smallest of some grids that holds them, if nobody waits.

  Returns:
    The move, or None if no smaller grid holds them.
  """
  if not seats.all_seated:
    return None
  sitting = np.flatnonzero(seats.row_NQ.reshape(-1) != NOBODY)
  places = sitting // seats.grid.seats
  # The seats of each prompt in each shard.
  groups: list[list[np.ndarray]] = []
  for shard in range(seats.shards):
    here = sitting[_shards_of(seats, places) == shard]
    prompts = seats.prompt_N[here // seats.grid.seats]
    groups.append([here[prompts == prompt] for prompt in dict.fromkeys(prompts.tolist())])

  def holds(grid: Grid) -> bool:
    needed = max(sum(-(-len(own) // grid.seats) for own in shard) for shard in groups)
    return grid.rows < seats.grid.rows and needed * seats.shards <= grid.places

  fitting = [grid for grid in grids if holds(grid)]
  if not fitting:
    return None
  grid = min(fitting, key=lambda grid: grid.rows)
  each = grid.places // seats.shards
  old = np.arange(seats.shards).repeat(each) * (seats.grid.places // seats.shards)
  move = Move(grid, np.tile(old[:, None] * seats.grid.seats, (1, grid.seats)), old)
  row_NQ, prompt_N = np.full(grid, NOBODY), np.full(grid.places, NOBODY)
  for shard, of_prompts in enumerate(groups):
    n = shard * each
    for own in of_prompts:
      for start in range(0, len(own), grid.seats):
        some = own[start : start + grid.seats]
        move.rows_NQ[n, : len(some)] = some
        move.places_N[n] = some[0] // seats.grid.seats
        row_NQ[n, : len(some)] = seats.row_NQ.reshape(-1)[some]
        prompt_N[n] = seats.prompt_N[some[0] // seats.grid.seats]
        n += 1
  seats.grid, seats.row_NQ, seats.prompt_N = grid, row_NQ, prompt_N
  return move
