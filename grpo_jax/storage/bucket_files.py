"""The files of a run: on its disk, or on this machine and in a bucket.

metrics.jsonl and the event files grow by a row at a time, which objects of a bucket cannot. So the
first process writes the files of a run in a bucket to a folder of this machine, and uploads whole
ones that have changed: before each checkpoint, at the end, and now and then in between. A run that
is killed and goes on, here or on another machine, starts with the files of the bucket. They have
all rows up to each of its checkpoints.
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
  """The folder of this machine where the run in `workdir` writes its files."""
  if not is_bucket(workdir):
    return workdir
  digest = hashlib.sha256(str(workdir).encode()).hexdigest()[:16]
  return platformdirs.user_cache_path("grpo_jax") / "runs" / f"{workdir.name[:100]}-{digest}"


def run_files(
  workdir: Path, warn: Callable[[str], None], stop: Callable[[str], None]
) -> "DiskFiles | BucketFiles":
  """The files of a run. Only its first process may call their methods.

  Args:
    workdir: The run's folder.
    warn: Receives a line about what does not stop the run.
    stop: Asks the run to stop, with the reason, when another run has taken its folder.
  """
  if is_bucket(workdir):
    return BucketFiles(workdir, local_files(workdir), warn, stop)
  return DiskFiles(workdir, warn)


class DiskFiles:
  """The files of a run on a disk, where they stay."""

  def __init__(self, workdir: Path, warn: Callable[[str], None]) -> None:
    self._workdir, self._warn = workdir, warn

  def held(self) -> contextlib.AbstractContextManager[None]:
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
    """Touches neither folder. The arguments are those of `run_files`, and the copy's folder."""
    self._workdir, self._copy = workdir, copy
    self._warn, self._stop, self._times = warn, stop, times
    self._lock: bucket_lock.BucketLock | None = None
    self._uploaded: dict[str, Any] | None = None  # None until the copy is made
    self._last_upload = time.monotonic()

  @contextlib.contextmanager
  def held(self) -> Iterator[None]:
    """Keeps other runs out of the folder. At its end, uploads what is not uploaded yet.

    Raises:
      ConfigError: Another run holds the folder, or the bucket cannot be used.
    """
    path = self._copy / LOCK_FILE
    # The kernel's lock on the copy proves that the run which left this file is dead, so that the
    # same command, on the same machine, need not wait until its lock in the bucket expires.
    dead = path.read_text() if path.exists() else ""
    with lock.held(self._copy, self._warn, self._workdir):
      self._lock = bucket_lock.BucketLock(self._workdir, path.read_text(), self._times)
      with bucket_lock.held(self._lock, self._workdir, dead, self._warn, self._stop):
        try:
          yield
        except BaseException:
          with contextlib.suppress(Exception):  # the first error says why the run ends
            self.upload()
          raise
        self.upload()

  def download(self) -> None:
    """Makes the copy anew from the bucket."""
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
    """Uploads the files that have changed and removes from the bucket those that were removed.

    Raises:
      RunFailed: The bucket cannot be written, or another run has taken the folder.
    """
    if self._uploaded is None:
      return
    with reaching(self._workdir):
      self._lock.check()
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
    """Uploads as `upload` does if the last time is long ago. A failure is only a warning."""
    if time.monotonic() - self._last_upload < UPLOAD_EVERY_S:
      return
    try:
      self.upload()
    except RunFailed as error:
      self._last_upload = time.monotonic()
      self._warn(f"not uploaded now, and tried again later: {error}")

  def _bucket(self) -> tuple[Any, str]:
    """The file system that epath itself uses, as it copies many files at a time, and the folder."""
    import fsspec  # here, because runs on disks do not need it

    return fsspec.core.url_to_fs(str(self._workdir))

  def _states(self) -> dict[str, Any]:
    """The regular files of the copy by name, each with what changes when the file does."""
    states = {}
    for path in self._copy.rglob("*"):
      if path.is_file() and not path.is_symlink() and path.name != LOCK_FILE:
        stat = path.stat()
        states[path.relative_to(self._copy).as_posix()] = (stat.st_size, stat.st_mtime_ns)
    return states
