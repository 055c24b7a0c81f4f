"""The image processor of SmolVLM and Idefics3: square tiles, then the whole image as one tile."""

import dataclasses
import math
from typing import Any

import numpy as np

from grpo_jax.data.images.fields import Fields
from grpo_jax.data.images.pictures import Layout, Picture, SquareKind, as_convolution, scale_of
from grpo_jax.data.images.resize import resize

_SIGLIP = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "resample": 1}
_LONGEST = 4096  # the most pixels of a side after the first resizing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Idefics3(SquareKind):
  """The image processor with the settings of a model's folder. A picture is a tile.

  Attributes:
    longest: The length in pixels to which the first resizing scales the longer side.
    splits: Whether images are cut into tiles.
    around: The token before each tile and after the last tile.
    whole: The token before the tile of the whole image.
  """

  longest: int
  splits: bool
  around: str
  whole: str

  def layout(self, height: int, width: int) -> Layout:
    """The layout of the tiles, with tokens for their rows and columns, and of the whole image."""
    rows, columns = self._tiles(height, width)
    tile = self.token * self.tokens
    text = ""
    for row in range(1, rows + 1):
      for column in range(1, columns + 1):
        text += f"{self.around}<row_{row}_col_{column}>{tile}"
      text += "\n"
    if rows:  # an empty line before the whole image
      text += "\n"
    text += f"{self.around}{self.whole}{tile}{self.around}"
    return Layout(text, (self.grid,) * (rows * columns + 1))

  def pictures(self, image: np.ndarray) -> list[Picture]:
    """The tiles row by row, then the whole image. The values of a patch: [channel, row, column]."""
    side, resample = self.side, self.scale.resample
    image = resize(image, *self._first_size(*image.shape[:2]), resample)
    if not self.splits:
      tiles = [resize(image, side, side, resample)]
    else:
      rows, columns = self._tile_grid(*image.shape[:2])
      image = resize(image, rows * side, columns * side, resample)
      tiles = [
        *image.reshape(rows, side, columns, side, -1).swapaxes(1, 2).reshape(-1, side, side, 3)
      ]
      if len(tiles) > 1:  # else the only tile already is the whole image
        tiles.append(resize(image, side, side, resample))
    return [as_convolution(self.scale(tile), self.patch) for tile in tiles]

  def _tiles(self, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of tiles, or (0, 0) if the whole image is the only tile."""
    if not self.splits:
      return 0, 0
    rows, columns = self._tile_grid(*self._first_size(height, width))
    return (rows, columns) if rows * columns > 1 else (0, 0)

  def _first_size(self, height: int, width: int) -> tuple[int, int]:
    """Height and width after the first resizing, rounded as in transformers.

    The longer side becomes `longest`, and the other is rounded up to an even number. Then both
    shrink so that the longer side has at most `_LONGEST` pixels.
    """
    ratio = width / height
    if width >= height:
      width, height = self.longest, int(self.longest / ratio)
      height += height % 2
    else:
      height, width = self.longest, int(self.longest * ratio)
      width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > _LONGEST:
      width, height = _LONGEST, int(_LONGEST / ratio)
    elif height > width and height > _LONGEST:
      height, width = _LONGEST, int(_LONGEST * ratio)
    return max(height, 1), max(width, 1)

  def _tile_grid(self, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of tiles, from the height and width after the first resizing."""
    ratio, side = width / height, self.side
    if width >= height:
      columns = math.ceil(width / side)
      return math.ceil(int(columns * side / ratio) / side), columns
    rows = math.ceil(height / side)
    return rows, math.ceil(int(rows * side * ratio) / side)


def make(fields: Fields, around: Fields, vision: Fields, tokens: dict[str, Any]) -> Idefics3:
  """Makes the processor from the fields in a model's folder.

  Fields that are missing have the defaults of transformers' Idefics3 classes.

  Args:
    fields: The fields of the image processor.
    around: The fields of the processor that contains the image processor.
    vision: vision_config of the model's config.json.
    tokens: The special tokens of the tokenizer by role.

  Raises:
    ConfigError: A field has a value that is not supported.
  """
  side = fields.inside("max_image_size", {"longest_edge": 364}).count("longest_edge", 364)
  kind = Idefics3(
    scale=scale_of(fields, _SIGLIP),
    longest=fields.inside("size", {"longest_edge": 1456}).count("longest_edge", 1456),
    side=side,
    patch=vision.count("patch_size", 32),
    tokens=around.count("image_seq_len", 169),
    splits=fields.flag("do_image_splitting", True),
    token=tokens.get("image_token", "<image>"),
    around=tokens.get("fake_image_token", "<fake_token_around_image>"),
    whole=tokens.get("global_image_token", "<global-img>"),
  )
  kind.check_sizes(fields, "max_image_size", around, "image_seq_len")
  return kind
