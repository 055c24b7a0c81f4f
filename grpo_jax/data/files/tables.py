"""Rows of files that are read into memory: CSV, and JSON with a list of objects."""

import csv
import json
from pathlib import Path
from typing import Any

from grpo_jax import files
from grpo_jax.settings import ConfigError

_LONGEST_FIELD = 2**30  # the most characters of a CSV field


class Table:
  """The rows of a file, all in memory."""

  def __init__(self, path: Path, rows: list[dict[str, Any]]) -> None:
    """Stores the rows of the file `path`, whose name error messages need."""
    self._path, self._rows = path, rows

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return self._rows[index]

  def where(self, index: int) -> str:
    """The file and the number of a row, for error messages."""
    return f"{self._path} row {index + 1}"

  def columns(self) -> list[str]:
    """The names of all columns that occur in any row, those of the first row first."""
    return list(dict.fromkeys(name for row in self._rows for name in row))


def csv_table(path: Path) -> Table:
  """Reads a CSV file whose first line names the columns. All values are texts.

  Raises:
    OSError: The file cannot be read.
    ConfigError: The file is not CSV in UTF-8, or its columns are malformed.
  """
  files.check_regular(path)
  before = csv.field_size_limit(_LONGEST_FIELD)  # a limit of the whole process, restored below
  try:
    with open(path, encoding="utf-8-sig", newline="") as file:
      reader = csv.DictReader(file, restkey="", strict=True)
      names = list(reader.fieldnames or ())
      rows = list(reader)
  except (csv.Error, ValueError) as error:
    raise ConfigError(f"data.path: {path} is not CSV in UTF-8 ({error})") from None
  finally:
    csv.field_size_limit(before)
  if "" in names:
    place = names.index("") + 1
    raise ConfigError(f"data.path: {path}: its first line has no name for column {place}")
  for name in names:
    if names.count(name) > 1:
      raise ConfigError(f"data.path: {path}: its first line has the name {name!r} twice")
  for number, row in enumerate(rows):
    if "" in row or None in row.values():  # DictReader's marks for too many and too few values
      raise ConfigError(f"data.path: {path} row {number + 1} has not the columns of its first line")
  return Table(path, rows)


def json_table(path: Path) -> Table:
  """Reads a JSON file with a list of objects.

  Raises:
    OSError: The file cannot be read.
    ConfigError: The file is not JSON or not a list of objects.
  """
  files.check_regular(path)
  try:
    rows = json.loads(path.read_bytes())
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"data.path: {path} is not JSON ({error!s:.80})") from None
  if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
    raise ConfigError(f"data.path: {path} must be a list of objects; write other rows as .jsonl")
  return Table(path, rows)
