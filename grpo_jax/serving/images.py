"""Images of conversations: read from requests, put into prompts, and made ready for the engine."""

from collections.abc import Mapping, Sequence
import hashlib
from typing import Any, NamedTuple

import numpy as np

from grpo_jax.data.images.batches import pad, padded_sizes, sizes_of
from grpo_jax.data.images.messages import place_images
from grpo_jax.data.images.processor import Processor
from grpo_jax.data.images.source import AnyImage, ImageSource, check_count, source_of
from grpo_jax.settings import ConfigError, shown
from grpo_jax.types import Images

Messages = list[dict[str, Any]]


class SeenImages(NamedTuple):
  """The images of a prompt, decoded.

  Attributes:
    arrays: The images of this one prompt in numpy, padded to the longest prompt of the engine.
    ids: The token ids of the prompt.
    known_as: The same for the prefix cache. A token of an image is a negative number there, which
      depends on all bytes of the image. Its id is that of any other image.
    end: How many tokens the prompt has up to the last one of an image.
    shift: By how much the position of what follows the prompt differs from its number of tokens.
  """

  arrays: Images
  ids: tuple[int, ...]
  known_as: tuple[int, ...]
  end: int
  shift: int

  @property
  def nbytes(self) -> int:
    """The memory that it takes."""
    return self.arrays.patches_PINC.nbytes

  def up_to(self, slots: int) -> Images:
    """The images for a prompt that is padded to so many tokens."""
    axes_PS3 = self.arrays.positions_PS3
    return self.arrays.replace(
      seen_PS2=self.arrays.seen_PS2[:, :slots],
      positions_PS3=None if axes_PS3 is None else axes_PS3[:, :slots],
    )


def image_of(part: Mapping[str, Any], where: str, sees_images: bool) -> AnyImage:
  """The image of a part of type image_url, of which nothing is decoded.

  Args:
    part: The part.
    where: Its name in errors.
    sees_images: Whether the model sees images.

  Raises:
    ConfigError: It has no image that this server reads.
  """
  if not sees_images:
    raise ConfigError(f"{where}: the model sees no images here; send texts alone")
  given = part.get("image_url")
  url = given.get("url") if isinstance(given, Mapping) else given
  if not isinstance(url, str) or not url.startswith("data:"):
    raise ConfigError(
      f"{where} is {shown(url):.80}: this server fetches no address and reads no file; send a data"
      " URL, such as data:image/png;base64,..."
    )
  try:
    return source_of(url, where)
  except ConfigError as error:
    raise ConfigError(" ".join(str(error).split())) from None


def taken_out(messages: Messages, sees_images: bool) -> tuple[Messages, list[AnyImage]]:
  """A conversation with places for its images, and the images.

  As in training, all contents are lists of parts then, also without an image: some templates read
  nothing else. Where the model sees no images, the messages stay as they are.

  Raises:
    ConfigError: There are too many.
  """
  if not sees_images:
    return messages, []
  placed, images = place_images(messages, (), "messages")
  check_count(len(images), "messages")
  return placed, images


def last_text(content: str | list[dict[str, Any]]) -> str:
  """The text that a content ends with, or "" if that is an image."""
  return content if isinstance(content, str) else content[-1].get("text", "")


def with_end(content: str | list[dict[str, Any]], end: str) -> str | list[dict[str, Any]]:
  """A content that ends with a text, and goes on with another one."""
  if isinstance(content, str):
    return content + end
  *before, last = content
  return [*before, {**last, "text": last["text"] + end}]


class ImageReader:
  """Reads images as a model's image processor does."""

  def __init__(self, processor: Processor) -> None:
    """Reads nothing yet."""
    self._processor = processor

  def expand(self, text: str, images: Sequence[AnyImage], most: int) -> str:
    """A rendered conversation with the tokens of its images. Headers alone are read.

    Args:
      text: The conversation.
      images: Its images.
      most: The most tokens that they may have.

    Raises:
      ConfigError: An image cannot be read, they have more tokens, or the text has other places.
    """
    layouts = [self._processor.layout(image) for image in images]
    count = sum(rows * columns for layout in layouts for rows, columns in layout.tokens)
    if count > most:
      raise ConfigError(
        f"messages: the images have {count} tokens and a prompt may have {most}; make them smaller"
      )
    return self._processor.expand(text, layouts, "messages")

  def read(self, ids: Sequence[int], images: Sequence[AnyImage], slots: int) -> SeenImages:
    """Decodes the images of a prompt.

    Args:
      ids: Its token ids.
      images: Its images.
      slots: The most tokens of a prompt.

    Raises:
      ConfigError: An image is damaged.
    """
    processor = self._processor
    layouts = [processor.layout(image) for image in images]
    placed = processor.place(ids, layouts, "messages")
    pictures = [picture for image in images for picture in processor.pictures(image)]
    sizes = padded_sizes(*sizes_of([layouts]), processor.kind.patches_per_token, None)
    arrays = Images(*pad([pictures], [placed], sizes, slots, processor))
    is_seen_S = placed.seen_S2[:, 0] >= 0
    known_S = np.array(ids, np.int64)
    counts = [sum(rows * columns for rows, columns in layout.tokens) for layout in layouts]
    known_S[is_seen_S] = np.concatenate([_names(*pair) for pair in zip(images, counts)])
    end = int(np.flatnonzero(is_seen_S)[-1]) + 1
    return SeenImages(arrays, tuple(ids), tuple(known_S.tolist()), end, placed.next - len(ids))


def _names(image: AnyImage, count: int) -> np.ndarray:
  """Negative int32 numbers for the tokens of an image. -1 is none of them."""
  content = image.data if isinstance(image, ImageSource) else repr(image).encode()
  words = np.frombuffer(hashlib.shake_128(content).digest(4 * count), "<u4")
  return -2 - (words % (2**31 - 2)).astype(np.int64)
