"""Assigns the rows of groups to the seats of the decoding batch. Pure Python and numpy.

The seats are a grid [N, Q]. Each of the N places has one prompt, and the members of the prompt's
group take its Q seats one after another. So a prompt is computed and stored once, however many
members it has. When no row waits and few seats are taken, the remaining rows move into a smaller
grid. A prompt may have several places there, and in a first grid with more places than prompts.

The places may be split over shards, such as the devices of a mesh. Rows never leave their shard.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
import copy
import dataclasses
from typing import NamedTuple

import numpy as np

# While rows wait for seats, a chunk ends once more than this share of the rows have ended in it.
IDLE_SHARE = 0.1
NOBODY = -1  # in arrays: a place without a prompt, or a seat without a row


class Grid(NamedTuple):
  """N places for prompts, with Q seats each."""

  places: int
  seats: int

  @property
  def rows(self) -> int:
    """The rows that are decoded together."""
    return self.places * self.seats


def first_grid(prompts: int, members: int, rows: int = 0, shards: int = 1) -> Grid:
  """Chooses the grid with which a call starts.

  If not all rows fit, all prompts start with fewer seats each, rather than some prompts with all
  their rows. Places beyond P get copies of prompts.

  Args:
    prompts: P, a multiple of `shards`.
    members: G, the completions of each prompt.
    rows: The most rows in flight, but at least one for each shard. 0 means all.
    shards: How many shards the places are split over. The number of places is a multiple of it.

  Returns:
    A grid with a seat for every row if `rows` allows it. Otherwise as many places as `rows` allows,
    with rows // P seats each, or one seat.
  """
  if not rows or rows >= prompts * members:
    return Grid(prompts, members)
  seats = max(1, rows // prompts)
  return Grid(max(1, rows // seats // shards) * shards, seats)


class Move(NamedTuple):
  """Rows that change their seats.

  Attributes:
    grid: The new grid [N', Q'].
    rows_NQ: int [N', Q'], the old seat n * Q + q of the row in each new seat. Empty seats have the
      first old seat of their shard.
    places_N: int [N'], the old place of the prompt at each new place. Empty places have the first
      old place of their shard.
  """

  grid: Grid
  rows_NQ: np.ndarray
  places_N: np.ndarray


@dataclasses.dataclass
class Seats:
  """The rows in flight, and those that wait. The functions of this module change it in place.

  Attributes:
    grid: The current grid.
    shards: D, how many shards the places are split over, equally many places each.
    members: G, the members of each prompt's group.
    prompt_N: int, the prompt at each place, or NOBODY.
    row_NQ: int, the row p * G + g in each seat, or NOBODY.
    waiting_P: int, the first member of each prompt that has not had a seat yet. G if all have.
    queue: The prompts that have not had a place yet, in order of submission.
    in_order: All prompts with members that may still wait, the oldest first.
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
  """Makes a grid of empty seats, with all rows of P prompts waiting."""
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
  """Extends the arrays to `prompts` prompts. The new numbers have no waiting members yet."""
  more = prompts - len(seats.waiting_P)
  seats.waiting_P = np.append(seats.waiting_P, np.full(more, seats.members))


def wait(seats: Seats, prompt: int) -> None:
  """Queues all members of a prompt behind those that already wait.

  The number may be reused after all members of an earlier prompt have left. The places that still
  had the earlier prompt become free.
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
  """A prompt that gets a place.

  Attributes:
    place: The place n.
    prompt: The prompt p.
    copied_from: Another place of the shard with the same prompt. NOBODY: it must be computed.
  """

  place: int
  prompt: int
  copied_from: int = NOBODY


def fill_places(seats: Seats, batch: int = 1) -> list[Arrival]:
  """Assigns free places to queued prompts or, if none is queued, to prompts with waiting members.

  Among the latter, the prompt with the most members without a seat gets a place first. A place is
  free once its prompt has neither rows nor waiting members.

  Args:
    seats: The seats, which are updated.
    batch: Queued prompts get places only if this many of them fit, or all that are left, because
      one call of a program computes this many. If not, the result is empty.
  """
  has_row_N = (seats.row_NQ != NOBODY).any(1)
  # Where prompt_N is NOBODY, -1, the index reads some prompt, which the first term masks.
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
  if not seats.all_seated:  # the free places get copies of prompts that other places have
    for place in free:
      source = _most_wanted(seats, place)
      if source != NOBODY:
        seats.prompt_N[place] = seats.prompt_N[source]
        arrivals.append(Arrival(place, int(seats.prompt_N[source]), source))
  return arrivals


def fill_places_in_order(seats: Seats, batch: int = 1) -> list[Arrival]:
  """Assigns each free place to the oldest prompt that has more waiting members than free seats.

  Args:
    seats: The seats, which are updated.
    batch: Ignored: an idle seat costs more than computing a prompt in a small batch.
  """
  del batch
  free_N = (seats.row_NQ == NOBODY).sum(1)
  has_row_N = free_N < seats.grid.seats
  # For each prompt, the waiting members that lack a reserved seat. A place with rows keeps its
  # prompt, which reserves its free seats. Several places may have one prompt, hence `subtract.at`.
  wanting_P = seats.members - seats.waiting_P
  np.subtract.at(wanting_P, seats.prompt_N[has_row_N], free_N[has_row_N])
  # Places without rows keep their prompt if its members still need their seats.
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
    if prompt in seats.queue:  # not if this is a further place of the prompt
      seats.queue.remove(prompt)
  return arrivals


def _most_wanted(seats: Seats, place: int) -> int:
  """Finds the place in the shard of `place` whose prompt lacks most seats. NOBODY if none does."""
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


def take_seats(seats: Seats, closed: Collection[int] = ()) -> list[int]:
  """Assigns free seats to waiting members of the place's prompt. Returns the rows p * G + g.

  Args:
    seats: The seats, which are updated.
    closed: Places whose seats stay free, because their prompts are not computed yet.
  """
  taken: list[int] = []
  if seats.all_seated:
    return taken
  has_free_N = (seats.row_NQ == NOBODY).any(1) & (seats.prompt_N != NOBODY)
  has_free_N[list(closed)] = False
  for n in np.flatnonzero(has_free_N).tolist():
    p = int(seats.prompt_N[n])
    first = int(seats.waiting_P[p])
    free = np.flatnonzero(seats.row_NQ[n] == NOBODY)[: seats.members - first]
    rows = p * seats.members + first + np.arange(len(free))
    seats.row_NQ[n, free] = rows
    seats.waiting_P[p] += len(free)
    taken += rows.tolist()
  return taken


def can_sit_now(seats: Seats, closed: Collection[int]) -> bool:
  """Whether a waiting row would get a seat at one of the places that are not closed."""
  return bool(take_seats(copy.deepcopy(seats), closed))


def can_sit(seats: Seats, fill: Callable[[Seats, int], Sequence[Arrival]], batch: int) -> bool:
  """Whether a waiting row would get a seat now. A free seat at another prompt's place is no use.

  Args:
    seats: The seats, which stay as they are.
    fill: `fill_places` or `fill_places_in_order`.
    batch: The argument of `fill`.
  """
  if seats.all_seated or (seats.row_NQ != NOBODY).all():
    return False
  tried = copy.deepcopy(seats)
  fill(tried, batch)
  return bool(take_seats(tried))


def move_together(seats: Seats, grids: Sequence[Grid]) -> Move | None:
  """Moves all rows into the smallest grid of `grids` that holds them, if no row waits.

  A round of decoding computes all seats of the grid, taken or not.

  Returns:
    The move, or None if a row waits or no grid is both smaller and large enough.
  """
  if not seats.all_seated:
    return None
  sitting = np.flatnonzero(seats.row_NQ.reshape(-1) != NOBODY)
  places = sitting // seats.grid.seats
  # groups[shard] has an array for each prompt: the seats that its rows take now.
  groups: list[list[np.ndarray]] = []
  for shard in range(seats.shards):
    here = sitting[_shards_of(seats, places) == shard]
    prompts = seats.prompt_N[here // seats.grid.seats]
    groups.append([here[prompts == prompt] for prompt in dict.fromkeys(prompts.tolist())])

  def holds_all(grid: Grid) -> bool:
    # Shards have equally many places, so the shard that needs most decides. A place has one prompt.
    needed = max(sum(-(-len(taken) // grid.seats) for taken in shard) for shard in groups)
    return grid.rows < seats.grid.rows and needed * seats.shards <= grid.places

  fitting = [grid for grid in grids if holds_all(grid)]
  if not fitting:
    return None
  grid = min(fitting, key=lambda grid: grid.rows)
  each = grid.places // seats.shards  # new places per shard
  # At first, every new place and seat refers to the first old one of its shard.
  old = np.arange(seats.shards).repeat(each) * (seats.grid.places // seats.shards)
  move = Move(grid, np.tile(old[:, None] * seats.grid.seats, (1, grid.seats)), old)
  row_NQ, prompt_N = np.full(grid, NOBODY), np.full(grid.places, NOBODY)
  for shard, of_prompts in enumerate(groups):
    n = shard * each
    for taken in of_prompts:
      for start in range(0, len(taken), grid.seats):
        moved = taken[start : start + grid.seats]  # the old seats of place n's rows
        move.rows_NQ[n, : len(moved)] = moved
        move.places_N[n] = moved[0] // seats.grid.seats
        row_NQ[n, : len(moved)] = seats.row_NQ.reshape(-1)[moved]
        prompt_N[n] = seats.prompt_N[moved[0] // seats.grid.seats]
        n += 1
  seats.grid, seats.row_NQ, seats.prompt_N = grid, row_NQ, prompt_N
  return move
