"""Prompts that go on where earlier texts stopped: the same tokens, computed from there on."""

import dataclasses
from pathlib import Path
import threading
import time

from engine_test import Listener, ask, submit
import jax
import numpy as np
import pytest

from grpo_jax import model
from grpo_jax.config import Mesh
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.parallel.sharding import model_shardings, param_specs
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.stop import end_at
from grpo_jax.serving import decoder, device_flight
from grpo_jax.serving.device_flight import Sizes
from grpo_jax.serving.engine import Engine, Job
from grpo_jax.serving.prefix_cache import Beginning, PrefixCache

FAMILIES = Path(__file__).parent / "golden" / "families"
S, T, ROWS = 90, 12, 4


@pytest.fixture(autouse=True)
def short_suffixes(monkeypatch):
  monkeypatch.setattr(device_flight, "_SUFFIXES", (8, 24))


@pytest.fixture(scope="module")
def tiny():
  config = model.ModelConfig(
    vocab_size=96, embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
  )
  return config, jax.jit(model.init, static_argnums=1)(jax.random.key(0), config)


def make(config, params, texts, rows=ROWS, tokens=T):
  stops = tuple(range(1, config.vocab_size, 10))  # about one token in ten ends a row
  sizes = Sizes(rows=rows, prompt_tokens=S, waiting=200, texts=texts)
  engine = Engine(config, Decoding(tokens, stops), sizes, params, 1)
  engine.start()
  return engine


def text_of(ids):
  return "".join(f"<{i}>" for i in ids)


def play(engine, vocabulary, calls=4, conversations=6):
  """Conversations that grow, forks, and prompts that begin alike. All calls of a round at once.

  Returns:
    The tokens and log-probs of all calls, and how many tokens of their prompts were new.
  """
  rng = np.random.default_rng(1)

  def some(least, most):
    return rng.integers(2, vocabulary, rng.integers(least, most)).tolist()

  found, new, head = [], 0, some(9, 10)
  prompts = [head + some(1, 12) for _ in range(conversations)]
  prompts[1] = prompts[0]  # two rows of one prompt
  new += sum(map(len, prompts[1:])) - len(head) * (conversations - 2)
  for turn in range(calls):
    number = 100 * turn
    stop = end_at([text_of([i]) for i in range(3, vocabulary, 7)], text_of)
    kinds = [RowSettings(0.0, min_tokens=5), RowSettings(), RowSettings(max_tokens=3)]
    jobs = [
      (prompt, number + i, kinds[i % 3], stop if i % 4 == 3 else None)
      for i, prompt in enumerate(prompts)
    ]
    heard = ask(engine, *jobs)
    found += [(one.tokens, one.logprobs) for one in heard]
    if turn == 1:  # a fork: the last answer is left out
      forks = [prompt[: len(prompt) - 2] + some(1, 5) for prompt in prompts[:3]]
      found += [(one.tokens, one.logprobs) for one in ask(engine, *[(x, 7) for x in forks])]
      new += sum(len(x) - len(y) + 2 for x, y in zip(forks, prompts))
    added = [some(1, 9) for _ in prompts]
    prompts = [(x + one.tokens + y)[:S] for x, one, y in zip(prompts, heard, added)]
    if turn < calls - 1:
      new += sum(map(len, added)) + len(prompts)  # and the token that was drawn last
  return found, new


def assert_same(found, expected):
  assert len(found) == len(expected)
  for (tokens, logprobs), (wanted, near) in zip(found, expected):
    assert tokens == wanted
    np.testing.assert_allclose(logprobs, near, atol=1e-4)


