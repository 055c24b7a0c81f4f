"""Locks a run's folder in a bucket, so that only one run uses it at a time.

A bucket has no locks. Instead, an object names the run that holds the folder, and this run rewrites
the object every few seconds. Another run waits until the object changes, and is then refused, or
until the object has not changed for `Times.expires` seconds, so that its holder counts as dead.
Clocks of machines may differ by less than that.

If two runs find a folder free at the same time, both write the object. The later write wins, and
the other run notices when it reads the object again.
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
    renewed: The time between two writes by the holder.
    expires: The time after the last write when the holder counts as dead.
    settles: The time between the first write and the check that no other run wrote later.
    looks: The time between two reads by a run that waits.
  """

  renewed: float = 10
  expires: float = 120
  settles: float = 2
  looks: float = 2


@dataclasses.dataclass(frozen=True)
class _Held:
  """The content of the lock object."""

  holder: str
  renewed: float  # the time of the last write in seconds since 1970, by the holder's clock


class BucketLock:
  """The lock that a run holds while it uses a folder in a bucket."""

  def __init__(self, workdir: Path, holder: str, times: Times) -> None:
    """`holder` is the name of this run. It must be unique among all runs, also earlier ones."""
    self._workdir = workdir
    self._path = workdir / LOCK_FILE
    self._holder = holder
    self._times = times

  def take(self, dead: str, warn: Callable[[str], None]) -> None:
    """Takes the lock, unless a living run holds it.

    Args:
      dead: A holder that is known to be dead, or "".
      warn: warn(line) is called before this waits, and if a dead run left the lock behind.

    Raises:
      ConfigError: Another run holds the lock.
    """
    other = self._read()
    if other is not None and other.holder != dead:
      self._wait_for_its_end(other, warn)
    self._write()
    # Another run may have found the folder free at the same time. The later write wins.
    time.sleep(self._times.settles)
    self._refuse_if_other(self._read())

  def check(self) -> None:
    """Raises RunFailed if another run has taken over the folder."""
    other = self._read()
    if other is not None and other.holder != self._holder:
      raise RunFailed(
        f"{self._workdir} was taken over by {other.holder}, because this run had not written its"
        f" run.lock for {self._times.expires:g} s: nothing more is saved here"
      )

  def keep(self, ended: threading.Event, on_lost: Callable[[str], None]) -> None:
    """Renews the lock until `ended` is set. Calls `on_lost(reason)` if another run has it."""
    while not ended.wait(self._times.renewed):
      try:
        self.check()
        self._write()
      except RunFailed as error:
        on_lost(str(error))
        return
      except Exception:  # the network is down. If it stays down, the next save reports it.
        continue

  def release(self) -> None:
    """Removes the object if this run holds the lock."""
    found = self._read()
    if found is not None and found.holder == self._holder:
      self._path.unlink()

  def _wait_for_its_end(self, other: _Held, warn: Callable[[str], None]) -> None:
    """Returns when the other run has ended or counts as dead. Raises ConfigError if it is alive."""
    age = max(0.0, time.time() - other.renewed)  # the other machine's clock may be ahead
    left = self._times.expires - age
    if left > 0:
      warn(
        f"{self._workdir} is in use by {other.holder}, or was until {age:.0f} s ago: waiting up to"
        f" {left:.0f} s to see which. If that run has ended, you can remove {self._path}"
      )
    deadline = time.monotonic() + left
    while time.monotonic() < deadline:
      time.sleep(self._times.looks)
      found = self._read()
      if found is None:  # the other run has ended and released the lock
        return
      if found != other:  # its holder renewed the lock, or another run took it
        self._refuse_if_other(found)
    warn(f"{self._workdir} was left by {other.holder}, which counts as dead: going on")

  def _refuse_if_other(self, found: _Held | None) -> None:
    """Raises ConfigError if the lock object names another run."""
    if found is not None and found.holder != self._holder:
      raise ConfigError(
        f"--workdir={self._workdir} is in use by {found.holder}: wait for its end, or name another"
        " folder"
      )

  def _read(self) -> _Held | None:
    """Reads the lock object, or returns None if there is none. ConfigError for other content."""
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
  """Takes the lock, renews it in a thread within the block, and releases it.

  Args:
    lock: The lock of the folder `workdir`.
    workdir: The folder, for messages.
    dead: A holder that is known to be dead, or "".
    warn: warn(line), as in `BucketLock.take`.
    lost: lost(reason) is called in the thread if another run has taken over the folder.

  Raises:
    ConfigError: Another run holds the lock, or the bucket cannot be used.
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
    with contextlib.suppress(Exception):  # the lock then expires
      lock.release()
