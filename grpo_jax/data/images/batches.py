"""The images of a batch of prompts as arrays, decoded by threads beside the device's work."""

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

_KEPT_BYTES = 1 << 30  # of pictures that were decoded and may be needed again
_THREADS = 8


class HostImages(NamedTuple):
  """`types.Images` in numpy: the same fields, with the same meaning."""

  patches_PINC: np.ndarray
  places_PIN2: np.ndarray
  seen_PS2: np.ndarray
  positions_PS3: np.ndarray | None = None
  next_P: np.ndarray | None = None


class ImageDecoder:
  """Decodes images in threads, and keeps the pictures of the last ones."""

  def __init__(self, processor: Processor) -> None:
    self._processor = processor
    self._pictures: OrderedDict[AnyImage, concurrent.futures.Future[list[Picture]]] = OrderedDict()
    self._sizes: dict[AnyImage, int] = {}
    self._lock = threading.Lock()
    self._threads = concurrent.futures.ThreadPoolExecutor(
      min(_THREADS, os.cpu_count() or 1), thread_name_prefix="images"
    )

  def begin(self, images: Sequence[AnyImage], layouts: Sequence[Layout]) -> None:
    """Begins to decode images. Returns at once."""
    for image, layout in zip(images, layouts, strict=True):
      self._begin(image, layout)

  def pictures(self, images: Sequence[AnyImage], layouts: Sequence[Layout]) -> list[list[Picture]]:
    """The pictures of each image. Waits for them.

    Raises:
      ConfigError: An image is damaged.
    """
    begun = [self._begin(image, layout) for image, layout in zip(images, layouts, strict=True)]
    return [future.result() for future in begun]

  def _begin(self, image: AnyImage, layout: Layout) -> concurrent.futures.Future[list[Picture]]:
    with self._lock:
      if image in self._pictures:
        self._pictures.move_to_end(image)
        return self._pictures[image]
      future = self._threads.submit(self._processor.pictures, image)
      kind = self._processor.kind
      patches = sum(rows * columns for rows, columns in layout.tokens) * kind.patches_per_token
      self._pictures[image] = future
      self._sizes[image] = patches * kind.patch_numbers * 4
      while sum(self._sizes.values()) > _KEPT_BYTES and len(self._pictures) > 1:
        oldest, _ = self._pictures.popitem(last=False)
        del self._sizes[oldest]
      return future


def sizes_of(layouts: Sequence[Sequence[Layout]]) -> tuple[int, int]:
  """The most pictures of a prompt, and the most visual tokens of a picture.

  Args:
    layouts: The layouts of the images of each prompt.
  """
  grids = [[grid for layout in of_prompt for grid in layout.tokens] for of_prompt in layouts]
  most_tokens = max(
    (rows * columns for of_prompt in grids for rows, columns in of_prompt), default=0
  )
  return max(map(len, grids), default=0), most_tokens


def padded_sizes(
  pictures: int, tokens: int, patches_per_token: int, most: tuple[int, int] | None
) -> tuple[int, int]:
  """I and N to which a batch is padded. There are few of them, so that few programs are compiled.

  Both are a power of two, or one and a half of one.

  Args:
    pictures: The most pictures of a prompt of the batch.
    tokens: The most visual tokens of a picture of the batch.
    patches_per_token: How many patches become a visual token.
    most: The largest `pictures` and `tokens` of all prompts of the split, if they are known.
  """
  count, size = _step(pictures), _step(tokens)
  if most is not None:
    count, size = min(count, max(most[0], pictures)), min(size, max(most[1], tokens))
  return count, size * patches_per_token


def pad(
  pictures: Sequence[Sequence[Picture]],
  placed: Sequence[Placed],
  sizes: tuple[int, int],
  max_tokens: int,
  processor: Processor,
) -> HostImages:
  """The images of P prompts as arrays.

  Args:
    pictures: The pictures of each prompt.
    placed: Where the visual tokens of each prompt are.
    sizes: I and N.
    max_tokens: S.
    processor: The processor that made them.
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
  for p, one in enumerate(placed):
    count = len(one.seen_S2)
    positions_PS3[p, :count] = one.positions_S3
    positions_PS3[p, count:] = one.next + np.arange(max_tokens - count)[:, None]
  next_P = np.array([one.next for one in placed], np.int32)
  return HostImages(patches_PINC, places_PIN2, seen_PS2, positions_PS3, next_P)


def _step(count: int) -> int:
  """The least power of two, or one and a half of one, that is at least `count`."""
  power = 1 << max(count - 1, 0).bit_length()
  middle = power * 3 // 4
  return middle if power >= 4 and middle >= count else power
