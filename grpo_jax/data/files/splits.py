"""Finds the files of a data set's splits. Can hold out training rows as a test split."""

from collections.abc import Callable, Sequence
import os
from pathlib import Path

import numpy as np

from grpo_jax.data.files import download
from grpo_jax.data.files.given import is_given, rows_given
from grpo_jax.data.files.parquet import Parquet
from grpo_jax.data.files.rows import Chosen, Example, Examples, Joined, JsonLines, Row, SplitRows
from grpo_jax.data.files.tables import csv_table, json_table
from grpo_jax.data.files.tfds import Prepared
from grpo_jax.settings import ConfigError

_KINDS: dict[str, Callable[[Path], SplitRows]] = {
  ".jsonl": JsonLines,
  ".parquet": Parquet,
  ".csv": csv_table,
  ".json": json_table,
}
_LAYOUT = (
  "it must be a folder with train.jsonl and test.jsonl (or .parquet), or one such file with"
  " data.held_out"
)


def rows_of(path: str, split: str) -> SplitRows | None:
  """Opens the rows of a split.

  A folder has SPLIT.jsonl (or .parquet, .csv, .json), or several files SPLIT-*.jsonl, or was
  prepared by TensorFlow Datasets. A single file has only training rows. A path may also refer
  to rows that a program passed in memory (`given.py`).

  Args:
    path: data.path.
    split: "train" or "test".

  Returns:
    The rows. None if there is no test split.

  Raises:
    ConfigError: The rows cannot be read, a file is empty, or there are no training rows.
  """
  if is_given(path):
    return rows_given(path, split)
  folder = Path(path).expanduser()
  if os.path.isfile(folder / "dataset_info.json"):  # TFDS writes it. os.path never raises
    rows: SplitRows = Prepared(folder, split)
  else:
    found = _files(folder, split)
    if not found and split == "test":
      return None
    if not found:
      raise ConfigError(
        f"data.path: cannot read {folder / 'train.jsonl'} (there is no such file); {_LAYOUT}"
      )
    parts = [_read(file) for file in found]
    rows = parts[0] if len(parts) == 1 else Joined(parts)
    if not len(rows):
      raise ConfigError(
        f"data.path: {found[0]} is empty; each line must be an object with question and answer"
      )
  if not len(rows) and split == "train":  # only a prepared folder can lack rows here
    raise ConfigError(f"data.path: {folder} has no split {split}")
  return rows if len(rows) else None


def examples_of(
  path: str, make_example: Callable[[Row, str], Example]
) -> tuple[Sequence[Example], Sequence[Example]]:
  """(training examples, test examples) of files. The latter are () without a test file.

  `make_example` maps a row, and its name in error messages, to an example.
  """
  train, test = rows_of(path, "train"), rows_of(path, "test")
  return Examples(train, make_example), Examples(test, make_example) if test is not None else ()


def rows_of_test(path: str, hub: str) -> SplitRows:
  """Opens the rows of a test set without training rows.

  Args:
    path: The file, a folder with test files or with a single file of rows, or OWNER/NAME/FILE on
      huggingface.co.
    hub: OWNER/NAME/FILE on huggingface.co, used if `path` is "".

  Raises:
    ConfigError: The rows cannot be read or downloaded, or there are none.
  """
  location = Path(path or hub).expanduser()
  try:
    if not path or (not location.exists() and download.is_name(path)):
      found = download.dataset_files(path or hub)
    elif location.is_dir():
      others = [file for file in location.iterdir() if file.suffix in _KINDS]
      found = _found(location, "test") or (others if len(others) == 1 else [])
    else:
      found = [location]
  except OSError as error:
    raise ConfigError(f"data.path: cannot read {location} ({error})") from None
  if not found:
    raise ConfigError(
      f"data.path: {location} has no test file ({', '.join('test' + kind for kind in _KINDS)}), and"
      " not a single other file of rows: name the file"
    )
  for file in found:
    if file.suffix not in _KINDS:
      raise ConfigError(f"data.path: {file} is none of {', '.join(_KINDS)}")
  try:
    parts = [_KINDS[file.suffix](file) for file in found]
  except OSError as error:
    raise ConfigError(f"data.path: cannot read {location} ({error.strerror or error})") from None
  rows = parts[0] if len(parts) == 1 else Joined(parts)
  if not len(rows):
    raise ConfigError(f"data.path: {found[0]} is empty")
  return rows


def hold_out(
  examples: Sequence[Example], share: float
) -> tuple[Sequence[Example], Sequence[Example]]:
  """Splits examples at random. Returns (examples for training, held-out examples).

  Whether an example is held out depends only on its index. So rows that are appended to a file do
  not move other rows between the splits.

  Args:
    examples: All examples.
    share: The approximate fraction to hold out.

  Raises:
    ConfigError: One of the splits has no examples.
  """
  # This uses raw words of a fixed key, because numpy promises that they never change. The keys of
  # epochs are (seed, epoch), and no epoch has this number.
  words = np.random.Philox(key=np.array([0, 2**64 - 1], np.uint64)).random_raw(len(examples))
  is_held_out = words < np.uint64(share * 2.0**64)
  if is_held_out.all() or not is_held_out.any():
    raise ConfigError(
      f"config key data.held_out is {share}: of {len(examples)} rows, that leaves"
      f" {int((~is_held_out).sum())} for training and {int(is_held_out.sum())} for the test"
    )
  train, test = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
  return Chosen(examples, train), Chosen(examples, test)


def _files(path: Path, split: str) -> list[Path]:
  """`_found`, with ConfigError for a folder that cannot be read."""
  try:
    return _found(path, split)
  except OSError as error:
    raise ConfigError(f"data.path: cannot read {path} ({error}); {_LAYOUT}") from None


def _found(path: Path, split: str) -> list[Path]:
  """The files of a split in a folder, sorted by name. A single file is the training split."""
  if path.suffix in _KINDS and not path.is_dir():
    return [path] if split == "train" else []
  for suffix in _KINDS:
    whole = path / f"{split}{suffix}"
    if whole.exists() or whole.is_symlink():
      return [whole]
    parts = sorted(path.glob(f"{split}-*{suffix}"))
    if parts:
      return parts
  return []


def _read(file: Path) -> SplitRows:
  try:
    return _KINDS[file.suffix](file)
  except OSError as error:
    raise ConfigError(f"data.path: cannot read {file} ({error}); {_LAYOUT}") from None
