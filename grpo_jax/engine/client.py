"""Calls a server with JSON over HTTP."""

import functools
import http.client
import io
import json
import threading
import time
from typing import Any
from urllib.parse import urlsplit

_MOST_BYTES = 1 << 26  # the size limit of an answer


class ServerGone(Exception):
  """A server does not answer: it or its machine is down, or the timeout has passed."""


class ServerRefused(Exception):
  """A server answers a call with an error, or with something that cannot be right.

  Attributes:
    status: The HTTP status. 200 if the answer itself is wrong.
  """

  def __init__(self, why: str, status: int = 200):
    super().__init__(why)
    self.status = status


class Client:
  """Sends calls to one server. Several threads may call at the same time.

  Attributes:
    url: The address of the server, such as http://127.0.0.1:8000.
  """

  def __init__(self, url: str, key: str = ""):
    """Sends the API key `key` with each call, unless it is empty. Does not connect yet."""
    self.url = url
    split = urlsplit(url)
    self._is_encrypted, self._host, self._port = split.scheme == "https", split.hostname, split.port
    self._headers = {"Content-Type": "application/json"}
    if key:
      self._headers["Authorization"] = f"Bearer {key}"
    self._lock, self._open = threading.Lock(), dict[http.client.HTTPConnection, Any]()

  def call(self, path: str, body: Any = None, seconds: float = 30.0, owner: Any = None) -> Any:
    """Sends one HTTP request on a new connection, and returns the answer.

    Args:
      path: The path of the URL, such as /v1/models.
      body: The body of a POST, which is sent as JSON. None sends a GET.
      seconds: The timeout for the whole answer.
      owner: Any object that identifies the call. `drop` can end the calls of one owner.

    Returns:
      The parsed JSON, or the answer as a text if it is not JSON.

    Raises:
      ServerGone: No answer came in time, or `drop` ended the call.
      ServerRefused: The status is not 200, or the answer is too large.
    """
    kind = http.client.HTTPSConnection if self._is_encrypted else http.client.HTTPConnection
    connection = kind(self._host, self._port, timeout=seconds)
    until = time.monotonic() + seconds
    response_class: Any = functools.partial(_Response, until=until)  # mypy wants a class
    connection.response_class = response_class
    content = None if body is None else json.dumps(body).encode()
    with self._lock:
      self._open[connection] = owner
    try:
      connection.request("GET" if body is None else "POST", path, content, self._headers)
      response = connection.getresponse()
      answer = response.read(_MOST_BYTES + 1)  # one byte too many shows that it is too large
    except TimeoutError:
      raise ServerGone(f"{self.url} did not answer {path} within {seconds:g} seconds") from None
    except (OSError, http.client.HTTPException, AttributeError) as error:
      # `drop` may close a connection while it is opened, which http.client does not expect.
      raise ServerGone(
        f"{self.url} does not answer ({str(error) or type(error).__name__})"
      ) from None
    finally:
      with self._lock:
        self._open.pop(connection, None)
      connection.close()
    if len(answer) > _MOST_BYTES:
      raise ServerRefused(f"{self.url} answers {path} with more than {_MOST_BYTES} bytes")
    if response.status != 200:
      why = f"{self.url} answers {path} with {response.status}: {_message(answer)}"
      raise ServerRefused(why, response.status)
    return _parsed(answer)

  def drop(self, owner: Any = None) -> None:
    """Aborts the pending calls of one owner, or all if it is None. They raise ServerGone."""
    with self._lock:
      for connection, caller in self._open.items():
        if (owner is None or caller is owner) and connection.sock is not None:
          _shut(connection.sock)


class _Response(http.client.HTTPResponse):
  """An answer with a deadline. A socket's own timeout only limits each read, not the whole."""

  def __init__(self, sock: Any, *arguments: Any, until: float, **named: Any):
    super().__init__(sock, *arguments, **named)
    self.fp = io.BufferedReader(_BytesBefore(self.fp.detach(), sock, until))


class _BytesBefore(io.RawIOBase):
  """Reads a socket until `until` by `time.monotonic`. After that, reads raise TimeoutError."""

  def __init__(self, raw: io.RawIOBase, sock: Any, until: float):
    self._raw, self._sock, self._until = raw, sock, until

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int | None:
    left = self._until - time.monotonic()
    if left <= 0:
      raise TimeoutError
    self._sock.settimeout(left)
    return self._raw.readinto(buffer)  # type: ignore[attr-defined]

  def close(self) -> None:
    self._raw.close()
    super().close()


def _shut(socket: Any) -> None:
  """Shuts a socket down in both directions, which wakes the thread that waits for it."""
  try:
    socket.shutdown(2)
  except OSError:  # the server has already closed it
    pass


def _parsed(answer: bytes) -> Any:
  """Parses JSON. Returns a text if the answer is not JSON."""
  try:
    return json.loads(answer)
  except (ValueError, RecursionError):
    return answer.decode("utf-8", "replace")


def _message(answer: bytes) -> str:
  """Finds the message in the body of an HTTP error. Returns it as one line of up to 300 chars."""
  found = _parsed(answer)
  if isinstance(found, dict):
    error = found.get("error", found)
    found = error.get("message", error) if isinstance(error, dict) else error
  return " ".join(str(found).split())[:300] or "nothing"
