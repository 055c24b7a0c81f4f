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
_OF_TASK = re.compile(r"([\w.-]+)=(.*)", re.DOTALL)


class EnvironmentObject(Protocol):
  """An object that answers the policy. `grpo_jax/environments/__init__.py` describes it."""

  def reset(self, example: Mapping[str, Any]) -> Any:
    """The messages that follow the prompt of the data set."""

  def step(self, message: Message) -> Any:
    """(the messages that answer a turn, its reward, whether the conversation has ended)."""


Factory = Callable[[], EnvironmentObject]

TOOLS: dict[str, Tool] = {"calculator": built_in.calculator}
ENVIRONMENTS: dict[str, Callable[..., EnvironmentObject]] = {"retry": built_in.Retry}
_OURS = frozenset((*TOOLS, *ENVIRONMENTS))


def register_tool(function: Tool) -> Tool:
  """Gives a tool of this program a name in configs: its own. It can be used as a decorator.

  Raises:
    ConfigError: A tool of grpo_jax has this name, or it has none.
  """
  register("tool", TOOLS, function, function)
  return function


def register_environment(
  made: Callable[..., EnvironmentObject],
) -> Callable[..., EnvironmentObject]:
  """Gives a class of this program a name in configs: its own. It can be used as a decorator.

  Raises:
    ConfigError: An environment of grpo_jax has this name, or it has none.
  """
  register("environment", ENVIRONMENTS, made, made)
  return made


def resolve_tools(name: str) -> list[Tool]:
  """The tools of an entry of environment.tools. Raises ConfigError if there is none."""
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
  """The factory that makes the objects of an environment.

  Args:
    name: The name as environment.name has it, without a task.

  Raises:
    ConfigError: No environment has this name, or it lacks a parameter that the name sets.
  """
  plain, options = calls.parse(name, _KEY)
  adapter, _, what = plain.partition(":")
  if adapter in _ADAPTERS:
    return _bound(_ADAPTERS[adapter], (what,), options, name)
  if plain in ENVIRONMENTS:
    return _bound(ENVIRONMENTS[plain], (), options, name)
  choices = (
    f"choose one of {', '.join(ENVIRONMENTS)}, or give textarena:ID, openenv:ADDRESS,"
    " path/file.py:Class or package.module:Class, or call grpo_jax.register_environment first"
  )
  factory = named(plain, _KEY, choices)
  _check_methods(factory, name)
  return _bound(factory, (), options, name)


def _check_methods(factory: Any, name: str) -> None:
  """Raises ConfigError for a class that lacks the methods of an environment."""
  if not inspect.isclass(factory):
    return
  public = [one for one, _ in inspect.getmembers(factory, inspect.isfunction) if one[0] != "_"]
  if not callable(getattr(factory, "reset", None)):
    raise ConfigError(f"{_KEY}: {name!r}: {name_of(factory)} has no method reset")
  if not callable(getattr(factory, "step", None)) and not {*public} - {"reset", "close"}:
    raise ConfigError(
      f"{_KEY}: {name!r}: {name_of(factory)} has no method step, and no public method that could be"
      " a tool"
    )


def by_task(name: str) -> dict[str, str]:
  """environment.name as names by task. The task "" means all tasks.

  Raises:
    ConfigError: A task has two environments, or some entries name a task and others do not.
  """
  found: dict[str, str] = {}
  for entry in calls.split_list(name):
    match = _OF_TASK.fullmatch(entry)
    task, own = (match[1], match[2]) if match else ("", entry)
    if task in found:
      raise ConfigError(f"{_KEY}: {name!r}: two environments for {task or 'all tasks'}")
    found[task] = own
  if "" in found and len(found) > 1:
    raise ConfigError(f"{_KEY}: {name!r}: write TASK=NAME for each of several environments")
  return found


def is_portable(name: str) -> bool:
  """Whether any process finds the tool or environment of this name."""
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
  try:
    inspect.signature(factory).bind(*values, **options)
  except TypeError as error:
    raise ConfigError(f"{_KEY}: {name!r}: {error}") from None
  except ValueError:  # some classes that are written in C have no signature
    pass
  return functools.partial(factory, *values, **options)
