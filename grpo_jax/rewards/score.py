"""Calls reward functions and checks what they return."""

from collections.abc import Callable, Mapping, Sequence, Set
import functools
import math
from typing import Any

import numpy as np

from grpo_jax.rewards.call import RewardError, call, text_of
from grpo_jax.rewards.functions import Reward, Steps, name_of
from grpo_jax.settings import ConfigError

LARGEST = float(np.finfo(np.float32).max)


def score(
  functions: Sequence[Reward],
  weights: Sequence[float],
  completions: Sequence[str],
  columns: Mapping[str, Sequence[Any]],
  on_each: Callable[[Callable[[], list[Steps]]], list[Steps]] = lambda act: act(),
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, list[Steps]]]:
  """Scores N completions with every reward function.

  Args:
    functions: The reward functions, with different names.
    weights: Their weights.
    completions: N texts.
    columns: The other arguments of the functions, lists of N entries: the prompts, token ids and
      fields of the examples.
    on_each: Calls each function. Where several processes score, it is `Hosts.on_each`, so that an
      error on one of them is an error on all before the next function is called.

  Returns:
    Three values, of which the last two are dicts from the names of the functions:

    The rewards, float32 [N]: the weighted sum over the functions that scored the completion. NaN
    where no function did.

    The scores of each function, float32 [N]: the mean over the completion's steps. NaN where it has
    no steps.

    The steps of each function, N lists. A score for the whole completion is a single step that ends
    where the completion ends.

  Raises:
    ConfigError: The weights do not match the functions.
    RewardError: A function raised something, or does not return N valid entries.
  """
  if not functions or len(weights) != len(functions):
    raise ConfigError(
      f"reward.weights: {len(weights)} weights for {len(functions)} functions in reward.functions;"
      " give one weight for each function, and at least one function"
    )
  steps = {
    name_of(function): on_each(functools.partial(_call, function, list(completions), columns))
    for function in functions
  }
  scores = {
    name: np.array([_mean_reward(steps_of_one) for steps_of_one in steps_of_all], np.float32)
    for name, steps_of_all in steps.items()
  }
  total_N = np.zeros(len(completions))
  for weight, scores_N in zip(weights, scores.values()):
    total_N += weight * np.nan_to_num(scores_N.astype(np.float64))
  if np.abs(total_N).max(initial=0) > LARGEST:
    raise RewardError(
      f"the weighted sum of the rewards is {np.abs(total_N).max():.3g}, which float32 cannot hold"
    )
  unscored_N = np.all([np.isnan(scores_N) for scores_N in scores.values()], axis=0)
  rewards_N = np.where(unscored_N, np.nan, total_N).astype(np.float32)
  return rewards_N, scores, steps


def _call(
  function: Reward, completions: list[str], columns: Mapping[str, Sequence[Any]]
) -> list[Steps]:
  """The steps of every completion, after all checks."""
  name = name_of(function)
  values = call(function, name, {"completions": completions, **columns})
  try:
    if isinstance(values, (str, bytes, Mapping, Set)):  # what they list is no score in its place
      raise TypeError
    values = list(values)
    steps = [_as_steps(value, text) for value, text in zip(values, completions)]
  except Exception:
    raise RewardError(
      f"reward function {name} must return a list of numbers, None or lists of steps"
      f" (end, number), got {text_of(values, repr):.80}"
    ) from None
  if len(values) != len(completions):
    raise RewardError(
      f"reward function {name} returned {len(values)} scores for {len(completions)} completions"
    )
  for steps_of_one, text in zip(steps, completions):
    _check_steps(name, steps_of_one, text)
  return steps


def _check_steps(name: str, steps: Steps, text: str) -> None:
  if not all(abs(reward) <= LARGEST for _, reward in steps):
    raise RewardError(
      f"reward function {name} returned a score that is not finite in float32; every score must be"
      " finite or None"
    )
  if not all(0 < end <= max(1, len(text)) for end, _ in steps):
    raise RewardError(
      f"reward function {name} returned a step that ends outside its completion of {len(text)}"
      f" characters: {steps!r:.80}"
    )


def _as_steps(value: Any, text: str) -> Steps:
  """What a function returned for the completion `text`, as steps. None and NaN are no steps."""
  if value is None:
    return []
  if isinstance(value, (str, bytes)):  # float("1") is a number
    raise TypeError
  if isinstance(value, (list, tuple)):
    return [(int(end), float(reward)) for end, reward in value]
  if math.isnan(float(value)):
    return []
  # An empty completion still has the token that ended it, so its step ends at 1 and not at 0.
  return [(max(1, len(text)), float(value))]


def _mean_reward(steps: Steps) -> float:
  return sum(reward for _, reward in steps) / len(steps) if steps else math.nan
