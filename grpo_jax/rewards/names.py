"""Reward functions by their names in the config."""

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

# Those that are marked `in_process` take time that is linear in the length of the text, for any
# text and any parameters. The others run patterns, packages or programs that can take long, or wait
# for a server, so workers call them.
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
SECONDS_TO_LOAD = 120.0  # the file or the module of a function, in each process that calls it


def register_reward(function: Reward) -> Reward:
  """Gives a reward function of this program a name in configs: its own.

  It can be used as a decorator. `reward.functions` and `eval.function` then find the name. The
  config that a run saves holds the name alone, so a program that goes on with the run registers the
  function first.

  Args:
    function: See `grpo_jax/rewards/__init__.py` for its arguments and what it returns.

  Returns:
    The function.

  Raises:
    ConfigError: A reward function of grpo_jax has this name, or it has none.
  """
  register("reward function", REWARDS, function, function)
  return function


def resolve(name: str, key: str, is_model: Callable[[str], bool]) -> Reward:
  """The reward function that a config key names.

  Whoever may also name reward models looks for these first, so that a model is an error here.

  Args:
    name: A key of `REWARDS`, or `path/file.py:function`, or `package.module:function`. The file is
      executed, and the module is imported. Parameters may follow: see `rewards/options.py`.
    key: The config key that holds `name`, for error messages.
    is_model: Returns whether a name is the folder of a model, or the name of one on
      huggingface.co.

  Raises:
    ConfigError: `name` is a model, or there is no such function.
  """
  plain_name, given = calls.parse(name, key)
  if plain_name in REWARDS:
    return options.bind(REWARDS[plain_name], plain_name, given, key)
  if plain_name != name:
    return options.bind(resolve(plain_name, key, is_model), plain_name, given, key)
  if is_model(name):
    raise ConfigError(f"{key}: {name!r} is a model, which only reward.functions may name")
  or_model = " or a reward model's folder" if key == "reward.functions" else ""
  choices = (
    f"choose one of {', '.join(REWARDS)}, or give path/file.py:function or"
    f" package.module:function{or_model}, or call grpo_jax.register_reward first"
  )
  return named(name, key, choices)


def named(name: str, key: str, choices: str) -> Any:
  """The function that `path/file.py:name` or `package.module:name` names.

  Args:
    name: The file is executed, and the module is imported.
    key: The config key that holds it, for error messages.
    choices: The names that a user can write instead, for the message of a name of another form.

  Raises:
    ConfigError: There is nothing of this name, or it cannot be called.
  """
  file, _, attribute = name.rpartition(":")
  if not file.endswith(".py") and all(part.isidentifier() for part in file.split(".")):
    return _function_of(import_module(file, key), attribute, name, key)
  if not file.endswith(".py"):
    raise ConfigError(f"{key}: {name!r} is unknown: {choices}")
  path = pathlib.Path(file).expanduser()
  if not path.is_file():
    raise ConfigError(f"{key}: {name!r}: there is no file {path}")
  return _function_of(load_module(path.resolve(), key), attribute, name, key)


def resolve_all(
  names: Sequence[str], load_model: Callable[[str], Reward], is_model: Callable[[str], bool]
) -> list[Reward]:
  """The reward functions and reward models that `reward.functions` names, in its order.

  Args:
    names: The value of the config key `reward.functions`.
    load_model: Loads the reward model of a name for which `is_model` is true.
    is_model: Returns whether a name is the folder of a model, or the name of one on
      huggingface.co. It decides only about names that are not in `REWARDS`.

  Raises:
    ConfigError: A name has no function, or two functions have the same `name_of`, so that their
      metrics would have the same names too.
  """
  functions = []
  for name in names:
    plain_name, _ = calls.split(name)
    if plain_name == name not in REWARDS and is_model(name):
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
  """Whether any process finds the function of this name: it is one of ours, or of a file."""
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
  """Imports a module. Raises ConfigError for whatever that raises, sys.exit included."""
  try:
    with _in_time(module_name, key):
      return importlib.import_module(module_name)
  except (KeyboardInterrupt, ConfigError):
    raise
  except BaseException as error:
    raise ConfigError(f"{key}: {module_name} cannot be imported: {describe(error)}") from None


def load_module(path: pathlib.Path, key: str) -> ModuleType:
  """Executes the file. Raises ConfigError for whatever it raises, sys.exit included."""
  path_hash = hashlib.sha1(str(path).encode()).hexdigest()[:12]
  module_name = f"reward_file_{path_hash}"
  spec = importlib.util.spec_from_file_location(module_name, path)
  module = importlib.util.module_from_spec(spec)
  # dataclasses and pickle look up the module of a class here, so it must be there before it runs.
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
  """Says on stderr that the block takes long. Raises ConfigError if it takes too long."""
  try:
    with doing(f"importing {what}"), timing.limited(SECONDS_TO_LOAD):
      yield
  except timing.TookTooLong:
    raise ConfigError(
      f"{key}: {what} is not imported after {SECONDS_TO_LOAD:g} s: let the function do slow work"
      " when it is called first"
    ) from None
