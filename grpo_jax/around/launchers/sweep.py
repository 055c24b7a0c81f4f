"""The settings of a sweep: a Python file whose `sweep()` yields one dict for each run.

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
_MOST_RUNS = 10_000  # a sweep() that never ends shall not fill the memory
_LONGEST_NAME = 150  # file systems take 255 bytes, and logs add to the name


def load_sweep(path: str) -> list[dict[str, Any]]:
  """The settings of each run: values by config key, in the order of the file.

  Whether the keys exist and the values fit is for the config to say.

  Args:
    path: A Python file that defines sweep(). It is executed.

  Raises:
    ConfigError: There is no such file, it fails, or sweep() yields no dicts of settings, or the
      same settings twice.
  """
  file = Path(path).expanduser()
  if not file.is_file():
    raise ConfigError(f"flag --sweep={path}: there is no file {file}")
  with doing(f"executing {path}"):
    yielded = _yielded(path, file)
  settings = [_plain(path, one) for one in yielded]
  if not settings:
    raise ConfigError(f"flag --sweep={path}: sweep() yields nothing")
  seen: dict[Any, dict[str, Any]] = {}
  for one in settings:
    # 1 and 1.0 are equal, and 0.001 and '0.001' share a name.
    for key in (frozenset(one.items()), name_of(one)):
      first = seen.setdefault(key, one)
      if first is not one:
        twice = "twice" if first == one else f"and {shown(first)}, which are the same run"
        raise ConfigError(f"flag --sweep={path}: sweep() yields {shown(one)} {twice}")
  return settings


def name_of(overrides: Mapping[str, Any]) -> str:
  """The name of a run's folder, such as "optimizer.learning_rate=0.001,seed=1".

  It depends on the settings alone, so that a run keeps its folder when the sweep gets other runs.
  Other settings have another name. The seed stands last.
  """
  keys = sorted(overrides, key=lambda key: (key == SEED, key))
  full = ",".join(f"{key}={flag_value(overrides[key])}" for key in keys)
  readable = re.sub(r"[^\w.,=+-]", "_", full, flags=re.ASCII)[:_LONGEST_NAME]
  if readable == full:
    return full
  return f"{readable}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"


def flag_value(value: Any) -> str:
  """A value as --config.KEY=VALUE wants it."""
  return value if isinstance(value, str) else repr(value)


def _yielded(path: str, file: Path) -> list[Any]:
  """The objects that sweep() of the file yields."""
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
  except BaseException as error:  # a program, so it can raise any exception, SystemExit included
    raise ConfigError(f"flag --sweep={path}: {describe(error, file)}") from None
  if len(made) > _MOST_RUNS:
    raise ConfigError(f"flag --sweep={path}: sweep() yields more than {_MOST_RUNS} runs")
  return made


def _plain(path: str, overrides: Any) -> dict[str, Any]:
  """The overrides with scalars of numpy as numbers, and lists as the tuples that flags hold."""
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
  # A scalar of numpy. Of any other object, nothing is asked, because it may do anything.
  return value.item() if hasattr(type(value), "ndim") and value.ndim == 0 else value


def _is_plain(value: Any) -> bool:
  if isinstance(value, tuple):
    return all(_is_plain(item) for item in value)
  return isinstance(value, (bool, int, float, str))
