"""Rows of Parquet files.

Parquet compresses thousands of rows together, so reading one row costs as much as reading all of
them. At the start, a file is therefore copied, a few rows at a time, to a temporary file in which
each row can be read alone. That file is never in memory as a whole. It disappears when the program
ends.

The package datasets stores values of mixed types, such as the calls of different tools, as JSON
texts (its feature `Json`). A row has the decoded values.

All objects of an Arrow column have the same keys, so Arrow adds keys with null. In messages and in
schemas of tools, these nulls would become a part of prompts. They are removed, as in TRL's
`remove_none_values`.
"""

from collections.abc import Mapping
import json
import os
from pathlib import Path
import tempfile
from typing import Any

import numpy as np

from grpo_jax import files
from grpo_jax.data.files.rows import TEXT, plain
from grpo_jax.data.images.of_prompts import IMAGE_COLUMNS
from grpo_jax.data.row_tools import COLUMN as TOOLS
from grpo_jax.settings import ConfigError

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # roles of messages
_AT_ONCE = 256  # the most rows in a batch of the copy
_BYTES = 1 << 20  # the approximate limit on the bytes of a batch, such as one of rows with images


class Parquet:
  """The rows of a Parquet file, as dicts keyed by column."""

  def __init__(self, path: Path) -> None:
    """Copies the file to a temporary file.

    Raises:
      OSError: The file cannot be read.
      ConfigError: The file is damaged, pyarrow is not installed, or there is no space for the copy.
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
      if getattr(error, "errno", None) is not None:  # pyarrow's errors for a damaged file have none
        raise ConfigError(
          f"data.path: {path} cannot be copied to {tempfile.gettempdir()} ({error}); name a folder"
          " with more space in the environment variable TMPDIR"
        ) from None
      reason = " ".join(str(error).split())
      raise ConfigError(f"data.path: {path} is not a whole Parquet file ({reason:.200})") from None
    self._batches = pyarrow.ipc.open_file(copy)
    self._columns: list[str] = self._batches.schema.names
    self._json = _json_columns(self._batches.schema)
    self._begins = np.cumsum([0, *counts])

  def __len__(self) -> int:
    return int(self._begins[-1])

  def __getitem__(self, index: int) -> Any:
    """Reads a row as Python values keyed by column. Raises ConfigError for an unreadable value."""
    number = int(np.searchsorted(self._begins, index, side="right")) - 1
    batch, place = self._batches.get_batch(number), index - int(self._begins[number])
    row = {}
    for name, column in zip(self._columns, batch.columns):
      where = f"{self.where(index)} column {name!r}"
      try:
        value = column[place].as_py()
      except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date beyond 9999
        raise ConfigError(f"data.path: {where} cannot be read ({error}){TEXT}") from None
      row[name] = plain(value, where, keeps_bytes=name in IMAGE_COLUMNS)
    row = without_added_nulls(row)
    # After `without_added_nulls`, because Arrow adds no nulls inside a JSON text.
    for name, places in self._json.items():
      row[name] = _decoded(row[name], places, f"{self.where(index)} column {name!r}")
    return row

  def where(self, index: int) -> str:
    """The file and the number of a row, for error messages."""
    return f"{self._path} row {index + 1}"

  def columns(self) -> list[str]:
    """The names of the columns."""
    return self._columns


def without_added_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
  """A row without nulls in messages and in the column of tools, where Arrow may have added them."""
  return {
    name: _without_nulls(value) if name == TOOLS else _without_added_nulls(value)
    for name, value in row.items()
  }


def _without_added_nulls(value: Any) -> Any:
  """The value of a column without nulls in messages, which may be nested in the value."""
  if isinstance(value, Mapping):
    return {key: _without_added_nulls(item) for key, item in value.items()}
  if not isinstance(value, list):
    return value
  if value and all(map(_looks_like_message, value)):
    return _without_nulls(value)
  return [_without_added_nulls(item) for item in value]


def _looks_like_message(value: Any) -> bool:
  has_content = isinstance(value, Mapping) and ("content" in value or "tool_calls" in value)
  return has_content and value.get("role") in _ROLES


def _without_nulls(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {key: _without_nulls(item) for key, item in value.items() if item is not None}
  return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _json_columns(schema: Any) -> dict[str, Any]:
  """The places of JSON texts in each column that has some, in the form of `_places_in_type`.

  They are known from Arrow's JSON type, or from the metadata that the package datasets writes.
  """
  try:
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    found = {name: _places_in_feature(feature) for name, feature in features.items()}
  except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
    found = {}  # another program wrote the file
  places = {field.name: _places_in_type(field.type) or found.get(field.name) for field in schema}
  return {name: found for name, found in places.items() if found}


def _places_in_type(kind: Any) -> Any:
  """The places of JSON texts in values of an Arrow type.

  Returns:
    True if the value is a JSON text, [places in an item] for lists, {field: places} for objects,
    or None without JSON texts.
  """
  import pyarrow

  if getattr(kind, "extension_name", "") == "arrow.json":
    return True
  if pyarrow.types.is_struct(kind):
    fields = {field.name: _places_in_type(field.type) for field in kind}
    return {name: found for name, found in fields.items() if found} or None
  if hasattr(kind, "value_type"):  # lists of all kinds
    found = _places_in_type(kind.value_type)
    return [found] if found else None
  return None


def _places_in_feature(feature: Any) -> Any:
  """The places of JSON texts in values of a feature, in the form of `_places_in_type`.

  A feature is the description of a column that the package `datasets` writes into a file.
  """
  if isinstance(feature, list):  # older versions of datasets describe lists like this
    found = _places_in_feature(feature[0])
    return [found] if found else None
  if not isinstance(feature, Mapping):
    return None
  kind = feature.get("_type")
  if kind == "Json":
    return True
  if isinstance(kind, str) and "feature" in feature:  # a list, whose _type has several names
    found = _places_in_feature(feature["feature"])
    return [found] if found else None
  # An object has a feature for each field. Other types have only plain values, without places.
  fields = {name: _places_in_feature(inner) for name, inner in feature.items()}
  return {name: found for name, found in fields.items() if found} or None


def _decoded(value: Any, places: Any, where: str) -> Any:
  """Decodes the JSON texts at `places` of a value. Raises ConfigError if one is not JSON."""
  if places is True and isinstance(value, str):
    try:
      return json.loads(value)
    except (ValueError, RecursionError) as error:
      raise ConfigError(
        f"data.path: {where} must be JSON, as its type says, and is {value!r:.80} ({error!s:.80})"
      ) from None
  if isinstance(places, list) and isinstance(value, list):
    return [_decoded(item, places[0], where) for item in value]
  if isinstance(places, Mapping) and isinstance(value, Mapping):
    return {key: _decoded(item, places.get(key), where) for key, item in value.items()}
  return value


def _copy(path: Path) -> tuple[Any, list[int]]:
  """Copies a Parquet file to a temporary Arrow file. Returns (open file, rows of each batch)."""
  import pyarrow
  import pyarrow.parquet

  descriptor, name = tempfile.mkstemp(prefix="grpo_jax_", suffix=".arrow")
  os.close(descriptor)
  counts = []
  try:
    # With these options, pyarrow reads a MiB at a time, and not whole columns of a row group.
    with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as parquet:
      schema = _without_dictionaries(parquet.schema_arrow)
      with pyarrow.OSFile(name, "wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
        for batch in parquet.iter_batches(_AT_ONCE):
          cast_batch = batch.cast(schema)
          # All rows if they are small, and else so many that they have about _BYTES.
          rows = max(1, batch.num_rows * _BYTES // max(batch.nbytes, _BYTES))
          for start in range(0, batch.num_rows, rows):
            part = cast_batch.slice(start, rows)
            writer.write_batch(part)
            counts.append(part.num_rows)
    return pyarrow.OSFile(name), counts
  finally:
    os.unlink(name)  # the data stay until the open file is closed


def _without_dictionaries(schema: Any) -> Any:
  """The schema without dictionary encoding, whose dictionaries may differ between batches."""
  import pyarrow

  for number, field in enumerate(schema):
    if pyarrow.types.is_dictionary(field.type):
      schema = schema.set(number, field.with_type(field.type.value_type))
  return schema
