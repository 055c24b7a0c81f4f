"""A case: one hostile input, as a row; and the small steps that prepare its folder."""

from collections.abc import Callable, Mapping
import dataclasses
import json
import os
from pathlib import Path
import struct
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Step = Callable[[Path], None]  # changes the folder of a case before its command runs


@dataclasses.dataclass(frozen=True)
class Case:
  """One hostile input.

  Attributes:
    name: Unique. What --only matches.
    command: A line of bash, run in the folder of the case. The commands train, evaluate, sample,
      export, report and serve stand for `python -m grpo_jax.NAME`. The variables of
      `hostile.VARIABLES`, such as $RUN, stand for flags that many rows share.
    code: The exit code that the user should get, or all that are right. 128 + N for signal N.
    words: Each must be in the output. Words in a row, so line breaks do not matter.
    absent: None may be in the output.
    needs: The fixtures to copy into the folder, such as "run model".
    files: Texts or bytes to write, by their paths.
    setup: Steps that run after that.
    env: Environment variables to set, or to remove where the value is None.
    may_change: Patterns of files that may change or go. All others that were there before must
      still be there: unchanged, with something appended, or under another name.
    signals: (text, signal): sent as soon as the output has the text. "" means half a second after
      the start.
    then: A second command, which must end with code 0 and have done its work: "the same command
      goes on".
    saved: A step whose checkpoint must exist at the end.
    tty: Whether stdout and stderr are a terminal.
    as_user: Whether permissions of files hold, as they do for everybody but root.
    lines: How many lines of stderr are few.
    limit: After so many seconds, not counting those without a core, the case has failed.
  """

  name: str
  command: str
  code: int | tuple[int, ...]
  words: tuple[str, ...] = ()
  absent: tuple[str, ...] = ()
  needs: str = ""
  files: Mapping[str, str | bytes] = dataclasses.field(default_factory=dict)
  setup: tuple[Step, ...] = ()
  env: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
  may_change: tuple[str, ...] = ()
  signals: tuple[tuple[str, int], ...] = ()
  then: str = ""
  saved: int | None = None
  tty: bool = False
  as_user: bool = False
  lines: int = 5
  limit: int = 120


def edit_json(file: str, **changes: Any) -> Step:
  """Sets keys of a JSON object. The value `...` removes the key."""

  def step(folder: Path) -> None:
    values = json.loads((folder / file).read_text())
    for key, value in changes.items():
      values.pop(key, None)
      if value is not ...:
        values[key] = value
    (folder / file).write_text(json.dumps(values))

  return step


def write(file: str, content: str | bytes) -> Step:
  """Writes a file over the one that a fixture brought."""

  def step(folder: Path) -> None:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)

  return step


def cut(pattern: str, keep: float = 0.5) -> Step:
  """Truncates the files that match, to a fraction of their length."""

  def step(folder: Path) -> None:
    for path in _found(folder, pattern):
      os.truncate(path, int(path.stat().st_size * keep))

  return step


def flip(pattern: str, *places: float) -> Step:
  """Flips the bits of a byte of the files that match: in the middle, or at each of these places.

  A place is a share of the file. Files of arrays hold parts that nothing reads.
  """

  def step(folder: Path) -> None:
    for path in _found(folder, pattern):
      content = bytearray(path.read_bytes())
      for at in places or (0.5,):
        content[int((len(content) - 1) * at)] ^= 0xFF
      path.write_bytes(content)

  return step


def remove(pattern: str) -> Step:
  """Removes the files and folders that match."""

  def step(folder: Path) -> None:
    for path in _found(folder, pattern):
      if path.is_dir() and not path.is_symlink():
        remove(f"{path.relative_to(folder)}/*")(folder) if any(path.iterdir()) else None
        path.rmdir()
      else:
        path.unlink()

  return step


def make_folder(path: str) -> Step:
  """Creates an empty folder, in the place of a file if there is one."""

  def step(folder: Path) -> None:
    (folder / path).unlink(missing_ok=True)
    (folder / path).mkdir(parents=True)

  return step


def fifo(path: str) -> Step:
  """Creates a named pipe that nobody writes to."""

  def step(folder: Path) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).unlink(missing_ok=True)
    os.mkfifo(folder / path)

  return step


def link(path: str, target: str) -> Step:
  """Creates a symbolic link, in the place of a file if there is one."""

  def step(folder: Path) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).unlink(missing_ok=True)
    (folder / path).symlink_to(target)

  return step


def move(old: str, new: str) -> Step:
  """Renames a file or folder."""

  def step(folder: Path) -> None:
    (folder / new).parent.mkdir(parents=True, exist_ok=True)
    (folder / old).rename(folder / new)

  return step


def mode(path: str, bits: int) -> Step:
  """Changes the permissions."""

  def step(folder: Path) -> None:
    (folder / path).chmod(bits)

  return step


def tensors(file: str, change: Callable[[dict[str, np.ndarray]], Any]) -> Step:
  """Calls `change` with the arrays of a safetensors file, by name, and writes them back."""

  def step(folder: Path) -> None:
    arrays = {name: array.copy() for name, array in load_file(folder / file).items()}
    change(arrays)
    save_file(arrays, folder / file, metadata={"format": "pt"})

  return step


def header(file: str, change: Callable[[dict[str, Any]], Any]) -> Step:
  """Calls `change` with the header of a safetensors file, and writes it back as it is."""

  def step(folder: Path) -> None:
    content = (folder / file).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    values = json.loads(content[8 : 8 + length])
    change(values)
    text = json.dumps(values).encode()
    (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

  return step


def _found(folder: Path, pattern: str) -> list[Path]:
  found = sorted(folder.glob(pattern), reverse=True)
  assert found, f"the fixture has no {pattern}"
  return found
