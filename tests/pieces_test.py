"""Prompts that are computed in pieces while other rows draw (sampling.prompt_piece)."""

import dataclasses
from types import SimpleNamespace

from flight_test import FAMILIES, G, P, T, assert_same, on, stops, tiny
import numpy as np
import pytest
from small_run import small_config, small_run, with_section
from stream_test import KEYS, drawn, replying

from grpo_jax import model
from grpo_jax.run.stages import programs
from grpo_jax.sampler.flight import Prompts
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.pieces import ArrivingPrompts, BegunPrompt, Unfinished, together
from grpo_jax.sampler.requests import GroupRequest
from grpo_jax.sampler.sampling import Sampler
from grpo_jax.sampler.seats import NOBODY, Arrival, Grid

S, GROUPS = 23, 8


# --- Which prompts are not complete ---


def test_a_prompt_is_unfinished_until_all_its_tokens_are_computed():
  left = Unfinished()
  left.add([Arrival(0, 7), Arrival(2, 8)], np.array([7, 5, 8]))
  assert left.begun == [BegunPrompt(0, 7), BegunPrompt(2, 8)] and left.places == {0, 2}
  left.computed([BegunPrompt(0, 7, 4), BegunPrompt(2, 8, 4)], {7: 9, 8: 4}.get)
  assert left.begun == [BegunPrompt(0, 7, 4)] and left.places == {0}
  left.computed([BegunPrompt(0, 7, 9)], {7: 9}.get)
  assert not left.places


def test_copies_follow_their_source():
  left = Unfinished()
  arrivals = [Arrival(0, 7), Arrival(1, 7, 0), Arrival(2, 7, 1), Arrival(3, 6, 4)]
  left.add(arrivals, np.array([7, 7, 7, 6, 6]))
  assert left.take_copies() == [Arrival(3, 6, 4)] and left.places == {0, 1, 2}
  left.computed([BegunPrompt(0, 7, 3)], {7: 3}.get)
  assert left.take_copies() == [Arrival(1, 7, 0), Arrival(2, 7, 1)] and not left.places


def test_places_with_other_prompts_are_forgotten():
  left = Unfinished()
  left.add([Arrival(0, 7), Arrival(1, 8), Arrival(2, 8, 1)], np.array([7, 8, 8]))
  left.computed([BegunPrompt(0, 7, 4), BegunPrompt(1, 8, 4)], {7: 9, 8: 9}.get)
  # Place 1 is free again, so the copy of its prompt must be computed. The number 7 comes again.
  left.add([Arrival(0, 7)], np.array([7, NOBODY, 8]))
  assert left.begun == [BegunPrompt(0, 7), BegunPrompt(2, 8)] and not left.take_copies()


def test_a_call_computes_the_oldest_prompts():
  new = [BegunPrompt(0, 7), BegunPrompt(2, 9), BegunPrompt(3, 10), BegunPrompt(4, 6)]
  assert together(new, 8, lambda x, y: y < 10) == new[:2]
  assert together(new, 1, lambda x, y: True) == new[:1]
  assert together(new, 8, lambda x, y: True) == new


# --- The tokens of rows ---


