"""Reads the settings of a sweep: a Python file whose `sweep()` yields one dict for each run.

def sweep():
  for learning_rate in (1e-4, 2e-4):
    for seed in range(3):
      yield {"optimizer.learning_rate": learning_rate, "seed": seed}
"""

from collections.abc import Iterable, Mapping
import hashlib
import itertools
from pathlib import Path
import re
import runpy
from typing import Any

from grpo_jax.foreign import describe
from grpo_jax.progress import doing
from grpo_jax.settings import ConfigError, shown

SEED = "seed"
_MOST_RUNS = 10_000  # keeps an endless sweep() from filling the memory
_LONGEST_NAME = 150  # file systems allow 255 bytes, and the names of logs are longer


def load_sweep(path: str) -> list[dict[str, Any]]:
  """Executes a sweep file. Returns the settings of each run by config key, in the file's order.

  The config checks later whether the keys exist and the values are valid.

  Args:
    path: A Python file that defines sweep().

  Raises:
    ConfigError: The file does not exist or fails, or sweep() yields nothing, something other than
      dicts of settings, or the same settings twice.
  """
  file = Path(path).expanduser()
  if not file.is_file():
    raise ConfigError(f"flag --sweep={path}: there is no file {file}")
  with doing(f"executing {path}"):
    yielded = _yielded(path, file)
  settings = [_plain(path, overrides) for overrides in yielded]
  if not settings:
    raise ConfigError(f"flag --sweep={path}: sweep() yields nothing")
  first_by_key: dict[Any, dict[str, Any]] = {}
  for overrides in settings:
    # Two runs are the same if their settings are equal (1 and 1.0) or share a name (1 and '1').
    for key in (frozenset(overrides.items()), name_of(overrides)):
      first = first_by_key.setdefault(key, overrides)
      if first is not overrides:
        conflict = "twice" if first == overrides else f"and {shown(first)}, which are the same run"
        raise ConfigError(f"flag --sweep={path}: sweep() yields {shown(overrides)} {conflict}")
  return settings


def name_of(overrides: Mapping[str, Any]) -> str:
  """The name of a run's folder, such as "optimizer.learning_rate=0.001,seed=1".

  The name depends only on the run's settings, so a run keeps its folder when the sweep changes.
  Different settings have different names: a long or unusual name ends in a hash. The seed is last.
  """
  keys = sorted(overrides, key=lambda key: (key == SEED, key))
  full = ",".join(f"{key}={flag_value(overrides[key])}" for key in keys)
  readable = re.sub(r"[^\w.,=+-]", "_", full, flags=re.ASCII)[:_LONGEST_NAME]
  if readable == full:
    return full
  return f"{readable}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"


def flag_value(value: Any) -> str:
  """Formats a value for --config.KEY=VALUE."""
  return value if isinstance(value, str) else repr(value)


def _yielded(path: str, file: Path) -> list[Any]:
  """Executes `file` and returns the objects that its sweep() yields. Messages name it `path`."""
  try:
    function = runpy.run_path(str(file), run_name="sweep").get("sweep")
    if not callable(function):
      raise ConfigError(f"flag --sweep={path}: {file} defines no function sweep()")
    yielded = function()
    if isinstance(yielded, Mapping) or not isinstance(yielded, Iterable):
      raise ConfigError(
        f"flag --sweep={path}: sweep() must yield dicts of settings, it returns {shown(yielded)}"
      )
    made = list(itertools.islice(yielded, _MOST_RUNS + 1))
  except (ConfigError, KeyboardInterrupt):
    raise
  except BaseException as error:  # a user's code can raise anything, even SystemExit
    raise ConfigError(f"flag --sweep={path}: {describe(error, file)}") from None
  if len(made) > _MOST_RUNS:
    raise ConfigError(f"flag --sweep={path}: sweep() yields more than {_MOST_RUNS} runs")
  return made


def _plain(path: str, overrides: Any) -> dict[str, Any]:
  """Converts NumPy scalars and lists in a run's settings to numbers and tuples, and checks them."""
  if not isinstance(overrides, Mapping) or not overrides:
    raise ConfigError(
      f"flag --sweep={path}: sweep() must yield dicts of settings such as"
      f' {{"optimizer.learning_rate": 1e-3, "seed": 1}}, it yields {shown(overrides)}'
    )
  plain = {}
  for key, value in overrides.items():
    plain[key] = _plain_value(value)
    if not isinstance(key, str) or not _is_plain(plain[key]):
      raise ConfigError(
        f"flag --sweep={path}: {shown(key)}: {shown(value)} is no setting: keys are strings, and"
        " values are numbers, strings, True or False, or lists of them"
      )
  return plain


def _plain_value(value: Any) -> Any:
  if isinstance(value, (list, tuple)):
    return tuple(_plain_value(item) for item in value)
  # Reads attributes of NumPy scalars only, because an attribute of another object may run any code.
  return value.item() if hasattr(type(value), "ndim") and value.ndim == 0 else value


def _is_plain(value: Any) -> bool:
  if isinstance(value, tuple):
    return all(_is_plain(item) for item in value)
  return isinstance(value, (bool, int, float, str))
