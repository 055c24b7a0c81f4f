"""How a step's batch is collected: draws, groups that differ, penalties, steps and temperatures."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from small_run import G, P, T, small_config, small_run, with_reward, with_section

from grpo_jax.batches.collect import Collector
from grpo_jax.config import TEMPERATURE_SCHEDULES, Sampling
from grpo_jax.data import loader
from grpo_jax.rollouts.complete import make_rollout
from grpo_jax.run.parameters import Parameters
from grpo_jax.sampler.sampling import TEMPERATURES, temperature_at
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import ConfigStopsRun
from grpo_jax.timing import Clock

# Groups of prompts that end in 3= or 7= have different rewards. The others have equal ones.
SOMETIMES = """
def reward(completions, prompts, completion_ids, **_):
  ids = [sum(tokens) for tokens in completion_ids]
  return [float(i) if p.endswith(("3=", "7=")) else 0.5 for i, p in zip(ids, prompts)]
"""
DIFFERS = ("3=", "7=")


class Small:
  """A run with its collector and its policy. Call it for what it collects in a step."""

  def __init__(self, config):
    self.run = small_run(config)
    self.collector = Collector(self.run, Scorers(self.run))
    self.params = self.run.initial_params()

  def __call__(self, index, host=None):
    host = self.collector.initial_host_state() if host is None else host
    return self.collector(self.params, index, host, Clock())

  def advantages_PGT(self, collected):
    with_advantages = self.run.programs.with_advantages
    return np.asarray(with_advantages(collected.batch, collected.rewards, 0.0)[0].advantages_PGT)

  def first_partly_live(self):
    """The first step in which some groups of the batch differ, and not all."""
    steps = (self(index) for index in range(20))
    return next(found for found in steps if 0 < found.metrics["dynamic_sampling/kept"] < P)


def prompts_of(collected):
  """The texts of the batch's prompts."""
  return [row["prompt"] for row in collected.rows][::G]


def by_group(collected, name):
  """A field of the rows as an array [P, G]."""
  return np.array([row[name] for row in collected.rows]).reshape(P, G)


def test_a_step_without_dynamic_sampling_is_one_draw_of_its_own_number(tmp_path):
  small = Small(with_reward(small_config(), tmp_path, SOMETIMES))
  prompts = small.collector.prompts
  found = small(3)
  made = prompts.make(loader.step_indices(0, 3, P, len(prompts)))
  assert prompts_of(found) == [prompt.text for prompt in made]
  assert not any(name.startswith("dynamic_sampling") for name in found.metrics)
  assert "sampling/temperature" not in found.metrics
  again = small(3)
  jax.tree.map(np.testing.assert_array_equal, again.batch, found.batch)
  assert (again.rows, again.metrics) == (found.rows, found.metrics)
  jax.tree.map(np.testing.assert_array_equal, again.host, found.host)


def test_groups_of_equal_rewards_are_replaced_by_fresh_ones(tmp_path):
  """The batch holds the first groups that differ, in the order of their numbers."""
  config = small_config(dynamic_sampling=True, max_resample_rounds=9)
  small = Small(with_reward(config, tmp_path, SOMETIMES))
  run, prompts = small.run, small.collector.prompts
  found = small(1)
  rollout = make_rollout(run, G)
  tokens, texts, sampled, asked, drawn = [], [], 0, 0, 0
  for number in range(10, 20):
    batch = loader.prompt_batch(prompts, loader.step_indices(0, number, P, len(prompts)))
    rollouts = rollout(small.params, batch, jax.random.fold_in(run.key("sample"), number))
    for p, text in enumerate(batch.columns["prompts"]):
      if len(tokens) < P:
        drawn += 1
        sampled += int(rollouts.completions.lengths_PG[p].sum())
        asked += G * int(batch.prompt_lengths_P[p])
        if text.endswith(DIFFERS):
          tokens.append(rollouts.completions.tokens_PGT[p])
          texts.append(text)
  assert drawn > P
  np.testing.assert_array_equal(found.batch.completions_PGT, tokens)
  assert prompts_of(found) == texts
  lengths_P = np.asarray(found.batch.prompt_lengths_P)
  read = [row[:n].tolist() for row, n in zip(np.asarray(found.batch.prompts_PS), lengths_P)]
  assert read == run.tokenizer.encode_batch(texts)
  assert (found.batch.mask_PGT.sum((1, 2)) > 0).all()
  expected = {"drawn": drawn, "kept": P, "dropped": drawn - P}
  assert {name: found.metrics[f"dynamic_sampling/{name}"] for name in expected} == expected
  # These count everything that was sampled, and not only what is in the batch.
  assert found.metrics["frac_reward_zero_std"] == pytest.approx(1 - P / drawn)
  counts = [found.metrics[name] for name in ("completions/tokens", "prompts/tokens", "num_tokens")]
  assert counts == [sampled, asked, sampled + asked]
  # The next step begins with the group after them.
  assert found.host["next_group"] == 10 * P + drawn


