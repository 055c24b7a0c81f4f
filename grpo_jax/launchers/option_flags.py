"""The options as flags of the command line: one flag for each."""

import dataclasses
from typing import Any

from absl import flags

from grpo_jax.launchers.options import ALL, Options
from grpo_jax.settings import ConfigError


def define(values: flags.FlagValues) -> None:
  """Defines them. The help of a flag says which launchers read it, if not all do."""
  for field in dataclasses.fields(Options):
    launchers = field.metadata["launchers"]
    of = "" if launchers == ALL else f"--on={'|'.join(launchers)}: "
    given = (field.name, field.default, of + field.metadata["meaning"])
    if isinstance(field.default, bool):
      flags.DEFINE_boolean(*given, flag_values=values)
    elif isinstance(field.default, int):
      lowest = field.metadata["lowest"]
      flags.DEFINE_integer(*given, lower_bound=lowest, flag_values=values)
    elif isinstance(field.default, tuple):
      flags.DEFINE_multi_string(*given, flag_values=values)
    else:
      flags.DEFINE_string(*given, flag_values=values)


def options_of(values: flags.FlagValues, on: str) -> Options:
  """The options that the flags give to the launcher `on`.

  Raises:
    ConfigError: The launcher does not read one of them.
  """
  given: dict[str, Any] = {}
  for field in dataclasses.fields(Options):
    value, launchers = values[field.name].value, field.metadata["launchers"]
    given[field.name] = tuple(value) if isinstance(value, list) else value
    if given[field.name] != field.default and on not in launchers:
      raise ConfigError(
        f"flag --{field.name} does nothing with --on={on}: it is for {', '.join(launchers)}"
      )
  return Options(**given)
