"""The recipes as modules, for config files that build on one: `from grpo_jax.configs import gsm8k`.

In a checkout, they are in configs/ beside this package. An installed package has them here.
"""

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if not Path(__file__).with_name("default.py").exists():
  __path__.append(str(Path(__file__).parents[2] / "configs"))

if TYPE_CHECKING:  # a type checker does not see the folder that is added to __path__

  def __getattr__(name: str) -> ModuleType: ...