FAMILIES_OF_ALL_KINDS = (
  "deepseek_v3",
  "gemma2",
  "gemma3",
  "gemma4",
  "gemma4_e",
  "gemma4_moe",
  "glm4_moe_lite",
  "gpt_oss",
  "llama_dynamic",
  "olmo3",
  "phi3_longrope",
  "qwen2_window",
  "qwen3_5",
  "qwen3_5_moe",
  "qwen3_next",
  "qwen3_moe_mixed",
  "smollm3_window",
)
CASES = [
  *((name, "", (), "dense") for name in FAMILIES_OF_ALL_KINDS),
  *((name, "int8", (), "dense") for name in ("gemma3", "qwen3_5", "deepseek_v3")),
  *((name, "", (2, 1, 2, 1), "dense") for name in ("gemma3", "qwen3_5", "deepseek_v3")),
  # As on a TPU or GPU, where attention after what is known does not hold all scores.
  *((name, "", (), "chunked") for name in ("gemma3", "gemma4_e", "gpt_oss")),
  ("gemma3", "", (2, 1, 2, 1), "chunked"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, cache_dtype, mesh, attention", CASES)
def test_families_write_the_same_after_what_is_known(name, cache_dtype, mesh, attention):
  """With windows, states, latent attention, borrowed keys and experts."""
  config, params = model.load(FAMILIES / name)
  config = dataclasses.replace(config, dtype="float32", cache_dtype=cache_dtype)
  config = dataclasses.replace(config, attention=attention)
  engines = [make(config, params, 0)]
  if mesh:
    made = make_mesh(Mesh(*mesh), jax.devices()[: int(np.prod(mesh))])
    config = dataclasses.replace(config, **model_shardings(config, made))
    params = jax.device_put(params, param_specs(params, made))
  engines.append(make(config, params, 8))
  (expected, _), (found, _) = [play(engine, config.vocab_size) for engine in engines]
  assert_same(found, expected)
  whole, known = [engine.counts for engine in engines]
  assert known.prompt_tokens == whole.prompt_tokens
  assert known.computed_tokens < 0.7 * whole.computed_tokens
  for engine in engines:
    engine.close()


@pytest.mark.parametrize(
  "sources, calls, lost",
  [
    ({}, 0, 0),
    ({3: 3}, 0, 0),
    ({1: 0, 2: 0}, 1, 0),
    ({0: 1, 1: 2, 2: 3}, 3, 0),  # a chain
    ({0: 1, 1: 0, 5: 1}, 2, 1),  # a circle, which loses a copy
    ({0: 1, 1: 2, 2: 0, 4: 5, 5: 4}, 3, 2),
  ],
)
def test_no_copy_overwrites_what_a_later_one_reads(sources, calls, lost):
  asked, places = dict(sources), [*range(6)]
  found = decoder.copies_in_order(sources)
  assert len(found) == calls and len(sources) == len(asked) - lost
  for copies in found:
    assert not {*copies} & {*copies.values()}
    for place, source in copies.items():
      places[place] = places[source]
  assert all(asked[place] == source == places[place] for place, source in sources.items())


@pytest.mark.slow
def test_what_is_known_is_not_computed_again(tiny):
  config, params = tiny
  whole, known = make(config, params, 0), make(config, params, 20)
  (expected, _), (found, new) = [play(engine, config.vocab_size) for engine in (whole, known)]
  assert_same(found, expected)
  # Beginnings of fewer than 8 tokens are not used, and texts that end rows cost a token each.
  assert new <= known.counts.computed_tokens <= 1.2 * new < 0.3 * known.counts.prompt_tokens
  assert whole.counts.computed_tokens > 0.9 * whole.counts.prompt_tokens  # but for copies
  assert 0 < known.counts.texts <= 20
  whole.close()
  known.close()


@pytest.mark.slow
def test_other_weights_know_nothing_of_what_was_computed_before(tiny):
  config, params = tiny
  other = jax.tree.map(lambda x: 1.5 * x, params)
  prompt, added = list(range(30, 50)), [5, 6, 7]
  engine, fresh = make(config, params, 4, tokens=30), make(config, other, 4, tokens=30)
  (first,) = ask(engine, (prompt, 0))
  engine.set_weights(other, 2)
  assert engine.counts.texts == 0
  longer = prompt + first.tokens + added
  before = engine.counts.computed_tokens
  ours, theirs = ask(engine, (longer, 1))[0], ask(fresh, (longer, 1))[0]
  assert engine.counts.computed_tokens - before == len(longer)
  assert_same([(ours.tokens, ours.logprobs)], [(theirs.tokens, theirs.logprobs)])

  # A row in flight goes on with keys of both weights. Its text is not kept.
  swap = threading.Thread(target=engine.set_weights, args=(params, 3))
  mixed = Listener()

  def hear(part):
    if not mixed.parts:
      swap.start()
      while engine._next_weights is None:
        time.sleep(0.001)
    mixed(part)

  texts, settings = engine.counts.texts, RowSettings(0.0, min_tokens=30)
  engine.submit([Job(tuple(prompt[::-1]), 2, settings, hear)])
  assert texts and mixed.ended.wait(20)
  swap.join()
  assert set(mixed.versions) == {2, 3} and engine.counts.texts == 0
  engine.close()
  fresh.close()


@pytest.mark.parametrize("window", [0, S])
def test_a_text_that_the_prompt_limit_shortens_is_cached_without_windows_alone(window, tiny):
  """A ring of slots has lost the first tokens of a row that drew more than the ring holds."""
  config = dataclasses.replace(tiny[0], windows=(0, window))
  sizes = Sizes(rows=1, prompt_tokens=S, waiting=8, texts=4)
  made = decoder.Decoder(config, Decoding(2 * S, (1,)), sizes, decoder.Counts())
  kept = []
  made._device.__dict__["whole_from"] = S  # of the arrays, which `compile` would make
  made._device.keep = kept.extend
  for drawn, text in ((S - 29, S), (S - 28, 0 if window else S), (2 * S, 0 if window else S)):
    made._known.forget()
    made._known.put(0, tuple(range(2, 32)))
    made.keep({0: decoder.EndedRow([5] * drawn, is_cut=False)})
    assert made._known._lengths_N[1:].max() == text
    assert kept == ([(0, S - 30, 0)] if text else [])
    kept.clear()


@pytest.mark.slow
def test_rows_of_a_window_as_long_as_prompts_are_computed_again():
  sizes = dict(vocab_size=96, embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8)
  config = model.ModelConfig(**sizes, mlp_dim=32, windows=(S,))
  params = jax.tree.map(lambda x: 3 * x, model.init(jax.random.key(0), config))
  engine = make(config, params, 4, rows=1, tokens=S + 30)
  prompt = list(range(2, 32))
  (first,) = ask(engine, (prompt, 5, RowSettings(min_tokens=S + 30)))
  ask(engine, ([50, 51, 52], 9, RowSettings(max_tokens=1)))  # overwrites the prompt at the place
  longer = prompt + first.tokens[:50]
  (known,) = ask(engine, (longer, 6, RowSettings(0.0, max_tokens=10)))
  engine.set_weights(params, 2)  # forgets all texts
  (whole,) = ask(engine, (longer, 6, RowSettings(0.0, max_tokens=10)))
  assert_same([(known.tokens, known.logprobs)], [(whole.tokens, whole.logprobs)])
  engine.close()


@pytest.mark.slow
def test_prompts_that_wait_are_computed_together(tiny):
  config, params = tiny
  engine = make(config, params, 8, rows=8)
  rng = np.random.default_rng(2)
  prompts = [rng.integers(2, 96, 20).tolist() for _ in range(8)]
  compiled = engine._decoder._device.programs.arrive.jitted._cache_size()
  calls = engine.counts.calls
  first = ask(engine, *[(prompt, i) for i, prompt in enumerate(prompts)])
  assert engine.counts.prompts == 8 and engine.counts.calls - calls <= 3  # they come one by one
  longer = [x + one.tokens + [5] for x, one in zip(prompts, first)]
  calls, going_on = engine.counts.calls, engine._decoder._device.programs.go_on.jitted._cache_size()
  ask(engine, *[(prompt, i) for i, prompt in enumerate(longer)])
  assert engine.counts.prompts == 16 and engine.counts.calls - calls <= 3
  programs = engine._decoder._device.programs
  assert (programs.arrive.jitted._cache_size(), programs.go_on.jitted._cache_size()) == (
    compiled,
    going_on,
  )
  engine.close()


# --- Long prompts in pieces ---


@pytest.fixture(scope="module")
def in_pieces(tiny):
  """An engine whose pieces have 24 tokens, and its weights."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(device_flight, "_SUFFIXES", (8, 24))
    engine = make(*tiny, 8, rows=6, tokens=60)
  yield engine, tiny[1]
  engine.close()


def rows_beside(engine, monkeypatch, *late, on_piece=lambda rows: None):
  """Asks for rows while another row draws.

  Args:
    engine: The engine.
    monkeypatch: Undoes the changes of the engine.
    late: As for `ask`.
    on_piece: Called with the handles of the rows before each call that continues a prompt.

  Returns:
    Their listeners, and what the decoder did after the other row began: "arrive" and "go_on" for
    calls that compute prompts, and "chunk" for chunks that rows draw.
  """
  did, found, rows, first = [], [], [], Listener()

  def note(name):
    call = getattr(engine._decoder._device, name)

    def noted(*arguments, **options):
      did.append(name.strip("_"))
      if name == "_go_on":
        on_piece(rows)
      return call(*arguments, **options)

    monkeypatch.setattr(engine._decoder._device, name, noted)

  def hear(part):
    if not first.parts:
      did.clear()
      listeners, handles = submit(engine, *late)
      found.extend(listeners)
      rows.extend(handles)
    first(part)

  engine.set_weights(engine._params, engine.version)  # forgets all prompts
  for name in ("_arrive", "_go_on", "chunk"):
    note(name)
  engine.submit([Job((7, 8, 9), 1, RowSettings(0.0, min_tokens=60), hear)])
  assert first.ended.wait(20), engine.failure
  for listener, row in zip(found, rows, strict=True):
    assert row.is_cancelled or listener.ended.wait(20), engine.failure
  monkeypatch.undo()
  return found, did


def assert_as_alone(engine, params, given, found):
  for row, one in zip(given, found, strict=True):
    engine.set_weights(params, 9)  # forgets all prompts
    (alone,) = ask(engine, row)
    assert_same([(one.tokens, one.logprobs)], [(alone.tokens, alone.logprobs)])


def prompts_of(vocabulary):
  rng = np.random.default_rng(3)
  return (rng.integers(2, vocabulary, size).tolist() for size in (S, 9))


def compiled_programs(engine):
  programs = engine._decoder._device.programs
  jitted = (
    programs.arrive.jitted,
    programs.go_on.jitted,
    programs.copy,
    programs.keep,
    programs.grow,
  )
  return [program._cache_size() for program in (*jitted, programs.chunk.jitted)]


def check_pieces(engine, params, vocabulary, monkeypatch):
  """Asks for long prompts beside a row that draws. Returns what `rows_beside` does."""
  long, short = prompts_of(vocabulary)
  given = [(long, 5), (short, 6), (long, 7), (long[:70], 8), (long[:32] + short + short, 9)]
  copies, compiled = engine.counts.copies, compiled_programs(engine)
  found, did = rows_beside(engine, monkeypatch, *given)
  # All programs were compiled at the start, for every size of the cache that rows draw into.
  assert len(engine._decoder._device._slots) > 1 and compiled_programs(engine) == compiled
  assert engine.counts.copies == copies + 1  # the second row of the long prompt waited for it
  assert_as_alone(engine, params, given, found)
  return found, did


def test_rows_that_draw_wait_for_one_piece_of_a_long_prompt_at_a_time(in_pieces, monkeypatch):
  found, did = check_pieces(*in_pieces, 96, monkeypatch)
  # The first piece has 32 tokens, which the last prompt uses. Then come the three other pieces. The
  # fourth prompt has waited for them, and uses all.
  waits = ["go_on", "chunk"]
  assert did[:10] == ["arrive", *waits, *waits, *waits, "go_on", *waits]
  assert [one.parts[0].computed for one in found] == [S, 9, 0, 1, 18]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES_OF_ALL_KINDS)
def test_families_compute_long_prompts_in_pieces(name, monkeypatch):
  config, params = model.load(FAMILIES / name)
  engine = make(dataclasses.replace(config, dtype="float32"), params, 8, rows=6, tokens=60)
  check_pieces(engine, params, config.vocab_size, monkeypatch)
  engine.close()


def test_a_row_that_leaves_before_its_prompt_is_complete_leaves_nothing(in_pieces, monkeypatch):
  engine, params = in_pieces
  long, _ = prompts_of(96)
  given = [(long, 5), (long, 6)]

  def leaves(rows):
    engine.cancel(rows[:1])

  (gone, stays), _ = rows_beside(engine, monkeypatch, *given, on_piece=leaves)
  assert not gone.parts and not engine._decoder._begun and not engine._decoder._waiting
  assert_as_alone(engine, params, given[1:], [stays])


def test_a_prompt_in_pieces_begins_again_with_new_weights(in_pieces, monkeypatch):
  engine, params = in_pieces
  other = jax.tree.map(lambda x: 1.5 * x, params)
  long, _ = prompts_of(96)

  def swaps(_):  # as `set_weights` does from another thread
    if engine.version != 2:
      engine._next_weights = other, 2

  (row,), did = rows_beside(engine, monkeypatch, (long, 5), on_piece=swaps)
  assert did[:4] == ["arrive", "chunk", "go_on", "chunk"]
  assert did[4:8] == ["arrive", "chunk", "go_on", "chunk"] and set(row.versions) == {2}
  assert_as_alone(engine, other, [(long, 5)], [row])
  engine.set_weights(params, 1)


def test_the_text_that_was_used_longest_ago_makes_room():
  cache = PrefixCache(places=1, texts=2, slots=9)
  first, second = tuple(range(5)), tuple(range(10, 15))
  for text in (first, second):
    cache.put(cache.room(text), text)
  assert (cache.texts, cache.drops) == (2, 0)
  assert cache.longest((*first, 7), 9, (), 3) == Beginning(1, 5)
  third = (20, 21, 22)
  assert cache.room(third) == 2 and cache.drops == 1  # the first was used since
  cache.put(2, third)
  longer = (*third, 23)
  assert cache.room(longer) == 2 and cache.drops == 1  # it takes the place of what it goes on from
  cache.forget()
  assert cache.texts == 0 and cache.longest((*first, 7), 9, (), 3).tokens == 0


def test_how_much_of_a_text_is_of_use():
  cache = PrefixCache(places=2, texts=1, slots=9)
  cache.put(2, (1, 2, 3, 4, 5, 6))

  def known(prompt, whole_from=9, among=(), least=2):
    return cache.longest(tuple(prompt), whole_from, among, least).tokens

  assert known([1, 2, 3, 9]) == 3 and known([1, 9]) == 0  # at least two
  assert known([1, 2, 3, 4, 5, 6]) == 5 and known([1, 2, 3]) == 2  # one is left to compute
  # Where layers have forgotten some of it, all or nothing.
  assert known([1, 2, 3, 9], whole_from=5) == 0 and known([1, 2, 3, 4, 5, 6, 7], whole_from=5) == 6
  assert known([1, 2, 3, 4, 5, 6], whole_from=0) == 0
  # A prompt waits for one that has clearly more of it, or all.
  cache.put(0, (1, 2, 3, 4, 5, 6, 7, 8))
  assert cache.longest((1, 2, 3, 4, 5, 6, 7, 8, 9), 9, [0], 2) == Beginning(0, 8)
  assert cache.longest((1, 2, 3, 4, 5, 6, 7, 8, 9), 9, [0], 3) == Beginning(2, 6)
  assert cache.longest((1, 2, 3, 4, 5, 6, 7, 8), 9, [0], 3) == Beginning(0, 8)
  assert cache.same((1, 2, 3, 4, 5, 6, 7, 8), range(2)) == 0
  assert cache.same((1, 2, 3), range(2)) is None
