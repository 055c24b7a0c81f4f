"""Rows that a program gives: lists of dicts, Datasets, and anything that has rows by number.

They are read by number, when they are needed. `keep_rows` keeps them in this process under a name
that a config can hold, in the place of a path.
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
_LOOKED_AT = 256  # rows whose columns are looked at, where to read all may take long
_given: dict[str, dict[str, SplitRows]] = {}


class OfProgram:
  """The rows of an object that has a length and items by number."""

  def __init__(self, rows: Any, name: str) -> None:
    """Takes the rows. `name` is what messages call them.

    Raises:
      ConfigError: The object has no length or no items by number.
    """
    has_rows = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    if not has_rows or isinstance(rows, (str, bytes, Mapping)):
      raise ConfigError(
        f"{name} is of type {type(rows).__name__}: give a list of dicts, a Dataset, or another"
        " object with __len__ and __getitem__"
      )
    self._rows, self._name = rows, name
    # A Dataset has them. Arrow gives the objects of its messages the keys of all others, with None.
    self._column_names = getattr(rows, "column_names", None)

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> Row:
    """Reads a row from the program's object, and checks it. Raises ConfigError."""
    where = self.where(index)
    try:
      row = self._rows[int(index)]
    except ConfigError:
      raise
    except Exception as error:  # it is a program
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
    return without_added_nulls(values) if self._column_names else values

  def where(self, index: int) -> str:
    """The name of the rows and the number of one, from 0."""
    return f"{self._name}[{index}]"

  def is_list(self) -> bool:
    """Whether all rows are in memory."""
    return isinstance(self._rows, (list, tuple))

  def is_same(self, other: SplitRows) -> bool:
    """Whether others are the rows of the same object."""
    return isinstance(other, OfProgram) and other._rows is self._rows

  def columns(self) -> list[str]:
    """The names of the columns that any row has. Only some rows are looked at where none is there.

    Those of a list are there, and a Dataset knows its columns.
    """
    if self._column_names:
      return list(self._column_names)
    count = len(self) if self.is_list() else min(len(self), _LOOKED_AT)
    return list(dict.fromkeys(itertools.chain(*(self[index] for index in range(count)))))


def keep_rows(data: Any, test: Any = None, *, key: str = "data") -> str:
  """Keeps rows in this process.

  Args:
    data: The training rows. Or a dict with `train` and perhaps `test`, such as a DatasetDict.
    test: The test rows, or None.
    key: The name of the rows in messages.

  Returns:
    The value of data.path that stands for them: always the same for the same rows.

  Raises:
    ConfigError: These are no rows, or none.
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
    if not len(rows):
      raise ConfigError(f"{rows.where(0).removesuffix('[0]')} has no rows")
  path = _PREFIX + _fingerprint(splits, reads_all=False)
  if path in _given and not _are_same(_given[path], splits):
    path = _PREFIX + _fingerprint(splits, reads_all=True)
  _given[path] = splits
  return path


def is_given(path: str) -> bool:
  """Whether a path stands for rows of a program."""
  return path.startswith(_PREFIX)


def rows_given(path: str, split: str) -> SplitRows | None:
  """The rows of a split that `keep_rows` returned the path of. None if there is no such split.

  Raises:
    ConfigError: This process was given none.
  """
  if path not in _given:
    raise ConfigError(
      f"data.path is {path!r}, which stands for rows that a program gave: run that program again,"
      " or give the rows with grpo_jax.train(config, workdir, data=...)"
    )
  return _given[path].get(split)


def _rows(rows: Any, name: str) -> SplitRows:
  """Rows of a file that was found already are left as they are."""
  is_of_file = isinstance(rows, (JsonLines, Joined, Parquet, Table, Prepared, OfProgram))
  return rows if is_of_file else OfProgram(rows, name)


def _are_same(first: Mapping[str, SplitRows], second: Mapping[str, SplitRows]) -> bool:
  """Whether two with one name have the same rows. Those that the name leaves out are read."""
  if first.keys() != second.keys():
    return False
  for name, rows in second.items():
    known = first[name]
    if _is_all_in_name(known) and _is_all_in_name(rows):
      continue
    if isinstance(known, OfProgram) and known.is_same(rows):
      continue
    if any(_text(known[index]) != _text(rows[index]) for index in range(len(rows))):
      return False
  return True


def _fingerprint(splits: Mapping[str, SplitRows], reads_all: bool) -> str:
  """A name for rows, from how many there are and what they hold.

  All rows of a list are read, and of others some at equal distances, unless `reads_all`.
  """
  found = hashlib.sha1()
  for name, rows in splits.items():
    found.update(f"{name} {len(rows)}\n".encode())
    count = len(rows) if reads_all or _is_all_in_name(rows) else _LOOKED_AT
    for index in range(count):
      place = index * (len(rows) - 1) // max(count - 1, 1)
      found.update(_text(rows[place]).encode("utf-8", "surrogatepass") + b"\n")
  return found.hexdigest()[:12]


def _is_all_in_name(rows: SplitRows) -> bool:
  is_list = isinstance(rows, OfProgram) and rows.is_list()
  return is_list or len(rows) <= _LOOKED_AT


def _text(value: Any) -> str:
  """A value as a text, with the keys of its dicts in order."""
  if isinstance(value, Mapping):
    items = sorted(f"{_text(key)}: {_text(item)}" for key, item in value.items())
    return f"{{{', '.join(items)}}}"
  if isinstance(value, (list, tuple)):
    return f"[{', '.join(map(_text, value))}]"
  if isinstance(value, str):
    return json.dumps(value)
  if hasattr(value, "tobytes"):  # an image
    value = value.tobytes()
  if isinstance(value, (bytes, bytearray)):
    return f"bytes {hashlib.sha1(value).hexdigest()}"
  text = repr(value)
  return type(value).__name__ if " at 0x" in text else text
