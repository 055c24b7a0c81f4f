"""The engine of the endpoint: rows that come and go, weights that change, listeners that fail."""

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest

import grpo_jax
from grpo_jax import model
from grpo_jax.config import Mesh
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.parallel.sharding import model_shardings, param_specs
from grpo_jax.sampler.filters import FILTERS
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.sampling import Draws, Sampler, whole
from grpo_jax.sampler.stop import end_at
from grpo_jax.serving import device_flight, requests
from grpo_jax.serving.chats import chat_request
from grpo_jax.serving.completions import completion_request
from grpo_jax.serving.decoder import NewRow
from grpo_jax.serving.device_flight import Sizes
from grpo_jax.serving.engine import Closed, Engine, Full, Job, Row
from grpo_jax.serving.requests import row_number
from grpo_jax.serving.responses import response_request

S, T = 40, 48
STOPS = (1, 11, 21)


@pytest.fixture(scope="module")
def parts():
  """(config, params, other params)"""
  config = model.ModelConfig(
    vocab_size=96, embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
  )
  init = jax.jit(model.init, static_argnums=1)
  return config, init(jax.random.key(0), config), init(jax.random.key(1), config)


def make(parts, rows=4, waiting=200, max_tokens=T, stops=STOPS):
  sizes = Sizes(rows=rows, prompt_tokens=S, waiting=waiting)
  engine = Engine(parts[0], Decoding(max_tokens, stops), sizes, parts[1], 1)
  engine.start()
  return engine


@pytest.fixture(scope="module")
def shared(parts):
  engine = make(parts)
  yield engine
  engine.close()


class Listener:
  """Collects the parts of one row."""

  def __init__(self):
    self.parts, self.ended, self.begun = [], threading.Event(), threading.Event()

  def __call__(self, part):
    self.parts.append(part)
    if part.tokens:
      self.begun.set()
    if part.finish:
      self.ended.set()

  @property
  def tokens(self):
    return sum((part.tokens for part in self.parts), [])

  @property
  def logprobs(self):
    return sum((part.logprobs for part in self.parts), [])

  @property
  def versions(self):
    return [part.version for part in self.parts for _ in part.tokens]


def submit(engine, *given):
  """The listeners of jobs, each given as (prompt, number, settings, end) or its beginning."""
  listeners = [Listener() for _ in given]
  jobs = []
  for listener, (prompt, number, *rest) in zip(listeners, given):
    settings = rest[0] if rest else RowSettings()
    jobs.append(Job(tuple(prompt), number, settings, listener, rest[1] if rest[1:] else None))
  return listeners, engine.submit(jobs)


def ask(engine, *given):
  """The listeners of jobs, once all have ended."""
  listeners, _ = submit(engine, *given)
  for listener in listeners:
    assert listener.ended.wait(20), engine.failure
  return listeners


