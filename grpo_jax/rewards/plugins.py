"""Plugins: files and modules of a user that register names for configs."""

from collections.abc import Sequence
import pathlib

from grpo_jax.rewards.names import import_module, load_module
from grpo_jax.settings import ConfigError, shown

_KEY = "config key plugins"
_loaded: dict[pathlib.Path, int] = {}  # the time of a file's last change, in nanoseconds


def load(plugins: Sequence[str]) -> None:
  """Executes files and imports modules, which register names.

  A file is executed once, and again after it has changed.

  Args:
    plugins: Paths of .py files, and names of modules.

  Raises:
    ConfigError: A file or module does not exist, or raises an exception.
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
