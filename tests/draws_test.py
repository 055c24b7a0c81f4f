"""What a step draws: rows in flight, pass rates, and a held-out check."""

import dataclasses
import time

from collect_test import Small
import jax
import numpy as np
import pytest
from small_run import G, P, small_config, with_reward, with_section

from grpo_jax.batches.rollout_metrics import check_metrics, most_disputed_first
from grpo_jax.storage.json_files import parse_rows
from grpo_jax.storage.reading import read_completions
from grpo_jax.timing import is_of_clock
from grpo_jax.training.loop import run_steps

# About half of the groups differ.
MIXED = """
def reward(completions, prompts, completion_ids, **_):
  ids = [sum(tokens) for tokens in completion_ids]
  return [float(i % 2) if p.endswith(tuple("13579=")) else 1.0 for i, p in zip(ids, prompts)]

def check(completion_ids, **_):
  return [float(len(tokens) % 2) for tokens in completion_ids]
"""

# Rows in flight.

SLEEPY = """
import pathlib

def reward(completions, completion_ids, **_):
  (pathlib.Path(__file__).parent / "began").touch()
  return [float(sum(tokens)) for tokens in completion_ids]
"""


@pytest.mark.slow
@pytest.mark.parametrize("rows", [2, *(P, 3 * P)])
def test_a_step_with_few_rows_in_flight_collects_what_it_collects_at_once(rows, tmp_path):
  at_once, few = (
    Small(with_section(with_reward(small_config(), tmp_path, MIXED), "sampling", rows=rows))(3)
    for rows in (0, rows)
  )
  for ours, theirs in zip(jax.tree.leaves(at_once.batch), jax.tree.leaves(few.batch), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
  for name in ("completion_ids", "reward", "prompt"):
    assert [row[name] for row in at_once.rows] == [row[name] for row in few.rows]
  assert at_once.metrics == pytest.approx(few.metrics, rel=1e-5)


def test_workers_score_complete_groups_while_the_others_are_sampled(tmp_path):
  """With one row in flight, the second group is not complete before a worker scores the first."""
  config = with_section(with_reward(small_config(), tmp_path, SLEEPY), "sampling", rows=1)
  small = Small(with_section(config, "reward", workers=1))
  player, parts = small.collector.flow._player, []
  advance = player.advance

  def watched():
    if parts:
      limit = time.monotonic() + 30
      while not (tmp_path / "began").exists():
        assert time.monotonic() < limit, "no worker has begun"
        time.sleep(0.01)
    played = advance()
    parts.extend(one.numbers for one in played)
    return played

  player.advance = watched
  assert len(small(0).rows) == P * G and len(parts) > 1
  assert sorted(sum(parts, [])) == list(range(P))


# The run as a whole.


@pytest.mark.slow
def test_a_resumed_run_draws_what_the_run_would_have_drawn(tmp_path):
  """With everything that the host remembers: pass rates, the place in the order, the next group."""
  algo = dict(dynamic_sampling=True, max_resample_rounds=9, kl_coef=0.0)
  config = with_reward(small_config(**algo), tmp_path, MIXED)
  config = with_section(config, "curriculum", rest=2, floor=0.5)
  config = dataclasses.replace(config, steps=4)
  run_steps(config, tmp_path / "whole")
  run_steps(config, tmp_path / "resumed", callback=lambda step: step.step == 2)
  run_steps(config, tmp_path / "resumed")
  whole, resumed = (
    [row for row, _ in parse_rows(tmp_path / name / "metrics.jsonl")]
    for name in ("whole", "resumed")
  )
  assert sum(row["dynamic_sampling/dropped"] for row in whole) > 0
  assert 0 < whole[-1]["curriculum/seen"] < 1
  for ours, theirs in zip(whole, resumed, strict=True):
    timeless = [name for name in ours if not is_of_clock(name)]
    assert {name: ours[name] for name in timeless} == {name: theirs[name] for name in timeless}
  assert all("pass_rate" in row for row in read_completions(tmp_path / "whole", 4))


def test_a_run_that_began_before_the_curriculum_remembered_something_goes_on(tmp_path):
  """A key that its memory lacks begins as in a new run."""
  small = Small(with_reward(small_config(kl_coef=0.0), tmp_path, MIXED))
  host = small(0).host
  new = small(1, host)
  older = {name: value for name, value in host["curriculum"].items() if name != "drawn_at"}
  found = small(1, host | {"curriculum": older})
  assert found.metrics == new.metrics
  drawn_at = np.asarray(found.host["curriculum"]["drawn_at"])
  assert (drawn_at == 1).sum() == P and (drawn_at == -1).sum() == len(drawn_at) - P


# A check that no update sees.


def test_the_check_is_beside_the_reward(tmp_path):
  config = with_reward(small_config(kl_coef=0.0), tmp_path, MIXED)
  config = with_section(config, "eval", check_training=True, function=f"{tmp_path}/reward.py:check")
  found = Small(config)(0)
  lengths = [row["length"] for row in found.rows]
  assert [row["check"] for row in found.rows] == [length % 2 for length in lengths]
  assert found.metrics["check/mean"] == np.mean([length % 2 for length in lengths])
  gap = np.mean([row["reward"] for row in found.rows]) - found.metrics["check/mean"]
  assert found.metrics["check/gap"] == pytest.approx(gap)


def test_the_gap_is_of_completions_that_both_have_scored():
  rewards = np.array([[1, 0.5, np.nan], [0, 1, 1]])
  checks = np.array([[1, 0, 1], [0, np.nan, 0]])
  assert check_metrics(rewards, checks) == {"check/mean": 0.25, "check/gap": 0.625 - 0.25}
  assert check_metrics(rewards, np.full((2, 3), np.nan)) == {}


def test_the_most_disputed_groups_come_first_and_groups_stay_together():
  values = [(0, 0), (0, 0), (1, 0.5), (0, 0), (0, 0), (1, 0), (None, 1), (0.1, 0.1)]
  rows = [dict(number=i, reward=r, check=c) for i, (r, c) in enumerate(values)]
  assert [row["number"] for row in most_disputed_first(rows, 2)] == [4, 5, 2, 3, 0, 1, 6, 7]
  plain = [dict(number=i, reward=1.0) for i in range(4)]
  assert most_disputed_first(plain, G) == plain
