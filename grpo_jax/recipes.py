"""Loads configs for programs: a recipe, and changes to it."""

from collections.abc import Callable, Mapping
import dataclasses
import importlib
import importlib.util
import os
from pathlib import Path
import re
from types import ModuleType
from typing import Any

from grpo_jax import calls
from grpo_jax.algo.presets import CHOICES
from grpo_jax.config import Config, changed, from_dict, to_dict
from grpo_jax.data.tasks.exams import path_in
from grpo_jax.foreign import describe
from grpo_jax.settings import ConfigError, path_text, shown

Change = Callable[[Config], Config]


def load_config(recipe: str | Path, changes: Mapping[str, Any] | None = None) -> Config:
  """Loads the config of a recipe, and applies changes.

  Args:
    recipe: The name of a file in configs/, such as "gsm8k", or the path of a file that ends in .py
      and defines `get_config` as those files do. ":PRESET" may follow, as in "gsm8k:dapo".
    changes: Values by key, such as {"optimizer.learning_rate": 1e-5, "seed": 1}.

  Raises:
    ConfigError: There is no such recipe, preset or key, a value has the wrong type, or a value is
      missing.
  """
  name, _, preset = path_text(recipe, "the recipe").partition(":")
  module = _from_file(name) if name.endswith(".py") else _recipe(name)
  get_config = getattr(module, "get_config", None)
  if not callable(get_config):
    raise ConfigError(f"recipe {name} has no function get_config")
  try:
    made = get_config(preset) if preset else get_config()
    values = to_dict(made) if isinstance(made, Config) else made.to_dict()
  except BaseException as error:  # a recipe is a program, so it can raise any exception
    if isinstance(error, KeyboardInterrupt):
      raise
    no_preset = isinstance(error, KeyError) and error.args == (preset,)
    reason = f"there is no preset {preset!r}: {CHOICES}" if no_preset else describe(error)
    raise ConfigError(f"recipe {recipe}: {reason}") from None
  # Missing values are an error only here, because `changes` may set them: for example model.path.
  return from_dict(changed(values, {} if changes is None else changes))


def unchanged(config: Config) -> Config:
  """A `Change` that changes nothing."""
  return config


