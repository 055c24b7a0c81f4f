"""Ends all processes of a run when one of them ends early.

A process that waits in a collective does not notice that another process has ended. JAX's
heartbeats notice it within a minute, and then abort the process. So each process also has a TCP
connection to the first process, which the kernel closes when a process ends in any way.
"""

from collections.abc import Callable
import contextlib
import os
import secrets
import socket
import struct
import sys
import threading
from typing import NoReturn

import numpy as np

_HELLO = struct.Struct("!II")  # the run's secret, the number of the process
_SECONDS_TO_CONNECT = 60.0
_SECONDS_TO_AGREE = 10.0
_SECONDS_TO_HEAR = 2.0
# Messages: the sender has failed, all processes have failed, the sender ends without the others,
# and the answer to that.
_FAILED, _ALL_FAILED, _ALONE, _HEARD = b"f", b"a", b"l", b"h"


class Watch:
  """A process's connections to other processes. A thread waits for the end of each connection."""

  def __init__(self, index: int, count: int, leave: Callable[[str], NoReturn]):
    """Watches in process `index` of `count`. `leave(line)` must end the process with the line."""
    self._index, self._count, self._leave = index, count, leave
    self._connections: dict[int, socket.socket] = {}  # by the number of the other process
    self._failed: set[int] = set()  # the processes that called `all_failed` and have not given up
    self._heard: set[int] = set()  # the processes that know that this one has given up
    self._changed = threading.Condition()  # guards the attributes, and is notified of messages
    self._is_over = False  # whether the other processes may end now

  def start(self, host: str, agree: Callable[[np.ndarray], np.ndarray]) -> None:
    """Connects this process with the first one. A process that cannot connect is not watched.

    Args:
      host: A name or address of the first process's machine.
      agree: agree(array) -> the array that the first process passed, on every process.
    """
    listener, offer = None, np.zeros(2, np.int32)  # (port, secret). Port 0: nobody listens
    if self._index == 0:
      with contextlib.suppress(OSError):
        dual = socket.has_dualstack_ipv6()  # then one socket listens for IPv4 and IPv6
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(
          ("", 0), family=family, dualstack_ipv6=dual, backlog=self._count
        )
        offer = np.array([listener.getsockname()[1], secrets.randbits(31)], np.int32)
    port, secret = map(int, agree(offer))
    if listener is not None:
      _in_background(self._accept, listener, secret)
    elif port and self._index:
      with contextlib.suppress(OSError):
        connection = socket.create_connection((host, port), _SECONDS_TO_CONNECT)
        connection.sendall(_HELLO.pack(secret, self._index))
        self._listen_to(0, connection)

  def stop(self) -> None:
    """Lets the other processes end from now on, because the run is over."""
    self._is_over = True

  def all_failed(self) -> bool:
    """Whether all processes call this within _SECONDS_TO_AGREE, because they fail together.

    If another process has ended, and its end made this process fail, `leave` ends this process
    before this returns.
    """
    with self._changed:
      self._failed.add(self._index)
      self._tell(_FAILED)
      self._conclude()
      if self._changed.wait_for(lambda: self._is_over, _SECONDS_TO_AGREE):
        return True
      # The end of this process may make the others fail. They must know before that it does not
      # count as failed any more, or they would take its end for an error of all.
      self._is_over = True
      self._tell(_ALONE)
      self._changed.wait_for(lambda: self._heard >= {*self._connections}, _SECONDS_TO_HEAR)
      return False

  def _accept(self, listener: socket.socket, secret: int) -> None:
    """On the first process, in a thread: accepts connections for ever."""
    while True:
      connection, _ = listener.accept()
      _in_background(self._greet, connection, secret)

  def _greet(self, connection: socket.socket, secret: int) -> None:
    """In a thread: keeps a connection of a process of this run, which knows the secret."""
    connection.settimeout(_SECONDS_TO_CONNECT)
    with contextlib.suppress(OSError, struct.error):
      found, index = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
      if found == secret and 0 < index < self._count:
        self._listen_to(index, connection)
        return
    connection.close()

  def _listen_to(self, index: int, connection: socket.socket) -> None:
    """Starts a thread that reads the messages of process `index`."""
    connection.settimeout(None)
    with self._changed:
      self._connections[index] = connection
    _in_background(self._listen, index, connection)

  def _listen(self, index: int, connection: socket.socket) -> None:
    """Reads messages of process `index`. If its connection ends early, ends this process."""
    message = b"?"  # any but b"", which means that the connection has ended
    while message:
      try:
        message = connection.recv(1)
      except OSError:
        message = b""
      with self._changed:
        if message == _FAILED:
          self._failed.add(index)
          self._conclude()
        elif message == _ALL_FAILED:
          self._is_over = True
        elif message == _ALONE:
          self._failed.discard(index)
          with contextlib.suppress(OSError):
            connection.sendall(_HEARD)
        elif message == _HEARD or not message:
          self._heard.add(index)
        self._changed.notify_all()
    if not self._is_over:
      self._leave(
        f"process {index} of {self._count} (counted from 0) has ended: see what it says; then run"
        " the same command on all hosts to go on from the newest checkpoint"
      )

  def _conclude(self) -> None:
    """On the first process: once all processes have failed, tells all of them so."""
    if self._index == 0 and not self._is_over and len(self._failed) == self._count:
      self._is_over = True  # set first, because the other processes end when they are told
      self._tell(_ALL_FAILED)

  def _tell(self, message: bytes) -> None:
    for connection in self._connections.values():
      with contextlib.suppress(OSError):
        connection.sendall(message)


def leave(line: str) -> NoReturn:
  """Prints the line to stderr and ends the process at once, even if its threads are waiting."""
  with contextlib.suppress(OSError, ValueError):
    print(f"error: {line}", file=sys.stderr, flush=True)
  os._exit(1)


def _in_background(act: Callable[..., None], *arguments: object) -> None:
  threading.Thread(target=act, args=arguments, daemon=True).start()
