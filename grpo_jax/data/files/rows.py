"""Rows of files that may be larger than memory: found once, and read when a batch needs them."""

from collections.abc import Callable, Mapping, Sequence
import json
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from grpo_jax import files
from grpo_jax.settings import ConfigError, is_text

Row = Any  # the JSON value of a line: a dict, unless the file is wrong
Example = dict[str, Any]

_AT_ONCE = 1 << 22  # bytes of a file that are in memory while its lines are found
_DEEPEST = 32  # of lists and objects in each other, in a row
TEXT = "; texts are in UTF-8: write it so, or leave that column out of the file"
_NEWLINE, _OPENING, _CLOSING = b"\n{}"


class Rows(Protocol):
  """The rows of a split."""

  def __len__(self) -> int:
    """How many there are."""

  def __getitem__(self, index: int) -> Row:
    """Reads a row. Raises ConfigError, with the file and the place in it, for a damaged one."""

  def where(self, index: int) -> str:
    """The file of a row and its place there, for error messages."""


class JsonLines:
  """The rows of a jsonl file. In memory are only the places of its lines.

  Empty lines are no rows. That a row begins and ends as an object does is checked for all of them
  at the start. The rest of a row is checked when it is read.
  """

  def __init__(self, path: Path) -> None:
    """Finds the lines.

    Raises:
      OSError: The file cannot be read.
      ConfigError: A line is not an object.
    """
    files.check_regular(path)
    self._path = path
    self._file = open(path, "rb", buffering=0)
    self._version = self._current_version()
    begins, ends, is_odd = _lines(self._file)
    self._begins, self._ends = begins, ends
    self._lines = np.arange(len(begins))  # the number of each row's line, from 0
    empty = [line for line in np.flatnonzero(is_odd) if self._is_empty(line)]
    if empty:
      self._lines = np.delete(self._lines, empty)
      self._begins, self._ends = begins[self._lines], ends[self._lines]

  def __len__(self) -> int:
    return len(self._begins)

  def __getitem__(self, index: int) -> Row:
    if self._current_version() != self._version:
      raise ConfigError(f"data.path: {self._path} was changed while it was in use: start again")
    return _parsed(self._bytes(index), self.where(index))

  def where(self, index: int) -> str:
    """The file and the line of a row."""
    return f"{self._path} line {self._lines[index] + 1}"

  def _is_empty(self, line: int) -> bool:
    """Whether a line that does not look like an object is empty. Raises ConfigError if it is not.

    It may also be an object with spaces around it.
    """
    text = self._bytes(line)
    if not text.strip():
      return True
    if not isinstance(_parsed(text, self.where(line)), dict):
      start = text[:40].decode(errors="replace")
      raise ConfigError(
        f"data.path: {self.where(line)} is not an object, but {start!r}; each line must be one"
      )
    return False

  def _bytes(self, index: int) -> bytes:
    begin = int(self._begins[index])
    return os.pread(self._file.fileno(), int(self._ends[index]) - begin, begin)

  def _current_version(self) -> tuple[int, int]:
    stat = os.fstat(self._file.fileno())
    return stat.st_size, stat.st_mtime_ns


class Joined:
  """The rows of several files, one file after the other."""

  def __init__(self, parts: Sequence[Rows]) -> None:
    self._parts = parts
    self._begins = np.cumsum([0, *map(len, parts)])

  def __len__(self) -> int:
    return int(self._begins[-1])

  def __getitem__(self, index: int) -> Row:
    part, place = self._find(index)
    return part[place]

  def where(self, index: int) -> str:
    """The file of a row and its place there."""
    part, place = self._find(index)
    return part.where(place)

  def _find(self, index: int) -> tuple[Rows, int]:
    number = int(np.searchsorted(self._begins, index, side="right")) - 1
    return self._parts[number], index - int(self._begins[number])


class Examples(Sequence[Example]):
  """Examples that are made of rows when they are asked for."""

  def __init__(self, rows: Rows, make_example: Callable[[Row, str], Example]) -> None:
    """`make_example` gets a row, and its place for error messages."""
    self._rows, self._make_example = rows, make_example

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: Any) -> Any:
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    if not -len(self) <= index < len(self):
      raise IndexError(f"there are {len(self)} examples, no number {index}")
    place = index % len(self)
    where = self._rows.where(place)
    example = self._make_example(self._rows[place], where)
    check_values(example, where)
    return example

  def where_is(self, index: int) -> str:
    """The file of an example and its place there."""
    return self._rows.where(index)


