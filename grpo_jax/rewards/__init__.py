"""Rewards: functions of a batch of completions. Either a name of `REWARDS` or `path/file.py:function`.

A reward is called as `f(completions=[...], prompts=[...], answer=[...], ...)`: N completions, their prompts and every
field of their examples, each a list of N. It returns N numbers, None where it has no opinion (as in TRL).
"""
import hashlib
import importlib.util
import math
import pathlib
import sys
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from grpo_jax.config import ConfigError
from grpo_jax.rewards import answers

Reward = Callable[..., Sequence[float | None]]

REWARDS: dict[str, Reward] = {
    "strict": answers.strict,
    "flexible": answers.flexible,
    "boxed": answers.boxed,
}


def resolve(name: str, key: str = "reward.functions") -> Reward:
  """The reward that config key `key` names: one of REWARDS, or `path/file.py:function`. ConfigError if there is none."""
  if name in REWARDS:
    return REWARDS[name]
  file, _, attribute = name.rpartition(":")
  if not file.endswith(".py"):
    raise ConfigError(f"{key}: {name!r} is none of {', '.join(REWARDS)}, nor a path/file.py:function")
  path = pathlib.Path(file).expanduser()
  if not path.is_file():
    raise ConfigError(f"{key}: {name!r}: there is no file {path}")
  function = getattr(_load(path.resolve()), attribute, None)
  if not callable(function):
    raise ConfigError(f"{key}: {name!r}: {path} defines no function {attribute!r}")
  return function


def resolve_all(names: Sequence[str]) -> list[Reward]:
  """The rewards that reward.functions names. ConfigError also where two have one name, under which both would report."""
  functions = [resolve(name) for name in names]
  called = [_name(function) for function in functions]
  if len(set(called)) < len(called):
    raise ConfigError(f"reward.functions: two functions have the same name in {called}; rename one")
  return functions


def score(functions: Sequence[Reward], weights: Sequence[float], completions: Sequence[str],
          columns: Mapping[str, Sequence[Any]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
  """-> (rewards float32 [N], {function name: float32 [N]}); NaN = None.

  A completion's reward is the weighted sum over the functions that scored it, NaN if none did. Raises ConfigError for
  weights that do not match the functions, and for a function that does not return N numbers.
  """
  if not functions or len(weights) != len(functions):
    raise ConfigError(f"reward.weights: {len(weights)} weights for {len(functions)} functions in reward.functions;"
                      " give as many, at least one")
  scores = {_name(f): _call(f, _name(f), list(completions), columns) for f in functions}
  total = np.zeros(len(completions))
  for weight, values in zip(weights, scores.values()):
    total += weight * np.nan_to_num(values)
  unscored = np.all([np.isnan(values) for values in scores.values()], axis=0)
  return np.where(unscored, np.nan, total).astype(np.float32), scores


def _name(function):
  return getattr(function, "__name__", type(function).__name__)


def _call(function, name, completions, columns):
  values = function(completions=completions, **columns)
  try:
    out = [math.nan if value is None else float(value) for value in values]
  except (TypeError, ValueError):
    raise ConfigError(f"reward.functions: {name} must return a list of numbers or None, got {values!r:.80}") from None
  if len(out) != len(completions):
    raise ConfigError(f"reward.functions: {name} returned {len(out)} scores for {len(completions)} completions")
  if any(math.isinf(value) for value in out):
    raise ConfigError(f"reward.functions: {name} returned an infinite score; every score must be finite or None")
  return np.array(out, np.float32)


def _load(path):
  name = f"reward_file_{hashlib.sha1(str(path).encode()).hexdigest()[:12]}"
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module  # dataclasses and pickle look their module up there
  spec.loader.exec_module(module)
  return module
