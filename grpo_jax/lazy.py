"""jax and orbax, which are imported when something is first computed or saved with them.

The files of `grpo_jax/algo/` hold the settings, properties and checks of a variant beside its
functions of arrays. Commands that only read the former, such as report and launch, start in a
fraction of the time without jax. And a run without checkpoints needs no orbax.

A file that takes a module from here must not evaluate annotations: it begins with
`from __future__ import annotations`, or has none that name the module.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  import jax
  import jax.numpy as jnp
  import orbax.checkpoint as ocp

__all__ = ["jax", "jnp", "ocp"]


class _Lazy:
  """Stands for a module until one of its attributes is used."""

  def __init__(self, name: str) -> None:
    self._name = name

  def __getattr__(self, attribute: str) -> Any:
    found = getattr(importlib.import_module(self._name), attribute)
    return self.__dict__.setdefault(attribute, found)


if not TYPE_CHECKING:
  jax, jnp, ocp = _Lazy("jax"), _Lazy("jax.numpy"), _Lazy("orbax.checkpoint")
