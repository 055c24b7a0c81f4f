"""The image processor of Gemma 4: of any shape, as large as the limit on visual tokens allows."""

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
_TOKENS = (70, 140, 280, 560, 1120)  # the supported limits on visual tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4(Kind):
  """The image processor with the settings of a model's folder.

  Attributes:
    pool: The side of the square of patches that becomes one visual token, in patches.
    most_tokens: The most visual tokens of an image.
    begin: The token before an image's visual tokens.
    end: The token after an image's visual tokens.
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
    """The layout of one picture, with the tokens that begin and end it."""
    rows, columns = self._tokens(height, width)
    text = f"{self.begin}{self.token * (rows * columns)}{self.end}"
    return Layout(text, ((rows, columns),))

  def pictures(self, image: np.ndarray) -> list[Picture]:
    """One picture: patches row by row, values as [row, column, channel]."""
    unit = self.patch * self.pool
    rows, columns = self._tokens(*image.shape[:2])
    resized = resize(image, rows * unit, columns * unit, self.scale.resample)
    patches = patches_of(self.scale(resized), self.patch)
    count = patches.shape[0] * patches.shape[1]
    places = places_of(*patches.shape[:2]).reshape(count, 2)
    return [Picture(np.ascontiguousarray(patches.reshape(count, -1)), places)]

  def _tokens(self, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of visual tokens: as many as allowed, in about the image's aspect ratio."""
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
  """Makes the processor from the fields in a model's folder.

  Args:
    fields: The fields of the image processor.
    tokens: The special tokens of the tokenizer by role.

  Raises:
    ConfigError: A field has a value that is not supported.
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
