"""Rows that a program passes: lists of dicts, Datasets, and other objects that can be indexed.

A row is read when it is needed. `keep_rows` keeps the object in this process under a name, which a
config has as data.path.
"""

from collections.abc import Mapping
import hashlib
import itertools
import json
from typing import Any

from grpo_jax.data.files.parquet import Parquet, without_added_nulls
from grpo_jax.data.files.rows import Joined, JsonLines, Row, SplitRows, plain
from grpo_jax.data.files.tables import Table
from grpo_jax.data.files.tfds import Prepared
from grpo_jax.data.images.of_prompts import IMAGE_COLUMNS
from grpo_jax.settings import ConfigError

_PREFIX = "python:"
_LOOKED_AT = 256  # rows that are sampled if reading all may take long
# The rows that `keep_rows` keeps: those of each split, keyed by the path that it returned.
_splits_by_path: dict[str, dict[str, SplitRows]] = {}


class OfProgram:
  """The rows of a program's object with `__len__` and `__getitem__`."""

  def __init__(self, rows: Any, name: str) -> None:
    """Stores the object. `name` is the name of the rows in messages.

    Raises:
      ConfigError: The object has no length or cannot be indexed.
    """
    has_rows = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    if not has_rows or isinstance(rows, (str, bytes, Mapping)):
      raise ConfigError(
        f"{name} is of type {type(rows).__name__}: give a list of dicts, a Dataset, or another"
        " object with __len__ and __getitem__"
      )
    self._rows, self._name = rows, name
    # Only a Dataset has this. Arrow adds missing keys to its objects, with None.
    self._column_names = getattr(rows, "column_names", None)

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> Row:
    """Reads a row from the object. Raises ConfigError if that fails or the row is not a dict."""
    where = self.where(index)
    try:
      row = self._rows[int(index)]
    except ConfigError:
      raise
    except Exception as error:  # the program's code may raise anything
      raise ConfigError(
        f"{where} cannot be read ({type(error).__name__}: {error!s:.80})"
      ) from error
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
      raise ConfigError(
        f"{where} is of type {type(row).__name__}: it must be a dict with texts as keys"
      )
    values = {
      name: plain(value, f"{where} column {name!r}", keeps_bytes=name in IMAGE_COLUMNS)
      for name, value in row.items()
    }
    # In a program's own dicts, a None may have a meaning.
    return without_added_nulls(values) if self._column_names else values

  def where(self, index: int) -> str:
    """The name of the rows and the index of a row, for error messages."""
    return f"{self._name}[{index}]"

  def is_list(self) -> bool:
    """Whether all rows are in memory."""
    return isinstance(self._rows, (list, tuple))

  def is_same(self, other: SplitRows) -> bool:
    """Whether `other` has the rows of the same object."""
    return isinstance(other, OfProgram) and other._rows is self._rows

  def columns(self) -> list[str]:
    """The names of all columns that occur in any row, those of the first row first.

    A Dataset knows its columns. Of other objects than lists, only the first rows are read.
    """
    if self._column_names:
      return list(self._column_names)
    count = len(self) if self.is_list() else min(len(self), _LOOKED_AT)
    return list(dict.fromkeys(itertools.chain(*(self[index] for index in range(count)))))


def keep_rows(data: Any, test: Any = None, *, key: str = "data") -> str:
  """Keeps rows in this process, so that data.path can refer to them.

  Args:
    data: The training rows, or a dict with `train` and perhaps `test`, such as a DatasetDict.
    test: The test rows, or None.
    key: The name of the rows in messages.

  Returns:
    The value of data.path. It depends only on the rows, so a resumed run finds the same value.

  Raises:
    ConfigError: A split is not rows, or is empty.
  """
  if isinstance(data, Mapping):
    if "train" not in data:
      raise ConfigError(f"{key} has {', '.join(map(str, data))}: it must have the key train")
    train, test = data["train"], data.get("test") if test is None else test
  else:
    train = data
  splits: dict[str, SplitRows] = {"train": _rows(train, f"{key}: train")}
  if test is not None:
    splits["test"] = _rows(test, f"{key}: test")
  for rows in splits.values():
    if not len(rows):  # the message has the name of the rows, without the index of a row
      raise ConfigError(f"{rows.where(0).removesuffix('[0]')} has no rows")
  # A sample usually tells rows apart. If other rows have the same name, all rows are hashed.
  path = _PREFIX + _fingerprint(splits, reads_all=False)
  if path in _splits_by_path and not _are_same(_splits_by_path[path], splits):
    path = _PREFIX + _fingerprint(splits, reads_all=True)
  _splits_by_path[path] = splits
  return path