@pytest.mark.slow
def test_places_that_no_group_fills_are_left_out_of_the_loss_and_of_every_mean(tmp_path):
  """group_mean_batch_std divides by the deviation of the live groups' rewards alone."""
  config = small_config("lite_ppo", dynamic_sampling=True, max_resample_rounds=1)
  small = Small(with_reward(config, tmp_path, SOMETIMES))
  found = small.first_partly_live()
  kept = int(found.metrics["dynamic_sampling/kept"])
  counts_P = np.asarray(found.batch.mask_PGT.sum((1, 2)) > 0)
  np.testing.assert_array_equal(counts_P, np.arange(P) < kept)
  assert [text.endswith(DIFFERS) for text in prompts_of(found)] == list(counts_P)
  assert found.metrics["dynamic_sampling/drawn"] == 2 * P
  rewards_PG = by_group(found, "reward")[:kept]
  expected_PG = (rewards_PG - rewards_PG.mean(1, keepdims=True)) / (rewards_PG.std(ddof=1) + 1e-4)
  advantages_PGT = small.advantages_PGT(found)
  np.testing.assert_allclose(advantages_PGT[:kept, :, 0], expected_PG, rtol=1e-4)
  assert (advantages_PGT[kept:] == 0).all()


def test_scores_keep_the_order_of_their_weights(tmp_path):
  """By numpy: names out of order, unequal weights, groups that are left out, and a penalty."""
  source = SOMETIMES + (
    "\ndef another(completions, **_):\n  return [len(c) * 10.0 for c in completions]\n"
  )
  config = small_config("dr_grpo", dynamic_sampling=True, overlong=0.4)
  names, weights = ("reward", "another"), (2.0, -1.0)
  small = Small(with_reward(config, tmp_path, source, names, weights))
  found = small(0)
  assert found.metrics["dynamic_sampling/drawn"] > P
  weighted_PG = 2 * by_group(found, "rewards/reward") - by_group(found, "rewards/another")
  np.testing.assert_allclose(by_group(found, "reward"), weighted_PG, rtol=1e-6)
  penalty_PG = np.minimum(0, (3 - by_group(found, "length")) / 2)
  np.testing.assert_allclose(by_group(found, "rewards/overlong"), penalty_PG)
  total_PG = weighted_PG + penalty_PG
  is_live_P = np.asarray(found.batch.mask_PGT).max((1, 2)) > 0
  expected_PG = (total_PG - total_PG.mean(1, keepdims=True)) * is_live_P[:, None]
  np.testing.assert_allclose(small.advantages_PGT(found)[..., 0], expected_PG, rtol=1e-5, atol=1e-4)


def test_overlong_is_a_score_of_its_own(tmp_path):
  """T = 5, the last 2 tokens: 3 tokens 0, 4 tokens -1/2, 5 tokens -1.

  The metrics reward and frac_reward_zero_std are of the reward functions alone.
  """
  source = (
    "def reward(completions, prompts, **_):\n"
    "  return [None if p.endswith('0=') else 1 for p in prompts]\n"
  )
  small = Small(with_reward(small_config(overlong=0.4), tmp_path, source))
  found = small(0)
  lengths_PG = by_group(found, "length")
  unscored_P1 = np.array([text.endswith("0=") for text in prompts_of(found)])[:, None]
  penalty_PG = np.where(unscored_P1, np.nan, np.clip((3 - lengths_PG) / 2, -1, 0))
  np.testing.assert_allclose(found.rewards.scores_PGJ[..., 1], penalty_PG)
  assert found.rewards.weights == (1.0, 1.0)
  assert found.metrics["frac_reward_zero_std"] == 1 and found.metrics["reward"] == 1
  assert found.metrics["rewards/overlong/mean"] == pytest.approx(np.nanmean(penalty_PG))
  assert {row["reward"] for row in found.rows} <= {1.0, None}
  advantages_PGT = small.advantages_PGT(found)
  for p in range(P):
    differ = len(set(lengths_PG[p].clip(3))) > 1 and not unscored_P1[p]
    assert bool((advantages_PGT[p] != 0).any()) == differ


