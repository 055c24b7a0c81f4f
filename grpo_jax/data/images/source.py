"""Images of a data set: files, bytes or URLs that are decoded when a batch needs them.

The files may come from untrusted people, so an image is decoded only after its header shows that
its size is within the limits.
"""

from __future__ import annotations  # so that annotations do not import Pillow

import base64
import binascii
from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import functools
import io
import os
from pathlib import Path
import tempfile
from typing import IO, Any
import urllib.request
import warnings

import numpy as np

from grpo_jax import files
from grpo_jax.lazy import Image, ImageOps
from grpo_jax.settings import ConfigError, shown

MOST_BYTES = 64 << 20  # of a file
MOST_IMAGES = 4096  # of a prompt
MOST_PIXELS = 50_000_000  # of an image: height times width
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # Pillow runs no program for these
_STARTS = (b"\x89PNG", b"\xff\xd8", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"P")
_MOST_CHUNKS = 10_000  # the most of a PNG, because Pillow needs 10 us a chunk
_SECONDS = 20  # timeout of a download
_ORIENTATION = 0x0112  # tag of EXIF
_WIDTH, _LENGTH = 0x0100, 0x0101  # tags of TIFF
_TURNED = (5, 6, 7, 8)  # orientations that swap height and width
_LONGEST_PATH = 1024  # a longer text that names no file is taken as base64

# Pillow warns of large images. MOST_PIXELS is lower than its limit, and exceeding it is an error.
warnings.filterwarnings("ignore", r"Image size .* exceeds limit")


@dataclasses.dataclass(frozen=True)
class ImageSource:
  """An image in a file, in bytes, or at a URL. Equal sources have the same content.

  Attributes:
    where: The origin in error messages, such as "data.path: train.jsonl line 3: image".
    path: The path of the file. "" for bytes and URLs.
    data: The bytes of an image file. b"" for paths and URLs.
    url: The URL. "" for paths and bytes.
    may_download: Whether the image may be read from a URL.
  """

  where: str = dataclasses.field(compare=False)
  path: str = ""
  data: bytes = dataclasses.field(default=b"", repr=False)
  url: str = ""
  may_download: bool = dataclasses.field(default=False, compare=False, repr=False)

  @property
  def name(self) -> str:
    """The name of the image in error messages: `where`, and the path or URL."""
    file = self.path or self.url
    return f"{self.where} ({file:.200})" if file else self.where

  def size(self) -> tuple[int, int]:
    """Height and width after rotation by EXIF, from the header. Raises like `image`."""
    with self._open() as image:
      return _upright_size(image, self.where)

  def image(self) -> Image.Image:
    """Decodes the image, rotated by EXIF, in the file's mode. Reads the first frame of animations.

    Raises:
      ConfigError: There is no image, it is damaged, or it exceeds the limits.
    """
    with self._open() as image:
      try:
        image.load()
        return ImageOps.exif_transpose(image)
      except Exception as error:  # decoders raise OSError, SyntaxError, ValueError and others
        raise self._refuse(
          f"is a damaged {image.format} ({_one_line(error)}); replace it"
        ) from None

  def for_reward(self) -> Image.Image:
    """A copy of `image` for a reward function, which may change it. Raises like `image`."""
    return _decoded(self).copy()

  def pixels(self) -> np.ndarray:
    """Decodes to RGB on white, uint8 [height, width, 3]. Raises like `image`."""
    decoded = self.image()
    try:
      return on_white(decoded)
    except Exception as error:
      raise self._refuse(
        f"has colours of mode {decoded.mode} that cannot be read ({_one_line(error)})"
      ) from None

  def _open(self) -> Image.Image:
    """Opens the image: checks the limits and reads the header. Pillow decodes the pixels later."""
    file = self._file()
    try:
      with open(file, "rb") if isinstance(file, str) else contextlib.nullcontext(file) as opened:
        is_png = opened.read(4) == _STARTS[0]
        opened.seek(0)
        if is_png and len(_chunks(opened)) > _MOST_CHUNKS:
          raise self._refuse(f"is a PNG of more than {_MOST_CHUNKS:,} chunks; save it again")
      image = Image.open(file, formats=FORMATS)
      height, width = image.height, image.width
    except ConfigError:
      raise
    except Image.DecompressionBombError:
      raise self._refuse(f"has more than {MOST_PIXELS:,} pixels; make it smaller") from None
    except Exception as error:
      from PIL import UnidentifiedImageError  # Pillow has been imported by now

      is_unknown = isinstance(error, UnidentifiedImageError)
      reason = "its format is unknown" if is_unknown else _one_line(error)
      kinds = ", ".join(FORMATS)
      raise self._refuse(f"cannot be read as an image ({reason}); it must be {kinds}") from None
    if not height or not width:
      raise self._refuse(f"has {width} x {height} pixels; replace it")
    if height * width > MOST_PIXELS:
      raise self._refuse(
        f"has {width} x {height} pixels, more than {MOST_PIXELS:,}; make it smaller"
      )
    return image

  def _file(self) -> str | io.BytesIO:
    """The argument of Image.open: a path of a file that exists, or a stream of the bytes."""
    if self.data:
      self._check_bytes(len(self.data))
      return io.BytesIO(self.data)
    path = self.path
    if self.url:
      if not self.may_download:
        raise self._refuse("is a URL; set data.image_urls=True to allow downloads")
      path = _downloaded(self.url, self.where)
    if not path:
      raise self._refuse("is empty; it must be a path, the bytes of an image or base64")
    try:
      files.check_regular(Path(path))
      self._check_bytes(os.path.getsize(path))
    except (OSError, ValueError) as error:  # a ValueError is a NUL in the path
      if isinstance(error, ConfigError):
        raise
      raise self._refuse(f"cannot be read ({_one_line(error)})") from None
    return path

  def _check_bytes(self, count: int) -> None:
    if not count:
      raise self._refuse("is an empty file; replace it")
    if count > MOST_BYTES:
      raise self._refuse(f"has {count:,} bytes; at most {MOST_BYTES:,} are read")

  def _refuse(self, problem: str) -> ConfigError:
    return ConfigError(f"{self.name} {problem}")


