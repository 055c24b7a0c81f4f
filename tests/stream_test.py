"""Groups that come and go: a row's tokens depend neither on the others nor on when it pauses."""

import dataclasses

import flight_test
from flight_test import FAMILIES, G, P, T, assert_same, on, prompts, stops, tiny
import jax
import numpy as np
import pytest

from grpo_jax import model
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.requests import GroupRequest
from grpo_jax.sampler.sampling import Sampler

KEYS = [np.asarray(jax.random.key_data(jax.random.key(seed))) for seed in (3, 4)]


def requests_of(config, sampler, pauses=False, two_arrays=True):
  """Groups of two keys, whose prompts lie in one or two arrays, with settings of their own."""
  tokens_PS, lengths_P = prompts(config.vocab_size, 2 * P)
  halves = [slice(0, P), slice(P, 2 * P)] if two_arrays else [slice(0, 2 * P)] * 2
  given = [sampler.prompts(tokens_PS[half], lengths_P[half]) for half in halves]
  return [
    GroupRequest(
      number=100 + n,
      prompts=given[n // P],
      place=n % P if two_arrays else n,
      key=KEYS[n // P],
      first_row=G * (n % P),
      settings=RowSettings(1.0 if n % 3 else 0.7, max_tokens=T - n),
      pauses=pauses,
    )
    for n in range(2 * P)
  ]


def stream_of(config, params, seats, in_order=True, chunk=5):
  decoding = Decoding(max_tokens=T, stop_ids=stops(config.vocab_size))
  sampler = Sampler(config, decoding, rows=seats)
  sampler.programs.columns = chunk
  return sampler, lambda: sampler.stream(lambda: (params, 0), P, G, in_order=in_order)


def drawn(stream, batches, reply=None, every=2):
  """{number: completions [1, G, ...]} of groups, of which some come every few chunks."""
  batches, found, chunks = list(batches), {}, 0
  wanted = sum(map(len, batches))
  while len(found) < wanted:
    if batches and chunks % every == 0:
      stream.submit(batches.pop(0))
    news = stream.advance()
    if reply is not None:
      reply(stream, chunks, news.paused)
    for one in news.finished:
      for place, number in enumerate(one.prompts):
        assert number not in found
        found[number] = jax.tree.map(lambda x: x[place : place + 1], one.completions)  # noqa: B023
    chunks += 1
    assert chunks < 2000
  return found


@pytest.fixture(scope="module")
def alone():
  """A model, and what each group draws alone."""
  config, params = tiny()
  sampler, begin = stream_of(config, params, 0, in_order=False, chunk=64)
  return (
    config,
    params,
    {one.number: drawn(begin(), [[one]])[one.number] for one in requests_of(config, sampler)},
  )


@pytest.mark.parametrize(
  "mesh, in_order, order",
  [
    pytest.param((), True, range(2 * P), marks=pytest.mark.slow),
    ((), True, (5, 0, 7, 2, 1, 6, 3, 4)),
    pytest.param((2, 1, 1, 1), True, (5, 0, 7, 2, 1, 6, 3, 4), marks=pytest.mark.slow),
    pytest.param((), False, (5, 0, 7, 2, 1, 6, 3, 4), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_groups_that_come_while_others_are_in_flight_draw_what_they_draw_alone(
  mesh, in_order, order, alone
):
  config, params, expected = alone
  placed = on(mesh, config, params) if mesh else (config, params)
  sampler, begin = stream_of(*placed, 6, in_order)
  asked = requests_of(placed[0], sampler)
  stream = begin()
  found = drawn(stream, [[asked[n]] for n in order])
  for number, completions in expected.items():
    assert_same(found[number], completions)
  assert not stream.draws and 0 < stream.seat_rounds.used <= stream.seat_rounds.all
  # A stream that has become empty draws again what it drew.
  again = drawn(stream, [[asked[n] for n in order]])
  for number, completions in expected.items():
    assert_same(again[number], completions)


def test_groups_that_are_cancelled_leave_no_trace(alone):
  config, params, expected = alone
  sampler, begin = stream_of(config, params, 6)
  asked, stream = requests_of(config, sampler), begin()
  stream.submit(asked[:5])
  for _ in range(2):
    stream.advance()
  stream.cancel()
  assert not stream.draws and not stream.advance().finished
  found = drawn(stream, [asked[4:]])
  assert sorted(found) == [one.number for one in asked[4:]]
  for number, completions in found.items():
    assert_same(completions, expected[number])


def replying(waits):
  """Replies of some tokens to rows that end for the first time, `waits(row)` chunks later."""
  waiting = []

  def reply(stream, chunk, paused):
    for row in paused:
      tokens = None if len(row.tokens) % 4 == 0 or 95 in row.tokens else [95, *row.tokens[:2]]
      waiting.append((chunk + waits(row), row, tokens and tokens[: 1 + row.member]))
    nobody_draws = not stream.draws
    for one in sorted(waiting, key=lambda one: one[0]):
      if one[0] <= chunk or nobody_draws:
        waiting.remove(one)
        stream.go_on(one[1].prompt, one[1].member, one[2])

  return reply


def assert_pauses_change_nothing(config, params, placed, seats, chunk):
  sampler, begin = stream_of(config, params, 0, in_order=False, chunk=64)
  at_once = drawn(begin(), [requests_of(config, sampler, True)], replying(lambda row: 0))
  sampler, begin = stream_of(*placed, seats, chunk=chunk)
  asked = requests_of(placed[0], sampler, True)
  batches = [asked[:3], asked[3:4], asked[4:]]
  late = drawn(begin(), batches, replying(lambda row: (0, 3, 11)[(row.prompt + row.member) % 3]))
  went_on, gaps = 0, []
  for number, completions in at_once.items():
    # Sums in another order differ in the last digit, and a number near the middle between two of
    # int8 then becomes the other one. That changes few log-probs.
    assert_same(late[number], completions, atol=1e-2 if config.cache_dtype else 1e-4)
    gaps.append(np.abs(late[number].logprobs_PGT - completions.logprobs_PGT).ravel())
    length_G = completions.lengths_PG[0]
    is_given = ~completions.sampled_PGT[0] & (np.arange(T) < length_G[:, None])
    went_on += int(is_given.any(1).sum())
  assert went_on > P and (np.concatenate(gaps) > 1e-4).mean() <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(), (2, 1, 1, 1)], ids=str)
def test_a_row_that_pauses_for_many_chunks_goes_on_as_one_that_went_on_at_once(mesh, alone):
  config, params, _ = alone
  placed = on(mesh, config, params) if mesh else (config, params)
  assert_pauses_change_nothing(config, params, placed, 8, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, cache_dtype", [("gemma3", ""), ("gemma3", "int8"), ("qwen3_5", ""), ("tiny", "int8")]
)
def test_pauses_change_nothing_with_windows_states_and_caches_of_int8(name, cache_dtype):
  config, params = tiny() if name == "tiny" else model.load(FAMILIES / name)
  config = dataclasses.replace(config, dtype="float32", cache_dtype=cache_dtype)
  assert_pauses_change_nothing(config, params, (config, params), 8, 3)
  assert flight_test.T == T


@pytest.mark.slow
def test_the_first_rows_that_pause_keep_their_windows_while_no_reply_comes():
  """They pause after 9 of the 20 tokens of a chunk, and another chunk comes before the replies."""
  config, params = model.load(FAMILIES / "gemma3")
  config = dataclasses.replace(config, dtype="float32")

  def drawn_with(chunk, wait):
    sampler = Sampler(config, Decoding(max_tokens=T, stop_ids=()))
    sampler.programs.columns = chunk
    first, *others = requests_of(config, sampler, True)[:P]
    asked = [first._replace(turn_tokens=9), *(one._replace(pauses=False) for one in others)]
    stream = sampler.stream(lambda: (params, 0), P, G)
    return drawn(stream, [asked], replying(lambda row: wait))

  at_once, late = drawn_with(64, 0), drawn_with(20, 2)
  assert 95 in at_once[100].tokens_PGT
  for number, completions in at_once.items():
    assert_same(late[number], completions)


@pytest.mark.slow
def test_a_stream_whose_seats_are_all_taken_by_rows_that_pause_draws_nothing(alone):
  """Groups that wait for a seat cannot draw either, so whoever asks waits for a reply."""
  config, params, _ = alone
  sampler, begin = stream_of(config, params, G)
  asked, stream = requests_of(config, sampler, pauses=True), begin()
  stream.submit(asked[:2])
  paused = []
  for _ in range(50):
    if stream.draws:
      paused += stream.advance().paused
  assert not stream.draws and len(paused) == G
  for row in paused:
    stream.go_on(row.prompt, row.member, None)
  assert [number for one in stream.advance().finished for number in one.prompts] == [100]
  assert stream.draws


@pytest.mark.slow
def test_a_stream_whose_free_seats_suit_no_row_that_waits_draws_nothing():
  """One row of the first group pauses at a place with a free seat, and other groups wait."""
  config, params = tiny()
  members, weights_read = 3, []

  def feed():
    weights_read.append(0)
    return params, 0

  sampler = Sampler(config, Decoding(max_tokens=T, stop_ids=()), rows=2 * P)
  stream = sampler.stream(feed, P, members)  # P places with 2 seats each
  given = sampler.prompts(*prompts(config.vocab_size))
  settings = RowSettings(1.0, max_tokens=T)
  stream.submit(
    [
      GroupRequest(n, given, n, KEYS[0], members * n, settings, turn_tokens=3, pauses=True)
      for n in range(P)
    ]
  )
  assert len(stream.advance().paused) == 2 * P
  stream.go_on(0, 0, None)
  assert [(row.prompt, row.member) for row in stream.advance().paused] == [(0, 2)]
  stream.go_on(0, 2, None)
  stream.advance()
  assert not stream.draws
  chunks = len(weights_read)
  assert not stream.advance().paused and len(weights_read) == chunks
  stream.go_on(0, 1, None)  # the place becomes free for the last row of another group
  assert [row.member for row in stream.advance().paused] == [2]
