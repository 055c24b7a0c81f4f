"""Completions of training that match a regular expression, or hold no banned text."""

import dataclasses
import re
import threading

from flight_test import G, P, T, prompts, tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from remote_test import a_draw
from small_run import small_config, small_run, with_reward, with_section

import grpo_jax
from grpo_jax import model
from grpo_jax.asynchronous.messages import Message
from grpo_jax.asynchronous.sampler import Drawer
from grpo_jax.config import Sampling
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.run.checks import check_config
from grpo_jax.sampler import guides
from grpo_jax.sampler.filters import has_filters
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.sampling import Draws, Sampler, whole
from grpo_jax.settings import ConfigError
from grpo_jax.storage.reading import read_completions, read_metrics
from tests import small_qwen

STOP = 1
REWARD = "def reward(completions, **_):\n  return [float(len(set(x))) for x in completions]\n"


class Rises:
  """A row of at most `most` tokens, each of which is larger than the one before it."""

  def __init__(self, most=4):
    self.seen, self.most = [], most

  def fill(self, bits_W):
    bits_W[:] = 0
    last = self.seen[-1] if self.seen else STOP
    larger = range(last + 1, 32 * len(bits_W)) if len(self.seen) < self.most else ()
    for token in [STOP, *larger]:
      bits_W.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

  def take(self, tokens):
    self.seen += tokens
    return True

  is_whole = True


def drawn(guide, rows, temperature=1.0):
  config, params = tiny()
  sampler = Sampler(config, Decoding(T, (STOP,)), rows=rows, guide=guide)
  given = prompts(config.vocab_size)
  parts = sampler(params, *given, G, Draws(jax.random.key(3), RowSettings(temperature)))
  return config, params, given, whole(parts)


@pytest.mark.parametrize("rows", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_draw_what_their_guide_allows_and_log_probs_say_from_what(rows):
  """More rows than seats: a new row has a new guide."""
  config, params, (prompts_PS, lengths_P), out = drawn(Rises, rows)
  assert (out.stopped_by_PG == STOP).all() and out.lengths_PG.max() <= 5
  assert out.lengths_PG.max() > 2
  most = prompts_PS.shape[1] + T
  forward = jax.jit(model.forward, static_argnums=1)
  for p, g in np.ndindex(P, G):
    length, start = int(out.lengths_PG[p, g]), int(lengths_P[p])
    tokens = out.tokens_PGT[p, g, :length].tolist()
    assert tokens[-1] == STOP and tokens[:-1] == sorted({*tokens[:-1]})
    text = [*prompts_PS[p, :start].tolist(), *tokens]
    padded_1N = jnp.array([text + [0] * (most - len(text))])
    logits_1NV, _ = forward(params, config, padded_1N, jnp.arange(most)[None])
    logprobs_TV = np.asarray(jax.nn.log_softmax(logits_1NV[0, start - 1 : len(text) - 1]))
    guide, words = Rises(), np.zeros(-(-config.vocab_size // 32), np.int32)
    for t, token in enumerate(tokens):
      guide.fill(words)
      allowed_V = np.unpackbits(words.view(np.uint8), bitorder="little")[: config.vocab_size] == 1
      mass = np.exp(logprobs_TV[t, allowed_V]).sum()
      # The learner's distribution, and that from which the token was drawn.
      assert out.logprobs_PGT[p, g, t] == pytest.approx(logprobs_TV[t, token], abs=1e-4)
      expected = logprobs_TV[t, token] - np.log(mass)
      assert out.behavior_logprobs_PGT[p, g, t] == pytest.approx(expected, abs=1e-4)
      guide.take([token])


@pytest.mark.slow
def test_a_guide_that_allows_all_changes_no_token():
  class Anything(Rises):
    def fill(self, bits_W):
      bits_W[:] = -1

  *_, found = drawn(Anything, 0)
  *_, expected = drawn(None, 0)
  np.testing.assert_array_equal(found.tokens_PGT, expected.tokens_PGT)
  np.testing.assert_allclose(found.logprobs_PGT, expected.logprobs_PGT, atol=1e-5)
  np.testing.assert_allclose(found.behavior_logprobs_PGT, expected.logprobs_PGT, atol=1e-5)


def test_a_row_whose_guide_gives_up_is_cut_off():
  class GivesUp(Rises):
    def take(self, tokens):
      super().take(tokens)
      return len(self.seen) < 2

  *_, out = drawn(GivesUp, 0, 0.0)
  assert out.lengths_PG.max() == 2
  cut_PG = out.tokens_PGT[..., 1] != STOP
  assert ((out.stopped_by_PG == -1) == (cut_PG & (out.lengths_PG == 2))).all()


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"sampling.regex": "a", "sampling.min_tokens": 2}, "sampling.regex is 'a': it says when"),
    (
      {"sampling.regex": "a", "sampling.stop": ("]",)},
      r"regex is 'a': it says .* set sampling.stop=\(\)",
    ),
    ({"sampling.regex": "a", "sampling.stop_ids": (5,)}, r"set sampling.stop_ids=\(\)"),
    ({"sampling.regex": "(?x)a # b\nc"}, "the flag x"),
    ({"sampling.regex": "b(?i)(?sx-u:a b)"}, "the flag x"),
    (
      {"sampling.regex": "a", "environment.tools": ("python",)},
      "sampling.regex is 'a': comp.*turns",
    ),
    ({"sampling.banned": ("a",), "environment.name": "retry"}, "sampling.banned.*several turns"),
    ({"sampling.banned": ("a", "")}, "sampling.banned.*an empty text"),
  ],
)
def test_what_cannot_be_is_refused_by_name(changes, words):
  with pytest.raises(ConfigError, match=words):
    check_config(small_config().replace(changes))


