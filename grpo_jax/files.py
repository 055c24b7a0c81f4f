"""Reads files that a user names, if they are regular files.

Reading a pipe or a device could block the program for ever, or fill the memory.
"""

import errno
import json
from pathlib import Path
import stat
from typing import Any

# The errors of creating a folder whose cause is the path, and not the disk.
NO_FOLDER = {
  errno.EEXIST,
  errno.ENOTDIR,
  errno.ENOENT,  # below /proc
  errno.ENAMETOOLONG,
  errno.ELOOP,
  errno.EINVAL,
}


def read_bytes(path: Path) -> bytes:
  """Reads a regular file, also through a link, or an object in a bucket.

  Raises:
    OSError: The file does not exist, is not regular, or cannot be read.
  """
  if isinstance(path, Path):  # an object in a bucket is always regular
    check_regular(path)
  return path.read_bytes()


def json_object(data: bytes) -> dict[str, Any]:
  """Parses a JSON text whose value must be an object. Raises ValueError for anything else."""
  try:
    value = json.loads(data)
  except RecursionError as error:
    raise ValueError(str(error)) from None
  if not isinstance(value, dict):
    raise ValueError(f"it holds a {type(value).__name__}, not an object")
  return value


def check_regular(path: Path) -> None:
  """Raises OSError unless `path` is a regular file, or a link to one."""
  mode = path.stat().st_mode
  if stat.S_ISDIR(mode):
    raise IsADirectoryError(f"{path} is a folder")
  if not stat.S_ISREG(mode):
    raise OSError(f"{path} is a pipe or a device, not a regular file")
