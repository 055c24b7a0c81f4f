"""Combines what several reward functions say of the same completions."""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.rewards.answer import LARGEST, Answer, RewardError, Steps
from grpo_jax.rewards.call import Columns, call_here
from grpo_jax.rewards.names import Reward, name_of
from grpo_jax.settings import ConfigError


class Scores(NamedTuple):
  """The scores of N completions.

  Attributes:
    rewards_N: float32 [N], the weighted sum over the functions that scored the completion. NaN
      where no function did.
    by_function: The scores of each function by name, float32 [N]: the mean over the completion's
      steps. NaN where it has no steps.
    steps: The steps of each function by name, N lists.
  """

  rewards_N: np.ndarray
  by_function: dict[str, np.ndarray]
  steps: dict[str, list[Steps]]


def answer_or_raise(function: Reward, columns: Columns) -> Answer:
  """What a function says, called in this process. Raises RewardError for any failure."""
  answer = call_here(function, name_of(function), columns)
  if answer.failures:
    raise RewardError(answer.failures[0].text)
  return answer


def score(
  functions: Sequence[Reward],
  weights: Sequence[float],
  completions: Sequence[str],
  columns: Mapping[str, Sequence[Any]],
  answer: Callable[[Reward, Columns], Answer] = answer_or_raise,
) -> Scores:
  """Scores N completions with every reward function.

  Args:
    functions: The reward functions, with different names.
    weights: Their weights.
    completions: N texts.
    columns: The other arguments of the functions, lists of N entries: the prompts, token ids and
      fields of the examples.
    answer: Calls a function.

  Raises:
    ConfigError: The weights do not match the functions.
    RewardError: A function raised something, or does not return N valid entries.
  """
  if not functions or len(weights) != len(functions):
    raise ConfigError(
      f"reward.weights: {len(weights)} weights for {len(functions)} functions in reward.functions;"
      " give one weight for each function, and at least one function"
    )
  columns = {"completions": list(completions), **columns}
  answers = {name_of(function): answer(function, columns) for function in functions}
  return combined(answers, weights)


def combined(answers: Mapping[str, Answer], weights: Sequence[float]) -> Scores:
  """The scores from the answers of the functions by name. Raises RewardError for an overflow."""
  steps = {name: one.steps for name, one in answers.items()}
  scores = {
    name: np.array([_mean_reward(steps_of_one) for steps_of_one in steps_of_all], np.float32)
    for name, steps_of_all in steps.items()
  }
  count = len(next(iter(scores.values())))
  total_N = np.zeros(count)
  for weight, scores_N in zip(weights, scores.values()):
    total_N += weight * np.nan_to_num(scores_N.astype(np.float64))
  if np.abs(total_N).max(initial=0) > LARGEST:
    raise RewardError(
      f"the weighted sum of the rewards is {np.abs(total_N).max():.3g}, which float32 cannot hold"
    )
  unscored_N = np.all([np.isnan(scores_N) for scores_N in scores.values()], axis=0)
  rewards_N = np.where(unscored_N, np.nan, total_N).astype(np.float32)
  return Scores(rewards_N, scores, steps)


def _mean_reward(steps: Steps) -> float:
  return sum(reward for _, reward in steps) / len(steps) if steps else math.nan
