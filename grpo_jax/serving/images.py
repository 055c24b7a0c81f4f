"""Images of conversations: reads them from requests and prepares them for the engine."""

from collections.abc import Mapping, Sequence
import hashlib
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.data.images.batches import HostImages, pad, padded_sizes
from grpo_jax.data.images.messages import place_images
from grpo_jax.data.images.pictures import Layout, Picture
from grpo_jax.data.images.processor import Processor
from grpo_jax.data.images.source import AnyImage, ImageSource, check_count, source_of
from grpo_jax.sampler.programs import MOST_PATCHES
from grpo_jax.settings import ConfigError, shown
from grpo_jax.types import Visual

Messages = list[dict[str, Any]]


class SeenImages(NamedTuple):
  """The decoded images of a prompt.

  Attributes:
    pictures: The pictures that the vision tower encodes, each padded to one of a few sizes.
    places: Which picture each token of the prompt (P = 1) sees, without patches. Padded to S, the
      longest prompt of the engine.
    ids: The token ids of the prompt.
    known_as: `ids` for the prefix cache, with negative numbers for tokens of images. They are
      hashes of the image, because all images have the same token ids.
    end: The index after the last image token.
    shift: The position of the first token after the prompt, minus the number of prompt tokens.
  """

  pictures: tuple[Picture, ...]
  places: HostImages
  ids: tuple[int, ...]
  known_as: tuple[int, ...]
  end: int
  shift: int

  def tokens_of(self, picture: int) -> np.ndarray:
    """Which visual token of picture number `picture` each prompt token sees: int32 [S], or -1."""
    picture_S, number_S = self.places.seen_PS2[0].T
    return np.where(picture_S == picture, number_S, -1)

  def visual(self, features_PKSD: jax.Array) -> Visual:
    """Makes the `Visual` of P copies of this prompt. Features are aligned with prompt tokens."""
    P, _, S, _ = features_PKSD.shape
    # Entry s of the features belongs to prompt token s, which therefore sees visual token s.
    picture_PS = np.repeat(self.places.seen_PS2[:, :S, 0], P, 0)
    axes, following = self.places.positions_PS3, self.places.next_P
    return Visual(
      features_PKND=features_PKSD,
      seen_PS=np.where(picture_PS >= 0, np.arange(S, dtype=np.int32), -1),
      picture_PS=picture_PS,
      positions_PS3=None if axes is None else np.repeat(axes[:, :S], P, 0),
      next_P=None if following is None else np.repeat(following, P),
    )


def image_of(part: Mapping[str, Any], where: str, sees_images: bool) -> AnyImage:
  """Reads a message part of type image_url, without decoding the image.

  Args:
    part: The part.
    where: The name of the part in errors.
    sees_images: Whether the model accepts images.

  Raises:
    ConfigError: The model accepts no images, or the part has no valid data URL.
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
    raise ConfigError(" ".join(str(error).split())) from None  # in one line


def taken_out(messages: Messages, sees_images: bool) -> tuple[Messages, list[AnyImage]]:
  """Replaces the images of a conversation by placeholders. Returns the messages and the images.

  If the model sees images, all contents become lists of parts, as in training, because some
  templates read nothing else. If it does not, the messages stay unchanged.

  Raises:
    ConfigError: There are too many images.
  """
  if not sees_images:
    return messages, []
  placed, images = place_images(messages, (), "messages")
  check_count(len(images), "messages")
  return placed, images


def last_text(content: str | list[dict[str, Any]]) -> str:
  """The text at the end of a message's content, or "" if the content ends with an image."""
  return content if isinstance(content, str) else content[-1].get("text", "")


def with_end(content: str | list[dict[str, Any]], end: str) -> str | list[dict[str, Any]]:
  """Appends a text to a message's content, which must end with a text."""
  if isinstance(content, str):
    return content + end
  *before, last = content
  return [*before, {**last, "text": last["text"] + end}]


