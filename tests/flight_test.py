"""Rows in flight: the sampler draws the same tokens however it is paced, on every mesh."""

import dataclasses
import functools
import itertools
from pathlib import Path
import re

import jax
import numpy as np
import pytest

from grpo_jax import model
from grpo_jax.config import Mesh
from grpo_jax.model import cache as model_cache
from grpo_jax.parallel.mesh import make_mesh, sampling_mesh
from grpo_jax.parallel.sharding import model_shardings, param_specs
from grpo_jax.sampler import sampling
from grpo_jax.sampler.flight import NewRows, Prompts, Resumed
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.rows import Chunk
from grpo_jax.sampler.sampling import Draws, Sampler, whole
from grpo_jax.sampler.seats import Grid
from grpo_jax.sampler.stop import end_at
from grpo_jax.sampler.stream import by_row

FAMILIES = Path(__file__).parent / "golden" / "families"
P, G, S, T = 4, 3, 7, 40
MANY = 10**9  # parameters, so that every call is large enough to move rows together


@pytest.fixture(autouse=True)
def small_grids(monkeypatch):
  monkeypatch.setattr(sampling, "_FEWEST_ROWS", 1)


def tiny(**fields):
  shape = dict(
    vocab_size=96, embed_dim=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8, mlp_dim=32
  )
  config = model.ModelConfig(**(shape | fields))
  return config, jax.jit(model.init, static_argnums=1)(jax.random.key(0), config)


def prompts(vocabulary, count=P):
  rng = np.random.default_rng(0)
  lengths_P = rng.integers(1, S + 1, count).astype(np.int32)
  return rng.integers(2, vocabulary, (count, S)).astype(np.int32), lengths_P


def on(mesh, config, params):
  """The model on a mesh of (data, fsdp, tensor, expert), or of these and sampling.context."""
  data, fsdp, tensor, expert, *context = mesh
  slots = int(np.prod(context))
  sizes = Mesh(data=data * slots, fsdp=fsdp, tensor=tensor, expert=expert)
  made = make_mesh(sizes, jax.devices()[: int(np.prod(mesh))])
  made = sampling_mesh(made, tensor, slots) if context else made
  config = dataclasses.replace(config, **model_shardings(config, made))
  return config, jax.device_put(params, param_specs(params, made))


def stops(vocabulary):
  """About one token in ten ends a row."""
  return tuple(range(1, vocabulary, 10))


def draw(
  config,
  params,
  rows=0,
  weights=MANY,
  chunk=64,
  max_tokens=T,
  given=None,
  **draws,
):
  """The completions of the prompts, and the numbers of the prompts of each part."""
  decoding = Decoding(max_tokens=max_tokens, stop_ids=stops(config.vocab_size))
  sampler = Sampler(config, decoding, weights, rows)
  sampler.programs.columns = min(sampler.programs.columns, chunk)
  given = given or prompts(config.vocab_size)
  parts = list(sampler(params, *given, G, Draws(jax.random.key(3), **draws)))
  return whole(parts), [part.prompts for part in parts]


def assert_same(ours, theirs, atol=1e-4):
  np.testing.assert_array_equal(ours.tokens_PGT, theirs.tokens_PGT)
  for name in ("lengths_PG", "stopped_by_PG", "sampled_PGT"):
    np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
  np.testing.assert_allclose(ours.logprobs_PGT, theirs.logprobs_PGT, atol=atol)
  np.testing.assert_allclose(ours.behavior_logprobs_PGT, theirs.behavior_logprobs_PGT, atol=atol)


@pytest.fixture(scope="module")
def alone():
  """A model, and what it draws when every prompt has a call of its own, one row at a time."""
  config, params = tiny()
  tokens_PS, lengths_P = prompts(config.vocab_size)
  decoding = Decoding(max_tokens=T, stop_ids=stops(config.vocab_size))
  sampler = Sampler(config, decoding, rows=1)
  calls = [
    whole(
      sampler(params, tokens_PS[[p]], lengths_P[[p]], G, Draws(jax.random.key(3), first_prompt=p))
    )
    for p in range(P)
  ]
  return config, params, jax.tree.map(lambda *x: np.concatenate(x), *calls)


