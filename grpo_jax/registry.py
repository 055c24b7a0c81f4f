"""Tables of what a config can name, to which a user's program may add."""

from typing import Any, TypeVar

from grpo_jax.settings import ConfigError, shown

T = TypeVar("T")

_added: set[tuple[str, str]] = set()  # (kind, name) of what users registered


def name_of(function: Any) -> str:
  """The name of a function, or that of the class of an object that can be called.

  Raises:
    ConfigError: It cannot be called, or its own __getattr__ raises another error than
      AttributeError, which would come up wherever Python looks at the object.
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
  """Adds an entry of a user. An entry that a user added before under this name is replaced.

  A cell of a notebook that is run again so takes effect in the next run.

  Args:
    kind: The word for the entry in messages, such as "reward function".
    table: Where a config's names are looked up.
    function: Its name is that of the entry in a config.
    entry: The value that the name stands for.

  Raises:
    ConfigError: The name is one of grpo_jax, or no name at all, as that of a lambda, or `function`
      is none.
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
