"""The sampler, with a five-line fake in the model's place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.sampler import logits as logits_lib
from grpo_jax.sampler.decode import Rows, capacities, decode, row_uniforms
from grpo_jax.sampler.logits import Decoding

PLAIN = Decoding(max_tokens=8, stop_ids=(1,))
PROBS = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
LOGITS = jnp.log(jnp.array(PROBS))


def decoding(**change):
  return dataclasses.replace(PLAIN, **change)


def kept(**change):
  return np.isfinite(logits_lib.filtered(LOGITS[None], decoding(**change)))[0].tolist()


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


@pytest.mark.parametrize(
  "size, levels", [(2, 1), (16, 1), (17, 2), (256, 2), (257, 3), (151_936, 5)]
)
def test_levels_of_the_tree(size, levels):
  assert logits_lib.draws_per_token(size) == levels


def test_one_level_inverts_the_distribution_function():
  """The token at uniform u is the one where the cumulative probability passes u."""
  u = np.array([0, 0.39, 0.41, 0.69, 0.71, 0.84, 0.86, 0.94, 0.96, 0.9999])
  out = logits_lib.draw(jnp.broadcast_to(LOGITS, (10, 5)), jnp.float32(u)[:, None])
  assert out.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def uniforms(count, size, key=0):
  return jax.random.uniform(jax.random.key(key), (count, logits_lib.draws_per_token(size)))


@pytest.mark.parametrize("size", [5, 16, 17, 300])
def test_frequencies_are_the_probabilities(size):
  """Every frequency of 40,000 draws within five standard deviations."""
  probs = np.random.default_rng(size).dirichlet(np.full(size, 0.5)).astype(np.float32)
  logits = jnp.broadcast_to(jnp.log(probs), (40000, size))
  sample = jax.jit(logits_lib.sample_token, static_argnums=3)
  tokens, logprobs, _ = sample(logits, uniforms(40000, size), jnp.ones(40000), PLAIN)
  frequencies = np.bincount(tokens, minlength=size) / 40000
  assert (np.abs(frequencies - probs) <= 5 * np.sqrt(probs / 40000) + 1e-9).all()
  np.testing.assert_allclose(logprobs, np.log(probs)[tokens], rtol=1e-4, atol=1e-5)


def test_the_draw_never_takes_what_was_filtered_out():
  """Also where rounding puts the uniform past the last cumulative share, at every level."""
  logits = jnp.where(jnp.arange(300) % 7 == 3, 0.0, -jnp.inf)
  u = jnp.concatenate(
    [uniforms(3000, 300), jnp.full((1, 3), 1 - 2**-24), jnp.ones((1, 3)), jnp.zeros((1, 3))]
  )
  out = logits_lib.draw(jnp.broadcast_to(logits, (len(u), 300)), u)
  assert (out % 7 == 3).all() and len(set(out.tolist())) == 43


def test_both_logprobs():
  """Temperature 2 and top-k 2: the first is tempered, the second is also of the two kept tokens."""
  tempered = PROBS**0.5 / (PROBS**0.5).sum()
  u = jnp.linspace(0, 0.999, 50)[:, None]
  tokens, logprobs, drawn = logits_lib.sample_token(
    jnp.broadcast_to(LOGITS, (50, 5)), u, jnp.full(50, 2.0), decoding(top_k=2)
  )
  assert set(tokens.tolist()) == {0, 1}
  np.testing.assert_allclose(logprobs, np.log(tempered)[tokens], rtol=1e-5)
  np.testing.assert_allclose(drawn, np.log(tempered[:2] / tempered[:2].sum())[tokens], rtol=1e-5)


def test_rows_have_temperatures_of_their_own():
  """At temperatures 1/2 and 2, probabilities are squares and roots of those at 1."""
  temperatures = jnp.repeat(jnp.array([0.5, 2.0]), 50)
  u = jnp.tile(jnp.linspace(0, 0.999, 50), 2)[:, None]
  logits = jnp.broadcast_to(LOGITS, (100, 5))
  tokens, logprobs, _ = logits_lib.sample_token(logits, u, temperatures, PLAIN)
  for rows, power in ((slice(50), 2), (slice(50, 100), 0.5)):
    expected = PROBS**power / (PROBS**power).sum()
    np.testing.assert_allclose(logprobs[rows], np.log(expected)[tokens[rows]], rtol=1e-5)


def test_greedy_takes_the_likeliest_token():
  tokens, logprobs, drawn = logits_lib.sample_token(
    LOGITS[None], jnp.array([[0.99]]), jnp.array([3.0]), decoding(greedy=True)
  )
  assert int(tokens[0]) == 0 and float(drawn[0]) == 0
  np.testing.assert_allclose(logprobs, np.log(0.4), rtol=1e-5)


# The loop. The fake's cache counts calls and remembers its capacity.

V = 16


def run(step, max_tokens=8, P=2, G=3, key=0, stop_ids=(1,), first=None):
  """Completions [P, G, ...] that start from the logits `first` [P, V]."""
  first = jnp.zeros((P, V)) if first is None else first
  P = len(first)

  def grow(cache, capacity):
    del capacity
    return cache

  def complete(key):
    rows = Rows(
      logits_BV=jnp.repeat(first, G, axis=0),
      uniforms_BTN=row_uniforms(key, jnp.arange(P * G), max_tokens, V),
      temperature_B=jnp.ones(P * G),
    )
    options = decoding(max_tokens=max_tokens, stop_ids=stop_ids)
    return decode(step, grow, jnp.int32(0), rows, options, G)

  return jax.jit(complete)(jax.random.key(key))


def always(token):
  return jnp.where(jnp.arange(V) == token, 0.0, -jnp.inf)


def uniform_step(cache, token_B, time):
  return jnp.zeros((token_B.shape[0], V)), cache + 1


def test_tokens_follow_the_step_function():
  """Each token is the one before plus one, from 3 on, until stop id 6."""

  def step(cache, token_B, time):
    return jax.vmap(always)(token_B + 1), cache

  out = run(step, first=jnp.stack([always(3), always(5)]), stop_ids=(6, 9))
  np.testing.assert_array_equal(
    out.tokens_PGT[:, 0], [[3, 4, 5, 6, 0, 0, 0, 0], [5, 6, 0, 0, 0, 0, 0, 0]]
  )
  np.testing.assert_array_equal(out.lengths_PG, [[4] * 3, [2] * 3])
  np.testing.assert_array_equal(out.stopped_by_PG, [[6] * 3, [6] * 3])
  np.testing.assert_allclose(out.logprobs_PGT, 0, atol=1e-6)


def test_any_of_several_stop_ids_stops_and_says_which():
  out = run(uniform_step, max_tokens=64, P=8, G=8, stop_ids=(2, 5))
  lengths, stopped = np.array(out.lengths_PG), np.array(out.stopped_by_PG)
  assert set(stopped.ravel()) >= {2, 5}
  for tokens, n, by in zip(out.tokens_PGT.reshape(64, 64), lengths.ravel(), stopped.ravel()):
    body, last = np.array(tokens[: n - 1]), int(tokens[n - 1])
    assert not np.isin(body, [2, 5]).any() and (tokens[n:] == 0).all()
    assert by == (last if last in (2, 5) else -1)
    assert n == 64 or last in (2, 5)


def test_without_a_stop_rows_are_cut_off():
  out = run(uniform_step, stop_ids=())
  assert (out.lengths_PG == 8).all() and (out.stopped_by_PG == -1).all()


def test_log_probs_are_zero_at_padding():
  out = run(uniform_step, max_tokens=40, P=4, G=4)
  padding = np.arange(40) >= np.array(out.lengths_PG)[..., None]
  assert padding.any()
  assert (np.array(out.logprobs_PGT)[padding] == 0).all()
  assert (np.array(out.behavior_logprobs_PGT)[padding] == 0).all()
  np.testing.assert_array_equal(out.sampled_PGT, ~padding)
  np.testing.assert_allclose(np.array(out.logprobs_PGT)[~padding], -np.log(V), rtol=1e-5)


def test_members_and_steps_differ_and_the_key_decides():
  out, again, other = run(uniform_step, key=0), run(uniform_step, key=0), run(uniform_step, key=1)
  rows = np.array(out.tokens_PGT).reshape(6, 8)
  assert len({tuple(r) for r in rows}) == 6
  np.testing.assert_array_equal(rows, np.array(again.tokens_PGT).reshape(6, 8))
  assert (rows != np.array(other.tokens_PGT).reshape(6, 8)).any(1).all()


def test_a_row_does_not_depend_on_the_others():
  """Row b draws with its own key: more prompts leave the first ones as they are."""
  few, many = run(uniform_step, P=2), run(uniform_step, P=5)
  np.testing.assert_array_equal(few.tokens_PGT, many.tokens_PGT[:2])


def test_it_stops_when_every_row_has():
  calls = []

  def step(cache, token_B, time):
    jax.debug.callback(lambda: calls.append(1), ordered=True)
    return jnp.broadcast_to(always(4), (token_B.shape[0], V)), cache

  out = run(step, max_tokens=500, stop_ids=(4,), first=jnp.stack([always(3), always(4)]))
  jax.effects_barrier()
  assert out.tokens_PGT.shape == (2, 3, 500) and len(calls) == 1


@pytest.mark.parametrize(
  "max_tokens, sizes", [(1, [1]), (20, [20]), (64, [32, 64]), (1000, [125, 250, 500, 1000])]
)
def test_the_cache_grows_by_doubling(max_tokens, sizes):
  assert capacities(max_tokens) == sizes


def test_every_token_finds_room_in_the_cache():
  """Token t is written to slot t before the capacity is passed."""
  seen = []

  def step(cache, token_B, time):
    used, slots = cache
    jax.debug.callback(lambda t, n=slots.shape[0]: seen.append((int(t), n)), time)
    return jnp.zeros((token_B.shape[0], V)), (used + 1, slots)

  def grow(cache, capacity):
    return cache[0], jnp.zeros(capacity)

  rows = Rows(
    logits_BV=jnp.zeros((1, V)),
    uniforms_BTN=row_uniforms(jax.random.key(0), jnp.arange(1), 100, V),
    temperature_B=jnp.ones(1),
  )
  cache = jnp.int32(0), jnp.zeros(32)
  decode(step, grow, cache, rows, decoding(max_tokens=100, stop_ids=()), 1)
  jax.effects_barrier()
  assert [t for t, _ in seen] == list(range(99)) and all(t < n for t, n in seen)
  assert sorted({n for _, n in seen}) == [32, 50, 100]