OFTEN = [(3, 5, MANY)]
PACES = [
  pytest.param(*pace, marks=() if pace in OFTEN else pytest.mark.slow)
  for pace in itertools.product((0, 1, 3, 5, 8), (64, 5, 2), (0, MANY))
]


@pytest.mark.parametrize("rows, chunk, weights", PACES)
def test_tokens_do_not_depend_on_the_pace(rows, chunk, weights, alone):
  config, params, expected = alone
  found, parts = draw(config, params, rows, weights, chunk)
  assert_same(found, expected)
  assert sorted(sum(parts, [])) == list(range(P))
  assert (found.stopped_by_PG >= 0).any() and 1 <= found.lengths_PG.min() < found.lengths_PG.max()


def test_what_is_not_drawn_is_zero(alone):
  found = alone[2]
  padding = np.arange(T) >= found.lengths_PG[..., None]
  np.testing.assert_array_equal(found.sampled_PGT, ~padding)
  for x in (found.tokens_PGT, found.logprobs_PGT, found.behavior_logprobs_PGT):
    assert (x[padding] == 0).all()


@pytest.mark.parametrize(
  "rows, mesh",
  [
    pytest.param(8, (1, 2, 2, 1), marks=pytest.mark.slow),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        (0, (2, 1, 1, 1)),
        (4, (4, 1, 2, 1)),
        (4, (2, 1, 1, 1)),
        (0, (1, 2, 2, 1)),
        (8, (4, 1, 2, 1)),
        (0, (1, 1, 1, 1, 2)),
        (4, (2, 1, 2, 1, 2)),
        (8, (1, 1, 1, 1, 8)),
      )
    ),
  ],
  ids=str,
)
def test_meshes_draw_the_same_tokens(rows, mesh, alone):
  config, params, expected = alone
  assert_same(draw(*on(mesh, config, params), rows, chunk=5)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, mesh",
  [
    ("gemma3", ()),
    ("qwen3_5", ()),
    ("qwen3_5", (2, 1, 2, 1)),
    ("olmo3", ()),
    ("olmo3", (2, 1, 2, 1)),
    ("smollm3_window", ()),
    ("qwen3_moe_mixed", ()),
    ("qwen3_moe_mixed", (2, 1, 1, 2)),
    ("gemma4_e", ()),
    ("gemma4_e", (2, 1, 2, 1)),
    ("gemma4", (1, 2, 2, 1)),
    ("gemma4_moe", (2, 1, 1, 2)),
    ("gemma4_moe", (2, 1, 2, 1)),
    ("gpt_oss", ()),
    ("deepseek_v3", ()),
    ("gpt_oss", (2, 1, 1, 2)),
    ("gpt_oss", (2, 1, 2, 1)),
    ("deepseek_v3", (2, 1, 2, 1)),
    ("deepseek_v3", (1, 2, 1, 2)),
    ("glm4_moe", (2, 1, 1, 2)),
    ("qwen3_next", (2, 1, 2, 1)),
    ("qwen3_5_moe", (1, 2, 1, 2)),
    ("llama_dynamic", ()),
    ("qwen3_yarn", (2, 1, 2, 1)),
    ("gemma3", (1, 1, 1, 1, 2)),
    ("olmo3", (2, 1, 1, 1, 4)),
    ("gemma4_e", (1, 1, 2, 1, 2)),
    ("gemma4_moe", (1, 1, 1, 2, 2)),
    ("gpt_oss", (1, 1, 1, 1, 4)),
    ("deepseek_v3", (1, 1, 1, 1, 8)),
    ("qwen3_next", (2, 1, 2, 1, 2)),
    ("qwen3_5_moe", (1, 1, 1, 2, 2)),
    ("qwen3_moe_mixed", (1, 1, 1, 2, 2)),
  ],
)
def test_families_draw_the_same_tokens(name, mesh):
  """With sliding windows, scaled positions, experts and states of layers that recur."""
  config, params = model.load(FAMILIES / name)
  config = dataclasses.replace(config, dtype="float32")
  expected, _ = draw(config, params, weights=0)
  if mesh:
    config, params = on(mesh, config, params)
  assert_same(draw(config, params, rows=5, chunk=7)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(), (2, 1, 2, 1), (2, 1, 1, 1, 2)], ids=str)
