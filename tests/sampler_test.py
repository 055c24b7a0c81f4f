"""The sampler, with a five-line fake in the model's place."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import grpo_jax
from grpo_jax.config import Sampling
from grpo_jax.sampler import logits as logits_lib
from grpo_jax.sampler.filters import FILTERS, OF_REQUESTS, has_filters, own_values
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.rows import Chunk, Rows, decode_chunk, draw_first, row_uniforms
from grpo_jax.sampler.sampling import settings_of, sizes_up_to
from grpo_jax.sampler.stream import by_row
from grpo_jax.serving import chats, completions, requests
from grpo_jax.settings import ConfigError

PLAIN = Decoding(max_tokens=8, stop_ids=(1,))
PROBS = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
LOGITS = jnp.log(jnp.array(PROBS))


def decoding(**change):
  return dataclasses.replace(PLAIN, **change)


def kept(**filters):
  """Of a row with these filters, between two that have none."""
  settings = RowSettings(**{name: jnp.array([0, x, 0]) for name, x in filters.items()})
  if "top_p" in filters:
    settings = settings.replace(top_p=jnp.array([1, filters["top_p"], 1]))
  found = np.isfinite(logits_lib.filtered(jnp.stack([LOGITS] * 3), settings))
  assert found[0].all() and found[2].all()
  return found[1].tolist()


def test_top_k_keeps_the_k_likeliest():
  assert kept(top_k=2) == [True, True, False, False, False]
  assert kept(top_k=99) == [True] * 5


def test_top_p_keeps_the_fewest_that_reach_p():
  """.4 + .3 = .7: .69 needs both, .71 a third."""
  assert kept(top_p=0.39) == [True, False, False, False, False]
  assert kept(top_p=0.69) == [True, True, False, False, False]
  assert kept(top_p=0.71) == [True, True, True, False, False]


def test_min_p_is_relative_to_the_largest():
  """.3 * .4 = .12."""
  assert kept(min_p=0.3) == [True, True, True, False, False]


def test_top_p_sees_what_top_k_left():
  """Of .4 and .3 alone, the first has 4/7 = .571."""
  assert kept(top_k=2, top_p=0.57) == [True, False, False, False, False]


@pytest.fixture
def within():
  """A filter of a program: it drops tokens that are less likely than the likeliest by its value."""

  @grpo_jax.register_filter
  def within(logits_BV, value_B1):
    assert value_B1.shape == (len(logits_BV), 1)
    return logits_BV >= logits_BV.max(-1, keepdims=True) - value_B1

  yield within
  del FILTERS["within"]


def test_a_filter_of_a_program_sees_what_top_k_left_and_rows_without_it_are_as_they_were(within):
  """The probabilities are .4, .3, .15, .1 and .05: log(.4 / .15) is .98 and log(.4 / .3) .29."""
  logits = jnp.stack([LOGITS] * 4)
  settings = RowSettings(own={"within": jnp.array([0.0, 1.0, 0.2, 9.0])})
  found = np.isfinite(logits_lib.filtered(logits, settings))
  assert found.sum(1).tolist() == [5, 3, 1, 5]
  settings = settings.replace(top_k=jnp.array([0, 2, 0, 4]))
  assert np.isfinite(logits_lib.filtered(logits, settings)).sum(1).tolist() == [5, 2, 1, 4]
  np.testing.assert_array_equal(logits_lib.filtered(logits, settings)[0], logits[0])
  off = settings.replace(own={"within": jnp.zeros(4)})
  np.testing.assert_array_equal(
    logits_lib.filtered(logits, off), logits_lib.filtered(logits, settings.replace(own=None))
  )


def test_a_filter_of_a_program_takes_no_name_of_a_setting():
  def temperature(logits_BV, value_B1):
    return logits_BV > value_B1

  with pytest.raises(ConfigError, match="sampling.temperature is a setting: give your filter"):
    grpo_jax.register_filter(temperature)
  assert "temperature" not in FILTERS


def test_a_filter_of_a_program_that_returns_logits_is_refused():
  @grpo_jax.register_filter
  def logits(logits_BV, value_B1):
    return logits_BV - value_B1

  try:
    with pytest.raises(ConfigError, match=r"the filter logits returned float32 .* bool \(2, 5\)"):
      logits_lib.filtered(jnp.stack([LOGITS] * 2), RowSettings(own={"logits": jnp.ones(2)}))
  finally:
    del FILTERS["logits"]


def test_filters_of_a_program_follow_in_the_order_of_their_names_and_keep_the_likeliest():
  seen = []

  def b_none(logits_BV, value_B1):
    seen.append("b")
    return jnp.zeros_like(logits_BV, bool)

  def a_none(logits_BV, value_B1):
    seen.append("a")
    return logits_BV * jnp.nan > 0

  for function in (b_none, a_none):
    grpo_jax.register_filter(function)
  try:
    settings = RowSettings(own={"b_none": jnp.ones(2), "a_none": jnp.zeros(2)})
    kept = logits_lib.filtered(jnp.stack([LOGITS] * 2), settings)
    assert seen == ["a", "b"] and np.isfinite(kept).sum(1).tolist() == [1, 1]
    settings = settings.replace(own={"b_none": jnp.zeros(2), "a_none": jnp.ones(2)})
    u = uniforms(2, 5)
    tokens, logprobs, behavior = logits_lib.sample_token(
      jnp.stack([LOGITS] * 2), u, settings.replace(temperature=jnp.ones(2))
    )
    assert tokens.tolist() == [0, 0]
    np.testing.assert_allclose(logprobs, np.log(0.4), rtol=1e-5)  # under the whole softmax
    np.testing.assert_allclose(behavior, 0, atol=1e-6)
  finally:
    del FILTERS["b_none"], FILTERS["a_none"]


@pytest.mark.parametrize(
  "size, levels", [(2, 1), (16, 1), (17, 2), (256, 2), (257, 3), (151_936, 5)]
)
def test_levels_of_the_tree(size, levels):
  assert logits_lib.draws_per_token(size) == levels


def test_one_level_inverts_the_distribution_function():
  """The token at uniform u is the one where the cumulative probability passes u."""
  u = np.array([0, 0.39, 0.41, 0.69, 0.71, 0.84, 0.86, 0.94, 0.96, 0.9999])
  logits = jnp.broadcast_to(LOGITS, (10, 5))
  out, log_total = logits_lib.draw(logits, jnp.float32(u)[:, None])
  assert out.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
  np.testing.assert_allclose(log_total, jax.nn.logsumexp(logits, -1), rtol=1e-6)


@pytest.mark.parametrize("size", [17, 300])
def test_a_tpu_adds_the_weights_of_a_node_along_an_axis_and_never_keeps_them_all(size):
  """Without the compiler for TPUs: the program that it would get, and what that computes."""
  logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (64, size)), jnp.float32)
  logits = logits.at[:, 5:9].set(-jnp.inf)
  given = logits, uniforms(64, size), RowSettings(jnp.ones(64))
  traced = jax.jit(logits_lib.sample_token).trace(*given)
  on_tpu, on_cpu = (traced.lower(lowering_platforms=(name,)).as_text() for name in ("tpu", "cpu"))
  kept = f"exponential %.* : tensor<64x{size}xf32>"
  assert not re.search(kept, on_tpu) and "LayoutConstraint" in on_tpu
  assert "LayoutConstraint" not in on_cpu
  padded = jnp.pad(logits, ((0, 0), (0, -size % 16)), constant_values=-jnp.inf)
  sums = logits_lib.sums_by_axis(padded, logits.max(-1))
  weights = np.exp(np.asarray(logits) - np.asarray(logits).max(-1, keepdims=True))
  by_hand = [weights[:, start : start + 16].sum(-1) for start in range(0, size, 16)]
  np.testing.assert_allclose(sums, np.stack(by_hand, 1), rtol=1e-6)


@pytest.mark.slow
def test_the_last_node_may_have_fewer_tokens():
  """Of 17, the second node has one. At the largest uniform numbers, it is drawn."""
  logits = jnp.zeros((3, 17))
  draws = jnp.float32([[0.9999, 0.9999], [0.9999, 0.0], [0.9, 0.9999]])
  assert logits_lib.draw(logits, draws)[0].tolist() == [16, 16, 15]


def uniforms(count, size, key=0):
  return jax.random.uniform(jax.random.key(key), (count, logits_lib.draws_per_token(size)))


@pytest.mark.parametrize(
  "size",
  [5, pytest.param(16, marks=pytest.mark.slow), pytest.param(17, marks=pytest.mark.slow), 300],
)
def test_frequencies_are_the_probabilities(size):
  """Every frequency of 40,000 draws within five standard deviations."""
  probs = np.random.default_rng(size).dirichlet(np.full(size, 0.5)).astype(np.float32)
  logits = jnp.broadcast_to(jnp.log(probs), (40000, size))
  settings = RowSettings(jnp.ones(40000))
  tokens, logprobs, _ = jax.jit(logits_lib.sample_token)(logits, uniforms(40000, size), settings)
  frequencies = np.bincount(tokens, minlength=size) / 40000
  assert (np.abs(frequencies - probs) <= 5 * np.sqrt(probs / 40000) + 1e-9).all()
  np.testing.assert_allclose(logprobs, np.log(probs)[tokens], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  "top_k, top_p",
  [
    (0, 0.5),
    (7, 1.0),
    pytest.param(40, 0.3, marks=pytest.mark.slow),
    (1, 0.99),
    pytest.param(999, 0.999, marks=pytest.mark.slow),
  ],
)
def test_filters_keep_what_a_sort_keeps(top_k, top_p):
  """Logits of both signs with ties, of which all or none are kept."""
  rng = np.random.default_rng(0)
  logits = np.round(rng.normal(0, 3, (6, 300)), 1).astype(np.float32)
  logits[0, :] = -5  # all equal
  logits[1, 10:] = -np.inf
  logits[2] *= 1e-30  # whose weights are all the same
  settings = RowSettings(top_k=jnp.full(6, top_k), top_p=jnp.full(6, top_p, jnp.float32))
  found = np.isfinite(logits_lib.filtered(jnp.asarray(logits), settings))
  for row, kept_V in zip(logits, found):
    order = np.sort(row)[::-1]
    left = row >= order[min(top_k or 300, 300) - 1]
    weights = np.where(left, np.exp(row.astype(float) - row.max()), 0)
    before = np.array([weights[row > x].sum() for x in row])
    expected = left & np.isfinite(row) & ((before < top_p * weights.sum()) | (top_p == 1))
    assert kept_V.tolist() == expected.tolist()


def test_a_row_draws_no_stop_id_before_its_least_tokens_and_ends_at_its_longest():
  """Of three rows that would draw stop id 1 at once, or never."""
  rows = new_rows(jax.random.key(0), 3, 8)
  settings = rows.settings.replace(
    min_tokens=jnp.array([0, 3, 0]), max_tokens=jnp.array([99, 5, 4])
  )
  rows, likely = rows.replace(settings=settings), jnp.where(jnp.arange(V) == 1, 9.0, 0.0)
  logits = jnp.stack([likely, likely, -likely])
  options = decoding(max_tokens=8)
  rows, drawn = draw_first(rows, lambda: logits, options, 8)
  step, limits = (
    (lambda cache, rows: (logits, cache)),
    Chunk(jnp.int32(7), jnp.int32(3)),
  )
  _, rows, drawn = decode_chunk(step, None, rows, drawn, options, limits)
  assert drawn.is_drawn_RN.sum(1).tolist() == [1, 4, 4]
  assert drawn.stopped_by_R.tolist() == [1, 1, -1] and (drawn.tokens_RN[1, :3] != 1).all()
  # A token that may not be a stop id was drawn from the others, and its first log-prob is of all.
  others = np.log(1 / (V - 1))
  np.testing.assert_allclose(drawn.behavior_logprobs_RN[1, :3], others, rtol=1e-4)
  np.testing.assert_allclose(drawn.logprobs_RN[1, :3], -np.log(np.exp(9) + V - 1), rtol=1e-4)


def test_the_draw_never_takes_what_was_filtered_out():
  """Also where rounding puts the uniform past the last cumulative share, at every level."""
  logits = jnp.where(jnp.arange(300) % 7 == 3, 0.0, -jnp.inf)
  u = jnp.concatenate(
    [uniforms(3000, 300), jnp.full((1, 3), 1 - 2**-24), jnp.ones((1, 3)), jnp.zeros((1, 3))]
  )
  out, _ = logits_lib.draw(jnp.broadcast_to(logits, (len(u), 300)), u)
  assert (out % 7 == 3).all() and len(set(out.tolist())) == 43


def test_both_logprobs():
  """Temperature 2 and top-k 2: the first is tempered, the second is also of the two kept tokens."""
  tempered = PROBS**0.5 / (PROBS**0.5).sum()
  u = jnp.linspace(0, 0.999, 50)[:, None]
  tokens, logprobs, drawn = logits_lib.sample_token(
    jnp.broadcast_to(LOGITS, (50, 5)), u, RowSettings(jnp.full(50, 2.0), top_k=jnp.full(50, 2))
  )
  assert set(tokens.tolist()) == {0, 1}
  np.testing.assert_allclose(logprobs, np.log(tempered)[tokens], rtol=1e-5)
  np.testing.assert_allclose(drawn, np.log(tempered[:2] / tempered[:2].sum())[tokens], rtol=1e-5)


def test_rows_have_temperatures_of_their_own():
  """At temperatures 1/2 and 2, probabilities are squares and roots of those at 1."""
  temperatures = jnp.repeat(jnp.array([0.5, 2.0]), 50)
  u = jnp.tile(jnp.linspace(0, 0.999, 50), 2)[:, None]
  logits = jnp.broadcast_to(LOGITS, (100, 5))
  tokens, logprobs, _ = logits_lib.sample_token(logits, u, RowSettings(temperatures))
  for rows, power in ((slice(50), 2), (slice(50, 100), 0.5)):
    expected = PROBS**power / (PROBS**power).sum()
    np.testing.assert_allclose(logprobs[rows], np.log(expected)[tokens[rows]], rtol=1e-5)


def test_greedy_takes_the_likeliest_token():
  """Beside a row that draws the last token, with a filter that renormalises."""
  settings = RowSettings(jnp.array([0.0, 1.0]), top_k=jnp.array([4, 4]))
  tokens, logprobs, drawn = logits_lib.sample_token(
    jnp.broadcast_to(LOGITS, (2, 5)), jnp.full((2, 1), 0.99), settings
  )
  assert tokens.tolist() == [0, 3]
  np.testing.assert_allclose(logprobs, np.log([0.4, 0.1]), rtol=1e-5)
  np.testing.assert_allclose(drawn, [0, np.log(0.1 / 0.95)], rtol=1e-5)


# The loop. The fake's cache counts calls.

V = 16


def new_rows(key, R, max_tokens):
  return Rows(
    token_R=jnp.zeros(R, jnp.int32),
    drawn_R=jnp.zeros(R, jnp.int32),
    goes_on_R=jnp.ones(R, bool),
    settings=RowSettings(jnp.ones(R)),
    uniforms_RTU=row_uniforms(jnp.broadcast_to(key, R), jnp.arange(R), max_tokens, V),
    idle_R=jnp.zeros(R, jnp.int32),
    given_RT=jnp.full((R, max_tokens), -1),
  )


def run(step, max_tokens=8, R=6, key=0, stop_ids=(1,), first=None, rounds=None):
  """The tokens [R, T] of rows that start from the logits `first` [R, V], and all that was drawn.

  They are drawn in chunks of so many rounds, or in one.
  """
  first = jnp.zeros((R, V)) if first is None else first
  R, rounds = len(first), max_tokens - 1 if rounds is None else rounds
  options = decoding(max_tokens=max_tokens, stop_ids=stop_ids)

  @jax.jit
  def chunk(cache, rows):
    rows, drawn = draw_first(rows, lambda: first, options, rounds + 1)
    limits = Chunk(jnp.int32(rounds), jnp.int32(R))
    return decode_chunk(step, cache, rows, drawn, options, limits)

  out = SimpleNamespace(
    tokens=np.zeros((R, max_tokens), int),
    logprobs=np.zeros((R, max_tokens)),
    lengths=np.zeros(R, int),
    stopped_by=np.full(R, -1),
    cache=jnp.int32(0),
  )
  rows = new_rows(jax.random.key(key), R, max_tokens)
  while rows.goes_on_R.any():
    out.cache, rows, drawn = chunk(out.cache, rows)
    drawn = jax.device_get(drawn)
    for r in range(R):
      own = drawn.is_drawn_RN[r]
      where = slice(out.lengths[r], out.lengths[r] + own.sum())
      out.tokens[r, where] = drawn.tokens_RN[r][own]
      out.logprobs[r, where] = drawn.logprobs_RN[r][own]
      assert (drawn.tokens_RN[r][~own] == 0).all() and (drawn.logprobs_RN[r][~own] == 0).all()
    out.lengths += drawn.is_drawn_RN.sum(1)
    np.testing.assert_array_equal(out.lengths, rows.drawn_R)
    out.stopped_by = np.maximum(out.stopped_by, drawn.stopped_by_R)
  return out


def always(token):
  return jnp.where(jnp.arange(V) == token, 0.0, -jnp.inf)


def uniform_step(cache, rows):
  return jnp.zeros((rows.token_R.shape[0], V)), cache + 1


def test_a_row_takes_the_tokens_that_are_given_and_counts_the_rounds_since_its_last():
  """Each token that is drawn is the one before plus one. A token that is given never stops."""
  options = decoding(max_tokens=8, stop_ids=(6, 9))
  rows = new_rows(jax.random.key(0), 2, 8)
  given_RT = jnp.full((2, 8), -1).at[0, 1:3].set(jnp.array([2, 6]))
  rows = rows.replace(given_RT=given_RT)

  def step(cache, rows):
    logits = jax.vmap(always)(rows.token_R + 1)
    return jnp.where(given_RT[:, 1:2] >= 0, logits.clip(-5), logits), cache

  first = jnp.stack([always(3), always(5)])
  rows, drawn = draw_first(rows, lambda: first, options, 8)
  limits = Chunk(jnp.int32(7), jnp.int32(2))
  _, rows, drawn = decode_chunk(step, jnp.int32(0), rows, drawn, options, limits)
  assert drawn.tokens_RN[0, :3].tolist() == [3, 2, 6] and (drawn.logprobs_RN[0, 1:3] == 0).all()
  assert drawn.is_drawn_RN[0, :4].all() and (drawn.logprobs_RN[0, 3:] < 0).any()
  assert drawn.tokens_RN[1].tolist() == [5, 6, 0, 0, 0, 0, 0, 0]
  rounds = int(drawn.is_drawn_RN[0].sum()) - 1
  assert rows.idle_R.tolist() == [0, rounds - 1] and rounds > 2


@pytest.mark.parametrize("rounds", [None, 1, 2])
def test_tokens_follow_the_step_function(rounds):
  """Each token is the one before plus one, from 3 on, until stop id 6."""

  def step(cache, rows):
    return jax.vmap(always)(rows.token_R + 1), cache

  out = run(step, first=jnp.stack([always(3), always(5)]), stop_ids=(6, 9), rounds=rounds)
  np.testing.assert_array_equal(out.tokens, [[3, 4, 5, 6, 0, 0, 0, 0], [5, 6, 0, 0, 0, 0, 0, 0]])
  np.testing.assert_array_equal(out.lengths, [4, 2])
  np.testing.assert_array_equal(out.stopped_by, [6, 6])
  np.testing.assert_allclose(out.logprobs, 0, atol=1e-6)


def test_any_of_several_stop_ids_stops_and_says_which():
  out = run(uniform_step, max_tokens=64, R=64, stop_ids=(2, 5))
  assert set(out.stopped_by) >= {2, 5}
  for tokens, n, by in zip(out.tokens, out.lengths, out.stopped_by):
    body, last = tokens[: n - 1], int(tokens[n - 1])
    assert not np.isin(body, [2, 5]).any() and (tokens[n:] == 0).all()
    assert by == (last if last in (2, 5) else -1)
    assert n == 64 or last in (2, 5)


def test_without_a_stop_rows_are_cut_off():
  out = run(uniform_step, stop_ids=())
  assert (out.lengths == 8).all() and (out.stopped_by == -1).all()


def test_log_probs_are_those_of_the_tokens():
  out = run(uniform_step, max_tokens=40, R=16)
  is_token = np.arange(40) < out.lengths[:, None]
  assert not is_token.all()
  np.testing.assert_allclose(out.logprobs[is_token], -np.log(V), rtol=1e-5)


def test_members_and_steps_differ_and_the_key_decides():
  out, again, other = run(uniform_step), run(uniform_step), run(uniform_step, key=1)
  assert len({tuple(row) for row in out.tokens}) == 6
  np.testing.assert_array_equal(out.tokens, again.tokens)
  assert (out.tokens != other.tokens).any(1).all()


@pytest.mark.parametrize(
  "rounds", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(7, marks=pytest.mark.slow)]
)
def test_a_row_depends_neither_on_the_others_nor_on_the_chunks(rounds):
  """Row r draws with its own key: more rows leave the first ones as they are."""
  few, many = run(uniform_step, R=6), run(uniform_step, R=15, rounds=rounds)
  np.testing.assert_array_equal(few.tokens, many.tokens[:6])


def test_it_stops_when_every_row_has():
  def step(cache, rows):
    return jnp.broadcast_to(always(4), (rows.token_R.shape[0], V)), cache + 1

  out = run(step, max_tokens=500, stop_ids=(4,), first=jnp.stack([always(3), always(4)]))
  assert out.cache == 1 and out.lengths.tolist() == [2, 1]


@pytest.mark.parametrize(
  "ended, rounds, passes",
  [
    (0, 9, 2),
    pytest.param(1, 9, 4, marks=pytest.mark.slow),
    pytest.param(2, 9, 6, marks=pytest.mark.slow),
    (9, 3, 3),
  ],
)
def test_a_chunk_ends_when_more_rows_have_ended_than_are_borne(ended, rounds, passes):
  """Row r ends after 2 r + 3 tokens."""

  def step(cache, rows):
    stops = rows.drawn_R + 1 == 2 * jnp.arange(4) + 3
    return jnp.where(stops[:, None], always(1), always(2)), cache + 1

  chunk = Chunk(jnp.int32(rounds), jnp.int32(ended))
  first = jnp.broadcast_to(always(2), (4, V))
  rows, options = new_rows(jax.random.key(0), 4, 20), decoding(max_tokens=20)
  rows, drawn = draw_first(rows, lambda: first, options, 10)
  cache, rows, _ = decode_chunk(step, jnp.int32(0), rows, drawn, options, chunk)
  assert cache == passes and rows.drawn_R.max() == passes + 1


def test_a_row_that_goes_on_waits_for_the_first_token_of_a_new_one():
  rows = new_rows(jax.random.key(0), 2, 20).replace(drawn_R=jnp.array([5, 0]))
  chunk = Chunk(jnp.int32(2), jnp.int32(9))
  options = decoding(max_tokens=20)
  rows, drawn = draw_first(rows, lambda: jnp.zeros((2, V)), options, 4)
  _, rows, drawn = decode_chunk(uniform_step, jnp.int32(0), rows, drawn, options, chunk)
  assert drawn.is_drawn_RN.tolist() == [[False, True, True, False], [True, True, True, False]]
  assert rows.drawn_R.tolist() == [7, 3]


@pytest.mark.parametrize(
  "longest, sizes",
  [
    (1, [1]),
    (20, [20]),
    (32, [32]),
    (40, [32, 40]),
    (64, [32, 64]),
    (1000, [125, 250, 500, 1000]),
    (1024, [128, 256, 512, 1024]),
  ],
)
def test_sizes_of_caches_and_prompts_double(longest, sizes):
  assert sizes_up_to(longest) == sizes


def test_the_slots_of_a_cache_are_multiples_of_a_step():
  assert sizes_up_to(1000, 128) == [128, 256, 512, 1024] and sizes_up_to(64, 128) == [128]


def test_a_config_s_settings_without_those_that_are_off():
  assert settings_of(Sampling(), 0.7) == RowSettings(0.7)
  config = Sampling(top_k=5, top_p=0.9, min_p=0.1, min_tokens=3)
  assert settings_of(config, 1.0) == RowSettings(1.0, 5, 0.9, 0.1, 3)
  assert settings_of(config, 0.0) == RowSettings(0.0, min_tokens=3)


def test_a_config_names_filters_of_a_program_with_their_values(within):
  config = Sampling(filters=("within=2.5",), top_k=3)
  assert settings_of(config, 1.0) == RowSettings(1.0, top_k=3, own={"within": 2.5})
  assert settings_of(config, 0.0) == RowSettings(0.0)
  rows = by_row(settings_of(config, 1.0), 2, 3)
  np.testing.assert_array_equal(rows.own["within"], np.full(6, 2.5, np.float32))
  alone = dataclasses.replace(config, top_k=0)
  assert has_filters(alone) and settings_of(alone, 1.0).filters
  for wrong in ("within", "within=0", "within=-1", "within=nan", "within=x"):
    with pytest.raises(ConfigError, match=f"filters has '{wrong}': write each filter once"):
      own_values((wrong,))
  with pytest.raises(ConfigError, match="write each filter once"):
    own_values(("within=1", "within=2"))
  with pytest.raises(ConfigError, match="filters has 'top_k=3': set sampling.top_k instead"):
    own_values(("top_k=3",))


@pytest.mark.parametrize(
  "on", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"min_tokens": 3}]
)
def test_a_config_has_filters_if_its_rows_have_some(on):
  config = Sampling(**on)
  assert has_filters(config) == settings_of(config, 1.0).filters == bool(on)


def test_a_filter_has_no_name_of_a_parameter_of_requests():
  known = requests.IGNORED | {*requests.NEUTRAL} | completions._KNOWN | chats._KNOWN
  assert {*OF_REQUESTS} == known

  def logprobs(logits_BV, value_B1):
    return logits_BV > value_B1

  with pytest.raises(ConfigError, match="logprobs is a parameter of requests"):
    grpo_jax.register_filter(logprobs)
