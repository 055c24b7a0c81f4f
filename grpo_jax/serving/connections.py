"""The connections of an endpoint: limits their number, and closes idle ones.

A connection without a request costs its client nothing, so it is closed after a short time. If
there is no room for a new connection, the one that has been idle longest is closed. A connection
whose request has arrived completely is never closed to make room.
"""

import asyncio
from collections.abc import Iterator
import contextlib
import dataclasses
import errno
import math
import resource
import socket
import time

from aiohttp import web

_FILES = 8192  # open files of the process, if it may raise the limit so far
_BACKLOG = 1024  # connections that the system queues until they are accepted
_PAUSE = 0.1  # seconds to wait after the system had no resources for a connection
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NOT_HERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # for example IPv6 on a machine without it
_OWN_FILES = 64  # open files that the process needs besides connections


def listen(host: str, port: int) -> list[socket.socket]:
  """Opens listening sockets at all addresses of a host that this machine has, on the same port.

  Args:
    host: A name or an address.
    port: The port. 0 picks a free port.

  Raises:
    OSError, OverflowError: The address or the port cannot be used. No socket stays open.
  """
  found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
  listeners: list[socket.socket] = []
  not_here: OSError | None = None  # raised only if no address can be used
  try:
    for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
      # For port 0, the system chooses the port of the first listener. The others take the same.
      port = listeners[0].getsockname()[1] if listeners else port
      place = (address[0], port, *address[2:])
      try:
        listener = socket.create_server(place, family=family, backlog=_BACKLOG)
      except OSError as error:
        if error.errno not in _NOT_HERE:
          raise
        not_here = error
        continue
      listener.setblocking(False)
      listeners.append(listener)
    if not_here is not None and not listeners:
      raise not_here
  except BaseException:
    for listener in listeners:
      listener.close()
    raise
  return listeners


def room(most: int) -> int:
  """Returns how many connections fit: `most`, or less if too few files may be open.

  First raises the process's limit of open files, up to `_FILES`.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    with contextlib.suppress(OSError, ValueError):
      resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
      soft = wanted
  return most if soft == resource.RLIM_INFINITY else min(most, max(soft - _OWN_FILES, soft // 2))


@dataclasses.dataclass
class _Wait:
  """The deadline of a connection that may be closed.

  Attributes:
    end: When the connection is closed, in seconds of time.monotonic().
    unsent: How many bytes the client had not read yet at the last check.
  """

  end: float
  unsent: int


class Connections:
  """Accepts connections for a server of aiohttp. Call all methods in the event loop."""

  def __init__(self, server: web.Server, most: int, seconds: float):
    """Accepts no connections yet.

    Args:
      server: Handles HTTP on the connections.
      most: The most connections.
      seconds: How long a connection may stay without a request.
    """
    self._server, self._most, self._seconds = server, most, seconds
    # The connections that may be closed. The one that has waited longest is first.
    self._waiting: dict[web.RequestHandler, _Wait] = {}
    self._kept: set[web.RequestHandler] = set()

  async def take(self, listener: socket.socket) -> None:
    """Accepts connections until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
      try:
        connected, _ = await loop.sock_accept(listener)
      except OSError as error:
        if error.errno in _FULL:
          self._close_first()
          await asyncio.sleep(_PAUSE)
        continue  # with other errors, the client has left
      # If all connections are taken, closes one to make room.
      if len(self._waiting) + len(self._kept) >= self._most and not self._close_first():
        connected.close()
        continue
      with contextlib.suppress(OSError):  # the client has left
        _, connection = await loop.connect_accepted_socket(self._server, connected)
        # A request may have arrived by now, and have lifted the deadline.
        self._waiting.setdefault(connection, _Wait(time.monotonic() + self._seconds, 0))

  async def watch(self) -> None:
    """Closes connections whose deadline has passed. Runs until it is cancelled."""
    while True:
      await asyncio.sleep(self._seconds / 10)
      now = time.monotonic()
      for connection, wait in list(self._waiting.items()):
        unsent = _unsent(connection)
        if unsent < wait.unsent:  # the client is still reading the last answer
          wait.end, wait.unsent = now + self._seconds, unsent
        if wait.end <= now or not _is_open(connection):
          self._close(connection)

  @contextlib.contextmanager
  def request(self, connection: web.RequestHandler) -> Iterator[None]:
    """Lifts the deadline within the block, in which a request is read and answered."""
    self._wait(connection, math.inf)
    try:
      yield
    finally:
      self._wait(connection, self._seconds)

  @contextlib.contextmanager
  def kept(self, connection: web.RequestHandler) -> Iterator[None]:
    """Within the block, the connection is not closed to make room."""
    self._waiting.pop(connection, None)
    self._kept.add(connection)
    try:
      yield
    finally:
      self._kept.discard(connection)
      self._wait(connection, math.inf)

  def _wait(self, connection: web.RequestHandler, seconds: float) -> None:
    self._waiting.pop(connection, None)
    if _is_open(connection):
      self._waiting[connection] = _Wait(time.monotonic() + seconds, _unsent(connection))

  def _close_first(self) -> bool:
    """Closes the connection that has waited longest. Returns False if there is none.

    Connections with unsent bytes of an answer are closed only if there is no other.
    """
    first = next(iter(self._waiting), None)
    connection = next((one for one in self._waiting if not _unsent(one)), first)
    if connection is not None:
      self._close(connection)
    return connection is not None

  def _close(self, connection: web.RequestHandler) -> None:
    del self._waiting[connection]
    if connection.transport is not None:
      connection.transport.abort()  # drops unsent bytes


def _unsent(connection: web.RequestHandler) -> int:
  """How many bytes of answers wait until the client reads them."""
  return connection.transport.get_write_buffer_size() if _is_open(connection) else 0


def _is_open(connection: web.RequestHandler) -> bool:
  return connection.transport is not None and not connection.transport.is_closing()
