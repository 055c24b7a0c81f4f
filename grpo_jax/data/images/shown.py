"""Describes an image for people: its source, and a thumbnail."""

import base64
import hashlib
import io
from typing import Any

from grpo_jax.data.images.source import AnyImage, ImageSource, on_white
from grpo_jax.lazy import Image
from grpo_jax.settings import ConfigError

_SIDE = 64  # pixels of a thumbnail's longer side
MOST = 4  # the most images of a prompt with a thumbnail


def shown(images: tuple[AnyImage, ...]) -> list[dict[str, Any]]:
  """JSON-like entries of images: `source`, and for the first `MOST` images also `thumbnail`."""
  return [
    {"source": source(image)} | ({"thumbnail": thumbnail(image)} if number < MOST else {})
    for number, image in enumerate(images)
  ]


def source(image: AnyImage) -> str:
  """The path or URL of an image. For bytes: `where` and the start of their SHA-256."""
  if not isinstance(image, ImageSource):
    return f"a drawing of {image.scene!r:.300}"
  if image.data:
    return f"{image.where} (sha256 {hashlib.sha256(image.data).hexdigest()[:16]})"
  return image.path or image.url


def thumbnail(image: AnyImage) -> str:
  """A JPEG of at most 64 x 64 pixels as a data URL, or "" if the image is damaged."""
  try:
    small = image.image()
    small.thumbnail((_SIDE, _SIDE))
    pixels = on_white(small)
  except (ConfigError, OSError, ValueError):
    return ""
  file = io.BytesIO()
  Image.fromarray(pixels).save(file, "JPEG", quality=80)
  return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
