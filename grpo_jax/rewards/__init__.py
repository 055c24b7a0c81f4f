"""Rewards: functions of a batch of completions. A name of `REWARDS`, `path/file.py:function`, or a reward model's folder
or its name on huggingface.co.

A reward is called as `f(completions=[...], prompts=[...], completion_ids=[...], answer=[...], ...)`: N completions, their
prompts, token ids and every field of their examples, each a list of N. Prompts and completions are always texts, as the
model read and wrote them: a prompt through a chat template with all its marks, a completion without the special tokens.
With data.chat there is also `messages`, the conversations that the prompts were rendered from, lists of
{"role": ..., "content": ...}. (TRL gives such lists as the prompts and completions of a conversational data set.)

It returns N scores, each a number; or None where it has no opinion (as in TRL); or, for process supervision, a list of
steps `(end, number)`, `end` being how many characters of the completion there are up to the end of the step. What counts
as the score of such a list is the mean of its numbers.
"""

import hashlib
import importlib.util
import math
import pathlib
import sys
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from grpo_jax.model import hub
from grpo_jax.rewards import answers, process, symbolic
from grpo_jax.settings import ConfigError

Steps = list[tuple[int, float]]
Reward = Callable[..., Sequence[float | Steps | None]]

REWARDS: dict[str, Reward] = {
  "strict": answers.strict,
  "flexible": answers.flexible,
  "boxed": answers.boxed,
  "math": symbolic.math,
  "worked_steps": process.worked_steps,
}


def resolve(name: str, key: str = "reward.functions") -> Reward:
  """The reward that config key `key` names: one of REWARDS, or `path/file.py:function`. ConfigError if there is none."""
  if name in REWARDS:
    return REWARDS[name]
  file, _, attribute = name.rpartition(":")
  if _is_model(name):
    raise ConfigError(f"{key}: {name!r} is a model's folder, which only reward.functions may name")
  if not file.endswith(".py"):
    models = ", nor a reward model's folder" if key == "reward.functions" else ""
    raise ConfigError(
      f"{key}: {name!r} is none of {', '.join(REWARDS)}, nor a path/file.py:function{models}"
    )
  path = pathlib.Path(file).expanduser()
  if not path.is_file():
    raise ConfigError(f"{key}: {name!r}: there is no file {path}")
  function = getattr(_load(path.resolve()), attribute, None)
  if not callable(function):
    raise ConfigError(f"{key}: {name!r}: {path} defines no function {attribute!r}")
  return function


def resolve_all(names: Sequence[str], load_model: Callable[[str], Reward]) -> list[Reward]:
  """The rewards that reward.functions names, those of folders as `load_model` gives them. ConfigError also where two have
  one name, under which both would report."""
  functions = [
    load_model(name) if name not in REWARDS and _is_model(name) else resolve(name) for name in names
  ]
  called = [name_of(function) for function in functions]
  if len(set(called)) < len(called):
    raise ConfigError(f"reward.functions: two functions have the same name in {called}; rename one")
  return functions


def score(
  functions: Sequence[Reward],
  weights: Sequence[float],
  completions: Sequence[str],
  columns: Mapping[str, Sequence[Any]],
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, list[Steps]]]:
  """-> (rewards float32 [N], {function name: float32 [N]}, {function name: N lists of steps}); NaN = None = no steps.

  A completion's reward is the weighted sum over the functions that scored it, NaN if none did. A number is one step, at
  the end. Raises ConfigError for weights that do not match the functions, and for a function that does not return N
  scores.
  """
  if not functions or len(weights) != len(functions):
    raise ConfigError(
      f"reward.weights: {len(weights)} weights for {len(functions)} functions in reward.functions;"
      " give as many, at least one"
    )
  steps = {name_of(f): _call(f, name_of(f), list(completions), columns) for f in functions}
  scores = {
    name: np.array([_mean(one) for one in values], np.float32) for name, values in steps.items()
  }
  total = np.zeros(len(completions))
  for weight, values in zip(weights, scores.values()):
    total += weight * np.nan_to_num(values)
  unscored = np.all([np.isnan(values) for values in scores.values()], axis=0)
  return np.where(unscored, np.nan, total).astype(np.float32), scores, steps


def name_of(function: Reward) -> str:
  """What it reports under."""
  return getattr(function, "__name__", type(function).__name__)


def silent(function: Reward) -> Reward:
  """What stands for `function` where another process calls it: of its name, without an opinion."""

  def none(completions, **_):
    return [None] * len(completions)

  none.__name__ = name_of(function)
  return none


def _is_model(name):
  return hub.is_name(name) or (pathlib.Path(name).expanduser() / "config.json").is_file()


def _call(function, name, completions, columns):
  values = function(completions=completions, **columns)
  try:
    values = list(values)
    out = [_steps(value, text) for value, text in zip(values, completions)]
  except (TypeError, ValueError):
    raise ConfigError(
      f"reward.functions: {name} must return a list of numbers, None or lists of steps (end, number),"
      f" got {values!r:.80}"
    ) from None
  if len(values) != len(completions):
    raise ConfigError(
      f"reward.functions: {name} returned {len(values)} scores for {len(completions)} completions"
    )
  for steps, text in zip(out, completions):
    if not all(map(math.isfinite, (reward for _, reward in steps))):
      raise ConfigError(
        f"reward.functions: {name} returned an infinite score; every score must be finite or None"
      )
    if not all(0 < end <= max(1, len(text)) for end, _ in steps):
      raise ConfigError(
        f"reward.functions: {name} returned a step that ends outside its completion of {len(text)}"
        f" characters: {steps!r:.80}"
      )
  return out


def _mean(steps):
  return sum(reward for _, reward in steps) / len(steps) if steps else math.nan


def _steps(value, text):
  if value is None:
    return []
  if isinstance(value, (list, tuple)):
    return [(int(end), float(reward)) for end, reward in value]
  return [] if math.isnan(float(value)) else [(max(1, len(text)), float(value))]


def _load(path):
  name = f"reward_file_{hashlib.sha1(str(path).encode()).hexdigest()[:12]}"
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # dataclasses and pickle look their module up there
  spec.loader.exec_module(module)
  return module
