"""Explains failures to write, such as a full disk or a read-only folder.

They are neither bad input nor bugs: the same command can continue once the disk is writable again.
"""

from collections.abc import Iterator
import errno
import os
from pathlib import Path
import re

from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.storage.bucket import folder
from grpo_jax.storage.workdir import saved_steps

# Error numbers -> the condition under which the same command can continue.
_REMEDIES = {
  errno.ENOSPC: "there is room",
  errno.EDQUOT: "the quota has room",
  errno.EROFS: "it can be written",
  errno.EACCES: "it can be written",
  errno.EPERM: "it can be written",
  errno.EIO: "the disk works",
  errno.EISDIR: "no folder is in its place",
  errno.EFBIG: "files may be larger (ulimit -f)",
  errno.EMFILE: "more files may be open (ulimit -n)",
}


def explain(error: BaseException, workdir: str | Path | None = None) -> str | None:
  """Explains a failure to write in one line. Returns None for any other error.

  Args:
    error: An exception. The exceptions that caused it are checked, too.
    workdir: The folder of the run, to name the newest checkpoint. None names none.
  """
  for cause in _chain(error):
    number, path = _number_and_path(cause)
    if number in _REMEDIES:
      where = f"{path}: " if path else ""
      saved = f"{_saved(workdir)}; " if workdir else ""
      return (
        f"{where}{os.strerror(number)}; {saved}run the same command again when {_REMEDIES[number]}"
      )
  return None


def _saved(workdir: str | Path) -> str:
  """Describes the newest checkpoint in a run's folder."""
  try:
    steps = saved_steps(folder(workdir) / "checkpoints")
  except (OSError, ConfigError, RunFailed):
    return "its checkpoints cannot be listed"
  return f"the newest checkpoint is of step {steps[-1]}" if steps else "no checkpoint is saved yet"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
  """Yields the error and the exceptions that caused it, as a traceback shows them."""
  seen: set[int] = set()
  while error is not None and id(error) not in seen:
    seen.add(id(error))
    yield error
    context = None if error.__suppress_context__ else error.__context__
    error = error.__cause__ or context


def _number_and_path(error: BaseException) -> tuple[int | None, str]:
  """Returns the errno of an error, or None, and the path of the file, or "".

  Errors of tensorstore and safetensors contain the errno in their message.
  """
  if isinstance(error, OSError):
    return error.errno, _shown(error.filename)
  message = str(error)
  number = re.search(r"os_error_code='(\d+)'|\(os error (\d+)\)", message)
  if number is None:
    return None, ""
  path = re.search(r'"(/[^"]+)"', message)
  return int(number[1] or number[2]), _shown(path[1] if path else None)


def _shown(path: str | bytes | int | None) -> str:
  """The path without the suffix of orbax's temporary folders. "" if there is no path."""
  if path is None or isinstance(path, int):
    return ""
  return re.sub(r"\.orbax-checkpoint-tmp.*", "", os.fsdecode(path))