def is_given(path: str) -> bool:
  """Whether a path refers to rows that `keep_rows` keeps."""
  return path.startswith(_PREFIX)


def rows_given(path: str, split: str) -> SplitRows | None:
  """The rows of a split under the path that `keep_rows` returned. None if there is no such split.

  Raises:
    ConfigError: This process keeps no rows under the path.
  """
  if path not in _splits_by_path:
    raise ConfigError(
      f"data.path is {path!r}, which stands for rows that a program gave: run that program again,"
      " or give the rows with grpo_jax.train(config, workdir, data=...)"
    )
  return _splits_by_path[path].get(split)


def _rows(rows: Any, name: str) -> SplitRows:
  """Wraps a program's object as rows. Rows of files are returned unchanged."""
  is_of_file = isinstance(rows, (JsonLines, Joined, Parquet, Table, Prepared, OfProgram))
  return rows if is_of_file else OfProgram(rows, name)


def _are_same(first: Mapping[str, SplitRows], second: Mapping[str, SplitRows]) -> bool:
  """Whether two sets of splits with the same fingerprint have the same rows.

  Equal fingerprints mean equally many rows. If the fingerprint hashes only a sample of the rows,
  this compares all of them.
  """
  if first.keys() != second.keys():
    return False
  for name, rows in second.items():
    known = first[name]
    if _hashes_all(known) and _hashes_all(rows):  # then equal fingerprints mean equal rows
      continue
    if isinstance(known, OfProgram) and known.is_same(rows):  # the same object, not read again
      continue
    if any(_text(known[index]) != _text(rows[index]) for index in range(len(rows))):
      return False
  return True


def _fingerprint(splits: Mapping[str, SplitRows], reads_all: bool) -> str:
  """A name for rows, which hashes their number and contents.

  It hashes all rows if `reads_all`, or if they are in a list or few, and else an even sample.
  """
  found = hashlib.sha1()
  for name, rows in splits.items():
    found.update(f"{name} {len(rows)}\n".encode())
    count = len(rows) if reads_all or _hashes_all(rows) else _LOOKED_AT
    for index in range(count):
      place = index * (len(rows) - 1) // max(count - 1, 1)
      found.update(_text(rows[place]).encode("utf-8", "surrogatepass") + b"\n")
  return found.hexdigest()[:12]


def _hashes_all(rows: SplitRows) -> bool:
  """Whether `_fingerprint` always hashes all of these rows."""
  is_list = isinstance(rows, OfProgram) and rows.is_list()
  return is_list or len(rows) <= _LOOKED_AT


def _text(value: Any) -> str:
  """A value as a text to hash, which does not depend on the order of keys or on addresses."""
  if isinstance(value, Mapping):
    items = sorted(f"{_text(key)}: {_text(item)}" for key, item in value.items())
    return f"{{{', '.join(items)}}}"
  if isinstance(value, (list, tuple)):
    return f"[{', '.join(map(_text, value))}]"
  if isinstance(value, str):
    return json.dumps(value)
  if hasattr(value, "tobytes"):  # an array, or an image of Pillow
    value = value.tobytes()
  if isinstance(value, (bytes, bytearray)):
    return f"bytes {hashlib.sha1(value).hexdigest()}"
  text = repr(value)
  return type(value).__name__ if " at 0x" in text else text
