"""Finds reward functions by their names in the config."""

from collections.abc import Callable, Coroutine, Iterator, Sequence
import contextlib
import hashlib
import importlib
import importlib.util
import pathlib
import sys
from types import ModuleType
from typing import Any

from grpo_jax import calls, timing
from grpo_jax.foreign import describe
from grpo_jax.progress import doing
from grpo_jax.registry import name_of, register
from grpo_jax.rewards import options
from grpo_jax.rewards.answer import NoReward, Steps
from grpo_jax.rewards.functions import (
  choice,
  code,
  countdown,
  environment,
  final_number,
  instructions,
  judge,
  lengths,
  reasoning,
  reasoning_gym,
  schema,
  symbolic,
  tags,
  worked_steps,
)
from grpo_jax.settings import ConfigError

# A reward function. `grpo_jax/rewards/__init__.py` describes its arguments and what it returns.
_Scores = Sequence[float | Steps | NoReward | None]
Reward = Callable[..., _Scores | Coroutine[Any, Any, _Scores]]

# The time of functions that are marked `in_process` is linear in the length of the text, for any
# text and parameters. Workers call the others, which run patterns, packages or programs that can
# take long, or wait for a server.
REWARDS: dict[str, Reward] = {
  "strict": final_number.strict,
  "flexible": final_number.flexible,
  "boxed": final_number.boxed,
  "math": symbolic.math,
  "worked_steps": worked_steps.worked_steps,
  "choice": choice.choice,
  "code": code.code,
  "cosine": lengths.cosine,
  "countdown": countdown.countdown,
  "environment": environment.environment,
  "ifeval": instructions.ifeval,
  "json_schema": schema.json_schema,
  "judge": judge.judge,
  "reasoning_accuracy": reasoning.reasoning_accuracy,
  "reasoning_gym": reasoning_gym.reasoning_gym,
  "regex": tags.regex,
  "repetition": lengths.repetition,
  "soft_overlong": lengths.soft_overlong,
  "tag_count": tags.tag_count,
  "think_format": tags.think_format,
}
_OURS = frozenset(REWARDS)
SECONDS_TO_LOAD = 120.0  # the time limit for importing the file or the module of a function


def register_reward(function: Reward) -> Reward:
  """Registers a reward function of the user's program under the function's name.

  Can be used as a decorator. `reward.functions` and `eval.function` may then use the name. A run
  saves only the name in its config, so a program that resumes the run must register the function
  first.

  Args:
    function: See `grpo_jax/rewards/__init__.py` for its arguments and return value.

  Returns:
    The function.

  Raises:
    ConfigError: The function has no name, or a reward function of grpo_jax has the same name.
  """
  register("reward function", REWARDS, function, function)
  return function


def resolve(name: str, key: str, is_model: Callable[[str], bool]) -> Reward:
  """Finds the reward function that a config key names, and binds its parameters.

  A reward model is an error here: a caller that allows models looks for them first.

  Args:
    name: A key of `REWARDS`, or `path/file.py:function`, or `package.module:function`. The file is
      executed, or the module imported. Parameters may follow: see `rewards/options.py`.
    key: The config key of `name`, for error messages.
    is_model: is_model(name) tells whether `name` is the folder of a model, or a model's name on
      huggingface.co.

  Raises:
    ConfigError: `name` is a model, or there is no such function.
  """
  plain_name, parameters = calls.parse(name, key)
  if plain_name in REWARDS:
    return options.bind(REWARDS[plain_name], plain_name, parameters, key)
  if plain_name != name:  # it has parameters, which the rest of this function does not know
    return options.bind(resolve(plain_name, key, is_model), plain_name, parameters, key)
  if is_model(name):
    raise ConfigError(f"{key}: {name!r} is a model, which only reward.functions may name")
  or_model = " or a reward model's folder" if key == "reward.functions" else ""
  choices = (
    f"choose one of {', '.join(REWARDS)}, or give path/file.py:function or"
    f" package.module:function{or_model}, or call grpo_jax.register_reward first"
  )
  return named(name, key, choices)


