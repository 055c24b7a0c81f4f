"""The defaults of every setting as a ConfigDict. Other configs start from here and change a few.

grpo_jax/config.py lists the settings with their meanings and ranges, and the modules of
grpo_jax/algo those of the section `algo`, which `Algo` in its settings.py brings together.
"""

import dataclasses

from ml_collections import ConfigDict

from grpo_jax.algo import presets
from grpo_jax.config import Config


def get_config(preset: str = "grpo") -> ConfigDict:
  """The defaults with a preset of grpo_jax/algo/presets.py: --config=configs/X.py:PRESET."""
  config = Config(algo=presets.preset(preset))
  # With tuples, because the command line cannot override a list of a ConfigDict.
  return ConfigDict(dataclasses.asdict(config))
