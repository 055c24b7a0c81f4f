"""Tools and environments by their names in the config."""

from collections.abc import Callable, Mapping
import functools
import inspect
import re
from typing import Any, Protocol

from grpo_jax import calls
from grpo_jax.environments import built_in
from grpo_jax.environments.adapters import mcp_tools
from grpo_jax.environments.adapters.games import TextArena
from grpo_jax.environments.adapters.servers import OpenEnv
from grpo_jax.registry import name_of, register
from grpo_jax.rewards.names import named
from grpo_jax.settings import ConfigError

Message = Mapping[str, Any]
Tool = Callable[..., Any]

_KEY = "environment.name"
_ADAPTERS: dict[str, Callable[..., Any]] = {"textarena": TextArena, "openenv": OpenEnv}
# TASK=NAME. It does not match an = within parentheses, as in retry(tries=2).
_OF_TASK = re.compile(r"([\w.-]+)=(.*)", re.DOTALL)


class EnvironmentObject(Protocol):
  """An object that answers the policy. `grpo_jax/environments/__init__.py` describes it."""

  def reset(self, example: Mapping[str, Any]) -> Any:
    """Returns the messages that follow the prompt of the data set."""

  def step(self, message: Message) -> Any:
    """Returns (messages that answer a turn, the turn's reward, whether the conversation ended)."""


Factory = Callable[[], EnvironmentObject]

TOOLS: dict[str, Tool] = {"calculator": built_in.calculator}
ENVIRONMENTS: dict[str, Callable[..., EnvironmentObject]] = {"retry": built_in.Retry}
_OURS = frozenset((*TOOLS, *ENVIRONMENTS))
# Functions that raise ConfigError for parameters that an environment cannot use.
_CHECKS: dict[str, Callable[..., None]] = {"retry": built_in.check_retry}


def register_tool(function: Tool) -> Tool:
  """Registers a tool under its function name, for environment.tools. Can be used as a decorator.

  Raises:
    ConfigError: grpo_jax has a tool with this name, or the function has no name.
  """
  register("tool", TOOLS, function, function)
  return function


def register_environment(
  made: Callable[..., EnvironmentObject],
) -> Callable[..., EnvironmentObject]:
  """Registers an environment under its class name, for environment.name. Can be a decorator.

  Raises:
    ConfigError: grpo_jax has an environment with this name, or the class has no name.
  """
  register("environment", ENVIRONMENTS, made, made)
  return made


def resolve_tools(name: str) -> list[Tool]:
  """Finds the tools that an entry of environment.tools names. Raises ConfigError if none exists."""
  if name.startswith(mcp_tools.PREFIX):
    return mcp_tools.tools_of(name)
  if name in TOOLS:
    return [TOOLS[name]]
  choices = (
    f"choose one of {', '.join(TOOLS)}, or give path/file.py:function, package.module:function,"
    " mcp:COMMAND or mcp:URL, or call grpo_jax.register_tool first"
  )
  return [named(name, "environment.tools", choices)]


def resolve_environment(name: str) -> Factory:
  """Finds the factory that makes the objects of an environment.

  Args:
    name: An entry of environment.name, without its task, such as "retry(tries=2)".

  Raises:
    ConfigError: No environment has this name, or it lacks a parameter that the entry sets, or it
      cannot use the parameter's value.
  """
  plain, options = calls.parse(name, _KEY)
  adapter, _, what = plain.partition(":")  # such as "textarena" and the ID of a game
  if adapter in _ADAPTERS:
    return _bound(_ADAPTERS[adapter], (what,), options, name)
  if plain in ENVIRONMENTS:
    factory = _bound(ENVIRONMENTS[plain], (), options, name)
    if plain in _CHECKS:
      _CHECKS[plain](**options)
    return factory
  choices = (
    f"choose one of {', '.join(ENVIRONMENTS)}, or give textarena:ID, openenv:ADDRESS,"
    " path/file.py:Class or package.module:Class, or call grpo_jax.register_environment first"
  )
  found = named(plain, _KEY, choices)
  _check_methods(found, name)
  return _bound(found, (), options, name)


def _check_methods(factory: Any, name: str) -> None:
  """Raises ConfigError if a class lacks `reset`, or has no `step`, `get_reward` or other method."""
  if not inspect.isclass(factory):  # the class that a function returns is not known yet
    return
  public = [key for key, _ in inspect.getmembers(factory, inspect.isfunction) if key[0] != "_"]
  if not callable(getattr(factory, "reset", None)):
    raise ConfigError(f"{_KEY}: {name!r}: {name_of(factory)} has no method reset")
  if not callable(getattr(factory, "step", None)) and not {*public} - {"reset", "close"}:
    raise ConfigError(
      f"{_KEY}: {name!r}: {name_of(factory)} has no method step, and no public method that could be"
      " a tool"
    )


def by_task(name: str) -> dict[str, str]:
  """Splits environment.name into names by task. The task "" means all tasks.

  Raises:
    ConfigError: A task has two environments, or some entries name a task and others do not.
  """
  found: dict[str, str] = {}
  for entry in calls.split_list(name):
    match = _OF_TASK.fullmatch(entry)
    task, environment = (match[1], match[2]) if match else ("", entry)
    if task in found:
      raise ConfigError(f"{_KEY}: {name!r}: two environments for {task or 'all tasks'}")
    found[task] = environment
  if "" in found and len(found) > 1:
    raise ConfigError(f"{_KEY}: {name!r}: write TASK=NAME for each of several environments")
  return found


def is_portable(name: str) -> bool:
  """Returns whether any process can load this name. False for names that a user registered."""
  if name.startswith(mcp_tools.PREFIX):
    return True
  plain, _ = calls.split(name)
  return ":" in plain or plain in _OURS


def _bound(
  factory: Callable[..., EnvironmentObject],
  values: tuple[Any, ...],
  options: Mapping[str, Any],
  name: str,
) -> Factory:
  """Binds arguments to a factory. Raises ConfigError, with the entry `name`, if they do not fit."""
  try:
    inspect.signature(factory).bind(*values, **options)
  except TypeError as error:
    raise ConfigError(f"{_KEY}: {name!r}: {error}") from None
  except ValueError:  # some classes that are written in C have no signature
    pass
  return functools.partial(factory, *values, **options)
