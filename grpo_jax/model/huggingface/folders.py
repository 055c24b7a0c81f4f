"""Folders of JSON and safetensors files. A folder is written completely or not at all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import json
import os
from pathlib import Path
import re
import shutil
import stat
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from grpo_jax import files, gguf_file
from grpo_jax.model.huggingface import fp8
from grpo_jax.settings import ConfigError

MAPPED_BYTES = 1 << 29  # how much of a file is read before it is opened again


def read_json(file: Path) -> dict[str, Any]:
  """Reads a JSON object. Raises ConfigError if the file is missing or holds anything else."""
  try:
    return files.json_object(files.read_bytes(file))
  except FileNotFoundError:
    raise ConfigError(
      f"{file} is missing: the folder must be one that transformers saved"
    ) from None
  except OSError as error:
    raise ConfigError(f"{file} cannot be read ({error}): download or save it again") from None
  except ValueError as error:
    raise ConfigError(f"{file} is not JSON ({error}): download or save it again") from None


def write_json(file: Path, values: Mapping[str, Any]) -> None:
  """Writes `values` as an indented JSON object."""
  file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[Path]:
  """Yields a temporary folder beside `path`, and renames it to `path` when the block ends.

  If the `with` block raises, the temporary folder is removed and `path` stays as it was.

  Raises:
    ConfigError: `path` exists and is not an empty folder, or it cannot name a folder.
    OSError: The folder cannot be written. The error names `path`, not the temporary folder.
  """
  target = Path(path).expanduser().resolve()
  if target.exists() and (not target.is_dir() or any(target.iterdir())):
    raise ConfigError(f"{target} exists and is not an empty folder: choose another or remove it")
  partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
  try:
    try:
      partial.mkdir(parents=True)
    except OSError as error:  # a path that cannot name a folder is the user's error, not the disk's
      if error.errno not in files.NO_FOLDER:
        raise
      raise ConfigError(f"{target} cannot be created: {error.strerror}") from error
    yield partial
    os.replace(partial, target)
  except OSError as error:
    # An error without a file name is taken for one of the temporary folder.
    if error.errno and str(error.filename or partial).startswith(str(partial)):
      error.filename = str(target)
    raise
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
  """Writes a safetensors file with the mode of a new file. Raises OSError if writing fails."""
  file.touch()
  mode = stat.S_IMODE(file.stat().st_mode)
  try:
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)  # safetensors makes files that only their owner can read
  except SafetensorError as error:
    # safetensors reports a full disk, for example, only in the text of its own error.
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number is None:
      raise
    raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error


def weight_files(folder: Path) -> list[Path]:
  """The safetensors files of a model: model.safetensors, or the files that its index lists.

  Raises:
    ConfigError: The folder has neither, or the index lists a missing file or one in another folder.
  """
  single = folder / "model.safetensors"
  if single.is_file():
    return [single]
  index = folder / "model.safetensors.index.json"
  if not index.is_file():
    shards = sorted(file.name for file in folder.glob("model-*.safetensors"))
    if shards:
      raise ConfigError(
        f"{folder} has {len(shards)} parts of a model, such as {shards[0]}, and no {index.name}"
        " that says what is in them: download or save it again"
      )
    pickled = " (a .bin is not read: unpickling can run code)" if any(folder.glob("*.bin")) else ""
    raise ConfigError(
      f"{folder} has no model.safetensors{pickled}: download or save it as safetensors"
      f"{gguf_file.names_in(folder)}"
    )
  weight_map = read_json(index).get("weight_map")
  if not isinstance(weight_map, dict) or not weight_map:
    raise ConfigError(f"{index} has no weight_map: download it again")
  for name in weight_map.values():
    # Only a bare file name is allowed: with a path, the index could make us read any file.
    if not isinstance(name, str) or Path(name).name != name:
      raise ConfigError(f"{index} lists {name!r}, which is not the name of a file beside it")
  parts = [folder / name for name in sorted(set(weight_map.values()))]
  for file in parts:
    if not file.is_file():
      raise ConfigError(f"{file} is missing, {index.name} lists it: download it again")
  return parts


class TensorFiles:
  """Reads tensors, by name, from safetensors files.

  One file is open at a time. It is opened again after every MAPPED_BYTES, because pages that were
  read stay in memory for as long as the file is open.

  Attributes:
    shapes: The shape of each tensor, by its name.
    dtypes: The dtype of each tensor as safetensors names it, such as BF16. FP8 counts as F32.
    file_of: The file of each tensor, by its name.
    config: The name of the model's config in error messages.
  """

  config = "config.json"

  def __init__(
    self,
    files: Sequence[Path],
    rename: Callable[[str], str | None] | None = None,
    fp8_block: fp8.Block | None = None,
  ) -> None:
    """Reads the headers of the files.

    Args:
      files: The safetensors files.
      rename: rename(name in the file) -> the tensor's name here, or None to leave the tensor out.
      fp8_block: The block size of matrices in FP8, or None if each has a single scale.

    Raises:
      ConfigError: A file is damaged, two files have the same tensor, or FP8 scales do not fit.
    """
    self.shapes: dict[str, tuple[int, ...]] = {}
    self.dtypes: dict[str, str] = {}
    self.file_of: dict[str, Path] = {}
    self._name_of: dict[str, str] = {}  # the name of each tensor in its file
    self._opened: Any = None  # the file that is open now, as `safe_open` returned it
    self._opened_path: Path | None = None
    self._bytes_read = 0  # since the file was opened
    for file in files:
      opened = self._open(file)
      for name_in_file in opened.keys():
        name = rename(name_in_file) if rename else name_in_file
        if name is None:
          continue
        if name in self.file_of:
          raise ConfigError(
            f"{file} and {self.file_of[name]} both have the tensor {name}: download them again"
          )
        header = opened.get_slice(name_in_file)
        self.file_of[name], self._name_of[name] = file, name_in_file
        self.shapes[name] = tuple(header.get_shape())
        self.dtypes[name] = header.get_dtype()
    # A matrix in FP8 is read as float32, and its scales are not listed as a tensor.
    self._block, self._fp8 = fp8_block, set[str]()
    for name in [name for name, dtype in self.dtypes.items() if dtype == fp8.DTYPE]:
      if name + fp8.SCALE in self.shapes:  # otherwise loading refuses the dtype
        self._fp8.add(name)
        self.dtypes[name] = "F32"
        fp8.check_scales(
          self.file_of[name], name, self.shapes[name], self.shapes.pop(name + fp8.SCALE), fp8_block
        )
    if self._fp8:  # the scales of activations, which are not quantised here
      self.shapes = {k: v for k, v in self.shapes.items() if not k.endswith(fp8.OTHERS)}

  def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a part of a tensor, in the dtype of the file, or as float32 where that is FP8.

    Args:
      name: The name of the tensor.
      index: A slice for each axis, with both ends.
    """
    if name in self._fp8:
      return self._read_fp8(name, index)
    opened = self._open(self.file_of[name])
    array = opened.get_slice(self._name_of[name])[index]
    self._bytes_read += array.nbytes
    return array

  def _read_fp8(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a part of a matrix in FP8, dequantised to float32."""
    rows, columns = index
    part = fp8.mapped(self.file_of[name], self._name_of[name])[rows, columns]
    of_scales = name + fp8.SCALE
    opened = self._open(self.file_of[of_scales])
    scales = opened.get_tensor(self._name_of[of_scales])
    return fp8.dequantised(part, scales, self._block, (rows.start, columns.start))

  def _open(self, file: Path) -> Any:
    """Opens a file, or returns the open one if it is this file and less than MAPPED_BYTES read."""
    if file != self._opened_path or self._bytes_read > MAPPED_BYTES:
      try:
        self._opened = safe_open(file, framework="numpy")
      except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is damaged or cut off ({error}): download it again") from None
      self._opened_path = file
      self._bytes_read = 0
    return self._opened