def test_a_cache_of_int8_draws_the_same_tokens_at_every_pace(mesh, alone):
  """And other ones than a whole cache, with log-probs that are near."""
  config, params, whole_cache = alone
  config = dataclasses.replace(config, cache_dtype="int8")
  expected, _ = draw(config, params, weights=0)
  if mesh:
    config, params = on(mesh, config, params)
  assert_same(draw(config, params, rows=4, chunk=7)[0], expected)
  first = expected.tokens_PGT[..., :2] == whole_cache.tokens_PGT[..., :2]
  gap = np.abs(expected.logprobs_PGT - whole_cache.logprobs_PGT)[..., :2][first]
  assert first.mean() > 0.9 and 0 < gap.max() < 0.01


@pytest.mark.parametrize("weights, sizes", [(MANY, [128, 64, 32, 8]), (1, [])])
def test_few_rows_move_into_smaller_grids_where_that_repays_the_compiler(weights, sizes):
  config, _ = tiny()
  pace = Sampler(config, Decoding(T), weights).pace(32, 8)
  assert pace.grid == Grid(32, 8) and [grid.rows for grid in pace.smaller] == sizes


def test_a_compiler_has_nothing_to_round_in_an_empty_cache_of_int8(alone):
  """It took seconds for each stack of a cache of zeros."""
  config, params, _ = alone
  _, cache = model.features(params, config, np.ones((P, S), np.int32), np.arange(S)[None])
  prefix = model.as_prefix(cache, np.full(P, S))
  config = dataclasses.replace(config, cache_dtype="int8")
  program = jax.make_jaxpr(lambda: model.empty_cache(config, prefix, G, 8))()
  assert "i8" in str(program) and "reduce" not in str(program)


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [2, *(1, 33)])
def test_short_completions_and_those_of_one_chunk_more(max_tokens, alone):
  config, params, expected = alone
  found, _ = draw(config, params, rows=5, max_tokens=max_tokens)
  np.testing.assert_array_equal(found.tokens_PGT, expected.tokens_PGT[..., :max_tokens])
  np.testing.assert_array_equal(found.lengths_PG, np.minimum(expected.lengths_PG, max_tokens))


@pytest.mark.slow
@pytest.mark.parametrize("rows, chunk", [(0, 64), (0, 3), (5, 64), (2, 3)])
def test_texts_end_a_row_at_the_token_that_completes_them(rows, chunk, alone):
  """A token's text is its id in words of two letters, so a text may lie across tokens."""
  config, params, drawn = alone

  def text(ids):
    return "".join(f"{chr(97 + i // 10)}{chr(97 + i % 10)}" for i in ids)

  def kept(ids):
    whole = text(ids)
    found = [whole.index(stop) + len(stop) for stop in stops if stop in whole]
    return -(-min(found) // 2) if found else len(ids)

  # Two letters of neighbours, and a token.
  stops = (text(drawn.tokens_PGT[0, 0, 2:4])[1:3], text(drawn.tokens_PGT[1, 1, 3:4]))
  found, _ = draw(config, params, rows, chunk=chunk, end=end_at(stops, text))
  lengths_PG = np.zeros((P, G), int)
  for p, g in np.ndindex(P, G):
    ids = drawn.tokens_PGT[p, g, : drawn.lengths_PG[p, g]]
    n = lengths_PG[p, g] = kept(ids)
    assert found.tokens_PGT[p, g, :n].tolist() == ids[:n].tolist()
    by = ids[n - 1] if n < len(ids) or text(ids).endswith(stops) else drawn.stopped_by_PG[p, g]
    assert found.stopped_by_PG[p, g] == by
  np.testing.assert_array_equal(found.lengths_PG, lengths_PG)
  assert (lengths_PG < drawn.lengths_PG).sum() > 1
  for x in (found.tokens_PGT, found.logprobs_PGT, found.sampled_PGT):
    assert (x[np.arange(T) >= lengths_PG[..., None]] == 0).all()


@pytest.mark.slow
def test_greedy_rows_take_the_likeliest_token(alone):
  config, params, drawn = alone
  found, _ = draw(config, params, settings=RowSettings(0.0))
  assert (found.tokens_PGT == found.tokens_PGT[:, :1]).all()  # all members are the same
  assert (found.tokens_PGT != drawn.tokens_PGT).any()
  assert (found.behavior_logprobs_PGT == 0).all() and (found.logprobs_PGT <= 0).all()
  assert_same(draw(config, params, rows=2, settings=RowSettings(0.0))[0], found)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(), (2, 1, 2, 1)], ids=str)
