"""Rows of Parquet files.

Parquet compresses thousands of rows together, so that one row costs as much to read as all of them.
At the start, a file is therefore copied, a few rows at a time, to a temporary file in which each
row can be read alone. That file is never in memory as a whole, and is gone when the program ends.
"""

import os
from pathlib import Path
import tempfile
from typing import Any

import numpy as np

from grpo_jax import files
from grpo_jax.data.files.rows import TEXT, plain
from grpo_jax.data.images.of_prompts import COLUMNS
from grpo_jax.settings import ConfigError

_AT_ONCE = 256  # rows that are copied, and later read, together
_BYTES = 1 << 20  # of rows with images, about so many are later read together


class Parquet:
  """The rows of a Parquet file, each a dict from the names of its columns."""

  def __init__(self, path: Path) -> None:
    """Copies the file.

    Raises:
      OSError: The file cannot be read.
      ConfigError: It is damaged, pyarrow is not installed, or there is no space for the copy.
    """
    try:
      import pyarrow  # imported here because it is an optional package
      import pyarrow.parquet
    except ImportError:
      raise ConfigError(
        f"data.path: reading {path} needs the package pyarrow: pip install -e '.[parquet]'"
      ) from None
    files.check_regular(path)
    self._path = path
    try:
      copy, counts = _copy(path)
    except (pyarrow.ArrowException, OSError) as error:
      if getattr(error, "errno", None) is not None:
        raise ConfigError(
          f"data.path: {path} cannot be copied to {tempfile.gettempdir()} ({error}); name a folder"
          " with more space in the environment variable TMPDIR"
        ) from None
      reason = " ".join(str(error).split())
      raise ConfigError(f"data.path: {path} is not a whole Parquet file ({reason:.200})") from None
    self._batches = pyarrow.ipc.open_file(copy)
    self._columns: list[str] = self._batches.schema.names
    self._begins = np.cumsum([0, *counts])

  def __len__(self) -> int:
    return int(self._begins[-1])

  def __getitem__(self, index: int) -> Any:
    number = int(np.searchsorted(self._begins, index, side="right")) - 1
    batch, place = self._batches.get_batch(number), index - int(self._begins[number])
    row = {}
    for name, column in zip(self._columns, batch.columns):
      where = f"{self.where(index)} column {name!r}"
      try:
        value = column[place].as_py()
      except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date beyond 9999
        raise ConfigError(f"data.path: {where} cannot be read ({error}){TEXT}") from None
      row[name] = plain(value, where, keeps_bytes=name in COLUMNS)
    return row

  def where(self, index: int) -> str:
    """The file and the number of a row."""
    return f"{self._path} row {index + 1}"

  def columns(self) -> list[str]:
    """The names of the columns."""
    return self._columns


def _copy(path: Path) -> tuple[Any, list[int]]:
  """The copy, whose file has no name any more, and the number of rows in each of its parts."""
  import pyarrow
  import pyarrow.parquet

  descriptor, name = tempfile.mkstemp(prefix="grpo_jax_", suffix=".arrow")
  os.close(descriptor)
  counts = []
  try:
    with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as parquet:
      schema = _plain(parquet.schema_arrow)
      with pyarrow.OSFile(name, "wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
        for batch in parquet.iter_batches(_AT_ONCE):
          whole = batch.cast(schema)
          rows = max(1, batch.num_rows * _BYTES // max(batch.nbytes, _BYTES))
          for start in range(0, batch.num_rows, rows):
            part = whole.slice(start, rows)
            writer.write_batch(part)
            counts.append(part.num_rows)
    return pyarrow.OSFile(name), counts
  finally:
    os.unlink(name)  # the open file stays


def _plain(schema: Any) -> Any:
  """The schema without dictionaries, which would have to be the same in the whole file."""
  import pyarrow

  for number, field in enumerate(schema):
    if pyarrow.types.is_dictionary(field.type):
      schema = schema.set(number, field.with_type(field.type.value_type))
  return schema