@dataclasses.dataclass(frozen=True)
class Drawing:
  """An image that a task draws.

  Attributes:
    draw: Maps the scene to pixels, uint8 [height, width, 3].
    scene: The description of the scene to draw. It is hashable.
    height: Height in pixels.
    width: Width in pixels.
  """

  draw: Callable[[Any], np.ndarray]
  scene: Any
  height: int
  width: int
  name = "a drawing"

  def size(self) -> tuple[int, int]:
    """Height and width in pixels."""
    return self.height, self.width

  def image(self) -> Image.Image:
    """The drawn image."""
    return Image.fromarray(self.pixels())

  def for_reward(self) -> Image.Image:
    """A copy of `image` for a reward function, which may change it."""
    return _decoded(self).copy()

  def pixels(self) -> np.ndarray:
    """Draws the scene, uint8 [height, width, 3]."""
    return self.draw(self.scene)


AnyImage = ImageSource | Drawing


def source_of(value: Any, where: str, folder: str = "", may_download: bool = False) -> AnyImage:
  """Makes an image source of a value in a data set. Images of Pillow and arrays become PNG bytes.

  Args:
    value: A path, a URL, a data URL, base64, bytes, an image of Pillow, pixels as uint8 [height,
      width(, channels)], a source, or a dict with one of these under the key bytes, path, url or
      base64. The first of these keys that is set counts. The package datasets stores such dicts.
    where: The name of the image in error messages.
    folder: The folder that relative paths start from.
    may_download: Whether the image may be read from a URL.

  Raises:
    ConfigError: `value` is something else, is empty, or is a path without a file.
  """
  make = functools.partial(ImageSource, where, may_download=may_download)
  if isinstance(value, Drawing):
    return value
  if isinstance(value, ImageSource):  # the caller decides about downloads, whoever made the source
    return dataclasses.replace(value, may_download=may_download)
  if isinstance(value, Mapping):
    keys = [key for key in ("bytes", "path", "url", "base64") if value.get(key) is not None]
    inner = value[keys[0]] if keys else None
    if isinstance(inner, str) and keys[0] in ("bytes", "base64"):  # not to be taken for a path
      return make(data=_from_base64(inner, where))
    if keys and not isinstance(inner, Mapping):  # a dict in a dict is refused below
      return source_of(inner, where, folder, may_download)
  if isinstance(value, (bytes, bytearray)):
    if not value:
      raise ConfigError(f"{where} is an empty file; replace it")
    return make(data=bytes(value))
  if isinstance(value, os.PathLike):
    value = os.fspath(value)
  if isinstance(value, str):
    return _of_text(value, make, where, folder)
  if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim in (2, 3):
    value = Image.fromarray(value)
  if isinstance(value, Image.Image):
    return make(data=_png(value, where))
  raise ConfigError(
    f"{where} is {shown(value):.80}; it must be a path, the bytes of an image or base64"
  )


