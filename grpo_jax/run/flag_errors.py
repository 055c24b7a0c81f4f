"""Errors that absl, ml_collections or a config file raise while flags are read, in one line."""

from pathlib import Path
import traceback

from absl import flags

from grpo_jax.algo.presets import PRESETS
from grpo_jax.config import wrong_type
from grpo_jax.settings import ConfigError


def flag_error(error: BaseException, overrides: list[tuple[str, str]]) -> ConfigError:
  """The error for what was raised while flags were read.

  Args:
    error: What was raised.
    overrides: (key, value) of each --config.KEY=VALUE, and ("", FILE) of --config=FILE.
  """
  for key, value in overrides:
    if key and str(error).startswith(f"flag --config.{key}={value}: "):
      return wrong_type(key, value)
  for key, value in overrides:
    in_file = None if key else _error_in_config(value, error)
    if in_file:
      return ConfigError(in_file)
  return ConfigError(str(error).strip().split("\n")[0] or type(error).__name__)


def _error_in_config(config: str, error: BaseException | None) -> str | None:
  """Where in the config file an error was raised, and what it is. None if it was elsewhere."""
  file, _, preset = config.partition(":")
  found = str(error)
  if isinstance(error, AttributeError) and "has no attribute 'get_config'" in found:
    return f"flag --config={config}: {file} defines no get_config(), as configs/default.py does"
  while error:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == Path(file)]
    if lines and isinstance(error, KeyError) and error.args == (preset,):
      names = ", ".join(PRESETS)
      return (
        f"flag --config={config}: {file} has no preset {preset!r}; grpo_jax/algo/presets.py has"
        f" {names}"
      )
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename) == Path(file):
      lines, text = [error.lineno], error.msg
    if isinstance(error, SystemExit):
      text = "a config file must not end the program"
    if lines:
      return f"{file} line {lines[-1]}: {type(error).__name__}: {text:.300}"
    if error.__context__ is None and not isinstance(error, flags.Error):
      return f"{file} cannot be read as a config: {type(error).__name__}: {text:.300}"
    error = error.__context__
  return None
