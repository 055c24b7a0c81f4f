"""Implements TLS over a socket on which one thread sends while another one receives."""

import socket
import ssl
import threading
import time

_BLOCK = 2**18  # the most bytes to encrypt or receive at once
_RECORDS = range(0x14, 0x18)  # possible first bytes of a TLS record


class NotEncrypted(ConnectionError):
  """The other side does not speak TLS."""


class Encrypted:
  """An encrypted socket, with the methods of a socket that `Connection` uses.

  Two threads must not use an `ssl.SSLSocket` at the same time: before Python 3.13 it may crash, and
  some later versions hold its lock while they wait. Here TLS encrypts and decrypts in memory. A
  lock protects only these computations, so no thread holds it while it waits for the socket.
  """

  def __init__(
    self,
    connected: socket.socket,
    context: ssl.SSLContext,
    until: float,
    name: str | None = None,
  ) -> None:
    """Performs the TLS handshake.

    Args:
      connected: A TCP socket.
      context: The TLS context of a server or of a client.
      until: The deadline of the handshake, in seconds of `time.monotonic`.
      name: The host that a client connects to, which TLS tells the server. None for a server.

    Raises:
      NotEncrypted: The other side did not send TLS.
      ssl.SSLError, OSError: The handshake failed, or the other side is gone.
    """
    self._socket, self._working = connected, threading.Lock()
    # Encrypted bytes from the socket and for the socket.
    self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
    self._tls = context.wrap_bio(
      self._arrived, self._leaving, context.protocol == ssl.PROTOCOL_TLS_SERVER, name
    )
    is_first = True
    while not self._has_agreed():
      # A timeout must be positive. After the deadline it is as short as this.
      connected.settimeout(max(1e-3, until - time.monotonic()))
      data = connected.recv(_BLOCK)
      if not data:
        raise ConnectionError("the connection was closed")
      if is_first and data[0] not in _RECORDS:
        raise NotEncrypted("it does not speak TLS")
      self._arrived.write(data)
      is_first = False

  def certificate(self) -> tuple[bytes, dict]:
    """The certificate of the other side in DER, and its fields as `ssl` decodes them."""
    return self._tls.getpeercert(binary_form=True) or b"", self._tls.getpeercert() or {}

  def sendall(self, data: bytes | memoryview) -> None:
    """Encrypts and sends all of `data`. Only one thread at a time may call this."""
    view, done = memoryview(data), 0
    while done < len(view):
      end = min(done + _BLOCK, len(view))
      with self._working:
        while done < end:
          done += self._tls.write(view[done:end])
        encrypted = self._leaving.read()
      self._socket.sendall(encrypted)

  def recv_into(self, buffer: memoryview) -> int:
    """Waits for bytes, writes them to `buffer` and returns their number, 0 after the last ones."""
    while True:
      with self._working:
        try:
          # With a buffer, `read` returns an int, but mypy expects bytes.
          return int(self._tls.read(len(buffer), buffer))  # type: ignore[arg-type, call-overload]
        except ssl.SSLWantReadError:  # the next record has not arrived completely
          pass
        except ssl.SSLZeroReturnError:  # the other side has closed
          return 0
      data = self._socket.recv(_BLOCK)
      if not data:
        return 0
      with self._working:
        self._arrived.write(data)

  def settimeout(self, seconds: float) -> None:
    """Limits how long each wait for the socket may take."""
    self._socket.settimeout(seconds)

  def shutdown(self, how: int) -> None:
    """Shuts the socket down, so that other threads stop waiting for it."""
    self._socket.shutdown(how)

  def close(self) -> None:
    """Closes the socket."""
    self._socket.close()

  def _has_agreed(self) -> bool:
    """Continues the handshake and sends its output. Returns whether the handshake is complete."""
    try:
      self._tls.do_handshake()
      return True
    except ssl.SSLWantReadError:
      return False
    finally:  # after a failure, the output tells the other side why
      self._socket.sendall(self._leaving.read())
