"""jax, which is imported when something is first computed with it.

The files of `grpo_jax/algo/` hold the settings, properties and checks of a variant beside its
functions of arrays. Commands that read settings alone, such as report and launch, start in a third
of the time without jax. A file that takes jax from here evaluates no annotations: it begins with
`from __future__ import annotations`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  import jax
  import jax.numpy as jnp

__all__ = ["jax", "jnp"]


class _Lazy:
  """Stands for a module until one of its attributes is used."""

  def __init__(self, name: str) -> None:
    self._name = name

  def __getattr__(self, attribute: str) -> Any:
    found = getattr(importlib.import_module(self._name), attribute)
    return self.__dict__.setdefault(attribute, found)


if not TYPE_CHECKING:
  jax, jnp = _Lazy("jax"), _Lazy("jax.numpy")