def named(name: str, key: str, choices: str) -> Any:
  """Finds the function that `path/file.py:function` or `package.module:function` names.

  Args:
    name: Such a name. The file is executed, or the module imported.
    key: The config key of `name`, for error messages.
    choices: The names that a user can write, for the error if `name` has another form.

  Raises:
    ConfigError: There is no such function, or it is not callable.
  """
  location, _, attribute = name.rpartition(":")
  if not location.endswith(".py") and all(part.isidentifier() for part in location.split(".")):
    return _function_of(import_module(location, key), attribute, name, key)
  if not location.endswith(".py"):
    raise ConfigError(f"{key}: {name!r} is unknown: {choices}")
  path = pathlib.Path(location).expanduser()
  if not path.is_file():
    raise ConfigError(f"{key}: {name!r}: there is no file {path}")
  return _function_of(load_module(path.resolve(), key), attribute, name, key)


def resolve_all(
  names: Sequence[str], load_model: Callable[[str], Reward], is_model: Callable[[str], bool]
) -> list[Reward]:
  """Finds the reward functions and loads the reward models of `reward.functions`, in that order.

  Args:
    names: The value of the config key `reward.functions`.
    load_model: load_model(name) returns the reward model of this name.
    is_model: is_model(name) tells whether `name` is the folder of a model, or a model's name on
      huggingface.co. It is not called for names in `REWARDS`.

  Raises:
    ConfigError: There is no function of a name, or two functions have the same `name_of`, so that
      their metrics would have the same names, too.
  """
  functions = []
  for name in names:
    _, parameters = calls.split(name)
    if not parameters and name not in REWARDS and is_model(name):  # a model takes no parameters
      functions.append(load_model(name))
    else:
      functions.append(resolve(name, "reward.functions", is_model))
  function_names = [name_of(function) for function in functions]
  if len(set(function_names)) < len(function_names):
    raise ConfigError(
      f"reward.functions: two functions have the same name in {function_names}; rename one"
      " with the parameter name, as in regex(name='code', pattern='...')"
    )
  return functions


def is_named(name: str) -> bool:
  """Whether other processes can find the function: it is of this package, a file or a module."""
  plain_name, _ = calls.split(name)
  return ":" in plain_name or plain_name in _OURS


def _function_of(module: ModuleType, attribute: str, name: str, key: str) -> Reward:
  function = getattr(module, attribute, None)
  if not callable(function):
    raise ConfigError(f"{key}: {name!r}: {module.__file__} defines no function {attribute!r}")
  try:
    name_of(function)
  except ConfigError as error:
    raise ConfigError(f"{key}: {name!r}: {error}") from None
  return function


def import_module(module_name: str, key: str) -> ModuleType:
  """Imports a module. Raises ConfigError if the import raises anything, SystemExit included."""
  try:
    with _in_time(module_name, key):
      return importlib.import_module(module_name)
  except (KeyboardInterrupt, ConfigError):
    raise
  except BaseException as error:
    raise ConfigError(f"{key}: {module_name} cannot be imported: {describe(error)}") from None


def load_module(path: pathlib.Path, key: str) -> ModuleType:
  """Executes a file as a module. Raises ConfigError if it raises anything, SystemExit included."""
  # Files of the same name in two folders are two modules.
  path_hash = hashlib.sha1(str(path).encode()).hexdigest()[:12]
  module_name = f"reward_file_{path_hash}"
  spec = importlib.util.spec_from_file_location(module_name, path)
  module = importlib.util.module_from_spec(spec)
  # dataclasses and pickle look up the module of a class in sys.modules while the file runs.
  sys.modules[module_name] = module
  try:
    with _in_time(str(path), key):
      spec.loader.exec_module(module)
  except BaseException as error:
    del sys.modules[module_name]
    if isinstance(error, (KeyboardInterrupt, ConfigError)):
      raise
    raise ConfigError(f"{key}: {path} cannot be executed: {describe(error, path)}") from None
  return module


@contextlib.contextmanager
def _in_time(what: str, key: str) -> Iterator[None]:
  """Shows that the block imports `what`. Raises ConfigError after `SECONDS_TO_LOAD`."""
  try:
    with doing(f"importing {what}"), timing.limited(SECONDS_TO_LOAD):
      yield
  except timing.TookTooLong:
    raise ConfigError(
      f"{key}: {what} is not imported after {SECONDS_TO_LOAD:g} s: let the function do slow work"
      " when it is called first"
    ) from None
