"""TLS over a socket on which one thread sends while another one receives."""

import socket
import ssl
import threading
import time

_BLOCK = 2**18  # bytes that are encrypted, or received, at once
_RECORDS = range(0x14, 0x18)  # the first byte of every record of TLS


class NotEncrypted(ConnectionError):
  """The other side does not speak TLS."""


class Encrypted:
  """An encrypted socket, with the methods of a socket that connections use.

  An `ssl.SSLSocket` must not send and receive at once: before Python 3.13 it may crash, and some
  later versions wait while they hold its lock. Here TLS works in memory. A lock is held only while
  it does, and never while the socket waits.
  """

  def __init__(
    self,
    connected: socket.socket,
    context: ssl.SSLContext,
    until: float,
    name: str | None = None,
  ) -> None:
    """Agrees on keys with the other side.

    Args:
      connected: A TCP socket.
      context: The TLS context of a server or of a client.
      until: When they must have agreed, in seconds of `time.monotonic`.
      name: A client tells the server that it has connected to this host.

    Raises:
      NotEncrypted: The other side did not send TLS.
      ssl.SSLError, OSError: They do not agree, or the other side has gone.
    """
    self._socket, self._working = connected, threading.Lock()
    self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    self._tls = context.wrap_bio(
      self._arrived, self._leaving, context.protocol == ssl.PROTOCOL_TLS_SERVER, name
    )
    is_first = True
    while not self._has_agreed():
      connected.settimeout(max(1e-3, until - time.monotonic()))
      data = connected.recv(_BLOCK)
      if not data:
        raise ConnectionError("the connection was closed")
      if is_first and data[0] not in _RECORDS:
        raise NotEncrypted("it does not speak TLS")
      self._arrived.write(data)
      is_first = False

  def certificate(self) -> tuple[bytes, dict]:
    """The certificate of the other side: its bytes (DER), and what it says."""
    return self._tls.getpeercert(binary_form=True) or b"", self._tls.getpeercert() or {}

  def sendall(self, data: bytes | memoryview) -> None:
    """Encrypts and sends all of `data`. One thread at a time may call it."""
    view, done = memoryview(data), 0
    while done < len(view):
      end = min(done + _BLOCK, len(view))
      with self._working:
        while done < end:
          done += self._tls.write(view[done:end])
        encrypted = self._leaving.read()
      self._socket.sendall(encrypted)

  def recv_into(self, buffer: memoryview) -> int:
    """Waits for some bytes. 0 means that there will be none."""
    while True:
      with self._working:
        try:
          # mypy thinks that read gives bytes here, too.
          return int(self._tls.read(len(buffer), buffer))  # type: ignore[arg-type, call-overload]
        except ssl.SSLWantReadError:
          pass
        except ssl.SSLZeroReturnError:
          return 0
      data = self._socket.recv(_BLOCK)
      if not data:
        return 0
      with self._working:
        self._arrived.write(data)

  def settimeout(self, seconds: float) -> None:
    """How long each wait for the socket may take."""
    self._socket.settimeout(seconds)

  def shutdown(self, how: int) -> None:
    """Ends what other threads do with the socket."""
    self._socket.shutdown(how)

  def close(self) -> None:
    """Closes the socket."""
    self._socket.close()

  def _has_agreed(self) -> bool:
    """Goes on with the handshake, and sends what it says."""
    try:
      self._tls.do_handshake()
      return True
    except ssl.SSLWantReadError:
      return False
    finally:  # also why it failed
      self._socket.sendall(self._leaving.read())
