"""The files of a run: on a disk, or in a bucket with a copy on this machine.

metrics.jsonl and the event files grow row by row, but objects in a bucket cannot be appended to. So
if the run's folder is in a bucket, the first process writes the files to a local folder, and
uploads each file that has changed: before each checkpoint, at the end, and after a step if the last
upload was UPLOAD_EVERY_S ago. A killed run that continues, here or on another machine, starts with
the files in the bucket, which have all rows up to the newest checkpoint.
"""

from collections.abc import Callable, Iterator
import contextlib
import hashlib
from pathlib import Path
import shutil
import time
from typing import Any

import platformdirs

from grpo_jax.settings import RunFailed
from grpo_jax.storage import bucket_lock, lock
from grpo_jax.storage.bucket import is_bucket, reaching
from grpo_jax.storage.workdir import LOCK_FILE

UPLOAD_EVERY_S = 60.0
_NOT_COPIED = {"checkpoints", "reference", LOCK_FILE}


def local_files(workdir: Path) -> Path:
  """The local folder to which the run in `workdir` writes: a cache folder, or `workdir` itself."""
  if not is_bucket(workdir):
    return workdir
  digest = hashlib.sha256(str(workdir).encode()).hexdigest()[:16]
  return platformdirs.user_cache_path("grpo_jax") / "runs" / f"{workdir.name[:100]}-{digest}"


def run_files(
  workdir: Path, warn: Callable[[str], None], stop: Callable[[str], None]
) -> "DiskFiles | BucketFiles":
  """Makes the object that manages a run's files. Only the first process may call its methods.

  Args:
    workdir: The run's folder.
    warn: warn(line) reports a problem that does not stop the run.
    stop: stop(reason) asks the run to stop, because another run has taken over its folder.
  """
  if is_bucket(workdir):
    return BucketFiles(workdir, local_files(workdir), warn, stop)
  return DiskFiles(workdir, warn)


class DiskFiles:
  """The files of a run on a disk. They need no copy."""

  def __init__(self, workdir: Path, warn: Callable[[str], None]) -> None:
    self._workdir, self._warn = workdir, warn

  def held(self) -> contextlib.AbstractContextManager[object]:
    """Keeps other runs out of the folder, as `lock.held` does."""
    return lock.held(self._workdir, self._warn)

  def download(self) -> None:
    """Does nothing."""

  def upload(self) -> None:
    """Does nothing."""

  def upload_if_due(self) -> None:
    """Does nothing."""


class BucketFiles:
  """The files of a run in a bucket, and their copy on this machine."""

  def __init__(
    self,
    workdir: Path,
    copy: Path,
    warn: Callable[[str], None],
    stop: Callable[[str], None],
    times: bucket_lock.Times = bucket_lock.Times(),  # noqa: B008, which is frozen
  ) -> None:
    """Touches neither folder. `copy` is the local folder. For the others, see `run_files`."""
    self._workdir, self._copy = workdir, copy
    self._warn, self._stop, self._times = warn, stop, times
    self._lock: bucket_lock.BucketLock | None = None
    # `_states` of the files in the bucket. None until `download` has made the copy.
    self._uploaded: dict[str, Any] | None = None
    self._last_upload = time.monotonic()

  @contextlib.contextmanager
  def held(self) -> Iterator[None]:
    """Keeps other runs out of the folder. When the block ends, uploads all changed files.

    Raises:
      ConfigError: Another run holds the folder, or the bucket cannot be used.
    """
    path = self._copy / LOCK_FILE
    # A restart on the same machine need not wait until the dead run's lock in the bucket expires.
    with lock.held(self._copy, self._warn, self._workdir) as dead:
      # The file on this machine has this run's name now.
      self._lock = bucket_lock.BucketLock(self._workdir, path.read_text(), self._times)
      with bucket_lock.held(self._lock, self._workdir, dead, self._warn, self._stop):
        try:
          yield
        except BaseException:
          with contextlib.suppress(Exception):  # the error that ends the run must be raised
            self.upload()
          raise
        self.upload()

  def download(self) -> None:
    """Replaces the local copy by the files in the bucket, without those that orbax writes there."""
    for entry in self._copy.iterdir():
      if entry.is_dir():
        shutil.rmtree(entry)
      elif entry.name != LOCK_FILE:
        entry.unlink()
    with reaching(self._workdir):
      files, root = self._bucket()
      tops = [entry.name for entry in self._workdir.iterdir() if entry.name not in _NOT_COPIED]
      found = [path for top in tops for path in files.find(f"{root}/{top}")]
      names = [path.removeprefix(f"{root}/") for path in found]
      if found:
        files.get(found, [str(self._copy / name) for name in names])
    self._uploaded = self._states()

  def upload(self) -> None:
    """Uploads files that have changed, and deletes from the bucket those that were deleted here.

    Raises:
      RunFailed: The bucket cannot be written, or another run has taken over the folder.
    """
    if self._uploaded is None:  # the copy may still hold files of an earlier run
      return
    with reaching(self._workdir):
      self._lock.check()  # the files of a run that has taken over must not be overwritten
      states = self._states()
      changed = [name for name, state in states.items() if self._uploaded.get(name) != state]
      removed = [name for name in self._uploaded if name not in states]
      files, root = self._bucket()
      if changed:
        files.put([str(self._copy / name) for name in changed], [f"{root}/{n}" for n in changed])
      if removed:
        files.rm([f"{root}/{name}" for name in removed])
    self._uploaded, self._last_upload = states, time.monotonic()

  def upload_if_due(self) -> None:
    """Calls `upload` if the last upload was UPLOAD_EVERY_S ago. A failure is only a warning."""
    if time.monotonic() - self._last_upload < UPLOAD_EVERY_S:
      return
    try:
      self.upload()
    except RunFailed as error:
      self._last_upload = time.monotonic()
      self._warn(f"not uploaded now, and tried again later: {error}")

  def _bucket(self) -> tuple[Any, str]:
    """The bucket's fsspec file system, which can copy many files at once, and the run's folder."""
    import fsspec  # here, because runs on disks do not need it

    return fsspec.core.url_to_fs(str(self._workdir))

  def _states(self) -> dict[str, Any]:
    """The size and modification time of each regular file of the copy, by its relative path."""
    states = {}
    for path in self._copy.rglob("*"):
      if path.is_file() and not path.is_symlink() and path.name != LOCK_FILE:
        stat = path.stat()
        states[path.relative_to(self._copy).as_posix()] = (stat.st_size, stat.st_mtime_ns)
    return states
