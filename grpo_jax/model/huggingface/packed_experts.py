"""Unpacks experts whose tensors in a checkpoint differ from those in the family's table.

* MXFP4 (OCP Microscaling, section 5.2), in gpt-oss: NAME_blocks has two numbers of 4 bits in each
  byte, and NAME_scales has an exponent of 2 for each 32 neighbouring numbers.
* One tensor for all experts of a layer, in Qwen3.5, where the table has a tensor for each expert.
  The published Qwen3-VL checkpoints have the transposed matrices.
"""

from collections.abc import Callable
import functools

import ml_dtypes
import numpy as np

from grpo_jax.model.huggingface.folders import TensorFiles
from grpo_jax.settings import ConfigError

Index = tuple[slice, ...]
_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK, _BIAS = 32, 127  # numbers that share an exponent, and the bias of the stored exponent
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"


class UnpackedExperts:
  """Wraps `TensorFiles` so that expert tensors have the names and shapes of the family's table."""

  config = TensorFiles.config

  def __init__(self, files: TensorFiles, embed_dim: int) -> None:
    """Finds the packed experts in `files`.

    Args:
      files: The tensors of the checkpoint.
      embed_dim: D if the family's table has a tensor for each expert, or 0 if it has one for all
        experts. Transposed matrices are recognised by D.
    """
    self._files, self._embed_dim = files, embed_dim
    # For each unpacked tensor, a function that reads the part at an index.
    self._reads: dict[str, Callable[[Index], np.ndarray]] = {}
    # Copies, in which `_add_mxfp4` and `_add_each` replace packed tensors by unpacked ones.
    self.shapes, self.dtypes = dict(files.shapes), dict(files.dtypes)
    # Tensors with these names and other numbers of axes stay as they are, so that loading refuses
    # their names or shapes.
    for name, shape in files.shapes.items():
      if name.endswith(_BLOCKS) and len(shape) == 4:
        self._add_mxfp4(name.removesuffix(_BLOCKS), shape)
      elif embed_dim and name.endswith((_GATE_UP, _DOWN)) and len(shape) == 3:
        self._add_each(name, shape)

  def read(self, name: str, index: Index) -> np.ndarray:
    """Reads a part of a tensor, as `TensorFiles.read` does. MXFP4 becomes float32."""
    if name in self._reads:
      return self._reads[name](index)
    return self._files.read(name, index)

  def _add_mxfp4(self, name: str, shape: tuple[int, ...]) -> None:
    """Lists bytes [X, rows, columns / 32, 16] in MXFP4 as float32 [X, columns, rows]."""
    X, rows, blocks, _ = shape
    found = self._files.shapes.get(name + _SCALES)
    if found != shape[:-1]:
      raise ConfigError(
        f"{self._files.file_of[name + _BLOCKS]}: tensor {name}{_SCALES} is {found or 'missing'}, by"
        f" {name}{_BLOCKS} it should be {shape[:-1]}: download it again"
      )

    def read(index: Index) -> np.ndarray:
      experts, columns, rows_read = index
      # All columns are read, because several share a byte and an exponent.
      of_scales = experts, rows_read, slice(0, blocks)
      packed = self._files.read(name + _BLOCKS, (*of_scales, slice(0, _BLOCK // 2)))
      scales = self._files.read(name + _SCALES, of_scales)
      return dequantised(packed, scales).swapaxes(1, 2)[:, columns]

    del self.shapes[name + _BLOCKS], self.dtypes[name + _BLOCKS]
    del self.shapes[name + _SCALES], self.dtypes[name + _SCALES]
    self.shapes[name], self.dtypes[name] = (X, blocks * _BLOCK, rows), "F32"
    self._reads[name] = read

  def _add_each(self, name: str, shape: tuple[int, ...]) -> None:
    """Lists down_proj [X, rows, columns] as one matrix per expert, and gate_up_proj as two."""
    X, rows, columns = shape
    del self.shapes[name], self.dtypes[name]
    beginning, is_down = name.rsplit(".", 1)[0], name.endswith(_DOWN)
    parts = ["down_proj"] if is_down else ["gate_proj", "up_proj"]
    # Hugging Face stores [outputs, inputs]: gate_up_proj has D inputs, and down_proj D outputs. The
    # matrices of one of the two may be square, so both are looked at.
    of_D = [(f"{beginning}.gate_up_proj", 2), (f"{beginning}.down_proj", 1)]
    shapes = self._files.shapes
    found = {shapes[part][axis] for part, axis in of_D if len(shapes.get(part, ())) == 3}
    is_transposed = found != {self._embed_dim}
    if is_transposed:
      rows, columns = columns, rows
    height = rows // len(parts)

    # `first` is the row at which the matrix begins within gate_up_proj.
    def read(expert: int, first: int, index: Index) -> np.ndarray:
      of_rows, of_columns = index
      of_rows = slice(of_rows.start + first, of_rows.stop + first)
      in_file = (of_columns, of_rows) if is_transposed else (of_rows, of_columns)
      found = self._files.read(name, (slice(expert, expert + 1), *in_file))[0]
      return found.T if is_transposed else found

    for expert in range(X):
      for number, part in enumerate(parts):
        of_expert = f"{beginning}.{expert}.{part}.weight"
        self.shapes[of_expert], self.dtypes[of_expert] = (height, columns), self._files.dtypes[name]
        self._reads[of_expert] = functools.partial(read, expert, number * height)


def dequantised(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Dequantises numbers in MXFP4.

  Args:
    packed: uint8 [..., blocks, 16]. The lower 4 bits of a byte are the first of two numbers.
    scales: uint8 [..., blocks]: the exponent of each block, plus 127.

  Returns:
    float32 [..., 32 * blocks].
  """
  of_byte = np.stack([packed & 15, packed >> 4], axis=-1)
  values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)[of_byte]
  exponents = scales.astype(np.int32)[..., None, None] - _BIAS
  return np.ldexp(values, exponents).reshape(*packed.shape[:-2], -1)
