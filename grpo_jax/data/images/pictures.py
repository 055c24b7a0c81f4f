"""The base class of image processors, with their pictures, layouts and scaling of pixels."""

import abc
from collections.abc import Mapping
import dataclasses
import math
from typing import NamedTuple

import numpy as np

from grpo_jax.data.images.fields import Fields
from grpo_jax.data.images.resize import FILTERS


class Picture(NamedTuple):
  """An image, or one tile of an image, as input of the vision tower.

  Attributes:
    patches_NC: float32, the C pixel values of each of the N patches.
    places_N2: int32, row and column of each patch in the picture.
  """

  patches_NC: np.ndarray
  places_N2: np.ndarray


@dataclasses.dataclass(frozen=True)
class Layout:
  """The text and the visual tokens of an image, which depend on the size of the image alone.

  Attributes:
    text: The text that replaces the image's placeholder in a prompt.
    tokens: For each picture of the image, the number of rows and of columns of its visual tokens.
  """

  text: str
  tokens: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Scale:
  """How an image is resampled, and how its bytes become floats.

  A byte is multiplied by `factor`. If there are mean and std, the result is then normalized.

  Attributes:
    resample: The resampling filter, a key of `resize.FILTERS`.
    mean: The mean of each channel after the multiplication, or None.
    std: The standard deviation of each channel after the multiplication, or None.
    factor: The rescaling factor of bytes, such as 1 / 255.
  """

  resample: int
  mean: tuple[float, ...] | None
  std: tuple[float, ...] | None
  factor: float

  def __call__(self, image: np.ndarray) -> np.ndarray:
    """Scales uint8 [height, width, 3]. Returns float32 of the same shape."""
    numbers = image.astype(np.float32)
    if self.mean is None:
      return numbers * np.float32(self.factor)
    # transformers divides mean and std by the factor instead, which rounds differently.
    inverse = np.float32(1.0 / self.factor)
    return (numbers - np.float32(self.mean) * inverse) / (np.float32(self.std) * inverse)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind(abc.ABC):
  """The base class of image processors. An instance has the settings of a model's folder.

  Attributes:
    scale: How pixels are resampled and scaled.
    patch: Height and width of a patch in pixels.
    token: The text of the special token that marks each visual token in a prompt.
    has_axes: Whether tokens have positions on three axes: time, height and width.
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
    """C, the number of values in a patch, from 3 channels."""
    return 3 * self.patch**2

  @abc.abstractmethod
  def layout(self, height: int, width: int) -> Layout:
    """The layout of an image of this size. Raises ValueError if the size is not supported."""

  @abc.abstractmethod
  def pictures(self, image: np.ndarray) -> list[Picture]:
    """Turns uint8 [height, width, 3] into pictures, in the order of `Layout.tokens`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SquareKind(Kind):
  """An image processor whose pictures are squares of one size.

  Attributes:
    side: Height and width of a picture in pixels.
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
    """The number of rows and of columns of a picture's visual tokens."""
    return math.isqrt(self.tokens), math.isqrt(self.tokens)

  def check_sizes(self, fields: Fields, size: str, around: Fields, count: str) -> None:
    """Raises ConfigError if the patches do not fill a picture or cannot be merged into its tokens.

    Args:
      fields: The fields that contain the side of a picture, for the error message.
      size: The name of the field with the side.
      around: The fields that contain the number of visual tokens, for the error message.
      count: The name of the field with this number.
    """
    if self.side % self.patch:
      fields.refuse(size, f"it must be a multiple of the model's patch_size, {self.patch}")
    patches, tokens = self.side // self.patch, math.isqrt(self.tokens)
    if tokens**2 != self.tokens or patches % tokens:
      around.refuse(count, f"{patches} x {patches} patches cannot be merged to so many tokens")


def scale_of(fields: Fields, defaults: Mapping[str, object]) -> Scale:
  """The scale that the fields of an image processor describe.

  `defaults` has `resample`, `mean`, `std` and maybe `do_normalize`, for fields that are absent.
  Raises ConfigError for a value that is not supported.
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
  """Cuts [rows * size, columns * size, channels] into [rows, columns, size, size, channels]."""
  rows, columns = image.shape[0] // size, image.shape[1] // size
  return image.reshape(rows, size, columns, size, -1).transpose(0, 2, 1, 3, 4)


def places_of(rows: int, columns: int) -> np.ndarray:
  """The row and the column of each patch, int32 [rows, columns, 2]."""
  return np.stack(np.mgrid[:rows, :columns], -1).astype(np.int32)


def as_convolution(image: np.ndarray, size: int) -> Picture:
  """Cuts an image into a picture's patches, row by row.

  The values of a patch are in the order of a convolution's kernel: channel, row, column. The image
  is float32 [height, width, 3]. Height and width are multiples of `size`.
  """
  patches = patches_of(image, size)
  count = patches.shape[0] * patches.shape[1]
  places = places_of(*patches.shape[:2])
  ordered = patches.transpose(0, 1, 4, 2, 3).reshape(count, -1)
  return Picture(np.ascontiguousarray(ordered), places.reshape(count, 2))
