"""A folder that keeps compiled programs, so that the next start of a run need not compile them.

JAX reads and writes the folder. The name of an entry is a hash of the program, of the versions and
flags of the compiler and of the kind of device, features of a CPU included. So a program for
another kind of machine has another name.
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
import platformdirs

AUTO = "auto"
_MOST_BYTES = 8 * 2**30  # of the user's cache folder when a run starts
_FAILURE = re.compile(r"Error (reading|writing) persistent compilation cache entry for '([^']*)'")


def use(folder: str) -> None:
  """Makes JAX keep compiled programs in a folder. It changes nothing if JAX has a folder already.

  A folder that cannot be used is a warning on stderr, because a run needs none.

  Args:
    folder: A path, "auto" for the user's cache folder, or "" for none.
  """
  if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
    # By default, JAX leaves out what compiles within a second. A run has dozens of such programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  if not folder or jax.config.jax_compilation_cache_dir is not None:
    return
  try:
    path = _automatic() if folder == AUTO else Path(folder).expanduser().absolute()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path) as file:
      file.write(b"it can be written")
  except (OSError, RuntimeError) as error:  # RuntimeError: nobody's home folder is known
    reason = getattr(error, "strerror", None) or error
    _warn(f"compiled programs are not kept: compilation_cache={folder}: {reason}")
    return
  jax.config.update("jax_compilation_cache_dir", str(path))
  _report_failures_once(path)
  if folder == AUTO:
    bound(path.parent, _MOST_BYTES)


def _automatic() -> Path:
  """The user's cache folder. Each version of JAX has its own, so that old ones can be deleted."""
  return platformdirs.user_cache_path("grpo_jax") / f"jax-{jax.__version__}"


def bound(folder: Path, most_bytes: int) -> None:
  """Deletes the programs of a folder that were not used for longest, until the others are few.

  JAX can bound its folder itself (`jax_compilation_cache_max_size`). But then it reads the dates of
  all entries at each write, and writes nothing more once one is missing because a process was
  killed.

  Args:
    folder: Entries in its folders count, too: each version of JAX has one.
    most_bytes: How large they may be together.
  """
  found = list[tuple[float, int, Path]]()
  for entry in folder.rglob("*-cache"):
    with contextlib.suppress(OSError):  # another process deletes it
      stat = entry.stat()
      found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, entry))
  excess = sum(size for _, size, _ in found) - most_bytes
  for _, size, entry in sorted(found):
    if excess <= 0:
      break
    with contextlib.suppress(OSError):
      entry.unlink()
    excess -= size


def _report_failures_once(folder: Path) -> None:
  """Prints the first failed read or write of an entry as one line, and the others not at all.

  JAX warns of each and compiles the program. It never replaces an entry, so a damaged one, such as
  one that was half written when the disk was full, is deleted here. That is no failure: nothing is
  printed.
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
  """Deletes the entries of a program of this name. JAX does not say which of them is damaged.

  Returns:
    Whether they are gone.
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
