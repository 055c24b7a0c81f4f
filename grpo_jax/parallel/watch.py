"""Ends all processes of a run when one of them has ended.

A process that waits in a collective does not notice that another one is gone. JAX's heartbeats
notice it after most of a minute, and then abort the process. So each process also has a TCP
connection to the first one. The kernel closes it when a process ends, however it ends.
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
_FAILED, _ALL_FAILED = b"f", b"a"


class Watch:
  """A process's connections to the others. Threads wait for the end of each."""

  def __init__(self, index: int, count: int, leave: Callable[[str], NoReturn]):
    """Process `index` of `count`. `leave` ends this process with a line."""
    self._index, self._count, self._leave = index, count, leave
    self._connections: dict[int, socket.socket] = {}
    self._failed: set[int] = set()
    self._changed = threading.Condition()
    self._is_over = False

  def start(self, host: str, agree: Callable[[np.ndarray], np.ndarray]) -> None:
    """Connects the processes. One that cannot connect is not watched.

    Args:
      host: A name or address of the first process's machine.
      agree: Returns the first process's array on every process.
    """
    listener, offer = None, np.zeros(2, np.int32)
    if self._index == 0:
      with contextlib.suppress(OSError):
        dual = socket.has_dualstack_ipv6()
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
    """From here on, the other processes may end."""
    self._is_over = True

  def all_failed(self) -> bool:
    """Whether every process calls this within some seconds, because they fail together.

    Where another process is gone, and this one failed for that reason, it does not return.
    """
    with self._changed:
      self._failed.add(self._index)
      self._tell(_FAILED)
      self._conclude()
      return self._changed.wait_for(lambda: self._is_over, _SECONDS_TO_AGREE)

  def _accept(self, listener: socket.socket, secret: int) -> None:
    while True:
      connection, _ = listener.accept()
      _in_background(self._greet, connection, secret)

  def _greet(self, connection: socket.socket, secret: int) -> None:
    """Listens to a process of this run, and to nobody else."""
    connection.settimeout(_SECONDS_TO_CONNECT)
    with contextlib.suppress(OSError, struct.error):
      found, index = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
      if found == secret and 0 < index < self._count:
        self._listen_to(index, connection)
        return
    connection.close()

  def _listen_to(self, index: int, connection: socket.socket) -> None:
    connection.settimeout(None)
    with self._changed:
      self._connections[index] = connection
    _in_background(self._listen, index, connection)

  def _listen(self, index: int, connection: socket.socket) -> None:
    """Reads what process `index` says until its connection ends."""
    said = b"?"
    while said:
      try:
        said = connection.recv(1)
      except OSError:
        said = b""
      with self._changed:
        if said == _FAILED:
          self._failed.add(index)
          self._conclude()
        elif said == _ALL_FAILED:
          self._is_over = True
        self._changed.notify_all()
    if not self._is_over:
      self._leave(
        f"process {index} of {self._count} (counted from 0) has ended: see what it says; then run"
        " the same command on all hosts to go on from the newest checkpoint"
      )

  def _conclude(self) -> None:
    """On the first process: tells all that all have failed, once they have."""
    if self._index == 0 and len(self._failed) == self._count:
      self._is_over = True  # before the others are told, because then they end
      self._tell(_ALL_FAILED)

  def _tell(self, what: bytes) -> None:
    for connection in self._connections.values():
      with contextlib.suppress(OSError):
        connection.sendall(what)


def leave(line: str) -> NoReturn:
  """Prints the line to stderr and ends the process at once, whatever its threads wait for."""
  with contextlib.suppress(OSError, ValueError):
    print(f"error: {line}", file=sys.stderr, flush=True)
  os._exit(1)


def _in_background(act: Callable[..., None], *arguments: object) -> None:
  threading.Thread(target=act, args=arguments, daemon=True).start()