@pytest.mark.parametrize(
  "regex", ["(?i)x", r"\(?x", "(?<x>a)", "(?P<x>a)", "(?:x)", "(?s-x:.)", r"(\d?x)"]
)
def test_an_x_that_is_no_flag_is_taken(regex):
  check_config(small_config().replace({"sampling.regex": regex}))


def test_constraints_are_a_filter():
  """So a correction may weigh with the share of the allowed tokens, and old log-probs are known."""
  assert has_filters(Sampling(regex="a")) and has_filters(Sampling(banned=("a",)))
  check_config(
    small_config().replace(
      {
        "sampling.regex": "a",
        "algo.correction": "truncate",
        "algo.correction_high": 2.0,
        "algo.minibatches": 2,
        "algo.old_logprobs": "sampler",
      }
    )
  )


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
  with pytest.raises(ConfigError, match=r"sampling.regex is 'a': .*pip install -e '.\[guides\]'"):
    guides.guides_of(Sampling(regex="a"), tokenizer.characters("ab"), 4)
  run = small_run(with_section(small_config(), "sampling", regex="a"))  # to export, none is needed
  with pytest.raises(ConfigError, match="sampling.regex"):
    run.programs.sampler()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
  pytest.importorskip("llguidance", reason="pip install -e '.[guides]'")
  folder = tmp_path_factory.mktemp("model")
  texts = [problem["question"] + problem["answer"] for problem in small_qwen.problems(40)]
  small_qwen.make_checkpoint(folder, texts, every_id_is_text=True)
  return tokenizer.load(folder)


