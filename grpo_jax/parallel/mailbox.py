"""Exchanges bytes between the processes of a run through JAX's coordinator, without devices.

Collectives on devices must run in the same order in all processes, which two threads cannot ensure.
"""

import itertools
import struct
import threading

import jax
from jax._src import distributed  # nothing public has the coordinator's client

from grpo_jax.settings import RunFailed

_PIECE = 2**20  # bytes in a message
_LOOK_MS = 1000  # how often a waiting process checks whether the mailbox was closed
_numbers = itertools.count()  # numbers of mailboxes, which all processes create in the same order


class Mailbox:
  """Exchanges bytes between all processes, one round after another."""

  def __init__(self) -> None:
    self._number, self._round = next(_numbers), 0
    self._is_closed = threading.Event()

  def gather(self, mine: bytes) -> list[bytes]:
    """Sends `mine` to all processes. Returns the bytes of each process, in the processes' order.

    Raises:
      RunFailed: `close` was called while this waited.
    """
    client, here = distributed.global_state.client, jax.process_index()
    # Even if `mine` is empty, one piece is sent, because it says how many there are.
    pieces = [mine[i : i + _PIECE] for i in range(0, len(mine), _PIECE)] or [b""]
    for number, piece in enumerate(pieces):
      key = self._key(self._round, here, number)
      client.key_value_set_bytes(key, struct.pack("<I", len(pieces)) + piece)
    found = [
      mine if process == here else self._of(process) for process in range(jax.process_count())
    ]
    # Now all processes have begun this round, so they have read the pieces of the round before.
    # Deleting this key also deletes these pieces, which are below it as files are in a folder.
    if self._round:
      client.key_value_delete(self._key(self._round - 1, here))
    self._round += 1
    return found

  def close(self) -> None:
    """Makes calls that wait for other processes raise RunFailed."""
    self._is_closed.set()

  def _of(self, process: int) -> bytes:
    """Waits for the bytes of another process in this round."""
    first = self._get(self._key(self._round, process, 0))
    (count,) = struct.unpack("<I", first[:4])
    others = [self._get(self._key(self._round, process, number)) for number in range(1, count)]
    return b"".join(piece[4:] for piece in (first, *others))

  def _get(self, key: str) -> bytes:
    """Waits for the value of a key. Raises RunFailed after `close`."""
    while not self._is_closed.is_set():
      try:
        return distributed.global_state.client.blocking_key_value_get_bytes(key, _LOOK_MS)
      except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
          raise
    raise RunFailed("the run ends while its processes exchange what they have sampled")

  def _key(self, *parts: int) -> str:
    return "/".join(["grpo_jax", "mailbox", *map(str, (self._number, *parts))])