def on_white(image: Image.Image) -> np.ndarray:
  """Converts an image to RGB on white, as transformers does: uint8 [height, width, 3]."""
  if "A" in image.getbands() or image.info.get("transparency") is not None:
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    image = Image.alpha_composite(white, image)
  return np.asarray(image.convert("RGB"))


def _of_text(text: str, make: Callable[..., ImageSource], where: str, folder: str) -> ImageSource:
  """Tells a URL, a data URL, a path and base64 apart, and makes the source with `make`.

  `where` and `folder` are as in `source_of`.
  """
  if text.startswith(("http://", "https://")):
    return make(url=text)
  if text.startswith("data:"):
    head, comma, body = text.partition(",")
    if not comma or not head.endswith(";base64"):
      raise ConfigError(f"{where} is a data URL that is not base64: {text:.40}")
    return make(data=_from_base64(body, where))
  path = os.path.join(folder, os.path.expanduser(text)) if text else ""
  if "\0" not in path and os.path.exists(path):
    return make(path=path)
  # A text counts as base64 if it is longer than `_LONGEST_PATH`, or if its start decodes to that
  # of an image. Else it is a misspelled path.
  start = text[:64].strip()  # enough for the first bytes of a file, by which formats differ
  # These characters are common in paths, and base64 has none of them.
  may_be_base64 = start.isascii() and not set(start) & set(".\\: _-")
  # A name, which mostly has fewer than 40, may decode to a start such as b"P" by chance.
  if len(text) > _LONGEST_PATH or (may_be_base64 and len(text) >= 40 and _looks_like_image(start)):
    return make(data=_from_base64(text, where))
  hint = f"; relative paths begin in {folder}" if folder and not os.path.isabs(text) else ""
  if not text:
    raise ConfigError(f"{where} is empty; it must be a path, the bytes of an image or base64")
  raise ConfigError(f"{where}: there is no file {text!r:.200}{hint}")


