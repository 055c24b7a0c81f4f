"""A run's folder in a bucket belongs to one run at a time.

A bucket has no locks. Instead, an object says who uses the folder, and its holder writes it again
every few seconds. Another run waits until the object changes, and is then refused, or until it has
not changed for so long that its holder must be dead. Clocks may differ by less than that.

Two runs that find a folder free at the same time both write the object. The later one wins, and the
other one notices when it reads the object again.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import json
from pathlib import Path
import threading
import time

from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.storage.bucket import reaching
from grpo_jax.storage.workdir import LOCK_FILE

_LOOKS_AT_A_DAMAGED_LOCK, _SECONDS_BETWEEN_LOOKS = 5, 0.1


@dataclasses.dataclass(frozen=True)
class Times:
  """How often the object is written and read, in seconds.

  Attributes:
    renewed: Between two writes by the holder.
    expires: After the last write, the holder counts as dead.
    settles: Between the first write and reading it again.
    looks: Between two looks of a run that waits.
  """

  renewed: float = 10
  expires: float = 120
  settles: float = 2
  looks: float = 2


@dataclasses.dataclass(frozen=True)
class _Held:
  holder: str
  renewed: float  # in seconds since 1970, by the clock of the holder


class BucketLock:
  """The lock that a run holds while it uses a folder in a bucket."""

  def __init__(self, workdir: Path, holder: str, times: Times) -> None:
    """`holder` says who holds it. No other run of any time may have the same words."""
    self._workdir = workdir
    self._path = workdir / LOCK_FILE
    self._holder = holder
    self._times = times

  def take(self, dead: str, warn: Callable[[str], None]) -> None:
    """Takes the folder if no living run has it.

    Args:
      dead: A holder that is known to be dead, or "".
      warn: Receives a line before this waits, and if another run has left the folder.

    Raises:
      ConfigError: Another run has the folder.
    """
    other = self._read()
    if other is not None and other.holder != dead:
      self._wait_for_its_end(other, warn)
    self._write()
    time.sleep(self._times.settles)
    self._refuse_if_other(self._read())

  def check(self) -> None:
    """Raises RunFailed if another run has taken the folder."""
    other = self._read()
    if other is not None and other.holder != self._holder:
      raise RunFailed(
        f"{self._workdir} was taken over by {other.holder}, because this run had not written its"
        f" run.lock for {self._times.expires:g} s: nothing more is saved here"
      )

  def keep(self, ended: threading.Event, on_lost: Callable[[str], None]) -> None:
    """Renews the lock until `ended` is set, or until another run has the folder."""
    while not ended.wait(self._times.renewed):
      try:
        self.check()
        self._write()
      except RunFailed as error:
        on_lost(str(error))
        return
      except Exception:  # the network is down. What is saved next says so, if it still is then
        continue

  def release(self) -> None:
    """Removes the object if it is this run's."""
    there = self._read()
    if there is not None and there.holder == self._holder:
      self._path.unlink()

  def _wait_for_its_end(self, other: _Held, warn: Callable[[str], None]) -> None:
    """Returns when the other run has ended or counts as dead. Raises ConfigError if it lives."""
    age = max(0.0, time.time() - other.renewed)
    left = self._times.expires - age
    if left > 0:
      warn(
        f"{self._workdir} is in use by {other.holder}, or was until {age:.0f} s ago: waiting up to"
        f" {left:.0f} s to see which. If that run has ended, you can remove {self._path}"
      )
    deadline = time.monotonic() + left
    while time.monotonic() < deadline:
      time.sleep(self._times.looks)
      there = self._read()
      if there is None:
        return
      if there != other:
        self._refuse_if_other(there)
    warn(f"{self._workdir} was left by {other.holder}, which counts as dead: going on")

  def _refuse_if_other(self, there: _Held | None) -> None:
    if there is not None and there.holder != self._holder:
      raise ConfigError(
        f"--workdir={self._workdir} is in use by {there.holder}: wait for its end, or name another"
        " folder"
      )

  def _read(self) -> _Held | None:
    for _ in range(_LOOKS_AT_A_DAMAGED_LOCK):  # it may be read while it is written
      try:
        return _Held(**json.loads(self._path.read_text()))
      except FileNotFoundError:
        return None
      except (ValueError, TypeError):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    raise ConfigError(f"{self._path} is not a run's lock: remove it if no run goes on")

  def _write(self) -> None:
    self._path.write_text(json.dumps(dataclasses.asdict(_Held(self._holder, time.time()))))


@contextlib.contextmanager
def held(
  lock: BucketLock, workdir: Path, dead: str, warn: Callable[[str], None], lost: Callable
) -> Iterator[None]:
  """Holds the lock.

  Args:
    lock: The lock of the folder `workdir`.
    workdir: The folder, for messages.
    dead: A holder that is known to be dead, or "".
    warn: Receives a line, as in `BucketLock.take`.
    lost: Receives a line, in another thread, when another run has taken the folder.

  Raises:
    ConfigError: Another run has the folder, or the bucket cannot be used.
  """
  with reaching(workdir, ConfigError):
    lock.take(dead, warn)
  ended = threading.Event()
  thread = threading.Thread(target=lock.keep, args=(ended, lost), daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()
    with contextlib.suppress(Exception):  # then it expires
      lock.release()
