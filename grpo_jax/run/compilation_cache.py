"""A folder that keeps compiled programs, so that the next start of a run need not compile them.

JAX reads and writes the folder. The name of an entry is a hash of the program, of the versions and
flags of the compiler and of the kind of device, features of a CPU included. So a program for
another kind of machine has another name.
"""

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


def _automatic() -> Path:
  """The user's cache folder. Each version of JAX has its own, so that old ones can be deleted."""
  return platformdirs.user_cache_path("grpo_jax") / f"jax-{jax.__version__}"


def _report_failures_once(folder: Path) -> None:
  """Prints the first failed read or write of an entry as one line, and the others not at all.

  JAX warns of each and compiles the program. It never replaces an entry, so a damaged one, such as
  one that was half written when the disk was full, is deleted here.
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
    if doing == "reading":
      _delete(folder, program)
    if not is_reported:
      _warn(f"compiled programs in {folder}: {' '.join(str(message).split())}")
    is_reported = True

  warnings.showwarning = show_first


def _delete(folder: Path, program: str) -> None:
  """Deletes the entries of a program of this name. JAX does not say which of them is damaged."""
  for entry in folder.glob("*-cache"):
    if entry.name.rpartition("-")[0].rpartition("-")[0] == program:
      try:
        entry.unlink()
      except OSError:
        return


def _warn(text: str) -> None:
  print(f"warning: {text}", file=sys.stderr, flush=True)
