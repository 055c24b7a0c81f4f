"""The base of all kinds of image processors: pictures, their layout, and the scale of pixels."""

import abc
from collections.abc import Mapping
import dataclasses
import math
from typing import NamedTuple

import numpy as np

from grpo_jax.data.images.fields import Fields
from grpo_jax.data.images.resize import FILTERS


class Picture(NamedTuple):
  """An image, or a tile of one, as the vision tower gets it.

  Attributes:
    patches_NC: float32, the pixels of each patch.
    places_N2: int32, row and column of each patch.
  """

  patches_NC: np.ndarray
  places_N2: np.ndarray


@dataclasses.dataclass(frozen=True)
class Layout:
  """The text and the visual tokens that an image of some size becomes. It need not be decoded.

  Attributes:
    text: The text that takes the place of the image's placeholder in a prompt.
    tokens: For each picture, the rows and columns of its visual tokens.
  """

  text: str
  tokens: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Scale:
  """How an image is resampled, and how its bytes become numbers.

  Attributes:
    resample: A number of `resize.FILTERS`.
    mean: The numbers that are subtracted from the channels.
    std: The numbers that the channels are then divided by.
    factor: The number that the result is multiplied by. A scale has a mean and std, or a factor.
  """

  resample: int
  mean: tuple[float, ...] | None
  std: tuple[float, ...] | None
  factor: float

  def __call__(self, image: np.ndarray) -> np.ndarray:
    """The numbers of uint8 [height, width, 3]: float32 of the same shape."""
    numbers = image.astype(np.float32)
    if self.mean is None:
      return numbers * np.float32(self.factor)
    # As transformers does: the mean and std of bytes, computed in float32.
    by = np.float32(1.0 / self.factor)
    return (numbers - np.float32(self.mean) * by) / (np.float32(self.std) * by)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind(abc.ABC):
  """A kind of image processor, with the settings of a folder.

  Attributes:
    scale: How pixels are resampled and scaled.
    patch: Height and width of a patch.
    token: The token that a visual token takes the place of.
    has_axes: Whether tokens have positions on three axes.
  """

  scale: Scale
  patch: int
  token: str
  has_axes: bool = False

  @property
  def placeholder(self) -> str:
    """The text that stands for an image in a prompt that a chat template has rendered."""
    return self.token

  @property
  def plain(self) -> str:
    """The text that stands for an image in a prompt without a chat template."""
    return self.placeholder

  @property
  @abc.abstractmethod
  def patches_per_token(self) -> int:
    """How many patches become a visual token."""

  @property
  def patch_numbers(self) -> int:
    """C, how many numbers a patch has: those of 3 channels."""
    return 3 * self.patch**2

  @abc.abstractmethod
  def layout(self, height: int, width: int) -> Layout:
    """The layout of an image. Raises ValueError if the processor cannot take this size."""

  @abc.abstractmethod
  def pictures(self, image: np.ndarray) -> list[Picture]:
    """The pictures of an image, uint8 [height, width, 3], in the order of `Layout.tokens`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquareKind(Kind):
  """A kind whose pictures are squares of one size.

  Attributes:
    side: Height and width of a picture.
    tokens: How many visual tokens a picture has, a square number.
  """

  side: int
  tokens: int

  @property
  def patches_per_token(self) -> int:
    """How many patches become a visual token."""
    return (self.side // self.patch) ** 2 // self.tokens

  @property
  def grid(self) -> tuple[int, int]:
    """The rows and columns of a picture's visual tokens."""
    return math.isqrt(self.tokens), math.isqrt(self.tokens)

  def check_sizes(self, fields: Fields, size: str, around: Fields, count: str) -> None:
    """Raises ConfigError for patches that do not fill the picture, or cannot become the tokens.

    Args:
      fields: Has the side of a picture.
      size: In this field.
      around: Has the number of tokens.
      count: In this field.
    """
    if self.side % self.patch:
      fields.refuse(size, f"it must be a multiple of the model's patch_size, {self.patch}")
    patches, tokens = self.side // self.patch, math.isqrt(self.tokens)
    if tokens**2 != self.tokens or patches % tokens:
      around.refuse(count, f"{patches} x {patches} patches cannot be merged to so many tokens")


def scale_of(fields: Fields, defaults: Mapping[str, object]) -> Scale:
  """The scale that the fields of an image processor describe.

  Raises:
    ConfigError: A field has a value that no processor has.
  """
  fields.must_be_true("do_resize", "do_convert_rgb")
  fields.must_be_false("do_center_crop")
  resample = fields.choice("resample", FILTERS, defaults["resample"])
  factor = fields.number("rescale_factor", 1 / 255) if fields.flag("do_rescale", True) else 1.0
  if not fields.flag("do_normalize", defaults.get("do_normalize", True)):
    return Scale(resample, None, None, factor)
  mean = fields.channels("image_mean", defaults["mean"])
  std = fields.channels("image_std", defaults["std"])
  if not all(std):
    fields.refuse("image_std", "no number may be 0")
  return Scale(resample, mean, std, factor)


def patches_of(image: np.ndarray, size: int) -> np.ndarray:
  """The patches of an image.

  Args:
    image: [height, width, channels], multiples of `size`.
    size: Height and width of a patch.

  Returns:
    [rows, columns, height of a patch, width of a patch, channels].
  """
  rows, columns = image.shape[0] // size, image.shape[1] // size
  return image.reshape(rows, size, columns, size, -1).transpose(0, 2, 1, 3, 4)


def places_of(rows: int, columns: int) -> np.ndarray:
  """int32 [rows, columns, 2], the row and the column of each patch."""
  return np.stack(np.mgrid[:rows, :columns], -1).astype(np.int32)


def as_convolution(image: np.ndarray, size: int) -> Picture:
  """A picture whose patches are in rows, with their numbers in the order of a convolution's kernel.

  That order is channel, row, column.
  """
  patches = patches_of(image, size)
  count = patches.shape[0] * patches.shape[1]
  places = places_of(*patches.shape[:2])
  ordered = patches.transpose(0, 1, 4, 2, 3).reshape(count, -1)
  return Picture(np.ascontiguousarray(ordered), places.reshape(count, 2))