class ImageReader:
  """Reads images as a model's image processor does."""

  def __init__(self, processor: Processor) -> None:
    """Reads nothing yet."""
    self._processor = processor

  def look(self, images: Sequence[AnyImage]) -> "UnreadImages":
    """Reads only the headers of a conversation's images, for their sizes.

    Raises:
      ConfigError: An image cannot be read, or is too large.
    """
    layouts = [self._processor.layout(image) for image in images]
    unread = UnreadImages(self._processor, tuple(images), layouts)
    patches = max(unread.sizes, default=0)
    if patches > MOST_PATCHES:
      raise ConfigError(
        f"messages: an image has {patches} patches, padded, and it may have {MOST_PATCHES}; make it"
        " smaller"
      )
    return unread


class UnreadImages(NamedTuple):
  """The images of a conversation, of which only the headers were read.

  Attributes:
    processor: The model's image processor.
    images: The images.
    layouts: How many pictures and tokens each image becomes.
  """

  processor: Processor
  images: tuple[AnyImage, ...]
  layouts: list[Layout]

  @property
  def sizes(self) -> list[int]:
    """How many patches each picture has after padding, for all images together."""
    per_token = self.processor.kind.patches_per_token
    grids = [grid for layout in self.layouts for grid in layout.tokens]
    return [padded_sizes(1, rows * columns, per_token, None)[1] for rows, columns in grids]

  @property
  def nbytes(self) -> int:
    """The bytes of the image files, and of the patches after decoding."""
    files = sum(len(image.data) for image in self.images if isinstance(image, ImageSource))
    return files + sum(self.sizes) * 4 * (self.processor.kind.patch_numbers + 2)

  def expand(self, text: str, most: int) -> str:
    """Replaces the placeholders of images in a rendered conversation by their tokens.

    Args:
      text: The rendered conversation.
      most: The most tokens that all images may have.

    Raises:
      ConfigError: The images have more tokens, or the placeholders do not match the images.
    """
    count = sum(rows * columns for layout in self.layouts for rows, columns in layout.tokens)
    if count > most:  # refused before a text with a placeholder for each token is made
      raise ConfigError(
        f"messages: the images have {count} tokens and a prompt may have {most}; make them smaller"
      )
    return self.processor.expand(text, self.layouts, "messages")

  def decode(self, ids: Sequence[int], slots: int) -> SeenImages:
    """Decodes the images of a prompt.

    Args:
      ids: The token ids of the prompt.
      slots: S, the most tokens of a prompt.

    Raises:
      ConfigError: An image is damaged.
    """
    processor, layouts = self.processor, self.layouts
    placed = processor.place(ids, layouts, "messages")
    pictures = (picture for image in self.images for picture in processor.pictures(image))
    padded = tuple(_padded(*pair) for pair in zip(pictures, self.sizes, strict=True))
    places = pad([[]], [placed], (0, 0), slots, processor)  # `pictures` has the patches
    is_seen_S = placed.seen_S2[:, 0] >= 0
    known_S = np.array(ids, np.int64)
    counts = [sum(rows * columns for rows, columns in layout.tokens) for layout in layouts]
    hashes = [_token_hashes(*pair) for pair in zip(self.images, counts)]
    known_S[is_seen_S] = np.concatenate(hashes)
    end, shift = int(np.flatnonzero(is_seen_S)[-1]) + 1, placed.next - len(ids)
    return SeenImages(padded, places, tuple(ids), tuple(known_S.tolist()), end, shift)


def _padded(picture: Picture, size: int) -> Picture:
  """Pads a picture to `size` patches."""
  more = ((0, size - len(picture.patches_NC)), (0, 0))
  patches_NC = np.pad(picture.patches_NC.astype(np.float32, copy=False), more)
  return Picture(patches_NC, np.pad(picture.places_N2, more, constant_values=-1))


def _token_hashes(image: AnyImage, count: int) -> np.ndarray:
  """Hashes an image to `count` negative int32 numbers, one for each token. None of them is -1."""
  content = image.data if isinstance(image, ImageSource) else repr(image).encode()
  words = np.frombuffer(hashlib.shake_128(content).digest(4 * count), "<u4")
  return -2 - (words % (2**31 - 2)).astype(np.int64)