def with_absolute_paths(config: Config) -> Config:
  """Makes the paths of a config absolute, so that a run can resume from another folder.

  A value that is not the path of an existing file stays, such as the name of a model. Raises
  ConfigError for a path that the file system does not accept.
  """

  def absolute(key: str, path: str) -> str:
    try:
      expanded = Path(path).expanduser()
      return str(expanded.absolute()) if path and expanded.exists() else path
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, NUL in it
      raise ConfigError(f"config key {key} is {shown(path)}: {error}") from None

  def absolute_reward(key: str, name: str) -> str:
    name, parameters = calls.split(name)  # FILE:FUNCTION or a folder, with parameters or without
    file, colon, function = name.rpartition(":")
    path = f"{absolute(key, file)}:{function}" if colon else absolute(key, name)
    return path + parameters

  def absolute_code(key: str, name: str) -> str:
    # Only FILE.py:NAME has a path. Other names stay, such as mcp:COMMAND.
    return absolute_reward(key, name) if Path(name.partition(":")[0]).suffix == ".py" else name

  def absolute_environment(entry: str) -> str:
    task, is_of_task, name = entry.partition("=")  # TASK=NAME, or NAME that may have parameters
    if not is_of_task or not re.fullmatch(r"[\w.-]+", task):
      return absolute_code("environment.name", entry)
    return f"{task}={absolute_code('environment.name', name)}"

  def absolute_source(entry: str) -> str:
    task, colon, path = entry.partition(":")
    # TASK, TASK:PATH or NAME=TASK:PATH. The path of reasoning_gym is a list of tasks.
    if task.rpartition("=")[2] == "reasoning_gym":
      return entry
    return f"{task}{colon}{absolute('data.mixture', path)}"

  def absolute_exam(entry: str) -> str:
    before_path, path = path_in(entry)
    return before_path + absolute("eval.tasks", path)

  replace = dataclasses.replace
  data_path = config.data.path  # a list of tasks for reasoning_gym
  if config.data.task != "reasoning_gym":
    data_path = absolute("data.path", data_path)
  functions = tuple(absolute_reward("reward.functions", x) for x in config.reward.functions)
  rollout_files = {
    name: absolute(f"rollout.{name}", getattr(config.rollout, name))
    for name in ("secret_file", "certificate_file", "key_file", "engine_folder", "replay")
  }
  entries = calls.split_list(config.environment.name)
  absolute_entries = [*map(absolute_environment, entries)]
  environment = replace(
    config.environment,
    name=config.environment.name if absolute_entries == entries else ",".join(absolute_entries),
    tools=tuple(absolute_code("environment.tools", x) for x in config.environment.tools),
    harness=absolute_code("environment.harness", config.environment.harness),
  )
  teacher = absolute("reward.teacher", config.reward.teacher)
  return replace(
    config,
    plugins=tuple(absolute("plugins", path) for path in config.plugins),
    model=replace(config.model, path=absolute("model.path", config.model.path)),
    lora=replace(config.lora, path=absolute("lora.path", config.lora.path)),
    data=replace(
      config.data,
      path=data_path,
      tokenizer=absolute("data.tokenizer", config.data.tokenizer),
      mixture=tuple(map(absolute_source, config.data.mixture)),
    ),
    reward=replace(config.reward, functions=functions, teacher=teacher),
    environment=environment,
    rollout=replace(config.rollout, **rollout_files),
    eval=replace(
      config.eval,
      function=absolute_reward("eval.function", config.eval.function),
      tasks=tuple(map(absolute_exam, config.eval.tasks)),
    ),
  )


def _from_file(path: str) -> ModuleType:
  """Executes the file of a recipe. Raises ConfigError for any error in it, even sys.exit."""
  file = Path(path).expanduser()
  if not file.is_file():
    raise ConfigError(f"there is no recipe {shown(path)}")
  spec = importlib.util.spec_from_file_location(f"recipe_{file.stem}", file)  # not None for *.py
  module = importlib.util.module_from_spec(spec)
  try:
    spec.loader.exec_module(module)
  except BaseException as error:
    if isinstance(error, KeyboardInterrupt):
      raise
    reason = describe(error, file) + import_hint(error)
    raise ConfigError(f"recipe {path} cannot be executed: {reason}") from None
  return module


def recipe_files() -> dict[str, str]:
  """The paths of the recipes of grpo_jax, by the name of the recipe."""
  folders = [Path(folder) for folder in importlib.import_module("grpo_jax.configs").__path__]
  files = sorted(file for folder in folders for file in folder.glob("[!_]*.py"))
  return {file.stem: str(file) for file in files}


def file_of(config: str) -> str:
  """Resolves a value of --config, RECIPE[:PRESET] or FILE[:PRESET], to FILE[:PRESET]."""
  name, colon, preset = config.partition(":")
  files = {} if os.path.isfile(name) else recipe_files()  # isfile never raises
  return f"{files.get(name, name)}{colon}{preset}"


def import_hint(error: BaseException) -> str:
  """Returns a hint for a config file that fails to import `configs`, or ""."""
  if isinstance(error, ImportError) and error.name == "configs":
    return "; the recipes of grpo_jax are in grpo_jax.configs"
  return ""


def _recipe(name: str) -> ModuleType:
  """Imports a recipe of grpo_jax. Raises ConfigError if there is no recipe of this name."""
  if name not in recipe_files():
    raise ConfigError(
      f"there is no recipe {shown(name)}: choose one of {', '.join(recipe_files())}, or name a file"
      " that ends in .py"
    )
  return importlib.import_module(f"grpo_jax.configs.{name}")
