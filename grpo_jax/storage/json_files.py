"""The JSON in a run's folder: files that are replaced in one step, and files of one row a line."""

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
  """Writes the file atomically: a reader, or a kill, sees the old content or the new content.

  Raises:
    OSError: It cannot be written. The old content stays.
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
    new.unlink(missing_ok=True)  # a full disk needs the room
    raise
  os.replace(new, path)


class AppendedFile:
  """A file that grows by whole pieces: a piece that cannot be written leaves no part of itself."""

  def __init__(self, path: Path) -> None:
    self._path = path
    self._file = open(path, "ab", buffering=0)

  def append(self, content: bytes) -> None:
    """Appends all of `content`. A kill loses none of it once `append` has returned.

    Raises:
      OSError: It cannot be written. The file is as it was before.
    """
    size = os.fstat(self._file.fileno()).st_size
    try:
      with naming(self._path):
        rest = memoryview(content)
        while rest:  # a disk that becomes full takes a part
          rest = rest[self._file.write(rest) :]
    except BaseException:
      with contextlib.suppress(OSError):  # otherwise the next start removes the part
        self._file.truncate(size)
      raise

  def close(self) -> None:
    self._file.close()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
  """Gives an OSError the name of the file. One that is raised by a write has none."""
  try:
    yield
  except OSError as error:
    if error.errno is not None and error.filename is None:
      error.filename = str(path)
    raise


def json_line(row: Mapping[str, Any]) -> bytes:
  """One row as a line of JSON.

  Array scalars become numbers. NaN and the infinities, which JSON lacks, become null. Lone
  surrogates, which a sampled text may hold, become JSON's escapes for them.
  """
  text = json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n"
  return text.encode("utf-8", "backslashreplace")


def plain(value: Any) -> Any:
  """A value as JSON holds it, with None for a number that is not finite."""
  if isinstance(value, Mapping):
    return {key: plain(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(item) for item in value]
  if hasattr(value, "item"):
    value = value.item()
  return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_rows(path: Path) -> list[tuple[dict[str, Any], bytes]]:
  """The rows of a metrics.jsonl, each with its line. Leaves out a last line that is half written.

  Raises:
    ConfigError: The file cannot be read, or another line is not a later row of metrics.
  """
  try:
    lines = files.read_bytes(path).split(b"\n")
  except OSError as error:
    raise ConfigError(f"{path} cannot be read ({error}): put it back, or move it away") from error
  rows: list[tuple[dict[str, Any], bytes]] = []
  for number, line in enumerate(lines, start=1):
    try:
      row = json.loads(line)
      if type(row["step"]) is not int or (rows and row["step"] <= rows[-1][0]["step"]):
        raise TypeError
      rows.append((row, line + b"\n"))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
      # After the last newline comes nothing, or the part of a row that a kill left.
      if number < len(lines):
        raise ConfigError(
          f"{path} line {number} is not a row of metrics of a later step than the line before:"
          " repair or remove that line"
        ) from error
  return rows
