"""Puts the images of rows into prompts, and makes the arrays of a batch of them."""

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

IMAGE_COLUMNS = ("image", "images")  # of an example, as TRL has them
Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class GivenImages:
  """The images of a row as a file has them. A model that sees none gets the value.

  Attributes:
    value: The value of the column.
    where: The row and the column, for error messages.
    folder: Where relative paths begin.
  """

  value: Any
  where: str
  folder: str


class Seeing(Protocol):
  """The part of a prompt that is read here. `prompts.Prompt` is one."""

  @property
  def ids(self) -> list[int]:
    """Its token ids."""

  @property
  def images(self) -> tuple[AnyImage, ...]:
    """Its images."""

  @property
  def layouts(self) -> tuple[Layout, ...]:
    """Their layouts."""

  @property
  def where(self) -> str:
    """Its name in error messages."""


class PromptImages:
  """Puts images into prompts. Headers are read at once, and pixels when a batch needs them."""

  def __init__(self, processor: Processor, data: "Data") -> None:
    self.processor = processor
    self._may_download = data.image_urls
    self._decoder = ImageDecoder(processor)

  def read(self, example: Mapping[str, Any]) -> tuple[dict[str, Any], list[AnyImage], str]:
    """The images of an example's columns.

    Returns:
      (the example with images that can be read, these images in their order, what error messages
      call the row)

    Raises:
      ConfigError: A column holds something else, or too many of them.
    """
    found, images, where = dict(example), list[AnyImage](), "a prompt"
    for name in IMAGE_COLUMNS:
      given = example.get(name)
      if given is None:
        continue
      if not isinstance(given, GivenImages):
        given = GivenImages(given, f"an example: {name}", "")
      where = given.where.rpartition(": ")[0]
      own = sources_of(given.value, given.where, given.folder, self._may_download)
      found[name] = own if isinstance(given.value, (list, tuple)) else next(iter(own), None)
      images += own
    return found, images, where

  def place(
    self, messages: Messages, images: Sequence[AnyImage], where: str
  ) -> tuple[Messages, list[AnyImage]]:
    """A conversation with places for its images, and all of them. See `place_images`."""
    messages, found = place_images(with_sources(messages, where, ""), images, where)
    check_count(len(found), where)
    limited = [
      dataclasses.replace(image, may_download=self._may_download)
      if isinstance(image, ImageSource)
      else image
      for image in found
    ]
    return messages, limited

  def before(self, text: str, images: Sequence[AnyImage], where: str) -> str:
    """A prompt without a chat template: its images come first."""
    check_count(len(images), where)
    return self.processor.kind.plain * len(images) + text

  def expand(
    self, text: str, images: Sequence[AnyImage], where: str
  ) -> tuple[str, tuple[Layout, ...]]:
    """A rendered prompt with the tokens of its images, and their layouts.

    Raises:
      ConfigError: An image cannot be read, or the text has other places for images.
    """
    if not images:
      return text, ()
    layouts = tuple(self.processor.layout(image) for image in images)
    return self.processor.expand(text, layouts, where), layouts

  def begin(self, prompts: Sequence[Seeing]) -> None:
    """Begins to decode the images of prompts that will be needed. Returns at once."""
    for prompt in prompts:
      self._decoder.begin(prompt.images, prompt.layouts)

  def arrays(
    self,
    prompts: Sequence[Seeing],
    max_tokens: int,
    needed: tuple[int, int],
    most: tuple[int, int] | None,
  ) -> HostImages:
    """The images of prompts as arrays. Waits until they are decoded.

    Args:
      prompts: The prompts, which may be some of a batch.
      max_tokens: S.
      needed: `sizes_of` the whole batch.
      most: `sizes_of` the whole split, or None if that is not known.

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
    placed = [self.processor.place(one.ids, one.layouts, one.where) for one in prompts]
    sizes = padded_sizes(*needed, self.processor.kind.patches_per_token, most)
    return pad(pictures, placed, sizes, max_tokens, self.processor)


def without_images(example: Mapping[str, Any]) -> Mapping[str, Any]:
  """An example for a model that sees no images.

  Raises:
    ConfigError: It has images, and not only texts in a column of that name.
  """
  if not any(
    isinstance(example.get(name), (GivenImages, ImageSource, Drawing)) for name in IMAGE_COLUMNS
  ):
    return example
  values = dict(example)
  for name in IMAGE_COLUMNS:
    given = example.get(name)
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
  """Whether an example has a column of images, or a conversation with images in its messages."""
  if any(
    isinstance(example.get(name), (GivenImages, ImageSource, Drawing)) for name in IMAGE_COLUMNS
  ):
    return True
  conversations = [value for value in example.values() if isinstance(value, (list, tuple))]
  messages = [message for one in conversations for message in one if isinstance(message, Mapping)]
  contents = [message.get("content") for message in messages]
  parts = [part for content in contents if isinstance(content, list) for part in content]
  return any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


def needed_sizes(prompts: Sequence[Seeing]) -> np.ndarray:
  """`sizes_of` each prompt, int32 [P, 2]."""
  return np.array([sizes_of([prompt.layouts]) for prompt in prompts], np.int32).reshape(-1, 2)


def _is_plain(value: Any) -> bool:
  """Whether a value has no images for sure: numbers and short texts."""
  if isinstance(value, (list, tuple)):
    return all(map(_is_plain, value))
  return isinstance(value, (str, int, float)) or value is None