def test_rows_with_other_settings_do_not_change_each_other(mesh, alone):
  """One row in three is greedy, one has filters and limits, and the rest draws as without them."""
  config, params, expected = alone
  if mesh:
    config, params = on(mesh, config, params)
  greedy, _ = draw(config, params, settings=RowSettings(0.0))
  assert (greedy.tokens_PGT == greedy.tokens_PGT[:, :1]).all()  # all members are the same
  assert (greedy.tokens_PGT != expected.tokens_PGT).any()
  own = RowSettings(0.7, top_k=20, top_p=0.8, min_p=0.01, min_tokens=9, max_tokens=12)
  limited, _ = draw(config, params, settings=own)
  off = RowSettings(1.0, top_k=0, top_p=1.0, min_p=0.0, min_tokens=0, max_tokens=T)
  kind = np.arange(P * G).reshape(P, G) % 3

  settings = jax.tree.map(lambda plain, own: np.where(kind == 2, own, plain), off, own)
  settings = settings.replace(temperature=np.choose(kind, [1.0, 0.0, 0.7]))
  found, _ = draw(config, params, rows=5 if not mesh else 8, chunk=7, settings=settings)
  for number, wanted in enumerate((expected, greedy, limited)):
    for name in ("tokens_PGT", "lengths_PG", "stopped_by_PG"):
      ours, theirs = getattr(found, name), getattr(wanted, name)
      np.testing.assert_array_equal(ours[kind == number], theirs[kind == number])
    own = kind == number
    np.testing.assert_allclose(
      found.behavior_logprobs_PGT[own], wanted.behavior_logprobs_PGT[own], atol=1e-4
    )
  assert 9 <= limited.lengths_PG.min() <= limited.lengths_PG.max() == 12


@pytest.mark.slow
def test_prompts_that_wait_for_a_place_get_the_same_completions():
  """Of 20 prompts, 16 have places at first."""
  config, params = tiny()
  given = prompts(config.vocab_size, 20)
  expected, _ = draw(config, params, weights=0, given=given)
  found, parts = draw(config, params, rows=16, given=given)
  assert_same(found, expected)
  assert len(parts) > 1 and sorted(sum(parts, [])) == list(range(20))


@pytest.mark.slow
@pytest.mark.parametrize(
  "family, rows, cache_dtype, attention",
  [
    ("tiny", 2, "", "dense"),
    ("gemma3", 5, "int8", "dense"),
    ("gemma3", 0, "", "dense"),
    ("gemma3", 0, "int8", "chunked"),
    ("qwen3_5", 2, "", "dense"),
    ("gemma4_e", 2, "", "dense"),
    ("gemma4_e", 2, "", "chunked"),
    ("gemma4_e", 2, "int8", "dense"),
    ("qwen3_moe_mixed", 2, "", "dense"),
  ],
)
def test_what_all_prompts_share_is_computed_once_and_changes_no_token(
  family, rows, cache_dtype, attention, monkeypatch
):
  config, params = tiny() if family == "tiny" else model.load(FAMILIES / family)
  config = dataclasses.replace(config, dtype="float32", cache_dtype=cache_dtype)
  config = dataclasses.replace(config, attention=attention)
  tokens_PS, lengths_P = prompts(config.vocab_size)
  first = np.random.default_rng(1).integers(2, config.vocab_size, 70)
  tokens_PS = np.concatenate([np.tile(first, (P, 1)), tokens_PS], 1).astype(np.int32)
  given = tokens_PS, lengths_P + 70
  assert sampling.shared_tokens(*given) == 64
  assert sampling.shared_tokens(tokens_PS, np.array([99, 65, 64, 99])) == 32
  assert sampling.shared_tokens(tokens_PS[:1], given[1][:1]) == 0
  found, _ = draw(config, params, rows, given=given)
  monkeypatch.setattr(sampling, "shared_tokens", lambda *prompts: 0)
  assert_same(found, draw(config, params, rows, given=given)[0])