@pytest.mark.slow
def test_an_advantage_that_takes_no_negative_reward_stops_the_run_at_one(tmp_path):
  source = "def reward(completions, **_):\n  return [1, 0, {}] * (len(completions) // 3)\n"
  config = small_config("max_rl")
  match = "the reward -0.5: .* none below 0.*another --workdir$"
  with pytest.raises(ConfigStopsRun, match=match):  # the trainer then promises nothing
    Small(with_reward(config, tmp_path, source.format(-0.5)))(0)
  small = Small(with_reward(config, tmp_path, source.format("None")))
  found = small(0)
  np.testing.assert_allclose(small.advantages_PGT(found)[..., 0], [[1, -1, 0]] * P)


def test_a_function_may_be_named_overlong_where_there_is_no_penalty(tmp_path):
  source = "def overlong(completions, **_):\n  return [float(len(c)) for c in completions]\n"
  found = Small(with_reward(small_config(), tmp_path, source, ("overlong",)))(0)
  lengths = [float(len(row["completion"])) for row in found.rows]
  assert [row["reward"] for row in found.rows] == lengths
  assert [row["rewards/overlong"] for row in found.rows] == lengths


def test_rewards_of_steps_reach_the_tokens(tmp_path):
  """A step for every character but the first, worth its place modulo 2: by hand from the formula.

  The last step includes the token that ends the completion.
  """
  source = """
def reward(completions, **_):
  return [[(i, float(i % 2)) for i in range(2, len(c) + 1)] or 1.0 for c in completions]
"""
  small = Small(with_reward(small_config("process"), tmp_path, source))
  found = small(0)
  tokens_BT = np.asarray(found.batch.completions_PGT).reshape(P * G, T)
  rewards, ends = np.zeros((P * G, T)), np.zeros((P * G, T), bool)
  for b, row in enumerate(found.rows):
    characters, last = len(row["completion"]), row["length"] - 1
    # A special token writes nothing.
    widths = [len(small.run.tokenizer.decode([int(id)])) for id in tokens_BT[b, : last + 1]]
    written = np.cumsum(widths)
    for i in range(2, characters + 1):
      at = last if i == characters else int((written < i).sum())
      rewards[b, at], ends[b, at] = i % 2, True
    if characters < 2:
      rewards[b, last], ends[b, last] = 1, True
  np.testing.assert_array_equal(found.rewards.step_rewards_PGT, rewards.reshape(P, G, T))
  np.testing.assert_array_equal(found.rewards.step_ends_PGT, ends.reshape(P, G, T))
  advantages_PGT = small.advantages_PGT(found)
  for p in range(P):
    group = slice(p * G, p * G + G)
    values = rewards[group][ends[group]]
    z = (rewards[group] - values.mean()) / (values.std(ddof=1) + 1e-4)
    z = np.where(ends[group], z, 0)
    expected = np.cumsum(z[:, ::-1], 1)[:, ::-1] * np.asarray(found.batch.mask_PGT[p])
    np.testing.assert_allclose(advantages_PGT[p], expected, atol=1e-4)


def test_process_supervision_with_rewards_of_whole_completions_is_grpo(tmp_path):
  small = Small(with_reward(small_config("process"), tmp_path, SOMETIMES))
  found = small(0)
  grpo = small_run(small_config())
  expected, _ = grpo.programs.with_advantages(found.batch, found.rewards, 0.0)
  assert (np.asarray(expected.advantages_PGT) != 0).any()
  np.testing.assert_allclose(small.advantages_PGT(found), expected.advantages_PGT, atol=1e-5)


