"""Messages between a learner and its sampler processes: a header in JSON, then raw arrays.

Received data is never executed. A malformed or too long message raises `BadMessage`. A checksum
follows the length of the header, the header and each array.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import json
import math
import socket
import struct
import threading
import time
from typing import Any, NamedTuple
import zlib

import ml_dtypes  # noqa: F401  registers dtypes such as bfloat16 and int4 with numpy
import numpy as np

from grpo_jax.asynchronous.encryption import Encrypted

BEAT = 2.0  # seconds between two "alive" messages
_SILENCE = 60.0  # seconds without any data after which the other side counts as dead
_LENGTH = struct.Struct("!I")  # the length of the header
_CHECKSUM = struct.Struct("!I")
_LONGEST_HEADER = 2**22
_BLOCK = 2**20  # bytes to send at once, few enough to be in the CPU's cache for the checksum
_DTYPES = (
  "bool int4 int8 int16 int32 int64 uint4 uint8 uint32 float16 bfloat16 float32 float64"
  " float8_e4m3fn float8_e5m2"
).split()
_MOST_AXES, _MOST_BYTES = 8, 2**50  # limits of one array


class BadMessage(Exception):
  """The bytes are not a message, or the message is not allowed here."""


class DamagedMessage(BadMessage):
  """A checksum is wrong: the data changed on its way."""


# The dtype and the shape of arrays, by name.
Shapes = dict[str, tuple[np.dtype, tuple[int, ...]]]


class Message(NamedTuple):
  """A message.

  Attributes:
    kind: The kind of message, such as "draw".
    fields: JSON values by name.
    arrays: The arrays by name.
  """

  kind: str
  fields: dict[str, Any]
  arrays: dict[str, np.ndarray]


class Connection:
  """Sends and receives messages on a socket. One thread receives, and any thread may send."""

  def __init__(self, connected: socket.socket | Encrypted):
    """`connected` is a TCP socket, or an encrypted one."""
    connected.settimeout(_SILENCE)  # for each block, not for a whole message
    self._socket, self._sending = connected, threading.Lock()

  def send(
    self,
    kind: str,
    fields: Mapping[str, Any] | None = None,
    arrays: Mapping[str, np.ndarray] | None = None,
  ) -> None:
    """Sends a message. Raises OSError if the other side is gone or does not receive."""
    arrays = arrays or {}
    described = [(name, str(x.dtype), x.shape) for name, x in arrays.items()]
    header = json.dumps({"kind": kind, "fields": fields or {}, "arrays": described}).encode()
    with self._sending:
      self._socket.sendall(_checked(_LENGTH.pack(len(header))) + _checked(header))
      for array in arrays.values():
        checksum = 0
        for block in _blocks(_bytes_of(np.ascontiguousarray(array))):
          checksum = zlib.crc32(block, checksum)
          self._socket.sendall(block)
        self._socket.sendall(_CHECKSUM.pack(checksum))

  def receive(
    self,
    most_bytes: int = _MOST_BYTES,
    check: Callable[[str, dict[str, Any], Shapes], None] = lambda kind, fields, shapes: None,
  ) -> Message:
    """Waits for a message.

    Args:
      most_bytes: The most bytes of all arrays together. With the default, `check` must limit them.
      check: Called with the kind, the fields and the arrays' shapes before the arrays are read.
        Raises BadMessage if the message is not allowed now.

    Raises:
      BadMessage: The bytes are not a message, or the message is too long or not allowed.
      DamagedMessage: A checksum is wrong. The text names the array.
      OSError: The other side is gone or silent.
    """
    # Only the header has a deadline. Arrays may take longer as long as their bytes keep arriving.
    until = time.monotonic() + _SILENCE
    prefix = bytearray(_LENGTH.size)
    self._read_checked(prefix, "the length of a header", until)
    (length,) = _LENGTH.unpack(prefix)
    if length > _LONGEST_HEADER:
      raise BadMessage(f"it sent a header of {length} bytes, and {_LONGEST_HEADER} are allowed")
    header = bytearray(length)
    self._read_checked(header, "a header", until)
    kind, fields, shapes = _parsed(header)
    check(kind, fields, shapes)
    size = bytes_of(shapes)
    if size > most_bytes:
      raise BadMessage(f"it sent arrays of {size} bytes, and {most_bytes} are allowed here")
    try:
      arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in shapes.items()}
    except MemoryError:
      raise BadMessage(f"it sent arrays of {size} bytes, for which no memory is left") from None
    for name, array in arrays.items():
      self._read_checked(_bytes_of(array), f"the array {name[:40]!r} of {kind[:20]!r}")
    return Message(kind, fields, arrays)

  def end(self) -> None:
    """Shuts the socket down, so that other threads stop waiting for it."""
    with contextlib.suppress(OSError):  # already shut down
      self._socket.shutdown(socket.SHUT_RDWR)

  def close(self) -> None:
    """Closes the socket."""
    self._socket.close()

  def _read_checked(self, data: bytearray | memoryview, name: str, until: float = math.inf) -> None:
    """Fills `data` before the deadline `until` and verifies its checksum. Errors call it `name`."""
    checksum, expected = 0, bytearray(_CHECKSUM.size)
    for block in _blocks(data):
      self._read_into(block, until)
      checksum = zlib.crc32(block, checksum)
    self._read_into(memoryview(expected), until)
    if expected != _CHECKSUM.pack(checksum):
      raise DamagedMessage(f"{name} arrived damaged: its checksum is wrong")

  def _read_into(self, data: memoryview, until: float) -> None:
    done = 0
    while done < len(data):
      if time.monotonic() > until:
        raise TimeoutError("timed out in the middle of a message")
      count = self._socket.recv_into(data[done:])
      if not count:
        raise ConnectionError("the connection was closed")
      done += count


def bytes_of(shapes: Shapes) -> int:
  """The total bytes of arrays with these dtypes and shapes."""
  return sum(dtype.itemsize * math.prod(shape) for dtype, shape in shapes.values())


def _parsed(header: bytearray) -> tuple[str, dict[str, Any], Shapes]:
  """Parses a header: the kind, the fields and the shapes of arrays. Raises BadMessage."""
  try:
    values = json.loads(header)
    kind, fields, arrays = values["kind"], values["fields"], values["arrays"]
    is_right = isinstance(kind, str) and isinstance(fields, dict) and isinstance(arrays, list)
    if not is_right or not all(_is_array(*array) for array in arrays):
      raise ValueError
    shapes = {name: (np.dtype(dtype), tuple(shape)) for name, dtype, shape in arrays}
    if len(shapes) < len(arrays):  # two arrays have the same name
      raise ValueError
  except (KeyError, RecursionError, TypeError, ValueError):
    raise BadMessage("it sent a header that makes no sense") from None
  return kind, fields, shapes


def _is_array(name: Any, dtype: Any, shape: Any) -> bool:
  is_shape = isinstance(shape, list) and len(shape) <= _MOST_AXES
  return (
    is_shape
    and isinstance(name, str)
    and dtype in _DTYPES
    and all(type(size) is int and size >= 0 for size in shape)
    # numpy limits the product of the axes even if one of them is 0.
    and math.prod(max(1, size) for size in shape) * np.dtype(dtype).itemsize < _MOST_BYTES
  )


def _bytes_of(array: np.ndarray) -> memoryview:
  """The memory of a contiguous array, without a copy."""
  return memoryview(array.reshape(-1).view(np.uint8))


def _blocks(data: bytearray | memoryview) -> Iterator[memoryview]:
  """Splits memory into blocks of at most _BLOCK bytes, without a copy."""
  view = memoryview(data)
  return (view[start : start + _BLOCK] for start in range(0, len(view), _BLOCK))


def _checked(data: bytes) -> bytes:
  """The data, followed by its checksum."""
  return data + _CHECKSUM.pack(zlib.crc32(data))