def _looks_like_image(start: str) -> bool:
  """Whether this base64 decodes to the first bytes of an image file."""
  try:
    head = base64.b64decode(start[: len(start) // 4 * 4], validate=True)
  except binascii.Error:
    return False
  return head.startswith(_STARTS)


def _from_base64(text: str, where: str) -> bytes:
  if len(text) > MOST_BYTES * 4 // 3 + 4:
    raise ConfigError(f"{where} has {len(text) * 3 // 4:,} bytes; at most {MOST_BYTES:,} are read")
  try:
    data = base64.b64decode("".join(text.split()), validate=True)
  except (binascii.Error, ValueError) as error:
    raise ConfigError(f"{where} is neither a file nor base64 ({_one_line(error)})") from None
  if not data:
    raise ConfigError(f"{where} is an empty file; replace it")
  return data


def _png(image: Image.Image, where: str) -> bytes:
  """Encodes an image as PNG, so that it can be sent to other processes. Rare modes become RGB."""
  file = io.BytesIO()
  try:
    image = ImageOps.exif_transpose(image)
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
      image = Image.fromarray(on_white(image))
    image.save(file, "PNG", compress_level=1)
  except Exception as error:
    raise ConfigError(f"{where} is an image that cannot be read ({_one_line(error)})") from None
  return file.getvalue()


@functools.lru_cache(4)  # all completions of a prompt are scored with the same images
def _decoded(image: AnyImage) -> Image.Image:
  return image.image()


def _upright_size(image: Image.Image, where: str) -> tuple[int, int]:
  try:
    # PngImageFile.getexif would decode the PNG to find metadata after its pixels, which is rare.
    is_plain = image.format == "PNG" and not _has_late_metadata(image)
    exif = Image.Image.getexif(image) if is_plain else image.getexif()
    turned = exif.get(_ORIENTATION) in _TURNED
    height, width = image.height, image.width
    if image.format == "TIFF":  # some versions of Pillow have already swapped height and width
      height, width = image.tag_v2[_LENGTH], image.tag_v2[_WIDTH]
  except Exception as error:
    raise ConfigError(f"{where} has damaged metadata ({_one_line(error)}); replace it") from None
  return (width, height) if turned else (height, width)


def _has_late_metadata(image: Image.Image) -> bool:
  """Whether a PNG has texts or EXIF after its first chunk of pixels."""
  found, behind = False, False
  for kind in _chunks(image.fp):
    behind |= kind == b"IDAT"
    found |= behind and kind in (b"eXIf", b"iTXt", b"tEXt", b"zTXt")
  return found


def _chunks(file: IO[bytes]) -> list[bytes]:
  """The types of a PNG's chunks. Stops at one more than `_MOST_CHUNKS`."""
  place, kinds = file.tell(), list[bytes]()
  try:
    file.seek(8)
    while len(head := file.read(8)) == 8 and len(kinds) <= _MOST_CHUNKS:
      kinds.append(head[4:])
      file.seek(int.from_bytes(head[:4], "big") + 4, os.SEEK_CUR)
  finally:
    file.seek(place)
  return kinds


def _downloaded(url: str, where: str) -> str:
  """Returns the path of a temporary file with the bytes of a URL. `where` names it in errors."""
  try:
    return _download(url)
  except Exception as error:  # network and HTTP errors, malformed addresses
    raise ConfigError(f"{where} ({url:.200}) cannot be downloaded ({_one_line(error)})") from None


@functools.lru_cache(4096)  # several rows may name one URL
def _download(url: str) -> str:
  """Writes the bytes of a URL to a temporary file. Returns its path."""
  with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
    data = answer.read(MOST_BYTES + 1)
  if len(data) > MOST_BYTES:
    raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
  descriptor, path = tempfile.mkstemp(dir=_folder().name)
  with os.fdopen(descriptor, "wb") as file:
    file.write(data)
  return path


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
  return tempfile.TemporaryDirectory(prefix="grpo_jax_images_")


def _one_line(error: BaseException) -> str:
  text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
  return " ".join(text.split())[:160] or type(error).__name__


def sources_of(
  value: Any, where: str, folder: str = "", may_download: bool = False
) -> list[AnyImage]:
  """The images of a column whose value is None, one value as in `source_of`, or a list of values.

  Raises ConfigError if a value is not an image, or for more than `MOST_IMAGES`.
  """
  if value is None:
    return []
  if not isinstance(value, (list, tuple)):
    return [source_of(value, where, folder, may_download)]
  check_count(len(value), where)
  return [
    source_of(one, f"{where} {number}", folder, may_download)
    for number, one in enumerate(value, start=1)
  ]


def check_count(count: int, where: str) -> None:
  """Raises ConfigError if a prompt's number of images is above `MOST_IMAGES`."""
  if count > MOST_IMAGES:
    raise ConfigError(f"{where}: there are {count:,} images; a prompt may have {MOST_IMAGES:,}")