def requests_of(config, sampler, pauses=False, short=()):
  """Groups with prompts of one to `S` tokens in two arrays. Those of `short` have at most 2."""
  rng = np.random.default_rng(1)
  lengths = rng.integers(5, S + 1, GROUPS).astype(np.int32)
  lengths[list(short)] = 2
  tokens = rng.integers(2, config.vocab_size, (GROUPS, S)).astype(np.int32)
  tokens[:, :3] = 5  # what all share is not computed for each
  halves = [slice(0, P), slice(P, GROUPS)]
  given = [sampler.prompts(tokens[half], lengths[half]) for half in halves]
  return [
    GroupRequest(
      number=100 + n,
      prompts=given[n // P],
      place=n % P,
      key=KEYS[n // P],
      first_row=G * (n % P),
      settings=RowSettings(1.0, max_tokens=T - n),
      pauses=pauses,
    )
    for n in range(GROUPS)
  ]


def draw(config, params, piece, seats=5, in_order=True, groups=P, pauses=False, calls=None):
  """{number: completions} of groups that come one by one, some of which pause, and `calls`."""
  decoding = Decoding(max_tokens=T, stop_ids=stops(config.vocab_size))
  sampler = Sampler(config, decoding, rows=seats, prompt_piece=piece)
  sampler.programs.columns = 5
  stream = sampler.stream(lambda: (params, 0), groups, G, in_order=in_order)
  calls = [] if calls is None else calls
  for name in ("arrive", "continue_prompts", "chunk"):
    program = getattr(stream._programs, name)

    def called(*arguments, name=name, program=program):
      calls.append((name, stream._rows_draw))
      return program(*arguments)

    vars(stream._programs)[name] = called
  asked = requests_of(config, sampler, pauses)
  reply = replying(lambda row: (0, 3, 11)[(row.prompt + row.member) % 3]) if pauses else None
  return drawn(stream, [[one] for one in asked], reply), calls


def assert_pieces_change_nothing(config, params, piece=4, placed=None, **options):
  whole, calls = draw(config, params, 0, **options)
  assert "continue_prompts" not in dict(calls)
  pieces, calls = draw(*(placed or (config, params)), piece, **options)
  assert "continue_prompts" in dict(calls)
  for number, completions in whole.items():
    assert_same(pieces[number], completions)
  return calls


@pytest.mark.parametrize(
  "piece, in_order, pauses, mesh",
  [
    (4, True, False, ()),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        (1, True, False, ()),
        (4, False, False, ()),
        (7, True, True, ()),
        (22, True, False, ()),
        (4, True, True, (2, 1, 1, 1)),
        (4, False, False, (2, 1, 2, 1)),
        (4, True, False, (1, 1, 1, 1, 2)),
        (3, False, True, (2, 1, 1, 1, 2)),
        (5, True, True, (1, 1, 2, 1, 4)),
      )
    ),
  ],
  ids=str,
)
def test_pieces_change_no_token_and_rows_wait_for_one_of_them_at_a_time(
  piece, in_order, pauses, mesh
):
  config, params = tiny()
  placed = on(mesh, config, params) if mesh else None
  calls = assert_pieces_change_nothing(
    config, params, piece, placed, in_order=in_order, pauses=pauses
  )
  # Between two chunks of rows that draw, one call at most computes prompts.
  before = None
  for name, rows_draw in calls:
    assert name == "chunk" or before in (None, "chunk") or not rows_draw
    before = name
  assert any(rows_draw for name, rows_draw in calls if name == "continue_prompts")


def test_members_that_can_sit_wait_for_one_piece(monkeypatch):
  """Where no row draws, but a place with a complete prompt has a free seat."""
  calls, compute = [], ArrivingPrompts.compute

  def recording(self, flight, params, draws):
    calls.append(("compute", draws))
    return compute(self, flight, params, draws)

  monkeypatch.setattr(ArrivingPrompts, "compute", recording)
  draw(*tiny(), 4, seats=2, groups=1, calls=calls)
  # What follows ("compute", True), which is one call at most, and then a chunk.
  after = [three[1:] for three in zip(calls, calls[1:], calls[2:]) if three[0] == ("compute", True)]
  computing = [pair for pair in after if pair[0][0] != "chunk"]
  assert all(second[0] == "chunk" for _, second in computing)
  assert any(not rows_draw for (_, rows_draw), _ in computing)


