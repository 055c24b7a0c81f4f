"""Images as Gemma 4 sees them: of any shape, as large as a number of visual tokens allows."""

import dataclasses
import math
from typing import Any

import numpy as np

from grpo_jax.data.images.fields import Fields
from grpo_jax.data.images.pictures import (
  Kind,
  Layout,
  Picture,
  patches_of,
  places_of,
  scale_of,
)
from grpo_jax.data.images.resize import resize

_DEFAULTS = {
  "mean": (0.0, 0.0, 0.0),
  "std": (1.0, 1.0, 1.0),
  "resample": 3,
  "do_normalize": False,
}
_TOKENS = (70, 140, 280, 560, 1120)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4(Kind):
  """The settings of a folder.

  Attributes:
    pool: Rows and columns of patches that become a visual token.
    most_tokens: The most visual tokens of an image.
    begin: The token that begins an image.
    end: The token that ends it.
  """

  pool: int
  most_tokens: int
  begin: str
  end: str

  @property
  def patches_per_token(self) -> int:
    """How many patches become a visual token."""
    return self.pool**2

  def layout(self, height: int, width: int) -> Layout:
    """One picture, with the tokens that begin and end it."""
    rows, columns = self._tokens(height, width)
    text = f"{self.begin}{self.token * (rows * columns)}{self.end}"
    return Layout(text, ((rows, columns),))

  def pictures(self, image: np.ndarray) -> list[Picture]:
    """Patches in rows. Numbers of a patch: row, column, channel."""
    unit = self.patch * self.pool
    rows, columns = self._tokens(*image.shape[:2])
    resized = resize(image, rows * unit, columns * unit, self.scale.resample)
    patches = patches_of(self.scale(resized), self.patch)
    count = patches.shape[0] * patches.shape[1]
    places = places_of(*patches.shape[:2]).reshape(count, 2)
    return [Picture(np.ascontiguousarray(patches.reshape(count, -1)), places)]

  def _tokens(self, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of visual tokens: as many as fit, in about the shape of the image."""
    unit = self.patch * self.pool
    pixels = self.most_tokens * self.pool**2 * self.patch**2
    factor = math.sqrt(pixels / (height * width))
    rows, columns = (math.floor(factor * side / unit) for side in (height, width))
    if not rows and not columns:
      raise ValueError("it would have no tokens")
    if not rows:
      rows, columns = 1, min(width // height, self.most_tokens)
    elif not columns:
      rows, columns = min(height // width, self.most_tokens), 1
    return rows, columns


def make(fields: Fields, tokens: dict[str, Any]) -> Gemma4:
  """The processor of a folder.

  Args:
    fields: The fields of the image processor.
    tokens: The special tokens of the tokenizer by their roles.

  Raises:
    ConfigError: A field has a value that this processor does not have.
  """
  return Gemma4(
    scale=scale_of(fields, _DEFAULTS),
    patch=fields.count("patch_size", 16),
    pool=fields.count("pooling_kernel_size", 3),
    most_tokens=fields.choice("max_soft_tokens", _TOKENS, 280),
    token=tokens.get("image_token", "<|image|>"),
    begin=tokens.get("boi_token", "<|image>"),
    end=tokens.get("eoi_token", "<image|>"),
  )
