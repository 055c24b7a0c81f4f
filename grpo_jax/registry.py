"""Adds functions of a user to the tables in which the names of a config are looked up."""

from typing import Any, TypeVar

from grpo_jax.settings import ConfigError, shown

T = TypeVar("T")

_added: set[tuple[str, str]] = set()  # (kind, name) of what users registered


def name_of(function: Any) -> str:
  """The name of a function. For another callable object, the name of its class.

  Raises:
    ConfigError: The object is not callable, or its own __getattr__ raises an error other than
      AttributeError, which would break any code that inspects the object.
  """
  kind = type(function).__name__
  if not callable(function):
    raise ConfigError(f"{shown(function)} is no function: give one that can be called")
  try:
    name = getattr(function, "__name__", kind)
  except Exception as error:
    raise ConfigError(
      f"__getattr__ of {kind} raises {type(error).__name__}: for a name that an object does not"
      " have, it must raise AttributeError"
    ) from None
  return name if isinstance(name, str) else kind


def register(kind: str, table: dict[str, T], function: Any, entry: T) -> None:
  """Adds an entry of a user to a table, under the name of a function.

  It replaces an entry that a user registered before, so that a notebook cell can be run again.

  Args:
    kind: The word for the entry in messages, such as "reward function".
    table: The table in which the names of a config are looked up.
    function: The function whose name selects the entry in a config.
    entry: The entry, such as a record that holds the function.

  Raises:
    ConfigError: An entry of grpo_jax has this name, or `function` is not callable or has no proper
      name, such as a lambda.
  """
  try:
    name = name_of(function)
  except ConfigError as error:
    raise ConfigError(f"a {kind} cannot be registered: {error}") from None
  if not name.isidentifier():
    raise ConfigError(f"a {kind} cannot be registered as {name!r}: give the function a name")
  if name in table and (kind, name) not in _added:
    raise ConfigError(f"grpo_jax has a {kind} named {name!r}: give yours another name")
  _added.add((kind, name))
  table[name] = entry
