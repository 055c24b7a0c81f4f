"""Resizes images as torchvision does, to the last bit.

transformers resizes uint8 tensors with torchvision, whose kernel on CPUs computes with integers:
weights of 16 bits, and values that are rounded to uint8 after the columns and after the rows.
"""

from collections.abc import Callable
import functools

import numpy as np

_MOST_BITS = 22  # of the fraction of a weight
_LARGEST = 1 << 15  # what a weight of 16 bits stays below
_TOGETHER = 16  # neighbours that are computed at once
_COLUMNS = 1 << 15  # of them, so that a part fits the processor's caches


def _bilinear(distances: np.ndarray) -> np.ndarray:
  return np.maximum(1.0 - np.abs(distances), 0.0)


def _bicubic(distances: np.ndarray) -> np.ndarray:
  """Keys, Cubic convolution interpolation (1981), with a = -1/2."""
  x, a = np.abs(distances), -0.5
  near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
  far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
  return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(distances: np.ndarray) -> np.ndarray:
  inside = (distances >= -3.0) & (distances < 3.0)
  return np.where(inside, np.sinc(distances) * np.sinc(distances / 3.0), 0.0)


# By Pillow's numbers, which transformers writes: the name, the filter, and how far it reaches.
FILTERS: dict[int, tuple[str, Callable[[np.ndarray], np.ndarray], int]] = {
  1: ("lanczos", _lanczos, 3),
  2: ("bilinear", _bilinear, 1),
  3: ("bicubic", _bicubic, 2),
}


def resize(image: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
  """An image of another size, with antialiasing.

  Args:
    image: uint8 [old height, old width, channels].
    height: The new height.
    width: The new width.
    resample: A number of FILTERS.

  Returns:
    uint8 [height, width, channels].
  """
  if image.shape[1] != width:
    planes = np.ascontiguousarray(image.transpose(1, 0, 2))
    image = _first_axis(planes, width, resample).transpose(1, 0, 2)
  if image.shape[0] != height:
    image = _first_axis(np.ascontiguousarray(image), height, resample)
  return np.ascontiguousarray(image)


def _first_axis(image: np.ndarray, size: int, resample: int) -> np.ndarray:
  """The image with another size of its first axis.

  Some neighbours at a time are a product of matrices. In float64 it is exact, because weights and
  bytes are integers and their sums are far below 2**53.
  """
  places, weights, bits = _weights(image.shape[0], size, resample)
  rest = image.reshape(len(image), -1)
  resized = np.empty((size, rest.shape[1]), np.uint8)
  for begin in range(0, size, _TOGETHER):
    some = slice(begin, min(begin + _TOGETHER, size))
    low, high = int(places[0, some].min()), int(places[-1, some].max()) + 1
    matrix = np.zeros((some.stop - begin, high - low))
    for place, weight in zip(places[:, some], weights[:, some]):
      matrix[np.arange(len(place)), place - low] += weight
    matrix /= 1 << bits
    for left in range(0, rest.shape[1], _COLUMNS):
      part = slice(left, left + _COLUMNS)
      sums = matrix @ rest[low:high, part].astype(np.float64)
      resized[some, part] = np.clip(np.floor(sums + 0.5), 0, 255)
  return resized.reshape(size, *image.shape[1:])


@functools.lru_cache(64)
def _weights(old: int, new: int, resample: int) -> tuple[np.ndarray, np.ndarray, int]:
  """Which old places make a new one, with which integer weights.

  Returns:
    (places and weights, each [places of a sum, new], and the bits of the weights' fraction)
  """
  _, kernel, reach = FILTERS[resample]
  scale = old / new
  support = reach * max(scale, 1.0)
  centres = scale * (np.arange(new) + 0.5)
  first = np.maximum((centres - support + 0.5).astype(np.int64), 0)
  end = np.minimum((centres + support + 0.5).astype(np.int64), old)
  places = first + np.arange(int((end - first).max()))[:, None]
  weights = kernel((places - centres + 0.5) * min(1.0 / scale, 1.0))
  weights = np.where(places < end, weights, 0.0)
  weights /= weights.sum(0)
  bits = 0
  while bits < _MOST_BITS and int(0.5 + weights.max() * (1 << (bits + 1))) < _LARGEST:
    bits += 1
  half = np.where(weights < 0, -0.5, 0.5)
  integers = np.trunc(weights * (1 << bits) + half).astype(np.int32)
  return np.minimum(places, old - 1), integers, bits
