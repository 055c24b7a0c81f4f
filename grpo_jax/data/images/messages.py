"""Puts the images of a row into its messages, as TRL does."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.data.images.source import AnyImage, check_count, source_of
from grpo_jax.settings import ConfigError, shown

_KEYS = ("image", "path", "url", "base64", "bytes")  # keys of an image part that hold its image
IMAGE = {"type": "image"}  # an image part as a chat template receives it, without its image


def is_part(part: Any) -> bool:
  """Whether a value is a part of a message's content: a text part or an image part."""
  if not isinstance(part, Mapping):
    return False
  return _is_image(part) or (part.get("type") == "text" and isinstance(part.get("text"), str))


def with_sources(value: Any, where: str, folder: str) -> Any:
  """Replaces the images in a conversation's parts by sources, which read an image when needed.

  Args:
    value: A field of an example.
    where: The name of the field in error messages.
    folder: The folder that relative paths start from.

  Returns:
    The messages. Each image part becomes {"type": "image"}, with an `ImageSource` or `Drawing` as
    "image" if the part names an image. A value without messages of parts is returned unchanged.

  Raises:
    ConfigError: A part is neither a text nor an image, its image cannot be read as a source, or
      there are too many images.
  """
  if not isinstance(value, (list, tuple)) or not any(map(_has_parts, value)):
    return value
  contents = [message["content"] for message in value if _has_parts(message)]
  count = sum(_is_image(part) for content in contents for part in content)
  check_count(count, where)  # before the sources, each of which looks for its file
  messages, number = [], 0  # `number` counts the images of the conversation
  for message in value:
    if not _has_parts(message):
      messages.append(message)
      continue
    parts = []
    for part in message["content"]:
      number += _is_image(part)
      parts.append(_part_with_source(part, f"{where}: image {number}", folder))
    messages.append({**message, "content": parts})
  return messages


def has_empty_places(value: Any) -> bool:
  """Whether a conversation, after `with_sources`, has an image part without an image."""
  return isinstance(value, list) and any(
    IMAGE == part for message in value if _has_parts(message) for part in message["content"]
  )


def place_images(
  messages: Sequence[Mapping[str, Any]], images: Sequence[AnyImage], where: str
) -> tuple[list[dict[str, Any]], list[AnyImage]]:
  """Assigns the images of a row's column to the empty image parts of its conversation, in order.

  If the conversation has no image part at all, the images are put at the start of the first user
  message.

  Args:
    messages: The conversation, after `with_sources`.
    images: The images of the row's column.
    where: The name of the row in error messages.

  Returns:
    (the messages, with contents as lists of parts and each image part as `IMAGE`; all images of the
    conversation, in the order of these parts)

  Raises:
    ConfigError: There are more or fewer empty image parts than images, or no user message to put
      the images in.
  """
  placed = [{**message, "content": _as_parts(message["content"])} for message in messages]
  parts = [part for message in placed for part in message["content"] if part["type"] == "image"]
  if not parts and images:
    users = [message for message in placed if message["role"] == "user"]
    if not users:
      raise ConfigError(f"{where} has images and no message of the user to put them in")
    parts = [dict(IMAGE) for _ in images]  # all are empty, so the row's images fill them below
    users[0]["content"] = [*parts, *users[0]["content"]]
  empty = sum("image" not in part for part in parts)
  if empty != len(images):
    raise ConfigError(
      f"{where} has {empty} places for images in its messages and {len(images)} images in its"
      " column; there must be as many"
    )
  rest = iter(images)
  found = [part["image"] if "image" in part else next(rest) for part in parts]
  for message in placed:
    message["content"] = [
      dict(IMAGE) if part["type"] == "image" else part for part in message["content"]
    ]
  return placed, found


def _part_with_source(part: Any, where: str, folder: str) -> dict[str, Any]:
  """A part of a message as a text part, or as an image part with its source if it has one."""
  if isinstance(part, str):
    return {"type": "text", "text": part}
  kind = part.get("type") if isinstance(part, Mapping) else None
  if kind == "text" and isinstance(part.get("text"), str):
    return {"type": "text", "text": part["text"]}
  if kind == "image":
    keys = [key for key in _KEYS if part.get(key) is not None]
    if not keys:
      return dict(IMAGE)
    value = part["image"] if keys[0] == "image" else part  # `source_of` reads the other keys
    return {**IMAGE, "image": source_of(value, where, folder)}
  if kind == "image_url":  # OpenAI's form of a part: the URL, perhaps in an object
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    return {**IMAGE, "image": source_of(url, where, folder)}
  name = where.rpartition(": ")[0]  # without the number of an image, which this part is not
  raise ConfigError(
    f"{name}: a part of a message must be a text or an image; got {shown(part):.80}"
  )


def _as_parts(content: Any) -> list[dict[str, Any]]:
  if isinstance(content, str):
    return [{"type": "text", "text": content}]
  return [dict(part) for part in content]


def _has_parts(message: Any) -> bool:
  return isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple))


def _is_image(part: Any) -> bool:
  return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")
