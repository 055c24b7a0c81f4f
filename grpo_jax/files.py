"""Files and folders that a user names. Only regular files are read.

A pipe or a device that lies where a file should be would block a program for ever, or fill memory.
"""

import errno
import json
from pathlib import Path
import stat
from typing import Any

# The errors that blame the path of a new folder, and not its disk.
NO_FOLDER = {
  errno.EEXIST,
  errno.ENOTDIR,
  errno.ENOENT,  # below /proc
  errno.ENAMETOOLONG,
  errno.ELOOP,
  errno.EINVAL,
}


def read_bytes(path: Path) -> bytes:
  """The content of a regular file, or of one that a link leads to.

  Raises:
    OSError: There is none, or it cannot be read.
  """
  if isinstance(path, Path):  # an object in a bucket is always regular
    check_regular(path)
  return path.read_bytes()


def json_object(data: bytes) -> dict[str, Any]:
  """The object that a text of JSON holds. Raises ValueError if it holds anything else."""
  try:
    value = json.loads(data)
  except RecursionError as error:
    raise ValueError(str(error)) from None
  if not isinstance(value, dict):
    raise ValueError(f"it holds a {type(value).__name__}, not an object")
  return value


def check_regular(path: Path) -> None:
  """Raises OSError unless `path` is a regular file, or a link that leads to one."""
  mode = path.stat().st_mode
  if stat.S_ISDIR(mode):
    raise IsADirectoryError(f"{path} is a folder")
  if not stat.S_ISREG(mode):
    raise OSError(f"{path} is a pipe or a device, not a regular file")
