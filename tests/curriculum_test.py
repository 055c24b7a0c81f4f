"""The curriculum: what is remembered of a prompt, and how often it is drawn."""

import dataclasses

import numpy as np
import pytest

from grpo_jax.batches.curriculum import PassRateCurriculum
from grpo_jax.config import Curriculum
from grpo_jax.data import loader
from grpo_jax.settings import ConfigError

N = 20
NAN = np.nan


def curriculum(size=N, **settings):
  return PassRateCurriculum(Curriculum(**settings), seed=3, size=size)


def with_rates(chooses, rates, drawn_at=0):
  """A memory in which the first prompts have these pass rates."""
  indices = np.arange(len(rates))
  memory = chooses.initial()
  memory["pass_rate"][indices], memory["drawn_at"][indices] = rates, drawn_at
  return memory


def draws(chooses, memory, steps, count, first=0):
  found = []
  for step in range(first, first + steps):
    indices, memory = chooses.draw(memory, step, count)
    found.append(indices)
  return np.concatenate(found), memory


# Pass rates.


def test_the_pass_rate_counts_scored_completions_alone():
  scores = np.array([[1, 0.5, 2, NAN], [0, 0, 0, 0], [1, 1, 1, 1], [NAN] * 4])
  np.testing.assert_allclose(curriculum().pass_rates(scores), [2 / 3, 0, 1, NAN], rtol=1e-6)
  np.testing.assert_allclose(curriculum(pass_score=0.5).pass_rates(scores)[0], 1)


def test_what_is_learned_is_of_the_drawn_prompts_and_the_memory_before_stays():
  chooses = curriculum()
  before = with_rates(chooses, [0.25] * N)
  after = chooses.learn(before, 7, np.array([4, 9]), np.array([[1, 1], [0, 1]]))
  assert after["pass_rate"][[4, 9, 5]].tolist() == [1, 0.5, 0.25]
  assert after["drawn_at"][[4, 9, 5]].tolist() == [7, 7, 0]
  assert (before["pass_rate"] == 0.25).all() and (before["drawn_at"] == 0).all()


def test_metrics_are_of_the_prompts_that_were_seen():
  chooses = curriculum()
  assert chooses.metrics(chooses.initial()) == {"curriculum/seen": 0}
  assert chooses.metrics(with_rates(chooses, [1, 1, 0, 0.5])) == {
    "curriculum/seen": 0.2,
    "curriculum/pass_rate": 0.625,
    "curriculum/solved": 0.5,
    "curriculum/hopeless": 0.25,
  }


# Chances.


def test_the_chance_is_largest_for_a_pass_rate_of_a_half():
  chooses = curriculum(floor=0.2)
  chances = chooses.chances(with_rates(chooses, [0, 0.25, 0.5, 0.75, 1]), 1)
  np.testing.assert_allclose(chances[:6], [0.2, 0.8, 1, 0.8, 0.2, 1])


def test_a_solved_or_hopeless_prompt_rests_for_so_many_steps():
  chooses = curriculum(rest=2)
  memory = with_rates(chooses, [0, 1, 0.5], drawn_at=5)
  assert [chooses.chances(memory, step)[:4].tolist() for step in (6, 7, 8)] == [
    [0, 0, 1, 1],
    [0, 0, 1, 1],
    [1, 1, 1, 1],
  ]


# Draws.


def test_without_a_choice_the_order_is_the_one_of_a_run_without_a_curriculum():
  chooses = curriculum()
  found, memory = draws(chooses, chooses.initial(), 11, 6)
  expected = np.concatenate([loader.step_indices(3, step, 6, N) for step in range(11)])
  np.testing.assert_array_equal(found, expected)
  assert memory["position"] == 66


def test_resting_prompts_are_not_drawn_and_the_others_once_an_epoch():
  chooses = curriculum(rest=100)
  memory = with_rates(chooses, [0, 1] * 5)
  found, memory = draws(chooses, memory, 5, 4, first=1)
  assert sorted(found) == sorted([*range(10, N), *range(10, N)])
  assert N < memory["position"] <= 2 * N


def test_prompts_are_drawn_as_often_as_their_chances_say():
  chooses = curriculum(size=2000, floor=0.1)
  memory = with_rates(chooses, np.repeat([0.5, 0.1, 0], [500, 500, 500]))
  found, _ = draws(chooses, memory, 200, 64, first=1)
  counts = np.bincount(found, minlength=2000).reshape(4, 500).sum(1)
  chances = np.array([1, 0.1 + 0.9 * 0.36, 0.1, 1])
  np.testing.assert_allclose(counts / counts.sum(), chances / chances.sum(), atol=0.02)


def test_if_all_rest_the_batch_is_full_nevertheless():
  chooses = curriculum(rest=9)
  found, memory = chooses.draw(with_rates(chooses, [0] * N), 1, 8)
  np.testing.assert_array_equal(found, loader.step_indices(3, 0, 8, N))
  assert memory["position"] == 2 * N


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_batch_may_be_larger_than_the_data(size):
  chooses = curriculum(size, rest=1, floor=0.5)
  for memory in (chooses.initial(), with_rates(chooses, [1.0])):
    found, _ = chooses.draw(memory, 1, 16)
    assert found.shape == (16,) and set(found) <= set(range(size))


def test_a_draw_depends_on_the_place_and_not_on_how_the_run_came_there():
  """So a resumed run draws what the run would have drawn that was not stopped."""
  chooses = curriculum(floor=0.3)
  memory = with_rates(chooses, [0.1] * N)
  together, _ = draws(chooses, memory, 1, 24, first=1)
  apart, _ = draws(chooses, memory, 8, 3, first=1)
  np.testing.assert_array_equal(together, apart)
  other = dataclasses.replace(chooses, seed=4)
  assert (draws(other, memory, 8, 3, first=1)[0] != apart).any()


def test_a_memory_of_other_data_is_refused():
  with pytest.raises(ConfigError, match="there are 5 training prompts, and the run has begun with"):
    curriculum(5).check(curriculum().initial())
