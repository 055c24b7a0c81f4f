"""JSON in a run's folder: files that are replaced atomically, and files with one row per line."""

from collections.abc import Iterator, Mapping
import contextlib
import json
import math
import os
from pathlib import Path
from typing import Any

from grpo_jax import files
from grpo_jax.settings import ConfigError
from grpo_jax.storage.bucket import is_bucket, reaching


def replace_file(path: Path, content: str | bytes) -> None:
  """Writes the file atomically: at any time, it has the old content or the new content.

  Raises:
    OSError: The file cannot be written. It keeps the old content.
  """
  content = content.encode() if isinstance(content, str) else content
  if is_bucket(path):  # a bucket replaces an object in one step
    with reaching(path):
      path.write_bytes(content)
    return
  new = path.with_name(path.name + ".new")
  try:
    with naming(path), open(new, "wb") as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
  except OSError:
    new.unlink(missing_ok=True)  # frees space on a full disk
    raise
  os.replace(new, path)


class AppendedFile:
  """A file to which records are appended as a whole or not at all."""

  def __init__(self, path: Path) -> None:
    self._path = path
    self._file = open(path, "ab", buffering=0)

  def append(self, content: bytes) -> None:
    """Appends all of `content`. Once it has returned, a kill of this process loses nothing.

    Raises:
      OSError: The content cannot be written. The file is unchanged.
    """
    size = os.fstat(self._file.fileno()).st_size
    try:
      with naming(self._path):
        rest = memoryview(content)
        while rest:  # a disk that becomes full may accept only a part
          rest = rest[self._file.write(rest) :]
    except BaseException:
      with contextlib.suppress(OSError):  # if this fails, the next start removes the part
        self._file.truncate(size)
      raise

  def close(self) -> None:
    self._file.close()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
  """Adds the name of the file to an OSError without one, such as that of a failed write."""
  try:
    yield
  except OSError as error:
    if error.errno is not None and error.filename is None:
      error.filename = str(path)
    raise


def json_line(row: Mapping[str, Any]) -> bytes:
  """Encodes a row as a line of JSON.

  Array scalars become numbers. NaN and the infinities, which JSON lacks, become null. Lone
  surrogates, which sampled text may contain, are escaped.
  """
  text = json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n"
  return text.encode("utf-8", "backslashreplace")


def plain(value: Any) -> Any:
  """A value as plain Python objects for JSON, with None in place of numbers that are not finite."""
  if isinstance(value, Mapping):
    return {key: plain(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(item) for item in value]
  if hasattr(value, "item"):
    value = value.item()
  return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_rows(path: Path) -> list[tuple[dict[str, Any], bytes]]:
  """Reads the rows of a metrics.jsonl, each with its line. Skips a partly written last line.

  Raises:
    ConfigError: The file cannot be read, or a line is not a row with a later step than before.
  """
  try:
    lines = files.read_bytes(path).split(b"\n")
  except OSError as error:
    raise ConfigError(f"{path} cannot be read ({error}): put it back, or move it away") from error
  rows: list[tuple[dict[str, Any], bytes]] = []
  for number, line in enumerate(lines, start=1):
    try:
      row = json.loads(line)
      last_step = rows[-1][0]["step"] if rows else -math.inf
      if type(row["step"]) is not int or row["step"] <= last_step:  # a bool is no step
        raise TypeError
      rows.append((row, line + b"\n"))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
      # The text after the last newline is empty, or the part of a row that a killed run left.
      if number < len(lines):
        raise ConfigError(
          f"{path} line {number} is not a row of metrics of a later step than the line before:"
          " repair or remove that line"
        ) from error
  return rows