def replies(asked):
  """A reply of one to three tokens, or none, to a row that has ended for the first time."""
  for row in asked:
    assert row.room == T - len(row.tokens) >= 0
    assert row.tokens[-1] == row.stopped_by or (row.stopped_by == -1 and row.room == 0)
  return [
    None
    if len(row.tokens) % 4 == 0 or 95 in row.tokens
    else [95, *row.tokens[:2]][: 1 + row.member]
    for row in asked
  ]


@pytest.mark.slow
@pytest.mark.parametrize(
  "rows, chunk, weights, mesh",
  [
    (0, 64, 0, ()),
    (0, 5, MANY, ()),
    (3, 64, MANY, ()),
    (5, 2, 0, ()),
    (1, 7, MANY, ()),
    (4, 5, MANY, (2, 1, 2, 1)),
    (5, 7, MANY, (1, 1, 1, 1, 2)),
    (4, 64, MANY, (2, 1, 1, 1, 4)),
  ],
)
def test_rows_go_on_with_the_tokens_of_a_reply(rows, chunk, weights, mesh, alone):
  """With the numbers that the model gives for the whole row, whenever the others pause."""
  config, params, first = alone
  given = prompts(config.vocab_size)
  placed = on(mesh, config, params) if mesh else (config, params)
  found, _ = draw(*placed, rows, weights, chunk, reply=replies)
  went_on = 0
  for p, g in np.ndindex(P, G):
    n, ids = int(first.lengths_PG[p, g]), found.tokens_PGT[p, g, : found.lengths_PG[p, g]]
    assert ids[:n].tolist() == first.tokens_PGT[p, g, :n].tolist()
    is_given = np.zeros(len(ids), bool)
    if len(ids) > n:
      went_on += 1
      is_given[n : n + 1 + g] = True
      assert ids[n : n + 1 + g].tolist() == [95, *ids[:2]][: 1 + g] and len(ids) > n + 1 + g
    np.testing.assert_array_equal(found.sampled_PGT[p, g, : len(ids)], ~is_given)
    assert_of_model(config, params, given, found, (p, g))
  assert 2 < went_on < P * G


@functools.partial(jax.jit, static_argnums=1)
def logprobs_of_model(params, config, tokens_T):
  """[T, V], of the token after each one."""
  hidden_1TD = model.features(params, config, tokens_T[None], np.arange(len(tokens_T))[None])[0]
  return jax.nn.log_softmax(model.unembed(params, config, hidden_1TD))[0]


