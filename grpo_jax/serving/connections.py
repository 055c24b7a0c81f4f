"""The connections of an endpoint: how many there may be, and which of them do not stay.

A connection without a request costs its client nothing. So it stays for a short time, and whoever
comes when there is no room takes the place of the one that has waited longest. A request that has
arrived whole keeps its connection.
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

_FILES = 8192  # that the process may have open, if it may say so itself
_BACKLOG = 1024  # connections that the system holds until they are taken
_PAUSE = 0.1  # seconds, after the system has given no connection
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NOT_HERE = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # as IPv6 where a machine has none
_OWN_FILES = 64  # that the process needs beside connections


def listen(host: str, port: int) -> list[socket.socket]:
  """Sockets that listen at all addresses of a host that this machine has, at the same port.

  Args:
    host: A name or an address.
    port: The port. 0 takes a free one.

  Raises:
    OSError, OverflowError: Nothing can listen there.
  """
  found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
  listeners: list[socket.socket] = []
  without: OSError | None = None
  try:
    for family, address in dict.fromkeys((one[0], one[4]) for one in found):
      port = listeners[0].getsockname()[1] if listeners else port
      place = (address[0], port, *address[2:])
      try:
        listener = socket.create_server(place, family=family, backlog=_BACKLOG)
      except OSError as error:
        if error.errno not in _NOT_HERE:
          raise
        without = error
        continue
      listener.setblocking(False)
      listeners.append(listener)
    if without is not None and not listeners:
      raise without
  except BaseException:
    for listener in listeners:
      listener.close()
    raise
  return listeners


def room(most: int) -> int:
  """How many connections there may be: at most so many, and no more than files may be open.

  It raises the process's own limit of open files as far as it may.
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
  """How long a connection may still be without a request.

  Attributes:
    end: When it is closed.
    unsent: The bytes that its client had not read yet, when that was last looked at.
  """

  end: float
  unsent: int


class Connections:
  """Takes connections for a server of aiohttp. All of its methods are for the event loop."""

  def __init__(self, server: web.Server, most: int, seconds: float):
    """Takes none yet.

    Args:
      server: Speaks HTTP on them.
      most: How many there may be.
      seconds: For how long a connection may be without a request.
    """
    self._server, self._most, self._seconds = server, most, seconds
    # Those that may be closed, and when that is to be. The one that has waited longest is first.
    self._waiting: dict[web.RequestHandler, _Wait] = {}
    self._kept: set[web.RequestHandler] = set()

  async def take(self, listener: socket.socket) -> None:
    """Takes connections until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
      try:
        connected, _ = await loop.sock_accept(listener)
      except OSError as error:
        if error.errno in _FULL:
          self._close_first()
          await asyncio.sleep(_PAUSE)
        continue  # otherwise the client has left
      if len(self._waiting) + len(self._kept) >= self._most and not self._close_first():
        connected.close()
        continue
      with contextlib.suppress(OSError):  # the client has left
        _, connection = await loop.connect_accepted_socket(self._server, connected)
        self._waiting.setdefault(connection, _Wait(time.monotonic() + self._seconds, 0))

  async def watch(self) -> None:
    """Closes connections without a request when their time is over, until it is cancelled."""
    while True:
      await asyncio.sleep(self._seconds / 10)
      now = time.monotonic()
      for connection, wait in list(self._waiting.items()):
        unsent = _unsent(connection)
        if unsent < wait.unsent:  # its client reads the last answer
          wait.end, wait.unsent = now + self._seconds, unsent
        if wait.end <= now or not _is_open(connection):
          self._close(connection)

  @contextlib.contextmanager
  def request(self, connection: web.RequestHandler) -> Iterator[None]:
    """In the block, a request is answered. Its own limits of time count."""
    self._wait(connection, math.inf)
    try:
      yield
    finally:
      self._wait(connection, self._seconds)

  @contextlib.contextmanager
  def kept(self, connection: web.RequestHandler) -> Iterator[None]:
    """In the block, the connection is not closed to make room."""
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
    """Closes the connection that has waited longest. Returns whether there was one.

    One whose answer is not sent yet is closed only if there is no other.
    """
    first = next(iter(self._waiting), None)
    connection = next((one for one in self._waiting if not _unsent(one)), first)
    if connection is not None:
      self._close(connection)
    return connection is not None

  def _close(self, connection: web.RequestHandler) -> None:
    del self._waiting[connection]
    if connection.transport is not None:
      connection.transport.abort()  # whatever of its data is not sent yet


def _unsent(connection: web.RequestHandler) -> int:
  """The bytes of answers that wait until the client reads."""
  return connection.transport.get_write_buffer_size() if _is_open(connection) else 0


def _is_open(connection: web.RequestHandler) -> bool:
  return connection.transport is not None and not connection.transport.is_closing()
