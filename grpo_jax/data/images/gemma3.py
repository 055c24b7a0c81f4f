"""The image processor of Gemma 3: resizes every image to a square of one size."""

import dataclasses
from typing import Any

import numpy as np

from grpo_jax.data.images.fields import Fields
from grpo_jax.data.images.pictures import Layout, Picture, SquareKind, as_convolution, scale_of
from grpo_jax.data.images.resize import resize

_SIGLIP = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "resample": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3(SquareKind):
  """The image processor with the settings of a model's folder.

  Attributes:
    begin: The token before an image's visual tokens, which is also the placeholder.
    end: The token after an image's visual tokens.
  """

  begin: str
  end: str

  @property
  def placeholder(self) -> str:
    """The token that begins an image, which chat templates write for it."""
    return self.begin

  def layout(self, height: int, width: int) -> Layout:
    """The layout of one picture, between the tokens that begin and end it and empty lines."""
    text = f"\n\n{self.begin}{self.token * self.tokens}{self.end}\n\n"
    return Layout(text, (self.grid,))

  def pictures(self, image: np.ndarray) -> list[Picture]:
    """One picture: patches row by row, values as [channel, row, column]."""
    resized = resize(image, self.side, self.side, self.scale.resample)
    return [as_convolution(self.scale(resized), self.patch)]


def make(fields: Fields, around: Fields, vision: Fields, tokens: dict[str, Any]) -> Gemma3:
  """Makes the processor from the fields in a model's folder.

  Args:
    fields: The fields of the image processor.
    around: The fields of the processor that contains the image processor.
    vision: vision_config of the model's config.json.
    tokens: The special tokens of the tokenizer by role.

  Raises:
    ConfigError: A field has a value that is not supported.
  """
  # If true, images would also be seen in crops. transformers' Gemma3Processor ignores this field.
  fields.must_be_false("do_pan_and_scan")
  size = fields.inside("size", {"height": 224, "width": 224})
  side = size.count("height", 224)
  if size.count("width", 224) != side:
    size.refuse("width", f"it must be the height, {side}")
  kind = Gemma3(  # the number of tokens may be in either processor's fields
    scale=scale_of(fields, _SIGLIP),
    side=side,
    patch=vision.count("patch_size", 14),
    tokens=around.count("image_seq_length", fields.count("image_seq_length", 256)),
    token=tokens.get("image_token", "<image_soft_token>"),
    begin=tokens.get("boi_token", "<start_of_image>"),
    end=tokens.get("eoi_token", "<end_of_image>"),
  )
  kind.check_sizes(size, "height", around, "image_seq_length")
  return kind
