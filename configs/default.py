"""The defaults of every setting as a ConfigDict. Other configs start from here and change a few.

grpo_jax/config.py lists the settings with their meanings and ranges, and the modules of
grpo_jax/algo those of the section `algo`, which `Algo` in its settings.py brings together.
"""

import dataclasses

from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference

from grpo_jax.algo import presets
from grpo_jax.config import Config
from grpo_jax.settings import Missing


def get_config(preset: str = "grpo") -> ConfigDict:
  """The defaults with a preset of grpo_jax/algo/presets.py: --config=configs/X.py:PRESET."""
  config = Config(algo=presets.preset(preset))
  # With tuples, because the command line cannot override a list of a ConfigDict.
  return ConfigDict(dataclasses.asdict(config))


def missing(what_to_do: str) -> FieldReference:
  """A text that the user has to give. The error without it says what to do, such as "run X"."""
  # A reference of type str would make a str of it, and one of type Missing would refuse a str. So
  # one refers to the other, until the user sets a value.
  return FieldReference(FieldReference(Missing(what_to_do)), field_type=str)
