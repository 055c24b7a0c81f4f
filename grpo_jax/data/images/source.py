"""An image as a data set names it: checked by its header, and decoded when it is needed.

Files of other people are read here, so nothing is decoded before its size is known to be in limits.
"""

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
from PIL import Image, ImageOps, UnidentifiedImageError

from grpo_jax import files
from grpo_jax.settings import ConfigError, shown

MOST_BYTES = 64 << 20  # of a file
MOST_IMAGES = 4096  # of a prompt
MOST_PIXELS = 50_000_000  # of an image: height times width
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # none that runs another program
_STARTS = (b"\x89PNG", b"\xff\xd8", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*", b"P")
_MOST_CHUNKS = 10_000  # of a PNG, because Pillow takes 10 us for each
_SECONDS = 20  # for one download
_ORIENTATION = 0x0112  # of EXIF
_WIDTH, _LENGTH = 0x0100, 0x0101  # of TIFF
_TURNED = (5, 6, 7, 8)  # orientations that swap height and width
_LONGEST_PATH = 1024  # a longer text that is no file was meant as base64

# Pillow warns of large images. The limit here is lower, and is an error.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@dataclasses.dataclass(frozen=True)
class ImageSource:
  """An image in a file, in bytes, or at a URL. Equal ones have the same content.

  Attributes:
    where: Its name in error messages, such as "data.path: train.jsonl line 3: image".
    path: The file, or "".
    data: The bytes of a file, if there is no path.
    url: Its address, if there are no bytes.
    may_download: Whether images may be read from URLs.
  """

  where: str = dataclasses.field(compare=False)
  path: str = ""
  data: bytes = dataclasses.field(default=b"", repr=False)
  url: str = ""
  may_download: bool = dataclasses.field(default=False, compare=False, repr=False)

  @property
  def name(self) -> str:
    """Its name in error messages, with its file or URL."""
    file = self.path or self.url
    return f"{self.where} ({file:.200})" if file else self.where

  def size(self) -> tuple[int, int]:
    """Height and width of the upright image, from its header.

    Raises:
      ConfigError: There is no image, or it is beyond the limits.
    """
    with self._open() as image:
      return _upright_size(image, self.where)

  def image(self) -> Image.Image:
    """The decoded image, upright, in its own mode. Of an animation: the first frame.

    Raises:
      ConfigError: There is no image, it is damaged, or it is beyond the limits.
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
    """A copy of `image`, which reward functions get. Raises like `image`."""
    return _decoded(self).copy()

  def pixels(self) -> np.ndarray:
    """The decoded image in RGB on white, uint8 [height, width, 3]. Raises like `image`."""
    decoded = self.image()
    try:
      return on_white(decoded)
    except Exception as error:
      raise self._refuse(
        f"has colours of mode {decoded.mode} that cannot be read ({_one_line(error)})"
      ) from None

  def _open(self) -> Image.Image:
    """The image, of which only the header was read, within the limits."""
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
    """The file for Pillow: a path, which it opens and closes, or the bytes of a file."""
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
    draw: Makes uint8 [height, width, 3] of the scene.
    scene: The description of the scene to draw. It can be hashed.
    height: In pixels.
    width: In pixels.
  """

  draw: Callable[[Any], np.ndarray]
  scene: Any
  height: int
  width: int
  name = "a drawing"

  def size(self) -> tuple[int, int]:
    """Height and width."""
    return self.height, self.width

  def image(self) -> Image.Image:
    """The drawn image."""
    return Image.fromarray(self.pixels())

  def for_reward(self) -> Image.Image:
    """A copy of `image`, which reward functions get."""
    return _decoded(self).copy()

  def pixels(self) -> np.ndarray:
    """uint8 [height, width, 3]."""
    return self.draw(self.scene)


AnyImage = ImageSource | Drawing


def source_of(value: Any, where: str, folder: str = "", may_download: bool = False) -> AnyImage:
  """An image as a data set gives it.

  Args:
    value: A path, a URL, a data URL, base64, bytes, an image of Pillow, an array of pixels, or what
      the package datasets stores: {"bytes": ..., "path": ...}.
    where: Its name in error messages.
    folder: Where relative paths begin.
    may_download: Whether images may be read from URLs.

  Raises:
    ConfigError: It is something else.
  """
  make = functools.partial(ImageSource, where, may_download=may_download)
  if isinstance(value, Drawing):
    return value
  if isinstance(value, ImageSource):
    return dataclasses.replace(value, may_download=may_download)
  if isinstance(value, Mapping):
    keys = [key for key in ("bytes", "path", "url", "base64") if value.get(key) is not None]
    inner = value[keys[0]] if keys else None
    if isinstance(inner, str) and keys[0] in ("bytes", "base64"):
      return make(data=_from_base64(inner, where))
    if keys and not isinstance(inner, Mapping):
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
  """An image in RGB, with what is transparent on white, as transformers has it.

  Returns:
    uint8 [height, width, 3].
  """
  if "A" in image.getbands() or image.info.get("transparency") is not None:
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    image = Image.alpha_composite(white, image)
  return np.asarray(image.convert("RGB"))


def _of_text(text: str, make: Callable[..., ImageSource], where: str, folder: str) -> ImageSource:
  """The image of a path, a URL, a data URL or base64."""
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
  start = text[:64].strip()
  is_code = start.isascii() and not set(start) & set(".\\: _-")
  if len(text) > _LONGEST_PATH or (is_code and len(text) >= 40 and _looks_like_image(start)):
    return make(data=_from_base64(text, where))
  begin = f"; relative paths begin in {folder}" if folder and not os.path.isabs(text) else ""
  if not text:
    raise ConfigError(f"{where} is empty; it must be a path, the bytes of an image or base64")
  raise ConfigError(f"{where}: there is no file {text!r:.200}{begin}")


def _looks_like_image(start: str) -> bool:
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
  """The bytes of a PNG without loss, so that the image can be sent to other processes."""
  file = io.BytesIO()
  try:
    image = ImageOps.exif_transpose(image)
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
      image = Image.fromarray(on_white(image))
    image.save(file, "PNG", compress_level=1)
  except Exception as error:
    raise ConfigError(f"{where} is an image that cannot be read ({_one_line(error)})") from None
  return file.getvalue()


@functools.lru_cache(4)  # the images of a prompt, which its completions have in common
def _decoded(image: AnyImage) -> Image.Image:
  return image.image()


def _upright_size(image: Image.Image, where: str) -> tuple[int, int]:
  try:
    # Pillow decodes a PNG to find metadata behind its pixels, which hardly any file has.
    is_plain = image.format == "PNG" and not _has_late_metadata(image)
    exif = Image.Image.getexif(image) if is_plain else image.getexif()
    turned = exif.get(_ORIENTATION) in _TURNED
    height, width = image.height, image.width
    if image.format == "TIFF":  # whose size some versions of Pillow give as that of the upright one
      height, width = image.tag_v2[_LENGTH], image.tag_v2[_WIDTH]
  except Exception as error:
    raise ConfigError(f"{where} has damaged metadata ({_one_line(error)}); replace it") from None
  return (width, height) if turned else (height, width)


def _has_late_metadata(image: Image.Image) -> bool:
  """Whether a PNG has texts or EXIF behind its first pixels."""
  found, behind = False, False
  for kind in _chunks(image.fp):
    behind |= kind == b"IDAT"
    found |= behind and kind in (b"eXIf", b"iTXt", b"tEXt", b"zTXt")
  return found


def _chunks(file: IO[bytes]) -> list[bytes]:
  """The kinds of the chunks of a PNG, at most one more than it may have."""
  place, kinds = file.tell(), list[bytes]()
  try:
    file.seek(8)
    while len(head := file.read(8)) == 8 and len(kinds) <= _MOST_CHUNKS:
      kinds.append(head[4:])
      file.seek(int.from_bytes(head[:4], "big") + 4, os.SEEK_CUR)
  finally:
    file.seek(place)
  return kinds


@functools.lru_cache(4096)
def _downloaded(url: str, where: str) -> str:
  """The file that a URL was downloaded to, once."""
  try:
    with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
      data = answer.read(MOST_BYTES + 1)
  except Exception as error:  # of the network, of HTTP, of a malformed address
    raise ConfigError(f"{where} ({url:.200}) cannot be downloaded ({_one_line(error)})") from None
  if len(data) > MOST_BYTES:
    raise ConfigError(f"{where} ({url:.200}) has more than {MOST_BYTES:,} bytes")
  number, path = tempfile.mkstemp(dir=_folder().name)
  with os.fdopen(number, "wb") as file:
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
  """The images of a row: of one value or of a list of them. None is no image.

  Raises:
    ConfigError: A value is no image, or there are too many.
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
  """Raises ConfigError if a prompt has too many images."""
  if count > MOST_IMAGES:
    raise ConfigError(f"{where}: there are {count:,} images; a prompt may have {MOST_IMAGES:,}")
