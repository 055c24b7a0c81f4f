"""The host's half of a step: texts, rewards, metrics and rows."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from grpo_jax.config import Data
from grpo_jax.data import tokenizer
from grpo_jax.data.loader import Prompts, prompt_batch
from grpo_jax.run import rollout
from grpo_jax.types import Completions

NAN = float("nan")
TOKENS = tokenizer.characters("0123456789+=# ")
EOS = TOKENS.stop_ids[0]
EXAMPLES = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in ((1, 2), (3, 4), (5, 6))]
DATA = Data("", "", "", prompt="{question}", chat=False, system="", max_prompt_tokens=8)
PROMPTS = prompt_batch(Prompts(EXAMPLES, TOKENS, DATA), np.arange(3))


def completions(texts, width=8):
  """Of [P][G] texts; one that ends in $ was stopped by the end-of-sequence token, another was cut off."""
  P, G = len(texts), len(texts[0])
  tokens_PGT, lengths_PG = np.zeros((P, G, width), np.int32), np.zeros((P, G), np.int32)
  stopped_by_PG = np.full((P, G), -1, np.int32)
  for p, g in np.ndindex(P, G):
    text = texts[p][g]
    ids = TOKENS.encode(text.rstrip("$")) + [EOS] * text.endswith("$")
    tokens_PGT[p, g, : len(ids)], lengths_PG[p, g] = ids, len(ids)
    stopped_by_PG[p, g] = EOS if text.endswith("$") else -1
  zeros_PGT = np.zeros(tokens_PGT.shape, np.float32)
  return Completions(tokens_PGT, lengths_PG, zeros_PGT, zeros_PGT, stopped_by_PG)


def score(texts, *functions):
  weights = (1.0,) * len(functions)
  return rollout.score(completions(texts), PROMPTS, TOKENS.decode, functions, weights)


def fixed(rewards_PG, name="fixed"):
  """A reward function that gives these numbers, in order; NaN stands for None."""

  def function(completions, **_):
    return [None if np.isnan(r) else r for r in np.ravel(rewards_PG)]

  function.__name__ = name
  return function


def measure(rewards_PG):
  texts = [["0$"] * len(group) for group in rewards_PG]
  return rollout.metrics(completions(texts), score(texts, fixed(rewards_PG)))


def test_texts_are_decoded_up_to_their_length_without_the_stop_token():
  out = completions([["12$", "#### 3", "$"], ["4", "5$", "66$"], ["7", "8", "9$"]])
  out.tokens_PGT[0, 0, 3:] = TOKENS.encode("99999")  # what lies beyond a completion is nobody's
  scored = rollout.score(out, PROMPTS, TOKENS.decode, [fixed(np.zeros((3, 3)))], (1.0,))
  assert scored.texts == [["12", "#### 3", ""], ["4", "5", "66"], ["7", "8", "9"]]


def test_every_group_member_is_scored_with_its_own_prompts_fields():
  seen = []

  def echo(completions, prompts, question, answer, **_):
    seen.extend(zip(completions, prompts, question, answer))
    return [float(c == a) for c, a in zip(completions, answer)]

  texts = [["3$", "7"], ["3", "7$"], ["11$", "11"]]  # 1+2, 3+4, 5+6
  scored = score(texts, echo)
  np.testing.assert_array_equal(scored.rewards_PG, [[1, 0], [0, 1], [1, 1]])
  assert seen == [
    (text.rstrip("$"), e["question"], e["question"], e["answer"])
    for group, e in zip(texts, EXAMPLES)
    for text in group
  ]


def test_rewards_are_weighted_and_each_functions_scores_are_kept():
  first, second = np.array([[1, 0], [1, NAN], [0, NAN]]), np.array([[2, 4], [NAN, 6], [8, NAN]])
  scored = rollout.score(
    completions([["0", "1"]] * 3),
    PROMPTS,
    TOKENS.decode,
    [fixed(first, "a"), fixed(second, "b")],
    (1.0, 0.5),
  )
  np.testing.assert_array_equal(
    scored.rewards_PG, [[2, 2], [1, 3], [4, NAN]]
  )  # None counts nothing; both None: NaN
  np.testing.assert_array_equal(scored.scores["a"], first)
  np.testing.assert_array_equal(scored.scores["b"], second)
  values = rollout.metrics(completions([["0", "1"]] * 3), scored)
  assert values["rewards/a/unscored"] == 2 and values["rewards/b/unscored"] == 2
  assert values["rewards/a/mean"] == 0.5 and values["rewards/b/mean"] == 5.0  # 2/4 and 20/4


def test_reward_and_its_spread_leave_unscored_completions_out():
  values = measure([[1, 0, NAN, 1], [0, 0, 0, NAN], [1, 1, 1, 1]])
  # Ten scored rewards, six of them 1: variance 10 * .6 * .4 / 9.
  assert values["reward"] == pytest.approx(0.6)
  assert values["reward_std"] == pytest.approx((2.4 / 9) ** 0.5)


@pytest.mark.parametrize(
  "group, has_none",
  [
    ([0, 1, 0, 0], 0),
    ([0.7, 0.7, 0.7, 0.7], 1),
    ([0.7, NAN, 0.7, 0.7], 1),
    ([NAN, NAN, NAN, 0.3], 1),
    ([NAN] * 4, 1),
    ([0.1, 0.1 + 1e-6, 0.1, NAN], 0),
  ],
)
def test_a_group_has_no_spread_where_no_two_scored_rewards_differ(group, has_none):
  assert measure([group, [0, 1, 1, 0], [0, NAN, 1, 0]])["frac_reward_zero_std"] == pytest.approx(
    has_none / 3
  )


def test_nothing_scored_is_nan_and_warns_of_nothing(recwarn):
  values = measure(np.full((3, 2), NAN))
  assert np.isnan([values["reward"], values["reward_std"], values["rewards/fixed/mean"]]).all()
  assert values["frac_reward_zero_std"] == 1 and not recwarn.list


def test_lengths_count_the_stop_token_and_clipped_are_those_without_one():
  texts = [["12$", "1234"], ["$", "1"], ["12345$", "12345678"]]  # lengths 3 4 1 1 6 8
  values = rollout.metrics(completions(texts), score(texts, fixed(np.zeros((3, 2)))))
  lengths = [values[f"completions/{name}_length"] for name in ("mean", "min", "max")]
  assert lengths == [pytest.approx(23 / 6), 1, 8] and values["completions/clipped_ratio"] == 0.5


def test_rows_are_json_in_group_order_and_no_function_hides_another_field():
  texts = [["1$", "2"], ["3$", "4"], ["5$", "6"]]
  rewards_PG = [[0, 1], [NAN, 3], [4, 5]]
  scored = score(texts, fixed(rewards_PG, "reward"), fixed(np.ones((3, 2)), "length"))
  rows = rollout.rows(completions(texts), scored, PROMPTS)
  assert json.loads(json.dumps(rows, allow_nan=False)) == rows
  assert rows[2] == {
    "prompt": "3+4=",
    "completion": "3",
    "reward": 1.0,
    "rewards/reward": None,
    "rewards/length": 1.0,
    "length": 2,
    "stopped_by": EOS,
  }
  assert rows[3] == {
    "prompt": "3+4=",
    "completion": "4",
    "reward": 4.0,
    "rewards/reward": 3.0,
    "rewards/length": 1.0,
    "length": 1,
    "stopped_by": -1,
  }
  assert [row["completion"] for row in rows] == list("123456")


def test_overlong_is_a_step_only_where_it_takes_something():
  """The last quarter of 8 tokens: 3 tokens 0, 7 tokens -1/2, 8 tokens -1; what no function scored has no penalty."""
  out = completions([["12$", "123456$"], ["12345678", "12345678"]] + [["1$", "2$"]])
  scored = score(
    [["12$", "123456$"], ["12345678", "12345678"]] + [["1$", "2$"]],
    fixed([[1, 1], [1, NAN], [1, 1]]),
  )
  shaped = rollout.with_overlong(scored, out, max_tokens=8, share=0.25)
  np.testing.assert_array_equal(shaped.scores["overlong"], [[0, -0.5], [-1, NAN], [0, 0]])
  assert shaped.steps["overlong"] == [[], [(6, -0.5)], [(8, -1.0)], [], [], []]
  np.testing.assert_array_equal(shaped.rewards_PG, scored.rewards_PG)
  rewards_PGT, ends_PGT = rollout.step_rewards(out, shaped, (2.0, 1.0), TOKENS.decode)
  np.testing.assert_array_equal(
    rewards_PGT[0], [[0, 0, 2, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1.5, 0]]
  )
  np.testing.assert_array_equal(ends_PGT.sum(-1), [[1, 1], [1, 0], [1, 1]])


@pytest.mark.parametrize(
  "family", ["llama2", "qwen"]
)  # bytes as pieces of sentencepiece, byte-level pieces
@pytest.mark.parametrize("text", ["🦜🦜é;x=北;1", " a;🦜", "é;;"])
def test_a_step_ends_at_the_token_with_its_last_character(family, text):
  """Also where characters are several tokens, of which a part may decode to more characters than the whole."""
  tokens = tokenizer.load(Path(__file__).parent / f"golden/tokenizers/{family}")
  ids = [*tokens.encode_batch_after([text])[0], tokens.stop_ids[0]]
  out = completions([["0"]], width=len(ids))
  out.tokens_PGT[0, 0], out.lengths_PG[0, 0] = ids, len(ids)
  of_semicolons = lambda completions, **_: [
    [(i + 1, float(i)) for i, c in enumerate(x) if c == ";"] for x in completions
  ]
  prompts = dataclasses.replace(PROMPTS, texts=("",), columns={})
  scored = rollout.score(out, prompts, tokens.decode, [of_semicolons], (1.0,))
  assert scored.texts == [[text]]
  rewards_PGT, ends_PGT = rollout.step_rewards(out, scored, (1.0,), tokens.decode)
  # By hand: the token after which this many semicolons are written for the first time, the stop token for the last one.
  counts = [tokens.decode(ids[: t + 1]).count(";") for t in range(len(ids))]
  where = [counts.index(n) for n in range(1, text.count(";") + 1)]
  if text.endswith(";"):
    where[-1] = len(ids) - 1
  np.testing.assert_array_equal(np.flatnonzero(ends_PGT[0, 0]), where)
  np.testing.assert_array_equal(
    rewards_PGT[0, 0, where], [i for i, c in enumerate(text) if c == ";"]
  )
