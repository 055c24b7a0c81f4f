"""The images of a batch of prompts as arrays. Threads decode them while the device works."""

from collections import OrderedDict
from collections.abc import Sequence
import concurrent.futures
import os
import threading
from typing import NamedTuple

import numpy as np

from grpo_jax.data.images.pictures import Layout, Picture
from grpo_jax.data.images.processor import Placed, Processor
from grpo_jax.data.images.source import AnyImage

_KEPT_BYTES = 1 << 30  # the most memory of the cache of decoded pictures
_THREADS = 8


class HostImages(NamedTuple):
  """Numpy arrays with the fields of `types.Images`."""

  patches_PINC: np.ndarray
  places_PIN2: np.ndarray
  seen_PS2: np.ndarray
  positions_PS3: np.ndarray | None = None
  next_P: np.ndarray | None = None


class ImageDecoder:
  """Decodes images in threads. An LRU cache keeps the pictures of the last images."""

  def __init__(self, processor: Processor) -> None:
    self._processor = processor
    self._pictures: OrderedDict[AnyImage, concurrent.futures.Future[list[Picture]]] = OrderedDict()
    self._sizes: dict[AnyImage, int] = {}
    self._lock = threading.Lock()
    self._threads = concurrent.futures.ThreadPoolExecutor(
      min(_THREADS, os.cpu_count() or 1), thread_name_prefix="images"
    )

  def begin(self, images: Sequence[AnyImage], layouts: Sequence[Layout]) -> None:
    """Starts to decode images, given with their layouts. Returns at once."""
    for image, layout in zip(images, layouts, strict=True):
      self._begin(image, layout)

  def pictures(self, images: Sequence[AnyImage], layouts: Sequence[Layout]) -> list[list[Picture]]:
    """The pictures of each image. Waits until all are decoded.

    A layout determines the size of its image in the cache. Raises ConfigError for a damaged image.
    """
    begun = [self._begin(image, layout) for image, layout in zip(images, layouts, strict=True)]
    return [future.result() for future in begun]

  def _begin(self, image: AnyImage, layout: Layout) -> concurrent.futures.Future[list[Picture]]:
    """The future of an image's pictures, from the cache or newly submitted to the threads."""
    with self._lock:
      if image in self._pictures:
        self._pictures.move_to_end(image)
        return self._pictures[image]
      future = self._threads.submit(self._processor.pictures, image)
      kind = self._processor.kind
      patches = sum(rows * columns for rows, columns in layout.tokens) * kind.patches_per_token
      self._pictures[image] = future
      self._sizes[image] = patches * kind.patch_numbers * 4  # bytes of float32
      # The newest stays, however large it is.
      while sum(self._sizes.values()) > _KEPT_BYTES and len(self._pictures) > 1:
        oldest, _ = self._pictures.popitem(last=False)
        del self._sizes[oldest]
      return future


def sizes_of(layouts: Sequence[Sequence[Layout]]) -> tuple[int, int]:
  """The largest number of pictures in a prompt, and of visual tokens in a picture.

  Args:
    layouts: For each prompt, the layouts of its images.
  """
  grids = [[grid for layout in of_prompt for grid in layout.tokens] for of_prompt in layouts]
  most_tokens = max(
    (rows * columns for of_prompt in grids for rows, columns in of_prompt), default=0
  )
  return max(map(len, grids), default=0), most_tokens


def padded_sizes(
  pictures: int, tokens: int, patches_per_token: int, most: tuple[int, int] | None
) -> tuple[int, int]:
  """The shape (I, N) to which a batch is padded: I pictures a prompt, N patches a picture.

  Both counts are rounded up to 2**n or 1.5 * 2**n, so that few shapes have to be compiled.

  Args:
    pictures: The largest number of pictures in a prompt of the batch.
    tokens: The largest number of visual tokens in a picture of the batch.
    patches_per_token: How many patches become a visual token.
    most: The largest `pictures` and `tokens` of the split, which limit the rounding, or None.
  """
  count, size = _step(pictures), _step(tokens)
  if most is not None:  # a batch may exceed `most` if an image has changed since the start
    count = min(count, max(most[0], pictures))
    size = min(size, max(most[1], tokens))
  return count, size * patches_per_token


def pad(
  pictures: Sequence[Sequence[Picture]],
  placed: Sequence[Placed],
  sizes: tuple[int, int],
  max_tokens: int,
  processor: Processor,
) -> HostImages:
  """Pads the images of P prompts to arrays.

  Args:
    pictures: The pictures of each prompt.
    placed: The places of the visual tokens in each prompt.
    sizes: I, the pictures of a padded prompt, and N, the patches of a padded picture.
    max_tokens: S, the tokens of a padded prompt.
    processor: The processor that made the pictures.
  """
  P, (I, N) = len(pictures), sizes
  patches_PINC = np.zeros((P, I, N, processor.kind.patch_numbers), np.float32)
  places_PIN2 = np.full((P, I, N, 2), -1, np.int32)
  seen_PS2 = np.full((P, max_tokens, 2), -1, np.int32)
  for p, of_prompt in enumerate(pictures):
    for i, picture in enumerate(of_prompt):
      patches_PINC[p, i, : len(picture.patches_NC)] = picture.patches_NC
      places_PIN2[p, i, : len(picture.places_N2)] = picture.places_N2
    seen_PS2[p, : len(placed[p].seen_S2)] = placed[p].seen_S2
  if not processor.kind.has_axes:
    return HostImages(patches_PINC, places_PIN2, seen_PS2)
  positions_PS3 = np.zeros((P, max_tokens, 3), np.int32)
  for p, prompt in enumerate(placed):
    count = len(prompt.seen_S2)
    positions_PS3[p, :count] = prompt.positions_S3
    positions_PS3[p, count:] = prompt.next + np.arange(max_tokens - count)[:, None]
  next_P = np.array([prompt.next for prompt in placed], np.int32)
  return HostImages(patches_PINC, places_PIN2, seen_PS2, positions_PS3, next_P)


def _step(count: int) -> int:
  """The least 2**n or 1.5 * 2**n that is at least `count`."""
  power = 1 << max(count - 1, 0).bit_length()
  middle = power * 3 // 4
  return middle if power >= 4 and middle >= count else power
