"""Counts floating-point operations of matrix products, convolutions and kernels.

All other instructions are elementwise or reductions. Memory traffic bounds their time.
"""

import math
import re

import numpy as np

from grpo_jax.around.planning.cost.hlo import Array, Computation, Instruction


def flops(instruction: Instruction, computation: Computation) -> float:
  """The operations of one instruction. A multiplication and its addition count as 2."""
  if instruction.opcode == "dot":
    return _dot(instruction, computation)
  if instruction.opcode == "convolution":
    return _convolution(instruction, computation)
  if instruction.opcode == "custom-call":
    return _attention_of_cudnn(instruction) or declared(instruction, "flops")
  return 0.0


def _attention_of_cudnn(instruction: Instruction) -> float:
  """The operations of a cuDNN attention kernel. 0 for any other instruction.

  A forward pass has two matrix products of the scores' size, a backward pass five. With a causal
  mask, the kernel computes half of the scores.
  """
  if "__cudnn$fmhaSoftmax" not in instruction.attributes:
    return 0.0
  numbers = instruction.attribute(
    r'"intermediate_tensor_shape": \{[^\]]*"dimensions": \[([^\]]*)\]'
  )
  scores = math.prod(int(number) for number in re.findall(r"\d+", numbers))
  products = 5 if "__cudnn$fmhaSoftmaxBackward" in instruction.attributes else 2
  share = 0.5 if '"mask_type": "CAUSAL"' in instruction.attributes else 1.0
  head_size = instruction.arrays[0].dims[-1]  # of the output, or of the gradient of the queries
  return 2.0 * share * products * scores * head_size


def declared(instruction: Instruction, name: str) -> float:
  """The entry "flops" or "bytes_accessed" of a kernel's own cost estimate. 0 if there is none."""
  return float(instruction.attribute(rf'"{name}":\s*"?(\d+)') or 0)


def _dot(instruction: Instruction, computation: Computation) -> float:
  left = computation.operand(instruction, 0).arrays[0]
  contracted = _numbers(instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}"))
  return 2.0 * _elements(instruction) * math.prod(left.dims[d] for d in contracted)


def _convolution(instruction: Instruction, computation: Computation) -> float:
  """The operations of a convolution, without products that involve padding.

  The TPU compiler writes a batch of matrix products as a convolution whose window spans the batch,
  with padding or dilation. Most of its products involve padding, and the TPU skips them.
  """
  left = computation.operand(instruction, 0).arrays[0]
  right = computation.operand(instruction, 1).arrays[0]
  labels = instruction.attribute(r"dim_labels=([\w\->]+)")  # such as b01f_01io->b01f
  left_labels, right_labels, out_labels = re.split(r"_|->", labels)
  # In a grouped convolution, an output feature uses only the inputs of its group.
  groups = int(instruction.attribute(r"feature_group_count=(\d+)") or 1)
  batch_groups = int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
  batch = left.dims[left_labels.index("b")] // batch_groups
  features_in = left.dims[left_labels.index("f")] // groups
  features_out = right.dims[right_labels.index("o")]
  products = float(batch * features_in * features_out)
  for axis in filter(str.isdigit, out_labels):
    sizes = [
      array.dims[names.index(axis)]
      for array, names in (
        (left, left_labels),
        (right, right_labels),
        (instruction.arrays[0], out_labels),
      )
    ]
    products *= _valid_pairs(instruction, int(axis), *sizes)
  return 2.0 * products


def _valid_pairs(instruction: Instruction, axis: int, left: int, right: int, out: int) -> int:
  """How many pairs (output position, window position) along an axis read an element, not padding.

  Args:
    instruction: The convolution, whose attribute `window` is read.
    axis: The number of the spatial axis.
    left, right, out: The sizes of the left operand, the window and the output along this axis.
  """
  window = instruction.attribute(r"window=\{([^}]*)\}")  # such as size=3x3 stride=2x2 pad=1_1x0_0

  def value(key: str, default: str) -> str:
    found = re.search(rf"\b{key}=(\S+)", window)
    return found[1].split("x")[axis] if found else default

  stride, left_dilation = int(value("stride", "1")), int(value("lhs_dilate", "1"))
  right_dilation, pad = int(value("rhs_dilate", "1")), int(value("pad", "0_0").split("_")[0])
  # Where each pair reads in the dilated left operand, which has zeros between its elements. Like
  # padding, these do not count.
  positions = np.arange(out)[:, None] * stride - pad + np.arange(right) * right_dilation
  inside = (positions >= 0) & (positions < (left - 1) * left_dilation + 1)
  return int((inside & (positions % left_dilation == 0)).sum())


def _elements(instruction: Instruction) -> int:
  array: Array = instruction.arrays[0]
  return math.prod(array.dims)


def _numbers(text: str) -> list[int]:
  return [int(number) for number in text.split(",") if number]