class Kept(list[Example]):
  """Examples that are kept in memory."""

  def __init__(self, examples: Sequence[Example], count: int | None = None) -> None:
    """Makes the first `count` of `examples`, or all."""
    super().__init__(examples[:count])
    self._places = [place_of(examples, index) for index in range(len(self))]

  def where_is(self, index: int) -> str:
    """As `place_of`."""
    return self._places[index]


class Chosen(Sequence[Example]):
  """The examples at some indices of others."""

  def __init__(self, examples: Sequence[Example], indices: np.ndarray) -> None:
    self._examples, self._indices = examples, indices

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: Any) -> Any:
    if isinstance(index, slice):
      return [self._examples[int(i)] for i in self._indices[index]]
    return self._examples[int(self._indices[index])]

  def where_is(self, index: int) -> str:
    """As `place_of`."""
    return place_of(self._examples, int(self._indices[index]))


def place_of(examples: Sequence[Mapping[str, Any]], index: int) -> str:
  """What messages call an example, such as its file and place there.

  "" for an example that a task makes when it is needed.
  """
  if hasattr(examples, "where_is"):
    return str(examples.where_is(index))
  return f"example {index}" if isinstance(examples, list) else ""


def plain(value: Any, where: str, keeps_bytes: bool = False) -> Any:
  """A value of a file with texts for bytes, and Python's numbers and lists for numpy's.

  The bytes of an image, which the package datasets stores as {"bytes": ..., "path": ...}, stay.

  Args:
    value: The value.
    where: Its place, for error messages.
    keeps_bytes: Whether all bytes stay.

  Raises:
    ConfigError: The bytes are no text.
  """
  if isinstance(value, Mapping):
    stored = keeps_bytes or value.keys() == {"bytes", "path"}
    return {key: plain(item, where, stored and key == "bytes") for key, item in value.items()}
  if isinstance(value, bytes) and keeps_bytes:
    return value
  if isinstance(value, bytes):
    try:
      return value.decode()
    except UnicodeDecodeError as error:
      raise ConfigError(
        f"data.path: {where} holds bytes that are no text ({error}){TEXT}"
      ) from None
  if hasattr(value, "tolist"):
    return plain(value.tolist(), where, keeps_bytes)
  if isinstance(value, list):
    return [plain(item, where, keeps_bytes) for item in value]
  return value


def check_values(value: Any, where: str, depth: int = 0) -> None:
  """Refuses what JSON can hold, but later steps cannot compute with or write."""
  if isinstance(value, str) and not is_text(value):
    raise ConfigError(
      f"data.path: {where} has half of a surrogate pair (such as \\ud800), which is no character:"
      " remove it"
    )
  if depth > _DEEPEST:
    raise ConfigError(f"data.path: {where} has more than {_DEEPEST} levels of lists and objects")
  if isinstance(value, Mapping):
    value = [*value.keys(), *value.values()]
  if isinstance(value, list):
    for item in value:
      check_values(item, where, depth + 1)


def _lines(file: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Finds the lines of a file: where each begins and ends, int64, and whether it looks odd, bool.

  A line is odd if its first byte is not { or its last one is not }.
  """
  breaks, firsts, lasts = [], [], []
  position, before = 0, np.full(1, _NEWLINE, np.uint8)  # the byte before the part
  while part := file.read(_AT_ONCE):
    # With the byte before it, so that the neighbours of a newline at its edge are in it, too.
    values = np.concatenate([before, np.frombuffer(part, np.uint8)])
    newlines = np.flatnonzero(values[1:] == _NEWLINE)
    breaks.append(newlines + position)
    lasts.append(values[newlines])
    firsts.append(values[1:][values[:-1] == _NEWLINE])
    position, before = position + len(part), values[-1:]
  ends = np.concatenate([*breaks, [position]]).astype(np.int64)
  begins = np.concatenate([[0], ends[:-1] + 1])
  # What follows the last newline is a line too. It is empty in most files.
  last = np.concatenate([*lasts, before])
  first = np.concatenate(firsts) if firsts else np.zeros(0, np.uint8)
  first = np.concatenate([first, np.zeros(len(last) - len(first), np.uint8)])
  return begins, ends, (first != _OPENING) | (last != _CLOSING)


def _parsed(line: bytes, where: str) -> Row:
  try:
    return json.loads(line.decode("utf-8"))
  except (ValueError, RecursionError) as error:  # a ValueError is also an int of 4,300 digits
    raise ConfigError(
      f"data.path: {where} is not JSON ({error}); each line must be one object"
    ) from None
