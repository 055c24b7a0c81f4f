"""Weights in FP8, with one scale for each block of a matrix (DeepSeek-V3) or for a whole matrix.

The tensor NAME holds float8_e4m3fn. The tensor NAME_scale_inv holds the factors that dequantise it.
"""

from collections.abc import Mapping
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from grpo_jax.model.huggingface.config_fields import Refuse
from grpo_jax.settings import ConfigError, shown

DTYPE = "F8_E4M3"  # as safetensors names it
SCALE = "_scale_inv"  # the suffix for the name of a matrix's scales
OTHERS = ("activation_scale", "input_scale")  # ignored: activations are not quantised here

Block = tuple[int, int]  # rows and columns


def check(quantization: Any, refuse: Refuse) -> None:
  """Refuses a `quantization_config` other than FP8 in e4m3, or MXFP4 (see packed_experts.py)."""
  key = "quantization_config"
  method = quantization.get("quant_method") if isinstance(quantization, dict) else None
  if method == "mxfp4":
    return
  if method != "fp8":
    refuse(
      key,
      f"is {shown(quantization)}: choose a checkpoint in FP8, in MXFP4 or without quantisation",
    )
  if quantization.get("fmt") not in (None, "e4m3"):
    refuse(key, f"has the format {shown(quantization['fmt'])}: choose a checkpoint in e4m3")
  size = quantization.get("weight_block_size")
  is_block = isinstance(size, list) and len(size) == 2
  if size is not None and not (is_block and all(type(x) is int and x > 0 for x in size)):
    refuse(key, f"has the block size {shown(size)}: it must be two positive ints or null")


def block_of(values: Mapping[str, Any]) -> Block | None:
  """The block size in a config.json that passed `check`. None means one scale for each matrix."""
  size = (values.get("quantization_config") or {}).get("weight_block_size")
  return None if size is None else (size[0], size[1])


def check_scales(
  file: Path, name: str, shape: tuple[int, ...], found: tuple[int, ...], block: Block | None
) -> None:
  """Raises ConfigError unless the scales of a matrix, whose shape is `found`, fit its blocks."""
  needed = () if block is None else tuple(-(-n // size) for n, size in zip(shape, block))
  is_single = block is None and math.prod(found) == 1
  if len(shape) != 2 or not (is_single or found == needed):
    raise ConfigError(
      f"{file}: tensor {name}{SCALE} is {found}, by its quantization_config it should be {needed}:"
      " correct either"
    )


def mapped(file: Path, name: str) -> np.ndarray:
  """Maps a float8_e4m3fn tensor of a safetensors file, because safetensors has no numpy FP8."""
  with file.open("rb") as opened:
    length = int.from_bytes(opened.read(8), "little")
    header = json.loads(opened.read(length))[name]
  shape, offset = tuple(header["shape"]), 8 + length + header["data_offsets"][0]
  return np.memmap(file, ml_dtypes.float8_e4m3fn, "r", offset, shape)


def dequantised(
  part: np.ndarray, scales: np.ndarray, block: Block | None, start: tuple[int, int]
) -> np.ndarray:
  """Dequantises a part of a matrix to float32.

  Args:
    part: float8 [rows, columns].
    scales: The scales of the whole matrix: [blocks of rows, blocks of columns], or one number.
    block: The size of a block, or None for a single scale.
    start: The row and the column of the matrix where `part` begins.
  """
  if block is None:
    return part.astype(np.float32) * np.float32(scales.reshape(()))
  # The number of the block that each row and each column of the part belongs to.
  row, column = ((first + np.arange(n)) // size for first, n, size in zip(start, part.shape, block))
  return part.astype(np.float32) * scales.astype(np.float32)[row][:, column]
