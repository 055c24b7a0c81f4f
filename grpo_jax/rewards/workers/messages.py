"""Messages between the process of a run, the forker and the workers, over stream sockets.

What the run sends is pickled, because columns hold any objects. What it receives is JSON, one
object a line: a worker that sends something else, by accident or not, can do no harm.
"""

import json
import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
_LONGEST_LINE = 2**28  # characters of an answer


def send(channel: socket.socket, message: Any) -> None:
  """Sends a pickled message."""
  send_data(channel, pickle.dumps(message))


def send_data(channel: socket.socket, data: bytes) -> None:
  """Sends a message that is pickled already."""
  channel.sendall(_LENGTH.pack(len(data)) + data)


def receive(channel: socket.socket) -> Any:
  """The next pickled message. Raises EOFError if the other side has ended."""
  (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size))
  return pickle.loads(_read(channel, length))


def send_line(channel: socket.socket, values: dict[str, Any]) -> None:
  """Sends an object as a line of JSON."""
  channel.sendall(json.dumps(values).encode() + b"\n")


class Lines:
  """The lines of JSON that come from a socket."""

  def __init__(self, channel: socket.socket) -> None:
    self._channel = channel
    self._buffer = bytearray()

  def read(self) -> list[dict[str, Any]]:
    """Waits for bytes to come, and returns the objects that are complete.

    Raises:
      EOFError: The other side has ended.
      ValueError: It sent something else than lines of objects.
    """
    data = self._channel.recv(2**20)
    if not data:
      raise EOFError
    start = len(self._buffer)
    self._buffer += data
    end = self._buffer.rfind(b"\n", start)
    if end < 0:
      if len(self._buffer) > _LONGEST_LINE:
        raise ValueError("a line has no end")
      return []
    whole, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
    try:
      objects = [json.loads(line) for line in whole.split(b"\n")]
    except RecursionError as error:
      raise ValueError(str(error)) from None
    if not all(isinstance(one, dict) for one in objects):
      raise ValueError("a line holds no object")
    return objects


def _read(channel: socket.socket, length: int) -> bytes:
  parts = []
  while length:
    part = channel.recv(min(length, 2**20))
    if not part:
      raise EOFError
    parts.append(part)
    length -= len(part)
  return b"".join(parts)
