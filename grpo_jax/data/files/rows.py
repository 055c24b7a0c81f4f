"""Rows of files that may be larger than memory: located once, and read when a batch needs them."""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
import json
import os
from pathlib import Path
import re
from typing import Any, Protocol

import numpy as np

from grpo_jax import files
from grpo_jax.settings import ConfigError, is_text

Row = Any  # the JSON value of a line: a dict, unless the file is malformed
Example = dict[str, Any]

_AT_ONCE = 1 << 22  # bytes of a file that are read together while its lines are located
_DEEPEST = 32  # the deepest nesting of lists and objects in a row
TEXT = "; texts are in UTF-8: write it so, or leave that column out of the file"
_NEWLINE, _OPENING, _CLOSING = b"\n{}"
_QUOTE, _COLON, _BACKSLASH, _SPACE = b'":\\ '
_SPACED_COLON = re.compile(rb'"[ \t\r]+:')


class SplitRows(Protocol):
  """The rows of a split."""

  def __len__(self) -> int:
    """The number of rows."""

  def __getitem__(self, index: int) -> Row:
    """Reads a row. Raises ConfigError, with the row's file and place, if the row is damaged."""

  def where(self, index: int) -> str:
    """The file of a row and its place in the file, for error messages."""

  def columns(self) -> list[str]:
    """The names of all columns that occur in any row, those of the first row first."""


class JsonLines:
  """The rows of a jsonl file. Only the positions of its lines are in memory.

  Empty lines are skipped. The start checks for every line that it begins and ends with braces.
  Reading a row checks the rest.
  """

  def __init__(self, path: Path) -> None:
    """Opens the file and locates its lines.

    Raises:
      OSError: The file cannot be read.
      ConfigError: A line is not an object.
    """
    files.check_regular(path)
    self._path = path
    self._file = open(path, "rb", buffering=0)  # reads are large blocks, or whole lines by pread
    self._version = self._current_version()
    begins, ends, lacks_braces = _lines(self._file)
    self._begins, self._ends = begins, ends
    self._lines = np.arange(len(begins))  # the number of each row's line, from 0
    # Only these lines are parsed now. `_is_empty` still needs the places of all lines.
    empty = [line for line in np.flatnonzero(lacks_braces) if self._is_empty(line)]
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
    """The file and the line of a row, for error messages."""
    return f"{self._path} line {self._lines[index] + 1}"

  def columns(self) -> list[str]:
    """The names of all columns that occur in any row, those of the first row first.

    This reads the whole file, but parses only blocks of lines that may have more names. Blocks with
    nested objects usually do.
    """
    names: dict[str, None] = {}
    start = 0
    while start < len(self):
      begin = int(self._begins[start])
      stop = int(np.searchsorted(self._ends, begin + _AT_ONCE, side="right"))
      stop = max(stop, start + 1)  # a line may be longer than a block
      block = os.pread(self._file.fileno(), int(self._ends[stop - 1]) - begin, begin)
      if _may_have_other_keys(block, names):
        for index in range(start, stop):
          offset = int(self._begins[index]) - begin
          names |= dict.fromkeys(_keys(block[offset : int(self._ends[index]) - begin]))
      start = stop
    return list(names)

  def _is_empty(self, line: int) -> bool:
    """Whether a line that does not begin and end with braces is empty.

    Returns False for an object with spaces around it. Raises ConfigError for anything else.
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
    line = os.pread(self._file.fileno(), int(self._ends[index]) - begin, begin)
    # Windows programs begin a file with this mark. Concatenated files also have it in the middle.
    return line.removeprefix(codecs.BOM_UTF8)

  def _current_version(self) -> tuple[int, int]:
    stat = os.fstat(self._file.fileno())
    return stat.st_size, stat.st_mtime_ns


class Joined:
  """The rows of several files, one file after the other."""

  def __init__(self, parts: Sequence[SplitRows]) -> None:
    self._parts = parts
    self._begins = np.cumsum([0, *map(len, parts)])

  def __len__(self) -> int:
    return int(self._begins[-1])

  def __getitem__(self, index: int) -> Row:
    part, place = self._find(index)
    return part[place]

  def where(self, index: int) -> str:
    """The file of a row and its place in the file, for error messages."""
    part, place = self._find(index)
    return part.where(place)

  def columns(self) -> list[str]:
    """The names of the columns of all files."""
    return list(dict.fromkeys(name for part in self._parts for name in part.columns()))

  def _find(self, index: int) -> tuple[SplitRows, int]:
    """(rows of the file, index in them) of the row `index`."""
    number = int(np.searchsorted(self._begins, index, side="right")) - 1
    return self._parts[number], index - int(self._begins[number])


class Examples(Sequence[Example]):
  """Examples that indexing makes from rows."""

  def __init__(self, rows: SplitRows, make_example: Callable[[Row, str], Example]) -> None:
    """`make_example` maps a row, and its `where` for error messages, to an example."""
    self._rows, self._make_example = rows, make_example

  def where(self, index: int) -> str:
    """The file of an example's row and the place in the file, for error messages."""
    return self._rows.where(index)

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
    check_texts_and_depth(example, where)
    return example