def test_what_was_sampled_is_what_is_trained(tmp_path):
  """Through a chat template and a tokenizer of bytes.

  A random model writes tokens that its text would not be encoded to, so the batch must hold the
  sampled tokens and not those of the text.
  """
  source = (
    "def reward(completions, completion_ids, messages, prompts, **_):\n"
    "  seen.append((completions, completion_ids, messages, prompts))\n"
    "  return [0.0] * len(completions)\n\n\nseen = []\n"
  )
  questions = [[{"role": "user", "content": "2 pens?"}], "3 pens?"]
  for split in ("train", "test"):
    lines = [json.dumps({"question": question, "answer": "#### 2"}) for question in questions]
    (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
  config = with_section(
    with_reward(small_config(), tmp_path, source),
    "data",
    task="gsm8k",
    path=str(tmp_path),
    tokenizer=str(Path(__file__).parent / "golden/tokenizers/qwen"),
    chat=True,
    system="Add.",
    max_prompt_tokens=64,
  )
  small = Small(config)
  tokenizer = small.run.tokenizer
  found = small(0)
  (function,) = small.collector._score._functions
  completions, ids, messages, prompts = function.__globals__["seen"][
    -1
  ]  # the first call was made up

  batch, indices_P = found.batch, loader.step_indices(0, 0, P, 2)
  assert messages[::G] == [
    [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{2 + i} pens?"}]
    for i in indices_P
  ]
  for p, row in enumerate(np.asarray(batch.prompts_PS)):
    text = tokenizer.render(messages[p * G])
    assert prompts[p * G] == text
    assert row[: batch.prompt_lengths_P[p]].tolist() == tokenizer.encode(text)

  drawn = loader.prompt_batch(small.collector.prompts, indices_P)
  key = jax.random.fold_in(small.run.key("sample"), 0)
  sampled = make_rollout(small.run, G)(small.params, drawn, key).completions
  np.testing.assert_array_equal(batch.completions_PGT, sampled.tokens_PGT)
  np.testing.assert_array_equal(batch.mask_PGT.sum(-1), sampled.lengths_PG)
  rows = zip(sampled.tokens_PGT.reshape(P * G, T), sampled.lengths_PG.ravel())
  assert ids == [row[:n].tolist() for row, n in rows]
  assert completions == [row["completion"] for row in found.rows]
  again = tokenizer.encode_batch_after(completions)
  assert sum(a != b for a, b in zip(again, ids)) > P * G / 2


def test_every_schedule_of_the_config_has_a_function():
  assert set(TEMPERATURES) == set(TEMPERATURE_SCHEDULES)


def test_every_schedule_goes_from_the_first_temperature_to_the_last():
  """A new schedule is tested as soon as the config allows its name."""
  for schedule in set(TEMPERATURE_SCHEDULES) - {"constant"}:
    sampling = Sampling(temperature=2.0, temperature_schedule=schedule, temperature_end=0.5)
    found = [temperature_at(sampling, i, 5) for i in range(5)]
    assert found[0] == pytest.approx(2.0) and found[-1] == pytest.approx(0.5), schedule
    assert found == sorted(found, reverse=True), schedule


def test_the_constant_temperature_ignores_where_it_would_end():
  sampling = Sampling(temperature=0.7, temperature_end=0.1)
  assert [temperature_at(sampling, i, 5) for i in range(5)] == [0.7] * 5


@pytest.mark.parametrize(
  "schedule, expected",
  [
    ("linear", [2.0, 1.625, 1.25, 0.875, 0.5]),
    # 0.5 + 1.5 (1 + cos(pi i / 4)) / 2
    ("cosine", [0.5 + 0.75 * (1 + math.cos(math.pi * i / 4)) for i in range(5)]),
  ],
)
def test_the_temperature_goes_from_the_first_step_to_the_last(schedule, expected):
  sampling = Sampling(temperature=2.0, temperature_schedule=schedule, temperature_end=0.5)
  found = [temperature_at(sampling, i, 5) for i in range(5)]
  assert all(type(temperature) is float for temperature in found)
  assert found == pytest.approx(expected, rel=1e-6)
  assert found[0] == 2.0 and found[-1] == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_temperature_may_rise_and_a_run_of_one_step_has_the_first_one(schedule):
  sampling = Sampling(temperature=0.5, temperature_schedule=schedule, temperature_end=1.5)
  assert [temperature_at(sampling, i, 3) for i in range(3)] == pytest.approx([0.5, 1.0, 1.5])
  assert temperature_at(sampling, 0, 1) == 0.5


@pytest.mark.slow
def test_each_completion_is_scored_once_with_greedy_ones_beside(tmp_path):
  source = f"""
def reward(completions, **_):
  open({str(tmp_path / "calls")!r}, "a").write("x" * len(completions))
  return [1.0] * len(completions)
"""
  small = Small(with_reward(small_config(advantage="greedy_baseline"), tmp_path, source))
  (tmp_path / "calls").unlink(missing_ok=True)  # of the check at the start
  small(0)
  assert len((tmp_path / "calls").read_text()) == P * G + P


def test_the_learner_knows_how_long_completions_may_be_that_were_cut():
  """Some scalings of the rotary embedding depend on it (see learner_test.py)."""
  config = small_config()
  most = config.sampling.max_tokens
  run = small_run(config)
  shape = run.parameters.model
  assert shape.completion_tokens == most
  assert shape.text_tokens == 0
  # The endpoint of a harness has room for a turn after the longest text.
  config = with_section(config, "environment", harness="mine.py:play")
  for turn_tokens, longest in ((0, 2 * most), (3, most + 3)):
    config = with_section(config, "environment", turn_tokens=turn_tokens)
    text_tokens = Parameters(config, shape, run.hosts.mesh).model.text_tokens
    assert text_tokens == config.data.max_prompt_tokens + longest
