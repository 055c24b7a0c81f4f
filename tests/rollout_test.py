"""The host's half of a step: texts, rewards, the rewards of steps, metrics and rows."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from grpo_jax.batches.rollout_metrics import (
  completion_rows,
  rollout_metrics,
  score_metrics,
  source_metrics,
  staleness_metrics,
)
from grpo_jax.config import Data, Mesh
from grpo_jax.data.loader import prompt_batch
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.parallel.mesh import make_mesh
from grpo_jax.rewards import REWARDS, Caller
from grpo_jax.rollouts import rollout
from grpo_jax.rollouts.complete import Completer, whole_batches
from grpo_jax.rollouts.player import Opened, PolicyPlayer
from grpo_jax.rollouts.rollout import Rollouts, sampled_ids, take, texts_of
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.requests import Finished, News
from grpo_jax.scoring.scorer import Scorer, Weighted, completion_columns
from grpo_jax.scoring.scores import groups_that_differ, with_overlong
from grpo_jax.settings import ConfigError
from grpo_jax.types import Completions, Rewards

NAN = float("nan")
TOKENS = tokenizer.characters("0123456789+=# ")
EOS = TOKENS.stop_ids[0]
EXAMPLES = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in ((1, 2), (3, 4), (5, 6))]
SPLIT = PromptSet(EXAMPLES, TOKENS, Data(max_prompt_tokens=8))
PROMPTS, PROMPTS_MADE = prompt_batch(SPLIT, np.arange(3)), SPLIT.make(range(3))
HOSTS = Hosts(make_mesh(Mesh(), jax.devices()[:1]))


def completions(texts, width=8):
  """Completions with the [P][G] texts.

  The end-of-sequence token stopped a text that ends in $. Another one was cut off. An environment
  wrote what is in square brackets.
  """
  P, G = len(texts), len(texts[0])
  tokens_PGT, lengths_PG = np.zeros((P, G, width), np.int32), np.zeros((P, G), np.int32)
  sampled_PGT = np.zeros((P, G, width), bool)
  stopped_by_PG = np.full((P, G), -1, np.int32)
  for p, g in np.ndindex(P, G):
    is_sampled = True
    for character in texts[p][g]:
      if character in "[]":
        is_sampled = character == "]"
        continue
      t = lengths_PG[p, g]
      tokens_PGT[p, g, t] = EOS if character == "$" else TOKENS.encode(character)[0]
      sampled_PGT[p, g, t] = is_sampled
      lengths_PG[p, g] += 1
    if texts[p][g].endswith("$"):
      stopped_by_PG[p, g] = EOS
  zeros_PGT = np.zeros(tokens_PGT.shape, np.float32)
  return Completions(
    tokens_PGT=tokens_PGT,
    lengths_PG=lengths_PG,
    sampled_PGT=sampled_PGT,
    logprobs_PGT=zeros_PGT,
    behavior_logprobs_PGT=zeros_PGT,
    stopped_by_PG=stopped_by_PG,
  )


def rollouts_of(texts, width=8):
  found = completions(texts, width)
  return Rollouts(completions=found, texts_PG=texts_of(found, TOKENS.decode))


def scorer(*functions, weights=None, needs_steps=False, decode=TOKENS.decode):
  weighted = list(map(Weighted, functions, weights or (1.0,) * len(functions)))
  return Scorer(weighted, HOSTS, decode, Caller(None), needs_steps)


def score(texts, *functions, **options):
  """The rewards of the texts under these functions."""
  return scorer(*functions, **options)(rollouts_of(texts), PROMPTS).rewards


def fixed(rewards_PG, name="fixed"):
  """A reward function that returns these numbers in order. NaN stands for None."""

  def function(completions, **_):
    return [None if np.isnan(reward) else reward for reward in np.ravel(rewards_PG)]

  function.__name__ = name
  return function


def measure(rewards_PG):
  """The metrics of completions with these rewards."""
  texts = [["0$"] * len(group) for group in rewards_PG]
  return rollout_metrics(completions(texts), score(texts, fixed(rewards_PG)), ["fixed"])


def test_texts_are_decoded_up_to_their_length_without_the_stop_token():
  found = completions([["12$", "#### 3", "$"], ["4", "5$", "66$"], ["7", "8", "9$"]])
  found.tokens_PGT[0, 0, 3:] = TOKENS.encode("99999")  # padding belongs to nobody
  texts_PG = texts_of(found, TOKENS.decode)
  assert texts_PG.tolist() == [["12", "#### 3", ""], ["4", "5", "66"], ["7", "8", "9"]]
  assert texts_PG.shape == (3, 3) and texts_PG.dtype == object


def test_texts_and_ids_are_of_the_sampled_tokens_alone():
  found = completions([["1[#7]2$", "12"], ["[###]4", "[#]$"]])
  assert texts_of(found, TOKENS.decode).tolist() == [["12", "12"], ["4", ""]]
  assert sampled_ids(found, 0, 0) == [*TOKENS.encode("12"), EOS]
  assert sampled_ids(found, 1, 0) == TOKENS.encode("4")
  assert found.lengths_PG.tolist() == [[5, 2], [4, 2]]


class Fake:
  """A `GroupSampler` with these completions. The groups `order[i]` end in its i-th chunk."""

  draws = True

  def __init__(self, texts, order):
    self.drawn, self.order, self.requests = completions(texts), list(order), []

  def submit(self, requests):
    self.requests += requests

  def advance(self):
    some = self.order.pop(0)
    return News(finished=[Finished(some, take(self.drawn, some))] if some else [])

  def cancel(self):
    self.requests.clear()


TEXTS = [["12$", "3"], ["4", "5$"], ["6", "7"]]


def played_by(fake, at_once=0):
  """A rollout with this sampler, and what was asked of it: (feed, prompts, changes)."""
  asked = []

  def player(feed, prompts, *, changes):
    asked.append((feed(), prompts, changes))
    return PolicyPlayer(fake, lambda batch: ("for", batch), RowSettings, 2, TOKENS.decode, HOSTS)

  return Completer(player, TOKENS.decode, at_once), asked


@pytest.mark.parametrize("at_once", [0, 2, 9])
def test_the_policy_samples_every_prompt_and_hands_on_the_groups_that_are_complete(at_once):
  fake, key = Fake(TEXTS, [[1], [], [0, 2]]), jax.random.key(5)
  policy, asked = played_by(fake, at_once)
  parts = [(one.numbers, one.rollouts) for one in policy.parts("params", PROMPTS, key, 0.7)]
  assert asked == [(("params", 0), 2 if at_once == 2 else 3, False)]
  assert [(some, part.texts_PG.tolist()) for some, part in parts] == [
    ([1], [["4", "5"]]),
    ([0, 2], [["12", "3"], ["6", "7"]]),
  ]
  for p, request in enumerate(fake.requests):
    assert (request.number, request.place, request.first_row) == (p, p, 2 * p)
    assert request.prompts[1] is PROMPTS and request.prompts is fake.requests[0].prompts
    np.testing.assert_array_equal(request.key, jax.random.key_data(key))
    assert request.settings == RowSettings(0.7) and not request.pauses
  assert len(fake.requests) == 3


def test_a_whole_rollout_is_in_the_order_of_its_prompts():
  policy, _ = played_by(Fake(TEXTS, [[2], [1, 0]]))
  found = policy("params", PROMPTS, jax.random.key(0))
  assert found.texts_PG.tolist() == [["12", "3"], ["4", "5"], ["6", "7"]]
  assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(found.completions))
  jax.tree.map(np.testing.assert_array_equal, found.completions, completions(TEXTS))


def test_what_completes_whole_batches_plays_the_groups_that_were_opened_together():
  """A batch of its own key, temperature and weights each, whenever its groups were opened."""
  asked = []

  def complete(params, prompts, key, temperature):
    asked.append((params, prompts, key, temperature))
    return rollouts_of(TEXTS[: len(prompts.prompt_lengths_P)])

  weights = iter(["old", "new"])
  two, keys = prompt_batch(SPLIT, np.arange(2)), jax.random.split(jax.random.key(0))
  player = whole_batches(complete, TOKENS.decode).player(lambda: (next(weights), 0), 3)
  player.submit([Opened(7 + p, PROMPTS, p, keys[0], p, 0.5) for p in range(3)])
  player.submit([Opened(10 + p, two, p, keys[1], p, 0.9) for p in range(2)])
  first, second = player.advance() + player.advance()
  assert (first.numbers, second.numbers) == ([7, 8, 9], [10, 11]) and player.advance() == []
  assert second.rollouts.texts_PG.tolist() == [["12", "3"], ["4", "5"]]
  assert [one[0] for one in asked] == ["old", "new"] and [one[3] for one in asked] == [0.5, 0.9]
  assert asked[0][1] is PROMPTS and asked[1][1] is two
  assert all((one[2] == key).all() for one, key in zip(asked, keys))
  player.submit([Opened(12, two, 0, keys[0], 0), Opened(13, two, 1, keys[0], 1)])
  player.cancel()
  assert player.advance() == []


def test_groups_of_one_key_that_are_completed_in_two_batches_are_drawn_with_other_numbers():
  """Where dynamic sampling opens a part of a batch, rows of the same places follow."""
  keys = []

  def complete(params, prompts, key, temperature):
    keys.append(key)
    return rollouts_of(TEXTS[: len(prompts.prompt_lengths_P)])

  player = whole_batches(complete, TOKENS.decode).player(lambda: (None, 0), 3)
  one, key = prompt_batch(SPLIT, np.arange(1)), jax.random.key(0)
  others = [prompt_batch(SPLIT, np.arange(1)) for _ in range(2)]
  for row, prompts in enumerate([one, *others]):
    player.submit([Opened(row, prompts, 0, key, row)])
    player.advance()
  assert (keys[0] == key).all() and len(
    {tuple(jax.random.key_data(one).tolist()) for one in keys}
  ) == 3


def test_groups_can_be_taken_and_put_one_after_the_other():
  first = rollouts_of([["1", "2"], ["3$", "4"]])
  second = rollouts_of([["5", "6$"]])
  both = rollout.concatenate([first, second])
  expected = rollouts_of([["1", "2"], ["3$", "4"], ["5", "6$"]])
  jax.tree.map(np.testing.assert_array_equal, both, expected)
  taken = rollout.take(both, np.array([2, 0]))
  expected = rollouts_of([["5", "6$"], ["1", "2"]])
  jax.tree.map(np.testing.assert_array_equal, taken, expected)


def test_the_column_task_chooses_the_function(capsys):
  """As in a file of verl with data.columns=('task=data_source',)."""
  sources = ("openai/gsm8k", "aime", "olympiad")
  examples = [{**example, "task": source} for example, source in zip(EXAMPLES, sources)]
  prompts = PromptSet(examples, TOKENS, Data(max_prompt_tokens=8))
  texts = [["#### 3", "3"], ["#### 7", "7"], ["#### 11", "11"]]

  def scorer_for(*names):
    functions = (REWARDS["strict"], REWARDS["flexible"])
    weighted = [Weighted(one, 1.0, name) for one, name in zip(functions, names)]
    return Scorer(weighted, HOSTS, TOKENS.decode, Caller(None))

  score = scorer_for("openai/gsm8k", "aime")
  score.check_arguments(prompts, "reward.functions")
  assert "no function for the tasks olympiad: their" in capsys.readouterr().err
  scores_PGJ = score(rollouts_of(texts), prompt_batch(prompts, np.arange(3))).rewards.scores_PGJ
  expected = [[[1, NAN], [0, NAN]], [[NAN, 1], [NAN, 1]], [[NAN, NAN]] * 2]
  np.testing.assert_array_equal(scores_PGJ, expected)
  for names in (("openai/gsm8k", ""), ("openai/gsm8k, olympiad", "aime")):
    scorer_for(*names).check_arguments(prompts, "reward.functions")
  assert capsys.readouterr().err == ""
  for names, split, words in (
    (("gsm8k", ""), prompts, "no training example has the task 'gsm8k'; they have aime, olym"),
    (("aime", ""), SPLIT, "the examples have no field task; .* data.columns=.'task=COLUMN',"),
  ):
    with pytest.raises(ConfigError, match=words):
      scorer_for(*names).check_arguments(split, "reward.functions")


def test_every_group_member_is_scored_with_its_own_prompts_fields():
  seen = []

  def echo(completions, prompts, question, answer, completion_ids, **_):
    seen.extend(zip(completions, prompts, question, answer, completion_ids))
    return [float(c == a) for c, a in zip(completions, answer)]

  texts = [["3$", "7"], ["3", "7$"], ["11$", "1[0]1"]]  # 1+2, 3+4, 5+6
  rewards = score(texts, echo)
  np.testing.assert_array_equal(rewards.score_PG, [[1, 0], [0, 1], [1, 1]])
  expected = []
  for group, example in zip(texts, EXAMPLES):
    question, answer = example["question"], example["answer"]
    for text in group:
      written = text.replace("[0]", "").rstrip("$")
      ids = TOKENS.encode(written) + [EOS] * text.endswith("$")
      expected.append((written, question, question, answer, ids))
  assert seen == expected
  columns = completion_columns(rollouts_of(texts), PROMPTS)
  assert columns["answer"] == [example["answer"] for example in EXAMPLES for _ in range(2)]


def test_rewards_are_weighted_and_each_functions_scores_are_kept():
  first, second = np.array([[1, 0], [1, NAN], [0, NAN]]), np.array([[2, 4], [NAN, 6], [8, NAN]])
  texts = [["0", "1"]] * 3
  score_texts = scorer(fixed(first, "a"), fixed(second, "b"), weights=(1.0, 0.5))
  rewards = score_texts(rollouts_of(texts), PROMPTS).rewards
  # None counts as nothing. Where both are None, the reward is NaN.
  np.testing.assert_array_equal(rewards.score_PG, [[2, 2], [1, 3], [4, NAN]])
  np.testing.assert_array_equal(rewards.scores_PGJ, np.stack([first, second], -1))
  assert rewards.scores_PGJ.dtype == np.float32 and rewards.weights == (1.0, 0.5)
  assert rewards.step_rewards_PGT is None and rewards.step_ends_PGT is None
  assert score_texts.names == ["a", "b"] and score_texts.weights == (1.0, 0.5)
  values = rollout_metrics(completions(texts), rewards, score_texts.names)
  assert values["rewards/a/unscored"] == 2 and values["rewards/b/unscored"] == 2
  assert values["rewards/a/mean"] == 0.5 and values["rewards/b/mean"] == 5.0  # 2/4 and 20/4
  assert values["rewards/a/std"] == pytest.approx((1 / 3) ** 0.5)  # of 1 0 1 0, with 3 below
  assert values["rewards/b/std"] == pytest.approx((20 / 3) ** 0.5)  # of 2 4 6 8
  alone = score_metrics(rewards, score_texts.names)
  assert alone == {name: values[name] for name in alone} and len(alone) == 6


def test_reward_and_its_spread_leave_unscored_completions_out():
  values = measure([[1, 0, NAN, 1], [0, 0, 0, NAN], [1, 1, 1, 1]])
  # Ten scored rewards, six of them 1: variance 10 * 0.6 * 0.4 / 9.
  assert values["reward"] == pytest.approx(0.6)
  assert values["reward_std"] == pytest.approx((2.4 / 9) ** 0.5)


@pytest.mark.parametrize(
  "group, differs",
  [
    ([0, 1, 0, 0], True),
    ([0.7, 0.7, 0.7, 0.7], False),
    ([0.7, NAN, 0.7, 0.7], False),
    ([NAN, NAN, NAN, 0.3], False),
    ([NAN] * 4, False),
    ([0.1, 0.1 + 1e-6, 0.1, NAN], True),
  ],
)
def test_a_group_has_no_spread_where_no_two_scored_rewards_differ(group, differs):
  rewards_PG = [group, [0, 1, 1, 0], [0, NAN, 1, 0]]
  expected = (1 - differs) / 3
  assert measure(rewards_PG)["frac_reward_zero_std"] == pytest.approx(expected)
  rewards = score([["0$"] * 4] * 3, fixed(rewards_PG))
  assert groups_that_differ(rewards).tolist() == [differs, True, True]


def test_where_nothing_is_scored_metrics_are_nan_without_a_warning(recwarn):
  values = measure(np.full((3, 2), NAN))
  assert np.isnan([values["reward"], values["reward_std"], values["rewards/fixed/mean"]]).all()
  assert values["frac_reward_zero_std"] == 1 and not recwarn.list


def test_lengths_count_the_stop_token_and_the_clipped_are_those_without_one():
  texts = [["12$", "1234"], ["$", "1"], ["12345$", "12345678"]]  # lengths 3 4 1 1 6 8
  rewards = score(texts, fixed(np.zeros((3, 2))))
  values = rollout_metrics(completions(texts), rewards, ["fixed"])
  lengths = [values[f"completions/{name}_length"] for name in ("mean", "min", "max")]
  assert lengths == [pytest.approx(23 / 6), 1, 8]
  assert values["completions/clipped_ratio"] == 0.5 and values["completions/tokens"] == 23
  ended = [values[f"completions/{name}_terminated_length"] for name in ("mean", "min", "max")]
  assert ended == [pytest.approx(10 / 3), 1, 6]  # lengths 3 1 6
  values = rollout_metrics(completions([["1", "2"]] * 3), rewards, ["fixed"])
  ended = [values[f"completions/{name}_terminated_length"] for name in ("mean", "min", "max")]
  assert ended == [0, 0, 0]  # none ended: 0, as in TRL


def test_tokens_and_the_filters_gap_are_of_the_sampled_tokens_alone():
  """Nobody drew the tokens of an environment, so their log-probs may hold anything."""
  found = completions([["1[23]4$", "12"], ["1", "[12]34$"], ["5$", "6"]])
  sampled_PGT = found.sampled_PGT
  assert sampled_PGT.sum() == 12 and found.lengths_PG.sum() == 16
  gap_PGT = np.random.default_rng(0).random(sampled_PGT.shape).astype(np.float32)
  is_token = np.arange(8) < found.lengths_PG[..., None]
  found = found.replace(
    logprobs_PGT=np.where(is_token, np.where(sampled_PGT, -gap_PGT, NAN), 0),
    behavior_logprobs_PGT=np.zeros_like(gap_PGT),
  )
  rewards = score([["0$"] * 2] * 3, fixed(np.zeros((3, 2))))
  values = rollout_metrics(found, rewards, ["fixed"])
  assert values["completions/tokens"] == 12
  # As in TRL, lengths count what the policy sampled: 3 2 1 3 2 1.
  lengths = [values[f"completions/{name}_length"] for name in ("mean", "min", "max")]
  assert lengths == [2, 1, 3]
  assert values["sampler/filter_gap_mean"] == pytest.approx(gap_PGT[sampled_PGT].mean())


def test_each_source_of_a_mixture_has_its_reward_and_its_share_of_idle_groups():
  rewards = score([["1", "2"]] * 3, fixed([[0, 1], [NAN, 3], [4, 4]]))
  found = source_metrics(rewards, ["a", "b", "a"], ["a", "b", "c"])
  assert found.pop("reward/c") != found.pop("frac_reward_zero_std/c")  # NaN
  assert found == {
    "reward/a": 2.25,
    "frac_reward_zero_std/a": 0.5,
    "reward/b": 3.0,
    "frac_reward_zero_std/b": 1.0,  # one reward alone differs from no other
  }


def test_rows_are_json_in_group_order_and_no_function_hides_another_field():
  texts = [["1$", "2"], ["3$", "4"], ["5[+]$", "6"]]
  functions = fixed([[0, 1], [NAN, 3], [4, 5]], "reward"), fixed(np.ones((3, 2)), "length")
  rewards = score(texts, *functions)
  rows = completion_rows(
    rollouts_of(texts),
    PROMPTS_MADE,
    np.asarray(rewards.score_PG),
    rewards.scores_PGJ,
    ["reward", "length"],
  )
  assert json.loads(json.dumps(rows, allow_nan=False)) == rows
  assert rows[2] == {
    "prompt": "3+4=",
    "completion": "3",
    "reward": 1.0,
    "rewards/reward": None,
    "rewards/length": 1.0,
    "length": 2,
    "stopped_by": EOS,
    "prompt_ids": TOKENS.encode("3+4="),
    "completion_ids": [*TOKENS.encode("3"), EOS],
    "logprobs": [0.0, 0.0],
  }
  assert rows[3] == {
    "prompt": "3+4=",
    "completion": "4",
    "reward": 4.0,
    "rewards/reward": 3.0,
    "rewards/length": 1.0,
    "length": 1,
    "stopped_by": -1,
    "prompt_ids": TOKENS.encode("3+4="),
    "completion_ids": TOKENS.encode("4"),
    "logprobs": [0.0],
  }
  assert [row["completion"] for row in rows] == list("123456")
  assert [row["length"] for row in rows] == [2, 1, 2, 1, 3, 1]


def test_overlong_is_a_step_only_where_it_takes_something():
  """The last quarter of 8 tokens: 3 tokens 0, 7 tokens -1/2, 8 tokens -1.

  A completion that no function scored has no penalty.
  """
  texts = [["12$", "123456$"], ["12345678", "12345678"], ["1$", "2$"]]
  function = fixed([[1, 1], [1, NAN], [1, 1]])
  rewards = score(texts, function, weights=(2.0,), needs_steps=True)
  shaped = with_overlong(rewards, completions(texts), max_tokens=8, fraction=0.25)
  np.testing.assert_array_equal(shaped.scores_PGJ[..., 0], rewards.scores_PGJ[..., 0])
  np.testing.assert_array_equal(shaped.scores_PGJ[..., 1], [[0, -0.5], [-1, NAN], [0, 0]])
  assert shaped.weights == (2.0, 1.0) and shaped.scores_PGJ.dtype == np.float32
  expected_PGT, ends_PGT = np.zeros((3, 2, 8)), np.zeros((3, 2, 8))
  # The step of the function and that of the penalty end at the same token.
  for p, g, t, reward in (
    (0, 0, 2, 2.0),
    (0, 1, 6, 2 - 0.5),
    (1, 0, 7, 2 - 1.0),
    (2, 0, 1, 2.0),
    (2, 1, 1, 2.0),
  ):
    expected_PGT[p, g, t], ends_PGT[p, g, t] = reward, 1
  np.testing.assert_array_equal(shaped.step_rewards_PGT, expected_PGT)
  np.testing.assert_array_equal(shaped.step_ends_PGT, ends_PGT)


def test_a_penalty_is_a_step_of_its_own_where_no_step_ends_at_the_last_token():
  texts = [["12345678", "123456$"], ["12$", "1$"]]

  def first_character(completions, **_):
    return [[(1, 1.0)] for _ in completions]

  rewards = score(texts, first_character, needs_steps=True)
  shaped = with_overlong(rewards, completions(texts), max_tokens=8, fraction=0.25)
  np.testing.assert_array_equal(shaped.step_ends_PGT.sum(-1), [[2, 2], [1, 1]])
  np.testing.assert_array_equal(shaped.step_rewards_PGT[0, 0], [1, 0, 0, 0, 0, 0, 0, -1])
  np.testing.assert_array_equal(shaped.step_rewards_PGT[0, 1], [1, 0, 0, 0, 0, 0, -0.5, 0])


def test_overlong_without_steps_adds_a_score_alone():
  rewards = Rewards(scores_PGJ=np.ones((1, 2, 1), np.float32), weights=(3.0,))
  shaped = with_overlong(rewards, completions([["12345678", "1$"]]), max_tokens=8, fraction=0.25)
  np.testing.assert_array_equal(shaped.score_PG, [[2, 3]])
  assert shaped.step_rewards_PGT is None and shaped.step_ends_PGT is None


def test_the_rewards_of_steps_land_on_sampled_tokens():
  """Characters are counted in the sampled text. Tokens of an environment are in between."""
  texts = [["12[##]34$", "[7]12"], ["1[+]$", "[=]$"]]

  def per_character(completions, **_):
    return [[(i + 1, float(c)) for i, c in enumerate(text)] or 9.0 for text in completions]

  rewards = score(texts, per_character, needs_steps=True)
  expected_PGT = [
    # 1 2 # # 3 4 $: the last step ends with the text, so at the stop token.
    [[1, 2, 0, 0, 3, 0, 4, 0], [0, 1, 2, 0, 0, 0, 0, 0]],
    [[0, 0, 1, 0, 0, 0, 0, 0], [0, 9, 0, 0, 0, 0, 0, 0]],
  ]
  np.testing.assert_array_equal(rewards.step_rewards_PGT, expected_PGT)
  np.testing.assert_array_equal(rewards.step_ends_PGT, np.array(expected_PGT) > 0)


# Pieces of sentencepiece are bytes where need be. Byte-level pieces are always bytes.
@pytest.mark.parametrize("family", ["llama2", "qwen"])
@pytest.mark.parametrize("text", ["🦜🦜é;x=北;1", " a;🦜", "é;;"])
def test_a_step_ends_at_the_token_with_its_last_character(family, text):
  """Also where a character is several tokens.

  A part of such a character may be decoded to more characters than the whole.
  """
  tokens = tokenizer.load(Path(__file__).parent / f"golden/tokenizers/{family}")
  ids = [*tokens.encode_batch_after([text])[0], tokens.stop_ids[0]]
  found = completions([["0"]], width=len(ids))
  found.tokens_PGT[0, 0], found.sampled_PGT[0, 0], found.lengths_PG[0, 0] = ids, True, len(ids)
  rollouts = Rollouts(completions=found, texts_PG=texts_of(found, tokens.decode))
  assert rollouts.texts_PG.tolist() == [[text]]

  def semicolons(completions, **_):
    return [
      [(i + 1, float(i)) for i, c in enumerate(written) if c == ";"] for written in completions
    ]

  prompts = dataclasses.replace(PROMPTS, own=slice(0, 1), columns={})
  rewards = scorer(semicolons, needs_steps=True, decode=tokens.decode)(rollouts, prompts).rewards
  # By hand: the token after which this many semicolons are written for the first time, and the
  # stop token for a semicolon at the end of the text.
  counts = [tokens.decode(ids[: t + 1]).count(";") for t in range(len(ids))]
  where = [counts.index(n) for n in range(1, text.count(";") + 1)]
  if text.endswith(";"):
    where[-1] = len(ids) - 1
  np.testing.assert_array_equal(np.flatnonzero(rewards.step_ends_PGT[0, 0]), where)
  expected = [i for i, c in enumerate(text) if c == ";"]
  np.testing.assert_array_equal(rewards.step_rewards_PGT[0, 0, where], expected)


def test_staleness_by_hand():
  """Version 7 learns. Ages are 0, 1, 1 and 3; the tokens without a mask are not counted."""
  versions, mask = np.array([[[7, 6, 99], [6, 4, 0]]]), np.array([[[1, 1, 0], [1, 1, 0]]])
  values = staleness_metrics(versions, 7, mask)
  ages = {"mean": 1.25, "min": 0, "max": 3}
  shares = {"share_0": 0.25, "share_1": 0.5, "share_2": 0, "share_3_or_more": 0.25}
  assert values == {f"staleness/{name}": value for name, value in (ages | shares).items()}
  of_rows = staleness_metrics(np.array([[[7], [5]]]), 7, mask)
  assert of_rows["staleness/mean"] == 1 and of_rows["staleness/share_2"] == 0.5
  assert all(np.isnan(x) for x in staleness_metrics(versions, 7, 0 * mask).values())
