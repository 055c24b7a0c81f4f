"""Exchanges bytes between the processes of a run through their coordinator, without devices.

Collectives on devices need one order in all processes. Two threads have none.
"""

import itertools
import struct
import threading

import jax
from jax._src import distributed  # nothing public has the coordinator's client

from grpo_jax.settings import RunFailed

_PIECE = 2**20  # bytes in a message
_LOOK_MS = 1000  # between two looks at whether the mailbox is closed
_numbers = itertools.count()  # of the mailboxes, which processes make in the same order


class Mailbox:
  """One exchange after another, in which all processes take part."""

  def __init__(self) -> None:
    self._number, self._round = next(_numbers), 0
    self._is_closed = threading.Event()

  def gather(self, mine: bytes) -> list[bytes]:
    """Returns the bytes that each process gives, in the order of the processes.

    Raises:
      RunFailed: `close` was called.
    """
    client, here = distributed.global_state.client, jax.process_index()
    pieces = [mine[i : i + _PIECE] for i in range(0, len(mine), _PIECE)] or [b""]
    for number, piece in enumerate(pieces):
      key = self._key(self._round, here, number)
      client.key_value_set_bytes(key, struct.pack("<I", len(pieces)) + piece)
    found = [
      mine if process == here else self._of(process) for process in range(jax.process_count())
    ]
    # Who has begun this round has read the one before.
    if self._round:
      client.key_value_delete(self._key(self._round - 1, here))
    self._round += 1
    return found

  def close(self) -> None:
    """Ends what waits for others."""
    self._is_closed.set()

  def _of(self, process: int) -> bytes:
    """The bytes that another process gives."""
    first = self._get(self._key(self._round, process, 0))
    (count,) = struct.unpack("<I", first[:4])
    others = [self._get(self._key(self._round, process, number)) for number in range(1, count)]
    return b"".join(piece[4:] for piece in (first, *others))

  def _get(self, key: str) -> bytes:
    while not self._is_closed.is_set():
      try:
        return distributed.global_state.client.blocking_key_value_get_bytes(key, _LOOK_MS)
      except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
          raise
    raise RunFailed("the run ends while its processes exchange what they have sampled")

  def _key(self, *parts: int) -> str:
    return "/".join(["grpo_jax", "mailbox", *map(str, (self._number, *parts))])
