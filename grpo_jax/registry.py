"""Tables of what a config can name, to which a user's program may add."""

from typing import TypeVar

from grpo_jax.settings import ConfigError

T = TypeVar("T")

_added: set[tuple[str, str]] = set()  # (kind, name) of what users registered


def register(kind: str, table: dict[str, T], name: str, entry: T) -> None:
  """Adds an entry of a user. An entry that a user added before under this name is replaced.

  A cell of a notebook that is run again so takes effect in the next run.

  Args:
    kind: What messages call the entry, such as "reward function".
    table: Where a config's names are looked up.
    name: Its name in a config.
    entry: What the name stands for.

  Raises:
    ConfigError: The name is one of grpo_jax, or no name at all, as that of a lambda.
  """
  if not name.isidentifier():
    raise ConfigError(f"a {kind} cannot be registered as {name!r}: give the function a name")
  if name in table and (kind, name) not in _added:
    raise ConfigError(f"grpo_jax has a {kind} named {name!r}: give yours another name")
  _added.add((kind, name))
  table[name] = entry
