"""Images as Gemma 3 sees them: squares of one size, whatever their shape was."""

import dataclasses
import math
from typing import Any

import numpy as np

from grpo_jax.data.images.fields import Fields
from grpo_jax.data.images.pictures import Layout, Picture, Scale, as_convolution, scale_of
from grpo_jax.data.images.resize import resize

_SIGLIP = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "resample": 2}


@dataclasses.dataclass(frozen=True)
class Gemma3:
  """The settings of a folder.

  Attributes:
    scale: How pixels are resampled and scaled.
    side: Height and width of a resized image.
    patch: Height and width of a patch.
    tokens: How many visual tokens an image has, a square number.
    token: The token that a visual token takes the place of.
    placeholder: The token that begins an image.
    end: The token that ends it.
  """

  scale: Scale
  side: int
  patch: int
  tokens: int
  token: str
  placeholder: str
  end: str
  has_axes: bool = False

  @property
  def plain(self) -> str:
    """The token that begins an image."""
    return self.placeholder

  @property
  def patches_per_token(self) -> int:
    """How many patches become a visual token."""
    return (self.side // self.patch) ** 2 // self.tokens

  @property
  def patch_numbers(self) -> int:
    """3 channels."""
    return 3 * self.patch**2

  def layout(self, height: int, width: int) -> Layout:
    """One picture, with the tokens that begin and end it and empty lines around it."""
    text = f"\n\n{self.placeholder}{self.token * self.tokens}{self.end}\n\n"
    side = math.isqrt(self.tokens)
    return Layout(text, ((side, side),))

  def pictures(self, image: np.ndarray) -> list[Picture]:
    """Patches in rows. Numbers of a patch: channel, row, column."""
    resized = resize(image, self.side, self.side, self.scale.resample)
    return [as_convolution(self.scale(resized), self.patch)]


def make(fields: Fields, around: Fields, vision: Fields, tokens: dict[str, Any]) -> Gemma3:
  """The processor of a folder.

  Args:
    fields: Of the image processor.
    around: Of the processor.
    vision: vision_config of the model's config.json.
    tokens: The special tokens of the tokenizer by their roles.

  Raises:
    ConfigError: A field has a value that this processor does not have.
  """
  # transformers' processor of Gemma 3 leaves it out, whatever the folder says.
  fields.must_be_false("do_pan_and_scan")
  size = fields.inside("size", {"height": 224, "width": 224})
  side, patch = size.count("height", 224), vision.count("patch_size", 14)
  if size.count("width", 224) != side:
    size.refuse("width", f"it must be the height, {side}")
  if side % patch:
    size.refuse("height", f"it must be a multiple of the model's patch_size, {patch}")
  count = around.count("image_seq_length", fields.count("image_seq_length", 256))
  grid = side // patch
  if math.isqrt(count) ** 2 != count or grid % math.isqrt(count):
    around.refuse("image_seq_length", f"{grid} x {grid} patches cannot be pooled to so many tokens")
  return Gemma3(
    scale=scale_of(fields, _SIGLIP),
    side=side,
    patch=patch,
    tokens=count,
    token=tokens.get("image_token", "<image_soft_token>"),
    placeholder=tokens.get("boi_token", "<start_of_image>"),
    end=tokens.get("eoi_token", "<end_of_image>"),
  )
