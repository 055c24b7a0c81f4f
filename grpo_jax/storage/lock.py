"""Locks a run's folder, so that only one run uses it at a time.

The run holds a kernel lock (flock) on a file in the folder. The kernel releases the lock when the
process ends in any way, so a file that a killed run leaves behind blocks nobody. The file names the
holder for the error message of other runs. Programs that only read the folder do not lock it.
"""

from collections.abc import Callable, Iterator
import contextlib
import datetime
import errno
import fcntl
import os
from pathlib import Path
import socket

from grpo_jax.settings import ConfigError
from grpo_jax.storage.json_files import naming
from grpo_jax.storage.workdir import LOCK_FILE, make_folder

# The errors by which file systems report that they have no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF}
_locked: set[int] = set()  # the descriptors of the lock files that this process holds


@contextlib.contextmanager
def held(workdir: Path, warn: Callable[[str], None], name: Path | None = None) -> Iterator[str]:
  """Creates the folder and keeps other runs out of it. Only a run's first process may call it.

  Args:
    workdir: The run's folder.
    warn: warn(line) is called if the lock may fail to keep out runs on other machines.
    name: The folder's name for error messages. None means `workdir`.

  Yields:
    The name of a run that left its lock file and is dead for certain. Otherwise "".

  Raises:
    ConfigError: Another run holds the folder, or the folder cannot be created.
    OSError: The folder cannot be written.
  """
  make_folder(workdir)
  path = workdir / LOCK_FILE
  descriptor, has_locks = _open_locked(path, name or workdir)
  _locked.add(descriptor)
  try:
    left = os.pread(descriptor, 1000, 0).decode(errors="replace")
    is_proof = has_locks and _on_this_host() + " " in left  # other hosts' locks may not be seen
    if not is_proof:
      _warn_of_others(workdir, left, has_locks, warn)
    with naming(path):
      os.ftruncate(descriptor, 0)
      os.pwrite(descriptor, f"process {os.getpid()}{_on_this_host()} since {_now()}".encode(), 0)
    yield left if is_proof else ""
  finally:
    if descriptor in _locked:  # false in a forked child, which has released it
      _locked.remove(descriptor)
      with contextlib.suppress(OSError):  # such as a disk that became read-only
        path.unlink()
      os.close(descriptor)


def holder(workdir: Path) -> str:
  """Who holds the folder, such as "process 7 on HOST since ...", or "" if nobody does."""
  try:
    descriptor = os.open(workdir / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
  except OSError:  # usually there is no file, because a run removes it when it ends
    return ""
  try:
    # This lock fails if a run holds the file. Otherwise closing the file releases it.
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except BlockingIOError:
    return _written(descriptor)
  except OSError:  # the file system has no locks, so nobody can tell
    return ""
  finally:
    os.close(descriptor)
  return ""


def _open_locked(path: Path, name: Path) -> tuple[int, bool]:
  """Opens and locks the file. Returns its descriptor, and whether the file system has locks.

  Raises ConfigError, which names the folder `name`, if another process holds the lock.
  """
  while True:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      if _is_at(path, descriptor):
        return descriptor, True
      # The holder removed the file between our `open` and `flock`. Another run may lock a new file.
    except BlockingIOError:
      holds = _written(descriptor)
      os.close(descriptor)
      raise ConfigError(
        f"--workdir={name} is in use by {holds}: wait for its end, or name another folder"
      ) from None
    except OSError as error:
      if error.errno in _NO_LOCKS:
        return descriptor, False
      os.close(descriptor)
      raise
    os.close(descriptor)


def _written(descriptor: int) -> str:
  """The holder's name in a lock file that is locked."""
  return os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"


def _is_at(path: Path, descriptor: int) -> bool:
  """Whether the open file is still the one at `path`."""
  try:
    return os.path.samestat(os.stat(path), os.fstat(descriptor))
  except FileNotFoundError:
    return False


def _warn_of_others(workdir: Path, left: str, has_locks: bool, warn: Callable[[str], None]) -> None:
  """Warns that the lock does not prove that no other run writes to the folder.

  Args:
    workdir: The run's folder.
    left: The former content of the lock file: a holder that did not remove it, or "".
    has_locks: Whether the file system has locks. Some locks do not work across machines.
    warn: warn(line) shows the warning.
  """
  if not has_locks:
    holder = f" ({left} did)" if left else ""
    warn(f"{workdir} has no file locks: make sure that no other run uses it{holder}")
  elif left:
    warn(f"{workdir} was left by {left}: if that run still goes on, stop one of the two")


def _on_this_host() -> str:
  return f" on {socket.gethostname()}"


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _release_in_child() -> None:
  """Closes the lock files in a forked child, which may outlive this process."""
  for descriptor in _locked:
    os.close(descriptor)
  _locked.clear()


os.register_at_fork(after_in_child=_release_in_child)