def assert_of_model(config, params, given, found, row):
  """The log-probs of a row are those that the model gives for the whole row."""
  prompt = given[0][row[0], : given[1][row[0]]]
  ids, is_sampled = (x[row][: found.lengths_PG[row]] for x in (found.tokens_PGT, found.sampled_PGT))
  tokens = np.concatenate([prompt, ids])
  # No token sees a later one, so one program of one length is enough for all rows.
  padded = np.pad(tokens, (0, S + found.tokens_PGT.shape[-1] - len(tokens)))
  logprobs = np.asarray(logprobs_of_model(params, config, padded))[len(prompt) - 1 :]
  expected = np.where(is_sampled, logprobs[np.arange(len(ids)), ids], 0)
  np.testing.assert_allclose(found.logprobs_PGT[row][: len(ids)], expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_state_drops_no_token_when_a_text_ends_a_turn(cut):
  """Rows with layers that recur go on after the token that the text ends at."""
  config, params = model.load(FAMILIES / "qwen3_5")
  given = prompts(config.vocab_size)

  def end(ids, seen):
    del seen
    return cut if len(ids) >= cut else None

  def reply(asked):
    return [[5, 95] if len(row.tokens) <= cut else None for row in asked]

  found, _ = draw(config, params, rows=5, chunk=7, max_tokens=12, end=end, reply=reply)
  for row in np.ndindex(P, G):
    assert_of_model(config, params, given, found, row)
  assert (~found.sampled_PGT[:, :, cut]).any() and found.sampled_PGT[:, :, cut + 2 :].any()


@pytest.mark.slow
def test_a_text_ends_a_turn_and_replies_are_not_searched(alone):
  """Each turn ends at its second token at the latest. A reply of four does not end there."""
  config, params, first = alone

  def end(ids, seen):
    del seen
    return 2 if len(ids) >= 2 else None

  def reply(asked):
    return [[1, 95, 1, 3] if len(row.tokens) <= 2 else None for row in asked]

  found, _ = draw(config, params, rows=5, chunk=7, end=end, reply=reply)
  for p, g in np.ndindex(P, G):
    n = min(2, first.lengths_PG[p, g])
    ids = found.tokens_PGT[p, g]
    assert ids[:n].tolist() == first.tokens_PGT[p, g, :n].tolist()
    assert ids[n : n + 4].tolist() == [1, 95, 1, 3] and found.lengths_PG[p, g] in (n + 5, n + 6)
  assert_same(draw(config, params, weights=0, chunk=64, end=end, reply=reply)[0], found)


@pytest.mark.slow
@pytest.mark.parametrize(
  "rows, chunk, weights",
  [
    (5, 7, 0),
    (0, 64, MANY),
  ],
)
def test_a_turn_has_a_limit_of_its_own(rows, chunk, weights, alone):
  """Each turn draws three tokens at most, whatever the replies before it were."""
  config, params, first = alone

  def reply(asked):
    return [[95] * (1 + row.member) for row in asked]

  found, _ = draw(config, params, rows, weights, chunk, reply=reply, turn_tokens=3)
  for p, g in np.ndindex(P, G):
    length = int(found.lengths_PG[p, g])
    written = "".join("ag"[not x] for x in found.sampled_PGT[p, g, :length])
    given = "g" * (1 + g)
    turns = written.split(given)
    assert all(len(turn) <= 3 for turn in turns) and len(turns) > 2
    n = min(3, int(first.lengths_PG[p, g]))
    assert found.tokens_PGT[p, g, :n].tolist() == first.tokens_PGT[p, g, :n].tolist()
    # What is left is no room for a reply and a token.
    assert T - length <= 1 + g


WINDOW, LONG = 6, 72


def in_long_turns(asked):
  """Rows go on with a reply of a few tokens until they are full."""
  return [[95, 3][: 1 + row.member % 2] for row in asked]


def at_some_tokens(ids, seen):
  return next((n for n in range(seen + 1, len(ids) + 1) if ids[n - 1] % 7 == 3), None)


@pytest.mark.slow
@pytest.mark.parametrize(
  "chunk, rows, mesh, fields",
  [
    (7, 0, (), dict(windows=(WINDOW, 0))),
    (64, 5, (), dict(windows=(WINDOW, WINDOW))),
    (7, 0, (), dict(windows=(WINDOW, 0), unrolled=True)),
    (2, 5, (), dict(windows=(1, 0))),
    (7, 5, (2, 1, 2, 1), dict(windows=(0, WINDOW))),
    (7, 5, (1, 1, 1, 1, 2), dict(windows=(0, WINDOW))),
    (64, 0, (2, 1, 1, 1, 4), dict(windows=(WINDOW, 0))),
  ],
)
def test_rings_hold_what_rows_see_after_replies_and_cuts(chunk, rows, mesh, fields):
  """In texts of twelve windows, whose rows pause for up to a chunk and drop tokens."""
  config, params = tiny(**fields)
  given = prompts(config.vocab_size)
  placed = on(mesh, config, params) if mesh else (config, params)
  turns = dict(end=at_some_tokens, reply=in_long_turns, given=given, max_tokens=LONG)
  found, _ = draw(*placed, rows, 0, chunk, **turns)
  assert (found.lengths_PG == LONG).sum() > P and (~found.sampled_PGT).sum() > 5 * P * G
  for row in np.ndindex(P, G):
    assert_of_model(config, params, given, found, row)


def without_rings(monkeypatch):
  """Layers with a window keep every token of prompts and completions."""
  monkeypatch.setattr(model_cache, "ring_slots", lambda config, window, slots, rewind: slots)
  monkeypatch.setattr(model, "within_windows", lambda config, prefix, slots: prefix)


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, cache_dtype, mesh",
  [
    ("gemma2", "", ()),
    ("gemma3", "", ()),
    ("gemma3", "int8", ()),
    ("gemma4", "", (2, 1, 2, 1)),
    ("gemma4_e", "", ()),
    ("gemma4_e", "int8", (2, 1, 2, 1)),
    ("gemma4_moe", "", ()),
    ("gpt_oss", "", ()),
    ("gpt_oss", "", (2, 1, 2, 1)),
    ("mistral", "", ()),
    ("olmo3", "", ()),
    ("qwen2_window", "", ()),
    ("smollm3_window", "", ()),
    ("gemma3", "int8", (1, 1, 1, 1, 2)),
    ("gpt_oss", "", (2, 1, 1, 1, 2)),
  ],
)
def test_rings_change_no_token(name, cache_dtype, mesh, monkeypatch):
  """While the cache grows, rows move and wait, and prompts are longer than windows."""
  config, params = model.load(FAMILIES / name)
  config = dataclasses.replace(config, dtype="float32", cache_dtype=cache_dtype)
  count = max(config.windows) + 3
  rng = np.random.default_rng(0)
  given = rng.integers(2, config.vocab_size, (P, count)), np.array([count, 1, 3, count - 1])
  paced = dict(rows=5, chunk=7, given=given, max_tokens=80, settings=RowSettings(min_tokens=20))
  placed = on(mesh, config, params) if mesh else (config, params)
  found, _ = draw(*placed, **paced)
  without_rings(monkeypatch)
  expected, _ = draw(config, params, **paced)
  assert expected.lengths_PG.max() > 3 * max(config.windows)
  # Sums in another order differ in the last digit, and a number near the middle between two of int8
  # then becomes the other one. That changes log-probs by less than 0.01 for all but a few tokens.
  gaps_PGT = np.abs(found.logprobs_PGT - expected.logprobs_PGT)
  assert_same(found, expected, atol=5e-2 if cache_dtype else 1e-4)
  assert (gaps_PGT > 1e-2).mean() <= 0.01


