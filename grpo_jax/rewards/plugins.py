"""Files of a user that register parts under names that a config can have."""

from collections.abc import Sequence
import pathlib

from grpo_jax.rewards.names import import_module, load_module
from grpo_jax.settings import ConfigError, shown

_KEY = "config key plugins"
_loaded: dict[pathlib.Path, int] = {}  # files, with the time of their last change


def load(plugins: Sequence[str]) -> None:
  """Executes files, or imports modules, so that what they register is there.

  A file is executed once, and again after it has changed.

  Args:
    plugins: Paths of files that end in .py, and names of modules.

  Raises:
    ConfigError: There is no such file or module, or it raises an exception.
  """
  for plugin in plugins:
    if not plugin.endswith(".py"):
      import_module(plugin, _KEY)
      continue
    try:
      path = pathlib.Path(plugin).expanduser().resolve()
      changed = path.stat().st_mtime_ns
    except (OSError, RuntimeError, ValueError) as error:
      raise ConfigError(f"{_KEY}: {shown(plugin)} cannot be read: {error}") from None
    if _loaded.get(path) != changed:
      load_module(path, _KEY)
      _loaded[path] = changed
