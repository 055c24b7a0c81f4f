"""The image processor of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, for images of any size.

An image roughly keeps its aspect ratio. Each side is rounded to a multiple of a merged patch,
and the number of pixels stays within bounds. The patches of one visual token are consecutive.
"""

import dataclasses
import math

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

_CLIP = {
  "mean": (0.48145466, 0.4578275, 0.40821073),
  "std": (0.26862954, 0.26130258, 0.27577711),
  "resample": 3,
}
_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
_MOST_STRETCHED = 200  # the largest ratio of the longer side to the shorter side


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenVL(Kind):
  """The image processor with the settings of a model's folder.

  Attributes:
    frames: How often a patch repeats its pixels. A video would have this many frames in a patch.
    merge: The side of the square of patches that becomes one visual token, in patches.
    fewest: The fewest pixels of a resized image, which grows if it has fewer.
    most: The most pixels of a resized image, which shrinks if it has more.
  """

  frames: int
  merge: int
  fewest: int
  most: int
  token: str = "<|image_pad|>"
  has_axes: bool = True

  @property
  def plain(self) -> str:
    """The text that stands for an image in a prompt without a chat template."""
    return f"<|vision_start|>{self.token}<|vision_end|>"

  @property
  def patches_per_token(self) -> int:
    """How many patches become a visual token."""
    return self.merge**2

  @property
  def patch_numbers(self) -> int:
    """C, the number of values in a patch: 3 channels for each of the `frames`."""
    return 3 * self.frames * self.patch**2

  def layout(self, height: int, width: int) -> Layout:
    """One picture."""
    unit = self.patch * self.merge
    height, width = self._resized(height, width)
    rows, columns = height // unit, width // unit
    return Layout(self.token * (rows * columns), ((rows, columns),))

  def pictures(self, image: np.ndarray) -> list[Picture]:
    """One picture: patches in the order of tokens, values as [channel, frame, row, column]."""
    height, width = self._resized(*image.shape[:2])
    pixels = self.scale(resize(image, height, width, self.scale.resample))
    patches = patches_of(pixels, self.patch).transpose(0, 1, 4, 2, 3)
    merged = self._merged(patches)
    repeated = np.repeat(merged[:, :, None], self.frames, 2).reshape(len(merged), -1)
    return [Picture(repeated, self._merged(places_of(*patches.shape[:2])))]

  def _merged(self, patches: np.ndarray) -> np.ndarray:
    """Flattens [rows, columns, ...] to [rows * columns, ...], so that a token's patches adjoin."""
    rows, columns = (size // self.merge for size in patches.shape[:2])
    rest = patches.shape[2:]
    split = patches.reshape(rows, self.merge, columns, self.merge, *rest)
    return split.swapaxes(1, 2).reshape(-1, *rest)

  def _resized(self, height: int, width: int) -> tuple[int, int]:
    """The height and width after resizing, rounded as by `smart_resize` of transformers.

    Raises ValueError if the image is too narrow.
    """
    if max(height, width) > _MOST_STRETCHED * min(height, width):
      raise ValueError(f"one side is more than {_MOST_STRETCHED} times the other")
    unit = self.patch * self.merge
    new_height, new_width = (round(side / unit) * unit for side in (height, width))
    if new_height * new_width > self.most:
      shrink = math.sqrt(height * width / self.most)
      new_height, new_width = (
        max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width)
      )
    elif new_height * new_width < self.fewest:
      grow = math.sqrt(self.fewest / (height * width))
      new_height, new_width = (math.ceil(side * grow / unit) * unit for side in (height, width))
    if not new_height or not new_width:  # a safeguard: both branches keep at least one unit
      raise ValueError("a side would have no pixels")
    return new_height, new_width


def make(fields: Fields) -> QwenVL:
  """Makes the processor from a folder's fields. Raises ConfigError for an unsupported value."""
  size = fields.inside("size", _SIZE)
  # Older folders have min_pixels and max_pixels, which take precedence over `size`.
  fewest = fields.count("min_pixels", size.count("shortest_edge", _SIZE["shortest_edge"]))
  most = fields.count("max_pixels", size.count("longest_edge", _SIZE["longest_edge"]))
  return QwenVL(
    scale=scale_of(fields, _CLIP),
    patch=fields.count("patch_size", 14),
    frames=fields.count("temporal_patch_size", 2),
    merge=fields.count("merge_size", 2),
    fewest=fewest,
    most=most,
  )
