"""Puts the images of a data set's rows into prompts, and makes the image arrays of a batch."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from grpo_jax.data.images.batches import HostImages, ImageDecoder, pad, padded_sizes, sizes_of
from grpo_jax.data.images.messages import place_images, with_sources
from grpo_jax.data.images.pictures import Layout
from grpo_jax.data.images.processor import Processor
from grpo_jax.data.images.source import (
  AnyImage,
  Drawing,
  ImageSource,
  check_count,
  sources_of,
)
from grpo_jax.settings import ConfigError

if TYPE_CHECKING:
  from grpo_jax.config import Data

IMAGE_COLUMNS = ("image", "images")  # columns of an example, with the names that TRL uses
Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class GivenImages:
  """The value of a row's image column, before it is read as images.

  A model without a vision tower uses the value itself, which may be a text.

  Attributes:
    value: The value of the column.
    where: The row and the column, for error messages.
    folder: The folder that relative paths start from.
  """

  value: Any
  where: str
  folder: str


class Seeing(Protocol):
  """The interface of a prompt in this module. `prompts.Prompt` implements it."""

  @property
  def ids(self) -> list[int]:
    """The token ids of the prompt."""

  @property
  def images(self) -> tuple[AnyImage, ...]:
    """The images of the prompt."""

  @property
  def layouts(self) -> tuple[Layout, ...]:
    """The layout of each image."""

  @property
  def where(self) -> str:
    """The name of the prompt in error messages."""


class PromptImages:
  """Puts images into prompts, which reads their headers. A batch decodes the pixels later."""

  def __init__(self, processor: Processor, data: "Data") -> None:
    self.processor = processor
    self._may_download = data.image_urls
    self._decoder = ImageDecoder(processor)

  def read(self, example: Mapping[str, Any]) -> tuple[dict[str, Any], list[AnyImage], str]:
    """Reads the image columns of an example as sources.

    Returns:
      (a copy of the example whose image columns hold sources, all these sources in order, the name
      of the row in error messages)

    Raises:
      ConfigError: A value of an image column is not an image, or there are too many images.
    """
    copy, images = dict(example), list[AnyImage]()
    where = "a prompt"  # if no image column is set
    for name in IMAGE_COLUMNS:
      given = example.get(name)
      if given is None:
        continue
      if not isinstance(given, GivenImages):  # a program's task or a `Drawing`, not a file
        given = GivenImages(given, f"an example: {name}", "")
      where = given.where.rpartition(": ")[0]  # without the name of the column
      sources = sources_of(given.value, given.where, given.folder, self._may_download)
      is_list = isinstance(given.value, (list, tuple))
      copy[name] = sources if is_list else next(iter(sources), None)  # one image stays one image
      images += sources
    return copy, images, where

  def place(
    self, messages: Messages, images: Sequence[AnyImage], where: str
  ) -> tuple[Messages, list[AnyImage]]:
    """Assigns a row's images to a conversation. The result and errors are as in `place_images`."""
    messages, found = place_images(with_sources(messages, where, ""), images, where)
    check_count(len(found), where)
    # `with_sources` makes sources that may not download.
    with_setting = [
      dataclasses.replace(image, may_download=self._may_download)
      if isinstance(image, ImageSource)
      else image
      for image in found
    ]
    return messages, with_setting

  def before(self, text: str, images: Sequence[AnyImage], where: str) -> str:
    """Puts the placeholders of images before a text that has no chat template."""
    check_count(len(images), where)
    return self.processor.kind.plain * len(images) + text

  def expand(
    self, text: str, images: Sequence[AnyImage], where: str
  ) -> tuple[str, tuple[Layout, ...]]:
    """Replaces the image placeholders of a rendered prompt by image tokens.

    Returns (text with image tokens, layout of each image). Raises ConfigError if an image cannot be
    read, or if the text has more or fewer placeholders than images.
    """
    if not images:
      return text, ()
    layouts = tuple(self.processor.layout(image) for image in images)
    return self.processor.expand(text, layouts, where), layouts

  def begin(self, prompts: Sequence[Seeing]) -> None:
    """Starts to decode the images of prompts in threads. Returns at once."""
    for prompt in prompts:
      self._decoder.begin(prompt.images, prompt.layouts)

  def arrays(
    self,
    prompts: Sequence[Seeing],
    max_tokens: int,
    needed: tuple[int, int],
    most: tuple[int, int] | None,
  ) -> HostImages:
    """The images of prompts as padded arrays. Waits until all images are decoded.

    Args:
      prompts: The prompts of a batch, or only some of them.
      max_tokens: S, the tokens of a padded prompt.
      needed: `sizes_of` the whole batch, so that all of its arrays have the same shapes.
      most: `sizes_of` the whole split, or None if not known.

    Raises:
      ConfigError: An image is damaged.
    """
    pictures = [
      [
        picture
        for of_image in self._decoder.pictures(prompt.images, prompt.layouts)
        for picture in of_image
      ]
      for prompt in prompts
    ]
    placed = [self.processor.place(x.ids, x.layouts, x.where) for x in prompts]
    sizes = padded_sizes(*needed, self.processor.kind.patches_per_token, most)
    return pad(pictures, placed, sizes, max_tokens, self.processor)


def without_images(example: Mapping[str, Any]) -> Mapping[str, Any]:
  """An example for a model without a vision tower: image columns keep their original values.

  Raises:
    ConfigError: An image column holds anything but texts, numbers and None.
  """
  if not any(
    isinstance(example.get(name), (GivenImages, ImageSource, Drawing)) for name in IMAGE_COLUMNS
  ):
    return example
  values = dict(example)
  for name in IMAGE_COLUMNS:
    if name not in example:
      continue
    given = example[name]
    value = given.value if isinstance(given, GivenImages) else given
    if not _is_plain(value):
      where = given.where if isinstance(given, GivenImages) else f"data.task: the field {name}"
      raise ConfigError(
        f"{where} holds images, which the model does not see; choose a model with a vision tower,"
        " or leave the column out of the file"
      )
    values[name] = value
  return values


def has_images(example: Mapping[str, Any]) -> bool:
  """Whether an example has an image column that is set, or a conversation with image parts."""
  if any(
    isinstance(example.get(name), (GivenImages, ImageSource, Drawing)) for name in IMAGE_COLUMNS
  ):
    return True
  conversations = [value for value in example.values() if isinstance(value, (list, tuple))]
  messages = [message for x in conversations for message in x if isinstance(message, Mapping)]
  contents = [message.get("content") for message in messages]
  parts = [part for content in contents if isinstance(content, list) for part in content]
  return any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


def needed_sizes(prompts: Sequence[Seeing]) -> np.ndarray:
  """`sizes_of` each prompt alone, int32 [P, 2]."""
  return np.array([sizes_of([prompt.layouts]) for prompt in prompts], np.int32).reshape(-1, 2)


def _is_plain(value: Any) -> bool:
  """Whether a value holds only texts, numbers and None, which are not read as images."""
  if isinstance(value, (list, tuple)):
    return all(map(_is_plain, value))
  return isinstance(value, (str, int, float)) or value is None
