"""Who sits where, with rows that only have a length."""

import numpy as np
import pytest

from grpo_jax.sampler import seats as seats_lib
from grpo_jax.sampler.seats import NOBODY, Grid, first_grid


def test_the_first_grid_has_one_place_for_each_prompt_where_it_can():
  assert first_grid(6, 4) == first_grid(6, 4, rows=24) == Grid(6, 4)
  assert first_grid(6, 4, rows=17) == Grid(8, 2)
  assert first_grid(6, 4, rows=11) == Grid(11, 1)
  assert first_grid(6, 4, rows=3) == Grid(3, 1)
  assert first_grid(6, 4, rows=15, shards=2) == Grid(6, 2)
  assert first_grid(6, 4, rows=1, shards=2) == Grid(2, 1)


def check(seats, first_shard):
  """What holds at any time."""
  grid = seats.grid
  rows = seats.row_NQ[seats.row_NQ != NOBODY]
  assert len(set(rows.tolist())) == len(rows)
  for n, prompt in enumerate(seats.prompt_N):
    here = seats.row_NQ[n][seats.row_NQ[n] != NOBODY]
    assert (here // seats.members == prompt).all()
    for row in here.tolist():
      shard = n * seats.shards // grid.places
      assert first_shard.setdefault(row, shard) == shard


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("rows, batch", [(0, 1), (5, 1), (8, 2), (12, 2), (16, 4)])
def test_every_row_has_a_seat_until_it_ends(rows, batch, shards):
  """Random lengths. A row sits in one seat at a time, at its prompt, and never changes shards."""
  P, G, rng = 6, 4, np.random.default_rng(rows)
  left = rng.geometric(0.15, P * G)
  grid = first_grid(P, G, rows, shards)
  smaller = [Grid(size * shards, 1) for size in (6, 3, 1)]
  seats, shard_of = seats_lib.no_one(P, G, grid, shards), {}
  seen, sizes = set(), [grid.rows]
  while True:
    arrivals = seats_lib.fill_places(seats, batch * shards)
    new = [arrival for arrival in arrivals if arrival.copied_from == NOBODY]
    assert all(seats.prompt_N[a.place] == a.prompt for a in arrivals)
    assert (
      len(new) in (0, P - len(seats.queue)) or len(new) >= min(batch * shards, P) or not seats.queue
    )
    taken = seats_lib.take_seats(seats)
    assert not seen & {*taken}
    seen |= {*taken}
    if seats.all_seated and (seats.row_NQ == NOBODY).all():
      break
    check(seats, shard_of)
    before = seats.row_NQ.reshape(-1).copy()
    move = seats_lib.move_together(seats, smaller)
    if move is not None:
      after = seats.row_NQ.reshape(-1)
      assert (before[move.rows_NQ.reshape(-1)] == after)[after != NOBODY].all()
      assert sorted(after[after != NOBODY]) == sorted(before[before != NOBODY])
      check(seats, shard_of)
      sizes.append(seats.grid.rows)
    row_R = seats.row_NQ.reshape(-1)
    sitting = np.flatnonzero(row_R != NOBODY)
    assert len(sitting), "nobody sits, and somebody waits"
    left[row_R[sitting]] -= 1
    seats_lib.leave(seats, sitting[left[row_R[sitting]] <= 0])
  assert seen == {*range(P * G)} and sizes == sorted(sizes, reverse=True) and sizes[-1] < P * G


def test_places_that_are_left_serve_the_prompts_with_most_waiting():
  seats = seats_lib.no_one(2, 6, Grid(4, 1))
  new = seats_lib.fill_places(seats)
  assert [(a.place, a.prompt) for a in new] == [(0, 0), (1, 1)]
  copies = seats_lib.fill_places(seats)
  assert [(a.place, a.prompt, a.copied_from) for a in copies] == [(2, 0, 0), (3, 1, 1)]
  assert seats_lib.take_seats(seats) == [0, 6, 1, 7]


def seated(prompts, members, grid, shards=1):
  """Seats of prompts of which the first rows have sat down."""
  seats = seats_lib.no_one(prompts, members, grid, shards)
  seats_lib.fill_places(seats)
  seats_lib.take_seats(seats)
  return seats


def test_a_free_seat_is_for_rows_of_its_place_until_the_place_is_free():
  seats = seated(2, 3, Grid(2, 2))
  fill = seats_lib.fill_places
  assert not seats_lib.can_sit(seats, fill, 1)  # no seat is free
  seats_lib.leave(seats, [0])
  assert seats_lib.can_sit(seats, fill, 1)  # for member 2 of prompt 0
  assert seats_lib.take_seats(seats) == [2]
  seats_lib.leave(seats, [0])
  before = seats.prompt_N.tolist(), seats.row_NQ.tolist(), seats.waiting_P.tolist()
  assert not seats_lib.can_sit(seats, fill, 1)  # member 2 of prompt 1 waits for the other place
  seats_lib.leave(seats, [1])
  assert seats_lib.can_sit(seats, fill, 1)  # place 0 gets a copy of prompt 1
  assert before[0] == seats.prompt_N.tolist() and before[2] == seats.waiting_P.tolist()
  assert seats.row_NQ.tolist() == [[NOBODY, NOBODY], *before[1][1:]]
  fill(seats)
  assert seats_lib.take_seats(seats) == [5] and not seats_lib.can_sit(seats, fill, 1)


def test_a_free_place_is_for_a_whole_batch_of_prompts_and_for_copies_of_its_shard():
  seats = seated(4, 1, Grid(2, 1))  # prompts 2 and 3 wait for a place
  seats_lib.leave(seats, [0])
  assert seats_lib.can_sit(seats, seats_lib.fill_places, 1)
  assert not seats_lib.can_sit(seats, seats_lib.fill_places, 2)
  seats = seated(2, 3, Grid(2, 2), shards=2)
  seats.waiting_P[0] = 3
  seats_lib.leave(seats, [0, 1])  # place 0 is free, and prompt 1 has its place in the other shard
  assert not seats_lib.can_sit(seats, seats_lib.fill_places, 1)
  assert seats_lib.can_sit(seats, seats_lib.fill_places_in_order, 1)


def simulate(lengths_PG, grid, grids, chunk):
  """How many row-tokens are computed, ended rows included, to decode rows of these lengths."""
  P, G = lengths_PG.shape
  seats, left, computed = seats_lib.no_one(P, G, grid), lengths_PG.reshape(-1).copy(), 0
  while True:
    seats_lib.fill_places(seats)
    seats_lib.take_seats(seats)
    if seats.all_seated and (seats.row_NQ == NOBODY).all():
      return computed
    seats_lib.move_together(seats, grids)
    rows = seats.row_NQ.reshape(-1)
    going = np.where(rows == NOBODY, 0, left[rows])
    steps = min(chunk, going.max())
    computed += steps * seats.grid.rows
    left[rows[rows != NOBODY]] -= steps
    seats_lib.leave(seats, np.flatnonzero((rows != NOBODY) & (left[rows] <= 0)))


@pytest.mark.parametrize(
  "rows, grids, most",
  [
    (0, [], 7.0),
    (0, [Grid(128, 1), Grid(64, 1), Grid(32, 1), Grid(16, 1)], 1.75),
    (64, [Grid(32, 1), Grid(16, 1)], 1.3),
  ],
)
def test_few_row_tokens_are_computed_for_each_that_is_emitted(rows, grids, most):
  """Lengths are geometric with mean 72 and at most 512, as with random stops."""
  lengths_PG = np.minimum(np.random.default_rng(0).geometric(1 / 72, (32, 8)), 512)
  grid = first_grid(32, 8, rows)
  computed = simulate(lengths_PG, grid, grids, chunk=4)
  assert 0.7 * most < computed / lengths_PG.sum() < most


def in_order(lengths_PG, places, shards=1, comes=lambda chunk: None):
  """Groups that follow each other without an end, in seats of one place each, in chunks.

  Args:
    lengths_PG: Of the rows.
    places: How many seats there are.
    shards: The parts of the seats.
    comes: chunk -> how many groups are there by then. None means all.

  Returns:
    (row, when it took a seat) in this order, and the share of the seats that drew.
  """
  P, G = lengths_PG.shape
  seats, left = seats_lib.no_one(0, G, Grid(places, 1), shards), lengths_PG.reshape(-1).copy()
  seats_lib.widen(seats, P)
  sat, used, rounds, there, chunk = [], 0, 0, 0, 0
  while True:
    while there < (P if comes(chunk) is None else comes(chunk)):
      seats_lib.wait(seats, there)
      there += 1
    for arrival in seats_lib.fill_places_in_order(seats):
      # The prompt is computed for a shard where it has no place yet, and copied in the others.
      same = [n for n in np.flatnonzero(seats.prompt_N == arrival.prompt) if n != arrival.place]
      here = [n for n in same if n * shards // places == arrival.place * shards // places]
      assert (arrival.copied_from == NOBODY) or arrival.copied_from in here
    sat += [(row, rounds) for row in seats_lib.take_seats(seats)]
    check(seats, {})
    row_R = seats.row_NQ.reshape(-1)
    taken = row_R != NOBODY
    # Nobody waits while a seat is free.
    assert taken.all() or seats.all_seated
    if there == P and seats.all_seated:
      return sat, used / (rounds * places)
    chunk += 1
    most = int(seats_lib.IDLE_SHARE * places)
    for _ in range(64):
      going = taken & (left[row_R] > 0)
      if (taken & ~going).sum() > most:
        break
      used, rounds = used + going.sum(), rounds + 1
      left[row_R[going]] -= 1
    seats_lib.leave(seats, np.flatnonzero(taken & (left[row_R] <= 0)))


@pytest.mark.parametrize("places, shards", [(7, 1), (16, 2), (64, 4)])
def test_free_seats_go_to_the_oldest_group_and_each_row_sits_once(places, shards):
  lengths_PG = np.random.default_rng(places).geometric(0.05, (40, 5))
  sat, _ = in_order(lengths_PG, places, shards)
  assert sorted(row for row, _ in sat) == list(range(200))
  # All rows that sit down at once are older than those that sit down later.
  times = sorted({time for _, time in sat})
  groups = [[row // 5 for row, time in sat if time == one] for one in times]
  assert all(max(before) <= min(after) for before, after in zip(groups, groups[1:]))


def test_groups_that_come_later_take_their_seats_while_others_are_in_flight():
  lengths_PG = np.random.default_rng(0).geometric(0.05, (40, 5))
  sat, _ = in_order(lengths_PG, 8, comes=lambda chunk: min(40, 1 + chunk // 3))
  assert sorted(row for row, _ in sat) == list(range(200))
  assert [row // 5 for row, _ in sat] == sorted(row // 5 for row, _ in sat)


def test_seats_are_used_where_groups_follow_each_other():
  """Lengths are geometric with mean 72 and at most 512, as with random stops."""
  lengths_PG = np.minimum(np.random.default_rng(0).geometric(1 / 72, (200, 8)), 512)
  _, share = in_order(lengths_PG, 64)
  assert share >= 0.95


@pytest.mark.parametrize("fill", [seats_lib.fill_places, seats_lib.fill_places_in_order])
def test_a_number_that_another_group_had_gets_no_place_with_that_ones_prompt(fill):
  """Its members have left, and nobody has looked for free places since."""
  seats = seats_lib.no_one(0, 2, Grid(3, 1))
  seats_lib.widen(seats, 2)
  seats_lib.wait(seats, 0)
  fill(seats), fill(seats), seats_lib.take_seats(seats)
  seats_lib.leave(seats, range(3))
  seats_lib.wait(seats, 1)
  seats_lib.wait(seats, 0)
  new = [(a.prompt, a.copied_from) for a in fill(seats)]
  assert new[0] == (1, NOBODY) and (0, NOBODY) in new