def allows(sampling, tokens, text, ends=True):
  """Whether a completion may be this text: however it is cut into tokens, also one by one."""
  found = []
  for ids in (tokens.encode(text), [i for c in text for i in tokens.encode(c)]):
    guide = guides.guides_of(sampling, tokens, tokens.vocab_size)()
    bits_W = np.zeros(-(-tokens.vocab_size // 32), np.int32)
    takes = True
    for token in [*ids, tokens.stop_ids[0]] if ends else ids:
      guide.fill(bits_W)
      takes &= bool(bits_W.view(np.uint32)[token // 32] >> np.uint32(token % 32) & 1)
      if not takes:
        break
      if token != tokens.stop_ids[0]:
        assert guide.take([token])
    found.append(takes)
  assert found[0] == found[1]
  return found[0]


REGEXES = {
  "[0-9]{1,3}": (["7", "123"], ["", "1234", "a", "1 "]),
  "<think>[^<]*</think>[0-9]+": (["<think>x\ny</think>12"], ["12", "<think>a</think>"]),
  r"a/b\.c": (["a/b.c"], ["a/bxc", "a\\/b.c"]),
  r"a\/b\\/c": (["a/b\\/c"], ["a/b/c", "a\\/b\\/c"]),
  r"(yes|no)\n?": (["yes", "no\n"], ["maybe", "yes\n\n"]),
  "^a$": (["a"], ["b", "^a$", "aa"]),
  "x\ny": (["x\ny"], ["xny", "x"]),
  "\u00e9+": (["\u00e9\u00e9"], ["e"]),
}


@pytest.mark.parametrize("regex", REGEXES)
def test_a_whole_completion_matches(regex, tokens):
  good, bad = REGEXES[regex]
  for text in good:
    assert re.fullmatch(regex, text) and allows(Sampling(regex=regex), tokens, text), text
  for text in bad:
    assert not re.fullmatch(regex, text) and not allows(Sampling(regex=regex), tokens, text), text


BANNED = ("pens", "a/b", "\n\n", "(x|y)", "\u00e9")


def test_no_completion_holds_a_banned_text(tokens):
  sampling = Sampling(banned=BANNED)
  for text in ("Ann has boxes", "a /b", "\n", "x|y", "pen s", "pe", "", "a\nb\n"):
    assert allows(sampling, tokens, text), text
  for text in ("Ann has pens", "a/b", "x\n\n", "(x|y)", "caf\u00e9s"):
    assert not allows(sampling, tokens, text), text


def test_both_hold(tokens):
  sampling = Sampling(regex="[a-z]{1,5}", banned=("bad",))
  assert allows(sampling, tokens, "bade"[:2]) and not allows(sampling, tokens, "abad")
  assert not allows(sampling, tokens, "toolong")


def test_with_bans_alone_special_tokens_may_come(tokens):
  """And a banned text is not made of what is before and after one."""
  opens = tokens.encode("<|im_start|>")
  assert len(opens) == 1 and opens[0] not in tokens.stop_ids
  guide = guides.guides_of(Sampling(banned=("pens",)), tokens, tokens.vocab_size)()
  for text in ("pe", "<|im_start|>", "<|im_start|>", "ns"):
    assert guide.take(tokens.encode(text))
  bits_W = np.zeros(-(-tokens.vocab_size // 32), np.int32)
  guide.fill(bits_W)
  (s,) = tokens.encode("s")
  assert bits_W.view(np.uint32)[s // 32] >> np.uint32(s % 32) & 1


@pytest.mark.parametrize("regex", ["(", "[", "(?<=a)b", "x(?i", "\\", "(" * 10**6])
def test_a_wrong_expression_is_one_line(regex, tokens):
  with pytest.raises(ConfigError) as caught:
    guides.guides_of(Sampling(regex=regex), tokens, tokens.vocab_size)
  said = str(caught.value)
  assert said.startswith("config key sampling.regex is ") and "\n" not in said and len(said) < 500


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["none", "truncate"])
def test_a_run_learns_from_completions_that_match(correction, tmp_path):
  pytest.importorskip("llguidance", reason="pip install -e '.[guides]'")
  config = with_reward(small_config(kl_coef=0.0), tmp_path, REWARD)
  if correction != "none":
    config = with_section(config, "algo", correction=correction, correction_high=2.0)
  config = with_section(config, "sampling", regex="[0-9]{1,3}|-[0-9]", banned=("7",))
  config = with_section(dataclasses.replace(config, steps=2), "eval", every=2)
  grpo_jax.train(config, tmp_path / "run")
  for step in (1, 2):
    rows = read_completions(tmp_path / "run", step)
    texts = {row["completion"] for row in rows}
    assert len(texts) > 2
    assert all(re.fullmatch(r"[0-9]{1,3}|-[0-9]", text) and "7" not in text for text in texts)
  for row in read_metrics(tmp_path / "run")[1:]:
    assert row["sampler/filter_gap_mean"] > 0.1 and row["sampler/logprob_gap_max"] < 1e-4
  policy = grpo_jax.load_policy(tmp_path / "run")
  for one in policy.sample("1+1=", n=4):
    assert re.fullmatch(r"[0-9]{1,3}|-[0-9]", one.text)


@pytest.mark.slow
def test_a_sampler_process_draws_what_a_run_draws_in_turn():
  pytest.importorskip("llguidance", reason="pip install -e '.[guides]'")
  run = small_run(with_section(small_config(), "sampling", regex="[0-9]{1,3}"))
  params = run.parameters.for_sampling(run.initial_params())
  weights = {str(place): np.asarray(x) for place, x in enumerate(jax.tree.leaves(params))}
  drawer, (fields, arrays) = Drawer(run), a_draw()
  drawer.weights.take({"version": 7, "leaves": [*range(len(weights))], "keep": [7]}, weights)
  found = whole(drawer.draw(Message("draw", fields, arrays), threading.Event()))
  draws = Draws(
    jax.random.wrap_key_data(arrays["key"]),
    RowSettings(**fields["settings"]),
    first_prompt=fields["first_prompt"],
  )
  given = arrays["prompts_PS"], arrays["prompt_lengths_P"]
  own = whole(run.programs.sampler()(params, *given, fields["members"], draws))
  np.testing.assert_array_equal(found.tokens_PGT, own.tokens_PGT)
  np.testing.assert_array_equal(found.behavior_logprobs_PGT, own.behavior_logprobs_PGT)
  assert (found.behavior_logprobs_PGT - found.logprobs_PGT).max() > 0.1
  for tokens_T, length in zip(
    found.tokens_PGT.reshape(len(found.lengths_PG.ravel()), -1), found.lengths_PG.ravel()
  ):
    assert re.fullmatch("[0-9]{1,3}", run.tokenizer.decode(tokens_T[:length].tolist()))
