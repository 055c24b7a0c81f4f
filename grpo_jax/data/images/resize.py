"""Resizes images with the same bits as torchvision.

transformers resizes uint8 tensors with torchvision, whose CPU kernel computes with integers: it has
16-bit weights and rounds to uint8 twice, after resizing the width and after resizing the height.
"""

from collections.abc import Callable
import functools

import numpy as np

_MOST_BITS = 22  # the most fractional bits of a weight
_LARGEST = 1 << 15  # signed 16-bit weights are below this
_TOGETHER = 16  # output rows that one matrix product computes
_COLUMNS = 1 << 15  # columns that one matrix product computes, so that they fit the CPU's caches


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


# Pillow's number of a filter, which transformers stores: name, function of distances, and radius.
FILTERS: dict[int, tuple[str, Callable[[np.ndarray], np.ndarray], int]] = {
  1: ("lanczos", _lanczos, 3),
  2: ("bilinear", _bilinear, 1),
  3: ("bicubic", _bicubic, 2),
}


def resize(image: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
  """Resizes an image with antialiasing.

  Args:
    image: uint8 [old height, old width, channels].
    height: The new height in pixels.
    width: The new width in pixels.
    resample: The filter, a key of FILTERS.

  Returns:
    uint8 [height, width, channels].
  """
  if image.shape[1] != width:  # the width first, as in torchvision, whose rounding depends on it
    planes = np.ascontiguousarray(image.transpose(1, 0, 2))
    image = _first_axis(planes, width, resample).transpose(1, 0, 2)
  if image.shape[0] != height:
    image = _first_axis(np.ascontiguousarray(image), height, resample)
  return np.ascontiguousarray(image)


def _first_axis(image: np.ndarray, size: int, resample: int) -> np.ndarray:
  """Resizes the first axis to `size`.

  Each block of output rows is a product of matrices. Float64 is exact, because weights and bytes
  are integers, the sums are far below 2**53, and the divisor is a power of two.
  """
  sources, weights, bits = _weights(image.shape[0], size, resample)
  flat = image.reshape(len(image), -1)
  resized = np.empty((size, flat.shape[1]), np.uint8)
  for begin in range(0, size, _TOGETHER):
    rows = slice(begin, min(begin + _TOGETHER, size))
    # The block sums over the input rows from `low` to `high`.
    low, high = int(sources[0, rows].min()), int(sources[-1, rows].max()) + 1
    matrix = np.zeros((rows.stop - begin, high - low))
    for source, weight in zip(sources[:, rows], weights[:, rows]):
      # Unused entries repeat an index with weight 0, so weights are added and not assigned.
      matrix[np.arange(len(source)), source - low] += weight
    matrix /= 1 << bits
    for left in range(0, flat.shape[1], _COLUMNS):
      columns = slice(left, left + _COLUMNS)
      sums = matrix @ flat[low:high, columns].astype(np.float64)
      resized[rows, columns] = np.clip(np.floor(sums + 0.5), 0, 255)
  return resized.reshape(size, *image.shape[1:])


@functools.lru_cache(64)
def _weights(old: int, new: int, resample: int) -> tuple[np.ndarray, np.ndarray, int]:
  """The input indices of size `old` that each output index sums over, and their integer weights.

  Indices and weights are rounded as in UpSampleKernel.cpp of PyTorch, by the functions
  `_compute_indices_min_size_weights_aa` and `_compute_index_ranges_int16_weights`.

  Returns:
    (indices, int64 [summands, new]; weights, int32 [summands, new], which are divided by 2**bits
    and are 0 for unused indices; bits)
  """
  _, kernel, reach = FILTERS[resample]
  scale = old / new
  support = reach * max(scale, 1.0)  # wider if the image shrinks, which is the antialiasing
  centres = scale * (np.arange(new) + 0.5)
  first = np.maximum((centres - support + 0.5).astype(np.int64), 0)
  end = np.minimum((centres + support + 0.5).astype(np.int64), old)
  sources = first + np.arange(int((end - first).max()))[:, None]
  weights = kernel((sources - centres + 0.5) * min(1.0 / scale, 1.0))
  weights = np.where(sources < end, weights, 0.0)
  weights /= weights.sum(0)
  bits = 0  # the most for which the largest weight still fits 16 bits
  while bits < _MOST_BITS and int(0.5 + weights.max() * (1 << (bits + 1))) < _LARGEST:
    bits += 1
  half = np.where(weights < 0, -0.5, 0.5)
  integers = np.trunc(weights * (1 << bits) + half).astype(np.int32)
  return np.minimum(sources, old - 1), integers, bits