@pytest.mark.slow
def test_a_stack_with_a_window_has_the_slots_that_it_needs():
  config, params = tiny(num_layers=3, windows=(6, 0, 6))
  cache = {}
  for columns, slots in itertools.product((1, 3, 9), (4, 8, 400)):
    programs = Sampler(config, Decoding(max_tokens=400)).programs
    programs.columns = columns
    settings = by_row(RowSettings(), 1, 6)
    flight = programs.abstract(Grid(2, 3), slots, jax.eval_shape(lambda: params), S, settings)
    keys, prompt_keys = flight.cache.keys, flight.cache.prefix.keys
    assert flight.cache.slots == slots and flight.cache.prefix.slots == S
    cache[columns, slots] = [keys[f"layers_{layer}"].shape[-2] for layer in range(3)]
    assert [prompt_keys[f"layers_{layer}"].shape[-2] for layer in range(3)] == [6, S, 6]
  assert cache[1, 400] == cache[3, 400] == [6, 400, 6] and cache[9, 400] == [12, 400, 12]
  assert cache[9, 8] == [8, 8, 8] and cache[1, 4] == cache[9, 4] == [4, 4, 4]


@pytest.mark.slow
def test_equal_calls_compile_nothing_again(alone):
  config, params, _ = alone
  sampler = Sampler(config, Decoding(max_tokens=T, stop_ids=stops(96)), MANY, rows=5)
  sizes = []
  for key in (3, 3):
    list(sampler(params, *prompts(96), G, Draws(jax.random.key(key))))
    programs = sampler.programs
    sizes.append(
      [f._cache_size() for f in (programs.begin.jitted, programs.chunk.jitted, programs.move)]
    )
  assert sizes[0] == sizes[1] and sizes[0][1] > 1


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 1])
@pytest.mark.parametrize(
  "grid",
  [
    Grid(4, 3),
    Grid(12, 1),
    Grid(1, 12),
    Grid(1, 1),
  ],
  ids=str,
)
def test_a_chunk_writes_its_tokens_in_place(grid, heads):
  """It needs less temporary memory than the keys of one of the two layers."""
  config, params = tiny(num_kv_heads=heads, head_dim=32, unrolled=True)
  programs, slots = Sampler(config, Decoding(max_tokens=20_000)).programs, 20_000

  def rows(dtype):
    return jax.ShapeDtypeStruct((grid.rows,), dtype)

  settings, number = RowSettings(rows("float32")), jax.ShapeDtypeStruct((), "int32")
  flight = programs.abstract(grid, slots, params, S, settings)
  keys = jax.ShapeDtypeStruct((grid.rows, 2), "uint32")
  new, chunk = NewRows(rows("bool"), keys, rows("int32"), settings), Chunk(number, number)
  lowered = programs.chunk.lower(params, flight, new, rows("bool"), chunk)
  needed = lowered.compile().memory_analysis().temp_size_in_bytes
  assert needed < 4 * grid.rows * heads * slots * config.head_dim