def crowd(count=40):
  """Prompts of all lengths, some of them the same. Greedy rows beside drawing ones, and limits."""
  rng = np.random.default_rng(0)
  kinds = [
    RowSettings(),
    RowSettings(0.0),
    RowSettings(0.7, top_k=9),
    RowSettings(1.3, top_p=0.8, min_p=0.01, max_tokens=20),
    RowSettings(min_tokens=30),
  ]
  prompts = [rng.integers(2, 96, length).tolist() for length in rng.integers(1, S + 1, count // 2)]
  return [(prompts[i % len(prompts)], i, kinds[i % len(kinds)]) for i in range(count)]


def test_a_row_whose_prompt_is_not_complete_slows_no_other_down(parts):
  """With a mask, every row draws one token in a chunk."""
  sizes = Sizes(rows=2, prompt_tokens=S, waiting=2)
  engine = Engine(parts[0], Decoding(T, STOPS), sizes, parts[1])
  filled = []

  class Guide:
    def fill(self, bits_W):
      filled.append(bits_W)

  row = Row(Job((2, 3), 0, RowSettings(), Listener(), guide=Guide(), alternatives=2))
  engine._seats[1] = row
  assert engine._extras() is None and not filled
  row.is_seated = True
  assert engine._extras().alternatives and len(filled) == 1


def test_tokens_are_the_same_alone_and_in_a_crowd(shared):
  given = crowd()
  together = [(one.tokens, one.parts[-1].finish) for one in ask(shared, *given)]
  for row, expected in zip(given, together):
    (alone,) = ask(shared, row)
    assert (alone.tokens, alone.parts[-1].finish) == expected
  lengths = [len(tokens) for tokens, _ in together]
  assert {finish for _, finish in together} == {"stop", "length"}
  assert min(lengths[4::5]) > 30 and max(lengths[3::5]) == 20 and max(lengths) == T
  assert shared.counts.copies and shared.counts.prompts  # both ways to a place


@pytest.mark.slow
def test_rows_with_a_filter_of_a_program_draw_beside_others(parts, shared):
  @grpo_jax.register_filter
  def likeliest(logits_BV, value_B1):
    del value_B1
    return logits_BV == logits_BV.max(-1, keepdims=True)

  try:
    engine = make(parts)
    prompt, own = [5, 6, 7], RowSettings(own={"likeliest": 1.0})
    found = ask(engine, (prompt, 3), (prompt, 3, own), (prompt, 3, RowSettings(0.0)))
    engine.close()
    body = {"prompt": prompt, "likeliest": 1}
    limits = requests.Limits("m", 96, S, T, 4)
    assert completion_request(body, limits, None).settings.own == {"likeliest": 1.0}
    greedy = completion_request(body | {"temperature": 0}, limits, None)
    assert greedy.settings.own == {"likeliest": 0.0}
    with pytest.raises(requests.RequestError, match="likeliest is -1: it must be at least 0"):
      completion_request(body | {"likeliest": -1}, limits, None)
  finally:
    del FILTERS["likeliest"]
  (plain,) = ask(shared, (prompt, 3))
  assert found[0].tokens == plain.tokens != found[1].tokens == found[2].tokens
  with pytest.raises(requests.RequestError, match="likeliest"):
    completion_request(body, limits, None)


def test_the_filters_of_an_engine_are_those_of_when_it_was_made(parts):
  def a_later(logits_BV, value_B1):
    return logits_BV > value_B1

  @grpo_jax.register_filter
  def b_first(logits_BV, value_B1):
    return logits_BV > value_B1

  try:
    sizes = Sizes(rows=2, prompt_tokens=S, waiting=2)
    engine = Engine(parts[0], Decoding(T, STOPS), sizes, parts[1], 1)
    grpo_jax.register_filter(a_later)
    limits = requests.Limits("m", 96, S, T, 4, filters=engine.filters)
    for read in (completion_request, chat_request, response_request):
      with pytest.raises(requests.RequestError, match="a_later: this server does not know"):
        read({"a_later": 2}, limits, None)
    asked = completion_request({"prompt": [5], "b_first": 3}, limits, None).settings
    assert asked.own == {"b_first": 3.0}
    seats = engine._decoder
    seats._known.put(1, (5,))  # so that nothing is computed
    seats.seat({1: NewRow((5,), 0, asked)}, parts[1])
    assert {name: x.tolist() for name, x in seats._new.settings.own.items()} == {"b_first": [0, 3]}
    with pytest.raises(ValueError, match="longer"):
      seats.seat({1: NewRow((5,), 0, RowSettings(own={"a_later": 2.0}))}, parts[1])
  finally:
    del FILTERS["a_later"], FILTERS["b_first"]


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_rows_and_are_those_of_the_sampler(parts, shared):
  given = [(prompt, number) for prompt, number, _ in crowd(12)]
  found = ask(shared, *given)
  other = make(parts, rows=1)
  assert [one.tokens for one in ask(other, *given)] == [one.tokens for one in found]
  other.close()
  sampler = Sampler(parts[0], Decoding(T, STOPS))
  for (prompt, number), one in zip(given, found):
    draws = Draws(jax.random.key(0), first_prompt=number)
    prompts_PS = np.array([prompt + [0] * (S - len(prompt))], np.int32)
    lengths_P = np.array([len(prompt)], np.int32)
    made = whole(sampler(parts[1], prompts_PS, lengths_P, 1, draws))
    length = made.lengths_PG[0, 0]
    assert one.tokens == made.tokens_PGT[0, 0, :length].tolist()
    np.testing.assert_allclose(one.logprobs, made.logprobs_PGT[0, 0, :length], atol=1e-4)


@pytest.mark.slow
def test_a_prompt_is_copied_before_its_place_is_taken(parts):
  """The first new row wants the prompt at the place of the second one, which wants another."""
  engine = make(parts, rows=2)
  first, second, third = ([5, 6, 7], 0), ([8, 9], 1), ([10], 2)
  alone = [ask(engine, row)[0].tokens for row in (second, third)]
  ask(engine, first, second)
  assert [one.tokens for one in ask(engine, second, third)] == alone
  engine.close()


def test_numbers_decide(shared):
  prompt = [5, 6, 7]
  found = ask(shared, *[(prompt, number) for number in (1, 1, 2, -3)])
  first, second, *others = [one.tokens for one in found]
  assert first == second and all(first != other for other in others)


def test_the_numbers_of_choices_and_seeds_differ():
  numbers = {row_number(seed, choice) for seed in range(-50, 50) for choice in range(50)}
  assert len(numbers) == 5000
  assert all(-(2**31) <= number < 2**31 for number in numbers)
  assert np.int32(row_number(2**64 - 1, 10**6)) == row_number(2**64 - 1, 10**6)


def test_a_text_ends_a_row(shared):
  (whole_row,) = ask(shared, ([5, 6], 4, RowSettings(min_tokens=T)))

  def text(ids):
    return "".join(f"<{i}>" for i in ids)

  stop = text(whole_row.tokens[11:13])
  (cut,) = ask(shared, ([5, 6], 4, RowSettings(min_tokens=T), end_at([stop], text)))
  count = next(n for n in range(T) if stop in text(whole_row.tokens[:n]))
  assert cut.tokens == whole_row.tokens[:count] and cut.parts[-1].finish == "stop"
  assert len(cut.logprobs) == count


@pytest.mark.slow
def test_weights_are_swapped_between_chunks(parts):
  """Tokens before the swap are those of the old weights, and so are the keys of the prompt."""
  config, old, new = parts
  prompt, settings = [5, 6, 7], RowSettings(0.0, min_tokens=T)
  engine = make(parts)
  (by_old,) = ask(engine, (prompt, 0, settings))
  engine.set_weights(new, 2)
  assert engine.version == 2
  (by_new,) = ask(engine, (prompt, 0, settings))
  assert (set(by_old.versions), set(by_new.versions)) == ({1}, {2})
  assert by_new.tokens != by_old.tokens
  computed = engine.counts.prompts
  assert computed == 2  # the prompt of the old weights was not used again
  engine.set_weights(old, 3)
  assert ask(engine, (prompt, 0, settings))[0].tokens == by_old.tokens

  swapped, swap = Listener(), threading.Event()

  def hear(part):
    swapped(part)
    if len(swapped.parts) == 2:  # the engine waits here, so that the swap falls between two chunks
      threading.Thread(target=lambda: (engine.set_weights(new, 4), swap.set())).start()
      while engine._next_weights is None:
        time.sleep(0.001)

  engine.submit([Job(tuple(prompt), 0, settings, hear)])
  assert swapped.ended.wait(20) and swap.wait(5)
  before = swapped.versions.count(3)
  assert swapped.versions == [3] * before + [4] * (T - before) and 0 < before < T
  assert swapped.tokens[:before] == by_old.tokens[:before]
  assert swapped.tokens != by_old.tokens
  assert len(swapped.tokens) == T
  with pytest.raises(ValueError, match="other shapes"):
    engine.set_weights(jax.tree.map(lambda x: x[..., :1], new), 5)
  engine.close()


@pytest.mark.slow
def test_rows_that_are_cancelled_leave(parts):
  engine = make(parts, rows=2, max_tokens=1000, stops=())
  long = [([5], number) for number in range(5)]
  listeners, rows = submit(engine, *long)
  assert listeners[0].begun.wait(10)
  engine.cancel(rows[:1] + rows[3:])
  (last,) = ask(engine, ([6], 0, RowSettings(max_tokens=3)))[:1]
  assert len(last.tokens) == 3
  assert not listeners[0].ended.is_set() and len(listeners[0].tokens) < 1000
  assert not listeners[3].parts and not listeners[4].parts
  engine.cancel(rows)
  end = time.monotonic() + 5
  while engine.in_flight or engine.waiting:
    assert time.monotonic() < end
  engine.close()


@pytest.mark.slow
def test_the_queue_has_a_limit_and_takes_all_or_nothing(parts):
  engine = make(parts, rows=1, waiting=3, max_tokens=1000, stops=())
  (first,), rows = submit(engine, ([5], 0))
  assert first.begun.wait(10)
  submit(engine, ([5], 1), ([5], 2))
  with pytest.raises(Full):
    submit(engine, ([5], 3), ([5], 4))
  assert engine.waiting == 2
  submit(engine, ([5], 5))
  engine.close()


@pytest.mark.slow
def test_closing_tells_everybody(parts):
  engine = make(parts, rows=1, max_tokens=1000, stops=())
  listeners, _ = submit(engine, ([5], 0), ([5], 1))
  assert listeners[0].begun.wait(10)
  engine.close()
  assert [one.parts[-1].finish for one in listeners] == ["closed", "closed"]
  with pytest.raises(Closed):
    submit(engine, ([5], 0))
  with pytest.raises(Closed):
    engine.set_weights(parts[1], 2)
  engine.close()


@pytest.mark.slow
def test_a_failure_tells_everybody_and_is_kept(parts, monkeypatch):
  engine = make(parts, rows=1)
  monkeypatch.setattr(engine._decoder, "chunk", lambda *_: 1 / 0)
  listeners, _ = submit(engine, ([5], 0), ([5], 1))
  for listener in listeners:
    assert listener.ended.wait(5) and listener.parts[-1].finish == "closed"
  assert isinstance(engine.failure, ZeroDivisionError) and not engine.is_open


@pytest.mark.slow
def test_a_listener_that_is_gone_frees_its_seat(parts):
  engine = make(parts, rows=1, max_tokens=1000, stops=())

  def gone(part):
    raise RuntimeError("Event loop is closed")

  engine.submit([Job((5,), 0, RowSettings(), gone)])
  assert len(ask(engine, ([5], 0, RowSettings(max_tokens=3)))[0].tokens) == 3
  engine.close()


@pytest.mark.slow
def test_the_cache_grows_shrinks_and_counts_from_0_again(parts, monkeypatch):
  monkeypatch.setattr(device_flight, "_MOST_ROUNDS", 20)
  engine = make(parts, max_tokens=300, stops=())
  long, short = RowSettings(max_tokens=300), RowSettings(max_tokens=5)
  found = ask(engine, ([5, 6], 1, long), ([5, 6], 2, short))
  assert engine._decoder._device._flight.cache.slots >= 300
  overlapping = [([5, 6], number, RowSettings(max_tokens=200 + 20 * number)) for number in range(6)]
  ask(engine, *overlapping[::-1])
  assert int(engine._decoder._device._flight.cache.time) < 350
  assert ask(engine, ([5, 6], 2, short))[0].tokens == found[1].tokens
  assert engine._decoder._device._flight.cache.slots < 100
  assert ask(engine, ([5, 6], 1, long))[0].tokens == found[0].tokens
  engine.close()


@pytest.mark.slow
def test_a_mesh_writes_the_same_tokens(parts, shared):
  mesh = make_mesh(Mesh(2, 1, 2, 1), jax.devices()[:4])
  config = dataclasses.replace(parts[0], **model_shardings(parts[0], mesh))
  params = jax.device_put(parts[1], param_specs(parts[1], mesh))
  engine = make((config, params))
  given = [*crowd(), *[([5, 6, 7], number) for number in range(8)]]
  expected = [one.tokens for one in ask(shared, *given)]
  assert [one.tokens for one in ask(engine, *given)] == expected
  assert engine.counts.copies
  engine.close()
