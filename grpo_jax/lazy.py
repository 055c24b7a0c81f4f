"""Stand-ins for jax, orbax and Pillow, which import the module when an attribute is first read.

A file of `grpo_jax/algo/` holds the settings and checks of its variants beside their functions of
arrays. Commands that need no arrays, such as report and launch, start in a fraction of the time
without jax. A run without checkpoints needs no orbax, and one without images no Pillow.

A file that uses a stand-in must not evaluate annotations that name the module, which would import
it. Such a file begins with `from __future__ import annotations`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  import jax
  import jax.numpy as jnp
  import orbax.checkpoint as ocp
  from PIL import Image, ImageOps

__all__ = ["Image", "ImageOps", "jax", "jnp", "ocp"]


class _Lazy:
  """A stand-in for a module. It caches the attributes that were read."""

  def __init__(self, name: str) -> None:
    self._name = name

  def __getattr__(self, attribute: str) -> Any:
    found = getattr(importlib.import_module(self._name), attribute)
    return self.__dict__.setdefault(attribute, found)


if not TYPE_CHECKING:
  jax, jnp, ocp = _Lazy("jax"), _Lazy("jax.numpy"), _Lazy("orbax.checkpoint")
  Image, ImageOps = _Lazy("PIL.Image"), _Lazy("PIL.ImageOps")