@pytest.mark.parametrize("mesh", [(), (2, 1, 1, 1), (1, 1, 1, 1, 2)], ids=str)
def test_copies_of_prompts_leave_the_others_where_they_are(mesh):
  """They need less temporary memory than the keys and values of two prompts."""
  config, params = tiny(head_dim=32, num_layers=4, unrolled=True)
  config, params = on(mesh, config, params) if mesh else (config, params)
  places, slots = 32, 512
  programs = Sampler(config, Decoding(max_tokens=4)).programs
  settings = RowSettings(jax.ShapeDtypeStruct((places,), "float32"))
  flight = programs.abstract(Grid(places, 1), 4, params, slots, settings)
  lowered = programs.copy.lower(flight, jax.ShapeDtypeStruct((places,), "int32"))
  needed = lowered.compile().memory_analysis().temp_size_in_bytes
  assert needed < 2 * (2 * 4 * 2 * slots * 32 * 4)  # two prompts in float32


@pytest.mark.slow
def test_devices_share_the_memory_of_a_cache_whose_slots_they_split():
  """While a chunk is decoded, while rows resume, and while prompts are computed for a flight."""
  bytes_of, begun_bytes = {}, {}
  shape = dict(num_kv_heads=1, head_dim=32, num_layers=4, attention="chunked")
  for devices in (1, 2, 4, 8):
    config, params = on((1, 1, 1, 1, devices), *tiny(**shape))
    programs, slots = Sampler(config, Decoding(max_tokens=16384)).programs, 16384
    grid, number = Grid(2, 2), jax.ShapeDtypeStruct((), "int32")

    def rows(dtype, *more, count=grid.rows):
      return jax.ShapeDtypeStruct((count, *more), dtype)

    settings = RowSettings(rows("float32"))
    flight = programs.abstract(grid, slots, params, 4096, settings)
    new = NewRows(rows("bool"), rows("uint32", 2), rows("int32"), settings)
    resumed = Resumed(*[rows("int32")] * 3, rows("int32", slots), rows("int32"))
    prompt = Prompts(rows("int32", 16, count=1), rows("int32", count=1))
    both = Prompts(rows("int32", 4096, count=2), rows("int32", count=2))
    begun = programs.begin.jitted.lower(grid, slots, params, both, None, settings).compile()
    memory = begun.memory_analysis()
    begun_bytes[devices] = memory.temp_size_in_bytes + memory.output_size_in_bytes
    lowered = (
      programs.chunk.lower(params, flight, new, rows("bool"), Chunk(number, number)),
      programs.resume.lower(flight, resumed._replace(is_resumed_R=rows("bool"))),
      programs.arrive.lower(flight, params, prompt, rows("int32", count=1)),
    )
    memory = [program.compile().memory_analysis() for program in lowered]
    bytes_of[devices] = [x.argument_size_in_bytes + x.temp_size_in_bytes for x in memory]
  for devices in (2, 4, 8):
    for one, split in zip(bytes_of[1], bytes_of[devices], strict=True):
      assert split < 1.1 * one / devices
    assert begun_bytes[devices] < 1.2 * begun_bytes[1] / devices


@pytest.mark.slow
def test_the_example_of_the_page_runs(tmp_path, capsys):
  config, params = tiny()
  model.save(tmp_path / "hf", dataclasses.replace(config, stop_ids=stops(96)), params)
  page = (Path(__file__).parents[1] / "docs/sampler.md").read_text()
  code, turns = re.findall("```python\n(.*?)```", page, re.S)
  names = {}
  exec(code.replace("FOLDER", str(tmp_path / "hf")), names)
  assert ", 4, 32)" in capsys.readouterr().out
  exec(turns, names)
  sampler, given = names["sampler"], (names["prompts"], names["lengths"])
  found = whole(sampler(names["params"], *given, members=4, draws=names["draws"]))
  assert (~found.sampled_PGT & (np.arange(32) < found.lengths_PG[..., None])).any()