class InMemory(list[Example]):
  """A list of the first `count` of some examples that keeps their names in error messages."""

  def __init__(self, examples: Sequence[Example], count: int) -> None:
    super().__init__(examples[:count])
    self._from = examples

  def where(self, index: int) -> str:
    """The file of an example's row and the place in the file, for error messages."""
    return place_of(self._from, index)


class Chosen(Sequence[Example]):
  """The subset of `examples` at `indices`, an int array."""

  def __init__(self, examples: Sequence[Example], indices: np.ndarray) -> None:
    self._examples, self._indices = examples, indices

  def where(self, index: int) -> str:
    """The file of an example's row and the place in the file, for error messages."""
    return place_of(self._examples, int(self._indices[index]))

  def __len__(self) -> int:
    return len(self._indices)

  def __getitem__(self, index: Any) -> Any:
    if isinstance(index, slice):
      return [self._examples[int(i)] for i in self._indices[index]]
    return self._examples[int(self._indices[index])]


def first(examples: Sequence[Example], count: int) -> Sequence[Example]:
  """The first `count` of some examples, or all of them if `count` is 0 or too large."""
  if not 0 < count < len(examples):
    return examples
  return Chosen(examples, np.arange(count))


def place_of(examples: Sequence[Any], index: int) -> str:
  """The name of an example in error messages: the file and place of its row, or its index."""
  where = getattr(examples, "where", None)
  return where(index) if where else f"example {index}"


def is_in_memory(examples: Sequence[Any]) -> bool:
  """Whether all examples are in memory, so that reading them is free."""
  return isinstance(chosen_from(examples), list)


def chosen_from(examples: Sequence[Any]) -> Sequence[Any]:
  """The examples that a subset was chosen from. Others are returned as they are."""
  while isinstance(examples, Chosen):
    examples = examples._examples
  return examples


def plain(value: Any, where: str, keeps_bytes: bool = False) -> Any:
  """Converts a value of a file: decodes bytes to texts, and numpy values to Python's.

  Images of the package datasets, {"bytes": ..., "path": ...}, keep their bytes.

  Args:
    value: The value.
    where: The place of the value, for error messages.
    keeps_bytes: Whether the value may be an image: bytes and pixels, uint8 with at least two axes,
      stay as they are, in an object only those of its key "bytes".

  Raises:
    ConfigError: Bytes are not UTF-8.
  """
  if isinstance(value, Mapping):
    is_image = keeps_bytes or value.keys() == {"bytes", "path"}
    return {key: plain(item, where, is_image and key == "bytes") for key, item in value.items()}
  if isinstance(value, bytes) and keeps_bytes:
    return value
  if isinstance(value, bytes):
    try:
      return value.decode()
    except UnicodeDecodeError as error:
      raise ConfigError(
        f"data.path: {where} holds bytes that are no text ({error}){TEXT}"
      ) from None
  if keeps_bytes and isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim > 1:
    return value  # the pixels of an image
  if hasattr(value, "tolist"):  # a numpy array or scalar
    return plain(value.tolist(), where, keeps_bytes)
  if isinstance(value, list):
    return [plain(item, where, keeps_bytes) for item in value]
  return value


