"""Configs as a program asks for them: a recipe and what to change in it."""

from collections.abc import Mapping
import dataclasses
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_jax.config import Config, changed, from_dict
from grpo_jax.rewards.call import describe
from grpo_jax.rewards.options import split
from grpo_jax.settings import ConfigError, shown


def load_config(recipe: str | Path, changes: Mapping[str, Any] | None = None) -> Config:
  """The config of a recipe, with changes.

  Args:
    recipe: The name of a file in configs/, such as "gsm8k", or the path of a file that ends in .py
      and has a function `get_config` as they have. ":PRESET" may follow, as in "gsm8k:dapo".
    changes: Values by key, such as {"optimizer.learning_rate": 1e-5, "seed": 1}.

  Raises:
    ConfigError: There is no such recipe or key, a value has the wrong type, or a value is missing.
  """
  name, _, preset = str(recipe).partition(":")
  module = _from_file(name) if name.endswith(".py") else _from_configs(name)
  get_config = getattr(module, "get_config", None)
  if not callable(get_config):
    raise ConfigError(f"recipe {name} has no function get_config")
  try:
    values = (get_config(preset) if preset else get_config()).to_dict()
  except BaseException as error:  # a recipe is a program, so it can raise any exception
    if isinstance(error, KeyboardInterrupt):
      raise
    reason = f"there is no preset {error}" if isinstance(error, KeyError) else describe(error)
    raise ConfigError(f"recipe {recipe}: {reason}") from None
  # A recipe may leave a value empty, such as model.path, that `changes` has to give.
  return from_dict(changed(values, changes or {}))


def with_absolute_paths(config: Config) -> Config:
  """The config with absolute paths, so that its run can be used from another folder."""

  def absolute(key: str, path: str) -> str:
    try:
      expanded = Path(path).expanduser()
      return str(expanded.absolute()) if path and expanded.exists() else path
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, NUL in it
      raise ConfigError(f"config key {key} is {shown(path)}: {error}") from None

  def absolute_reward(key: str, name: str) -> str:
    name, parameters = split(name)
    file, colon, function = name.rpartition(":")
    path = f"{absolute(key, file)}:{function}" if colon else absolute(key, name)
    return path + parameters

  def absolute_source(entry: str) -> str:
    task, colon, path = entry.partition(":")
    return f"{task}{colon}{absolute('data.mixture', path)}"

  replace = dataclasses.replace
  functions = tuple(absolute_reward("reward.functions", x) for x in config.reward.functions)
  return replace(
    config,
    model=replace(config.model, path=absolute("model.path", config.model.path)),
    lora=replace(config.lora, path=absolute("lora.path", config.lora.path)),
    data=replace(
      config.data,
      path=absolute("data.path", config.data.path),
      tokenizer=absolute("data.tokenizer", config.data.tokenizer),
      mixture=tuple(map(absolute_source, config.data.mixture)),
    ),
    reward=replace(config.reward, functions=functions),
    eval=replace(config.eval, function=absolute_reward("eval.function", config.eval.function)),
  )


def _from_file(path: str) -> ModuleType:
  """Executes a recipe. Raises ConfigError for whatever it raises, sys.exit included."""
  file = Path(path).expanduser()
  if not file.is_file():
    raise ConfigError(f"there is no recipe {shown(path)}")
  spec = importlib.util.spec_from_file_location(f"recipe_{file.stem}", file)
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except BaseException as error:
    if isinstance(error, KeyboardInterrupt):
      raise
    raise ConfigError(f"recipe {path} cannot be executed: {describe(error, file)}") from None
  return module


def _from_configs(name: str) -> ModuleType:
  """A recipe of configs/, which is installed with this package."""
  folder = Path(importlib.import_module("configs").__file__).parent
  names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
  if name not in names:
    raise ConfigError(
      f"there is no recipe {shown(name)}: choose one of {', '.join(names)}, or name a file that"
      " ends in .py"
    )
  return importlib.import_module(f"configs.{name}")
