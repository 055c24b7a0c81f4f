"""The JSON in a run's folder: files that are replaced in one step, and files of one row a line."""

from collections.abc import Mapping
import json
import math
import os
from pathlib import Path
from typing import Any

from grpo_jax.settings import ConfigError


def replace_file(path: Path, content: str | bytes) -> None:
  """Writes the file atomically: a reader, or a kill, sees the old content or the new content."""
  new = path.with_name(path.name + ".new")
  with open(new, "wb") as file:
    file.write(content.encode() if isinstance(content, str) else content)
    file.flush()
    os.fsync(file.fileno())
  os.replace(new, path)


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


def read_metrics(path: Path) -> list[tuple[dict[str, Any], bytes]]:
  """The rows of a metrics.jsonl, each with its line. Leaves out a last line that is half written.

  Raises:
    ConfigError: Another line is not a row of metrics.
  """
  lines = path.read_bytes().split(b"\n")
  rows = []
  for number, line in enumerate(lines, start=1):
    try:
      row = json.loads(line)
      if type(row["step"]) is not int:
        raise TypeError
      rows.append((row, line + b"\n"))
    except (ValueError, TypeError, KeyError) as error:
      # After the last newline comes nothing, or the part of a row that a kill left.
      if number < len(lines):
        raise ConfigError(
          f"{path} line {number} is not a row of metrics: repair or remove that line"
        ) from error
  return rows