def test_each_shard_computes_the_prompts_of_its_places():
  """The oldest ones first, as many as a call takes."""
  made = []

  def continue_prompts(flight, params, pieces):
    made.append(pieces)
    return flight, None

  programs = SimpleNamespace(
    row_shards=2, pieces_at_once=lambda *sizes: 4, continue_prompts=continue_prompts
  )
  flight = SimpleNamespace(grid=Grid(6, 1), cache=SimpleNamespace(prefix=SimpleNamespace(slots=9)))
  prompts = Prompts(np.arange(54).reshape(6, 9), np.full(6, 9))
  requests = {x: SimpleNamespace(prompts=prompts, place=x) for x in range(6)}
  arriving = ArrivingPrompts(programs, requests, None, at_once=4, piece=5)
  arriving.add([Arrival(place, place) for place in (2, 1, 0, 4)], np.arange(6))
  begun = [BegunPrompt(place, place, 3) for place in (2, 1, 0, 4)]
  arriving._unfinished.computed(begun, lambda x: 9)
  arriving.compute(flight, None, draws=True)
  (pieces,) = made
  assert pieces.places_n.tolist() == [2, 1, 4, 6]  # 6 is no place
  assert pieces.tokens_nU[0].tolist() == [21, 22, 23, 24, 25]
  assert pieces.known_n.tolist()[:3] == [3, 3, 3] and pieces.lengths_n.tolist()[:3] == [5, 5, 5]
  assert arriving._unfinished.begun == [
    BegunPrompt(2, 2, 8),
    BegunPrompt(1, 1, 8),
    BegunPrompt(0, 0, 3),
    BegunPrompt(4, 4, 8),
  ]


@pytest.mark.slow
@pytest.mark.parametrize(
  "name, cache_dtype, mesh",
  [
    ("gemma3", "", ()),
    ("gemma3", "int8", ()),
    ("gpt_oss", "", ()),
    ("llama_dynamic", "", ()),
    ("qwen3_5", "", ()),
    ("deepseek_v3", "", ()),
    ("gemma3", "", (2, 1, 1, 1, 2)),
    ("gpt_oss", "", (1, 1, 1, 2, 4)),
    ("qwen3_5", "", (1, 1, 2, 1, 2)),
    ("deepseek_v3", "", (1, 1, 1, 1, 8)),
    ("qwen3_moe_mixed", "", (1, 1, 1, 1, 4)),
    ("gemma4_e", "", (1, 1, 1, 1, 2)),
    ("gemma4", "", (2, 1, 2, 1)),
    ("gpt_oss", "", (2, 1, 1, 2)),
  ],
)
@pytest.mark.parametrize("attention", ["dense", "chunked"])
def test_families_compute_prompts_in_pieces(name, cache_dtype, mesh, attention):
  """With windows, sinks, scaled angles, states, latent attention and experts."""
  config, params = model.load(FAMILIES / name)
  config = dataclasses.replace(config, dtype="float32", cache_dtype=cache_dtype)
  config = dataclasses.replace(config, attention=attention)
  placed = on(mesh, config, params) if mesh else None
  assert_pieces_change_nothing(config, params, 5, placed)


@pytest.mark.slow
def test_the_experts_of_prompts_are_those_of_whole_prompts():
  config, params = model.load(FAMILIES / "qwen3_moe_mixed")
  config = dataclasses.replace(config, dtype="float32", keeps_experts=True)
  (whole, _), (pieces, calls) = draw(config, params, 0), draw(config, params, 4)
  assert "continue_prompts" in dict(calls)
  lengths = requests_of(config, Sampler(config, Decoding(T)))
  for number, one in whole.items():
    n = lengths[number - 100].prompts.lengths_n[lengths[number - 100].place]
    assert_same(pieces[number], one)
    np.testing.assert_array_equal(
      np.sort(pieces[number].prompt_experts_PSY[0, :n]), np.sort(one.prompt_experts_PSY[0, :n])
    )


# --- Runs ---


def test_the_plan_of_a_run_has_a_program_for_pieces():
  config = with_section(small_config(), "sampling", max_tokens=5, rows=2, prompt_piece=5)
  run = small_run(config)
  (sample,) = [program for program in programs(run) if program.name == "sample"]
  compiled = run.programs.sampler().programs
  runs = {stage.program: stage.runs for stage in sample.stages}
  # Two of the four prompts have no place at first. Each has 12 tokens in three pieces.
  assert runs[compiled.arrive] == 2 and runs[compiled.continue_prompts] == 4
  for stage in sample.stages:
    stage.lower()
