"""Reads GGUF files, the format of llama.cpp: metadata by key, and tensors, most of them quantised.

A file may be damaged or hostile. So each count, length and offset in the file is compared with the
size of the file before anything is read or allocated.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import math
import os
from pathlib import Path
import re
import struct
from typing import Any, BinaryIO, NoReturn

import numpy as np

from grpo_jax import files
from grpo_jax.settings import ConfigError, shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_AXES = 4
_PART_BYTES = 1 << 24  # of float32 numbers that are dequantised at once
_PART_OF_SEVERAL = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)
_STRING, _ARRAY = 8, 9
# The number of a type of metadata -> its dtype in numpy.
_NUMBERS = {
  0: "<u1",
  1: "<i1",
  2: "<u2",
  3: "<i2",
  4: "<u4",
  5: "<i4",
  6: "<f4",
  7: "|b1",
  10: "<u8",
  11: "<i8",
  12: "<f8",
}
_Entry = tuple[str, tuple[int, ...], int, int]  # name, shape, number of the kind, offset
_STRING_BYTES = 8  # of the shortest string, which has only a length
_FIELD_BYTES = 8 + 4 + 1  # of the shortest metadata field: a name, a type and a value
_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # of the shortest entry of a tensor: name, axes, type, offset


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """The position and format of a tensor in a file.

  Attributes:
    shape: The shape, as in numpy: numbers along the last axis are adjacent.
    kind: The quantisation under its name in the package gguf, such as Q4_K or F16.
    offset: The position of the first byte in the file.
    row_bytes: The bytes of one row, the numbers along the last axis.
  """

  shape: tuple[int, ...]
  kind: str
  offset: int
  row_bytes: int

  @property
  def num_rows(self) -> int:
    """The number of rows, counted over all axes but the last."""
    return math.prod(self.shape[:-1])


@dataclasses.dataclass(frozen=True)
class GGUFFile:
  """A GGUF file whose header was read and checked.

  Attributes:
    path: The file.
    metadata: The metadata by key. An array of numbers is a numpy array, an array of strings a list.
    tensors: The tensors by name.
  """

  path: Path
  metadata: Mapping[str, Any] = dataclasses.field(repr=False)
  tensors: Mapping[str, StoredTensor] = dataclasses.field(repr=False)

  def refuse(self, reason: str) -> NoReturn:
    """Raises ConfigError with the path of the file and the reason."""
    raise ConfigError(f"{self.path}: {reason}")

  def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
    """Reads and dequantises rows of a tensor, about 16 MiB of them at a time.

    Args:
      name: The name of the tensor.
      start: The first row. Rows are counted over all axes but the last.
      stop: The row after the last one.

    Returns:
      float32 [stop - start, length of the last axis].
    """
    from gguf import constants, quants

    tensor = self.tensors[name]
    kind = constants.GGMLQuantizationType[tensor.kind]
    rows = np.empty((stop - start, tensor.shape[-1]), np.float32)
    step = max(1, _PART_BYTES // (4 * tensor.shape[-1]))  # rows of float32, of 4 bytes a number
    for first in range(start, stop, step):
      count = min(step, stop - first)
      stored = self._read_bytes(tensor.offset + first * tensor.row_bytes, count * tensor.row_bytes)
      stored = stored.reshape(count, tensor.row_bytes)
      with np.errstate(all="ignore"):  # the caller checks that the numbers are finite
        rows[first - start : first - start + count] = quants.dequantize(stored, kind)
    return rows

  def _read_bytes(self, offset: int, count: int) -> np.ndarray:
    try:
      stored = np.fromfile(self.path, np.uint8, count, offset=offset)
    except OSError as error:
      self.refuse(f"cannot be read ({error}): download it again")
    if len(stored) < count:  # `_Header` found it long enough
      self.refuse("was cut off while it was read: download it again")
    return stored


def is_gguf(path: str | os.PathLike) -> bool:
  """Whether a path ends in .gguf and is no folder. The file need not exist."""
  return Path(path).suffix.lower() == ".gguf" and not Path(path).expanduser().is_dir()


def names_in(folder: Path) -> str:
  """Returns a hint on how to read a GGUF file in `folder`, for an error message. "" without one."""
  found = sorted(path for path in folder.glob("*") if is_gguf(path))
  return f"; to read a GGUF file, give the file, such as {found[0]}" if found else ""


def open_file(path: str | os.PathLike) -> GGUFFile:
  """Reads the header of a GGUF file.

  Raises:
    ConfigError: The file does not exist, is damaged, is one of several parts of a model or has
      tensors that the package gguf cannot dequantise, or the package is not installed.
  """
  file = Path(path).expanduser()
  try:
    files.check_regular(file)
    status = file.stat()
  except FileNotFoundError:
    raise ConfigError(f"model file {path} does not exist: download it first") from None
  except OSError as error:
    raise ConfigError(f"{file} cannot be read: {error}") from None
  return _open(file, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _open(file: Path, size: int, changed: int) -> GGUFFile:
  """Reads a header, and caches it because weights, config and tokenizer need it in turn.

  `size` in bytes and `changed`, a time in ns, make sure that a changed file is read again.
  """
  del changed
  part = _PART_OF_SEVERAL.search(file.name)
  if part and int(part[1]) > 1:  # -00001-of-00001 is a whole model
    raise ConfigError(
      f"{file} is one of {int(part[1])} parts of a model: join them with llama-gguf-split --merge"
    )
  try:
    with file.open("rb") as stream:
      return _Header(file, stream, size).read()
  except OSError as error:
    raise ConfigError(f"{file} cannot be read ({error}): download it again") from None


class _Header:
  """Reads the header of one file, from its start to its end."""

  def __init__(self, file: Path, stream: BinaryIO, size: int) -> None:
    self._file, self._stream, self._size = file, stream, size
    self._position = 0

  def read(self) -> GGUFFile:
    """Reads the header. Raises ConfigError if the file is damaged or not a GGUF file."""
    if self._size < len(_MAGIC) or self._take(len(_MAGIC)) != _MAGIC:
      raise ConfigError(f"{self._file} is not a GGUF file: its first bytes are not GGUF")
    version = self._number("<u4")
    if version not in _VERSIONS:
      swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
      what = "has its bytes in big-endian order" if swapped else f"is of version {version}"
      raise ConfigError(f"{self._file} {what}: convert it to GGUF version 3, little-endian")
    num_tensors, num_fields = self._number("<u8"), self._number("<u8")
    self._check_count(num_tensors, _TENSOR_BYTES, "tensors")
    self._check_count(num_fields, _FIELD_BYTES, "fields of metadata")
    metadata = dict(self._fields(num_fields))
    count = metadata.get("split.count", 0)
    if type(count) is not int:
      self._damaged(f"split.count is {shown(count)}")
    if count > 1:  # a part that was renamed
      raise ConfigError(
        f"{self._file} is one of {count} parts of a model: join them with llama-gguf-split --merge"
      )
    alignment = metadata.get("general.alignment", 32)  # 32 is GGUF's default
    if type(alignment) is not int or alignment < 1:
      self._damaged(f"general.alignment is {shown(alignment)}")
    entries = list(self._entries(num_tensors))
    start = -(-self._position // alignment) * alignment  # rounded up, past the padding
    tensors = {entry[0]: self._placed(start, entry) for entry in entries}
    if len(tensors) < len(entries):
      self._damaged("two tensors have the same name")
    self._check_apart(tensors)
    return GGUFFile(self._file, metadata, tensors)

  def _damaged(self, reason: str) -> NoReturn:
    """Raises ConfigError for a damaged file."""
    raise ConfigError(f"{self._file} is damaged or cut off ({reason}): download it again")

  def _take(self, count: int) -> bytes:
    """Reads the next `count` bytes. Raises ConfigError if the file has fewer."""
    if count > self._size - self._position:
      self._damaged(f"its header ends {count} bytes after byte {self._position} of {self._size}")
    self._position += count
    taken = self._stream.read(count)
    if len(taken) < count:
      self._damaged("it became shorter while it was read")
    return taken

  def _check_count(self, count: int, bytes_of_one: int, what: str) -> None:
    """Raises ConfigError if the rest of the file is too short for `count` entries of this size."""
    if count * bytes_of_one > self._size - self._position:
      self._damaged(f"its header announces {count} {what}, more than it has room for")

  def _number(self, kind: str) -> Any:
    """Reads a number of the dtype `kind`."""
    return np.frombuffer(self._take(np.dtype(kind).itemsize), kind)[0].item()

  def _string(self) -> str:
    (length,) = struct.unpack("<Q", self._take(8))
    return self._decoded(self._take(length))

  def _decoded(self, text: bytes) -> str:
    try:
      return text.decode("utf-8")
    except UnicodeDecodeError:
      self._damaged(f"a text before byte {self._position} is not UTF-8")

  def _fields(self, count: int) -> Iterator[tuple[str, Any]]:
    """Reads `count` fields of metadata, and yields the name and the value of each."""
    seen = set()
    for _ in range(count):
      name = self._string()
      if name in seen:
        self._damaged(f"two fields have the name {shown(name)}")
      seen.add(name)
      yield name, self._value(name, self._number("<u4"))

  def _value(self, name: str, kind: int) -> Any:
    """Reads the value of the metadata field `name`. `kind` is the number of its GGUF type.

    Returns a number, a text, a list of texts or an array of numbers. Refuses any other type, also
    an array of arrays.
    """
    if kind == _STRING:
      return self._string()
    if kind in _NUMBERS:
      return self._number(_NUMBERS[kind])
    if kind != _ARRAY:
      self._damaged(f"field {shown(name)} is of type {kind}, which does not exist")
    element, count = self._number("<u4"), self._number("<u8")
    if element == _STRING:
      self._check_count(count, _STRING_BYTES, f"texts in {shown(name)}")
      return [self._string() for _ in range(count)]
    if element not in _NUMBERS:
      self._damaged(f"field {shown(name)} is an array of type {element}, which cannot be read")
    dtype = np.dtype(_NUMBERS[element])
    self._check_count(count, dtype.itemsize, f"numbers in {shown(name)}")
    return np.frombuffer(self._take(count * dtype.itemsize), dtype)

  def _entries(self, count: int) -> Iterator[_Entry]:
    """Reads the entries of `count` tensors. GGUF stores a shape in the reverse order of numpy."""
    for _ in range(count):
      name = self._string()
      axes = self._number("<u4")
      if not 1 <= axes <= _MOST_AXES:
        self._damaged(f"tensor {shown(name)} has {axes} axes")
      shape = struct.unpack(f"<{axes}Q", self._take(8 * axes))
      yield name, shape[::-1], self._number("<u4"), self._number("<u8")

  def _placed(self, start: int, entry: _Entry) -> StoredTensor:
    """Converts a header entry, whose offset counts from the byte `start` of the file.

    Refuses a tensor that is empty, has rows of broken blocks or ends beyond the end of the file.
    """
    name, shape, kind_number, offset = entry
    kind, block, block_bytes = self._kind(name, kind_number)
    if not math.prod(shape):
      self._damaged(f"tensor {shown(name)} has no numbers: its shape is {shape}")
    if shape[-1] % block:
      self._damaged(
        f"tensor {shown(name)} has rows of {shape[-1]} numbers, but {kind} has blocks of {block}"
      )
    row_bytes = shape[-1] // block * block_bytes
    tensor = StoredTensor(shape, kind, start + offset, row_bytes)
    end = tensor.offset + tensor.num_rows * row_bytes
    if end > self._size:
      self._damaged(f"tensor {shown(name)} ends at byte {end}, the file has {self._size}")
    return tensor

  def _kind(self, name: str, number: int) -> tuple[str, int, int]:
    """Looks up a kind: (name, numbers in a block, bytes of a block). `name` is of the tensor."""
    sizes = kinds(self._file)
    if number not in sizes:
      readable = ", ".join(kind for kind, _, _ in sizes.values())
      raise ConfigError(
        f"{self._file}: tensor {shown(name)} is of kind {_kind_name(number)}, which the package"
        f" gguf cannot dequantise: choose a file of {readable}"
      )
    return sizes[number]

  def _check_apart(self, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuses tensors that overlap, with which a small file could describe a huge model."""
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
      if tensor.offset < end:
        self._damaged(f"tensors {shown(before)} and {shown(name)} overlap")
      end, before = tensor.offset + tensor.num_rows * tensor.row_bytes, name


def kinds(file: Path) -> dict[int, tuple[str, int, int]]:
  """The kinds that the package gguf can dequantise: number -> (name, numbers and bytes of a block).

  Raises:
    ConfigError: The package is not installed. The message says that `file` needs it.
  """
  try:
    from gguf import constants
  except ImportError:
    raise ConfigError(f"{file} needs the package gguf: pip install -e '.[gguf]'") from None
  return {
    int(kind): (kind.name, *constants.GGML_QUANT_SIZES[kind])
    for kind in constants.GGMLQuantizationType
    if _can_dequantise(kind)
  }


@functools.cache
def _can_dequantise(kind: Any) -> bool:
  """Whether the package dequantises a kind. It has no list of them, so this tries zeros."""
  from gguf import constants, quants

  _, block_bytes = constants.GGML_QUANT_SIZES[kind]
  try:
    with np.errstate(all="ignore"):
      quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
  except NotImplementedError:
    return False
  return True


def _kind_name(number: int) -> str:
  from gguf import constants

  try:
    return constants.GGMLQuantizationType(number).name
  except ValueError:
    return f"number {number}"
