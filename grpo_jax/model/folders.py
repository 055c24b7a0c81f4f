"""Folders of JSON and safetensors files: read with one line for what is wrong, written whole or not at all."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

import jax.numpy as _  # its import names bfloat16 to numpy, without which safetensors cannot read it
import numpy as np
from safetensors import SafetensorError, safe_open

from grpo_jax.settings import ConfigError

MAPPED_BYTES = 1 << 29


def read_json(file: Path) -> dict[str, Any]:
  """An object. Raises ConfigError."""
  try:
    values = json.loads(file.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise ConfigError(
      f"{file} is missing: the folder must be one that transformers saved"
    ) from None
  except ValueError as error:
    raise ConfigError(f"{file} is not JSON ({error}): download or save it again") from None
  if not isinstance(values, dict):
    raise ConfigError(f"{file} is not a JSON object: download or save it again")
  return values


def write_json(file: Path, values: Mapping[str, Any]) -> None:
  file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[Path]:
  """Yields a folder to write into, which becomes `path` at the end. Raises ConfigError where that holds something."""
  target = Path(path).expanduser().resolve()
  if target.exists() and (not target.is_dir() or any(target.iterdir())):
    raise ConfigError(f"{target} exists and is not an empty folder: choose another or remove it")
  partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
  partial.mkdir(parents=True)
  try:
    yield partial
    os.replace(partial, target)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def weight_files(folder: Path) -> list[Path]:
  """model.safetensors, or the files that its index lists. Raises ConfigError where there is neither, or one is missing."""
  index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
  if single.is_file():
    return [single]
  if not index.is_file():
    pickled = " (a .bin is not read: unpickling can run code)" if any(folder.glob("*.bin")) else ""
    raise ConfigError(
      f"{folder} has no model.safetensors{pickled}: download or save it as safetensors"
    )
  weight_map = read_json(index).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise ConfigError(f"{index} has no weight_map: download it again")
  files = [folder / name for name in sorted(set(weight_map.values()))]
  for file in files:
    if not file.is_file():
      raise ConfigError(f"{file} is missing, {index.name} lists it: download it again")
  return files


class Tensors:
  """The tensors of safetensors files, by name. One file is open at a time, and opened anew after MAPPED_BYTES: pages that were
  read stay in memory for as long as it is."""

  def __init__(self, files: Sequence[Path]):
    self._files: dict[str, Path] = {}
    self.shapes: dict[str, tuple[int, ...]] = {}
    self.dtypes: dict[str, str] = {}  # such as BF16
    self._path, self._mapped, self._opened = None, 0, None
    for file in files:
      opened = self._open(file)
      for name in opened.keys():
        about = opened.get_slice(name)
        self._files[name], self.shapes[name], self.dtypes[name] = (
          file,
          tuple(about.get_shape()),
          about.get_dtype(),
        )

  def read(self, name: str, start: int, index: tuple[slice, ...]) -> np.ndarray:
    """What `index` says of the tensor, its first axis counted from `start`."""
    first, *rest = index
    array = self._open(self._files[name]).get_slice(name)[
      slice(first.start + start, first.stop + start), *rest
    ]
    self._mapped += array.nbytes
    return array

  def _open(self, file):
    if file != self._path or self._mapped > MAPPED_BYTES:
      try:
        self._path, self._mapped, self._opened = file, 0, safe_open(file, framework="numpy")
      except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is damaged or cut off ({error}): download it again") from None
    return self._opened