def check_texts_and_depth(value: Any, where: str, depth: int = 0) -> None:
  """Raises ConfigError for half surrogate pairs and deep nesting, which JSON files may have.

  Later code could neither encode the former nor recurse through the latter. `depth` is the nesting
  depth of `value`, for the recursion.
  """
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
      check_texts_and_depth(item, where, depth + 1)


def _lines(file: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Locates the lines of a file, and finds those that are no object at first sight.

  For example, `{"a": 1}` and an empty line, each with a newline, are ([0, 9, 10], [8, 9, 10],
  [False, True, True]): the third line is the empty rest after the last newline.

  Returns:
    (first byte of each line, int64; byte after each line, int64; whether the line lacks braces,
    bool: its first byte is not { or its last byte is not })
  """
  breaks, firsts, lasts = [], [], []  # the newlines of each part, and the bytes next to them
  position, before = 0, np.full(1, _NEWLINE, np.uint8)  # as if a newline preceded the file
  while part := file.read(_AT_ONCE):
    # The byte before the part is prepended, so that every newline has both of its neighbours.
    values = np.concatenate([before, np.frombuffer(part, np.uint8)])
    newlines = np.flatnonzero(values[1:] == _NEWLINE)
    breaks.append(newlines + position)
    lasts.append(values[newlines])
    firsts.append(values[1:][values[:-1] == _NEWLINE])
    position, before = position + len(part), values[-1:]
  ends = np.concatenate([*breaks, [position]]).astype(np.int64)
  begins = np.concatenate([[0], ends[:-1] + 1])
  # The bytes after the last newline are also a line, which is empty in most files.
  last = np.concatenate([*lasts, before])
  first = np.concatenate(firsts) if firsts else np.zeros(0, np.uint8)
  # If that line is empty, it has no first byte. The 0 that stands for it is no brace.
  first = np.concatenate([first, np.zeros(len(last) - len(first), np.uint8)])
  return begins, ends, (first != _OPENING) | (last != _CLOSING)


def _may_have_other_keys(part: bytes, names: Iterable[str]) -> bool:
  """Whether a block of lines may have keys that are not in `names`.

  A key ends in a quote and a colon. If all of these are the ends of known names, the caller need
  not parse the lines, which is much slower. Texts and nested objects may cause a needless True.
  """
  values = np.frombuffer(part, np.uint8)
  ends_N = np.flatnonzero(values[1:] == _COLON)  # the positions of the bytes before the colons
  before_N = values[ends_N]
  if (before_N <= _SPACE).any() and _SPACED_COLON.search(part):
    return True  # keys that end in a quote, spaces and a colon are not looked up
  ends_N = ends_N[before_N == _QUOTE]
  for name in names:  # drops the positions at which a key of this name ends
    if not len(ends_N):
      return False
    key = json.dumps(name, ensure_ascii=False).encode("utf-8", "replace")
    is_name_N = ends_N >= len(key)
    preceding = ends_N[is_name_N] - len(key)  # the byte before a key may escape its first quote
    is_name_N[is_name_N] = values[preceding] != _BACKSLASH
    # Each comparison looks at the positions that still match, and unmarks those that differ.
    for offset, byte in enumerate(key, start=1 - len(key)):  # relative to the last byte of the key
      is_name_N[is_name_N] = values[ends_N[is_name_N] + offset] == byte
    ends_N = ends_N[~is_name_N]
  return len(ends_N) > 0


def _keys(line: bytes) -> Iterable[str]:
  """The keys of a row. Empty for a damaged row, because reading it raises an error."""
  try:
    row = json.loads(line)
  except (ValueError, RecursionError):
    return ()
  return row if isinstance(row, dict) else ()


def _parsed(line: bytes, where: str) -> Row:
  """Parses a line. Raises ConfigError if it is not JSON in UTF-8."""
  try:
    return json.loads(line.decode("utf-8"))
  except (ValueError, RecursionError) as error:  # a ValueError is also an int of 4,300 digits
    raise ConfigError(
      f"data.path: {where} is not JSON ({error}); each line must be one object"
    ) from None
