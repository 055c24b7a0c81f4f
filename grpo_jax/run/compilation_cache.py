"""A folder of compiled programs, so that the next run does not compile them again.

JAX reads and writes the folder. The name of an entry contains a hash of the program, the compiler's
versions and flags, and the type of device with the features of a CPU. So programs for different
types of machine do not collide.
"""

import contextlib
import os
from pathlib import Path
import re
import sys
import tempfile
from typing import Any
import warnings

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache
import platformdirs

AUTO = "auto"
_MOST_BYTES = 8 * 2**30  # the limit of the user's cache folder when a run starts
_FAILURE = re.compile(r"Error (reading|writing) persistent compilation cache entry for '([^']*)'")


def use(folder: str) -> None:
  """Makes JAX store compiled programs in a folder, unless JAX already has a folder.

  If the folder cannot be used, a warning is printed to stderr, and the run continues without it.

  Args:
    folder: A path, "auto" for the user's cache folder, or "" for none.
  """
  if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
    # By default, JAX stores no program that compiles within a second. A run has dozens of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  if not folder or jax.config.jax_compilation_cache_dir is not None:
    return
  try:
    path = _automatic() if folder == AUTO else Path(folder).expanduser().absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path) as file:
      file.write(b"it can be written")
  except (OSError, RuntimeError) as error:  # RuntimeError: the home folder is unknown
    reason = getattr(error, "strerror", None) or error
    _warn(f"compiled programs are not kept: compilation_cache={folder}: {reason}")
    return
  jax.config.update("jax_compilation_cache_dir", str(path))
  forget_folder()
  _report_failures_once(path)
  if folder == AUTO:  # nothing is deleted from a folder that the user names
    bound(path.parent, _MOST_BYTES)


def forget_folder() -> None:
  """Lets JAX open the folder of its current settings. It would keep the first one otherwise."""
  jax_cache.reset_cache()


def _automatic() -> Path:
  """The user's cache folder for this version of JAX. Folders of old versions can be deleted."""
  return platformdirs.user_cache_path("grpo_jax") / f"jax-{jax.__version__}"


def bound(folder: Path, most_bytes: int) -> None:
  """Deletes the least recently used programs of a folder, until the others fit in `most_bytes`.

  JAX can limit the folder itself (`jax_compilation_cache_max_size`). But then it reads the dates of
  all entries at each write, and stops writing if one is missing because a process was killed.

  Args:
    folder: The folder, with a folder for each version of JAX in it.
    most_bytes: The maximum total size of the entries.
  """
  entries = list[tuple[float, int, Path]]()
  for entry in folder.rglob("*-cache"):
    with contextlib.suppress(OSError):  # another process has deleted it
      stat = entry.stat()
      # A file system may not record reads: then st_atime is older than st_mtime.
      entries.append((max(stat.st_atime, stat.st_mtime), stat.st_size, entry))
  excess = sum(size for _, size, _ in entries) - most_bytes
  for _, size, entry in sorted(entries):
    if excess <= 0:
      break
    with contextlib.suppress(OSError):  # as above, and then its bytes are free, too
      entry.unlink()
    excess -= size


def _report_failures_once(folder: Path) -> None:
  """Prints one line for the first failed read or write of an entry, and nothing for the others.

  JAX warns of each failure and compiles the program, but never replaces a damaged entry, such as
  one that was half written when the disk was full. So entries that cannot be read are deleted here.
  If that succeeds, nothing is printed.
  """
  show = warnings.showwarning
  is_reported = False

  def show_first(message: Any, *where: Any, **more: Any) -> None:
    nonlocal is_reported
    failure = _FAILURE.match(str(message))
    if not failure:
      show(message, *where, **more)
      return
    doing, program = failure.groups()
    if doing == "reading" and _delete(folder, program):
      return
    if not is_reported:
      _warn(f"compiled programs in {folder}: {' '.join(str(message).split())}")
    is_reported = True

  warnings.showwarning = show_first


def _delete(folder: Path, program: str) -> bool:
  """Deletes all entries with this program's name, because JAX does not say which one is damaged.

  Returns False if an entry cannot be deleted.
  """
  for entry in folder.glob("*-cache"):
    if entry.name.rpartition("-")[0].rpartition("-")[0] == program:
      try:
        entry.unlink(missing_ok=True)
      except OSError:
        return False
  return True


def _warn(text: str) -> None:
  print(f"warning: {text}", file=sys.stderr, flush=True)
