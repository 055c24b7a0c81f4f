"""How one tensor of a Hugging Face checkpoint becomes a leaf of the parameters, and back.

In this and the neighbouring files, a "tensor" is an array in a Hugging Face folder, and a "leaf" is
an array in the tree of parameters. "hf" marks what belongs to the tensor.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from typing import NamedTuple, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

Array = TypeVar("Array", np.ndarray, jax.Array)
Sizes = Mapping[str, int]  # the length of each axis letter


@dataclasses.dataclass(frozen=True)
class TensorSpec:
  """The names and axes of a tensor and of its leaf.

  Axes are the letters of grpo_jax/types.py. Axes of a tensor are separated by spaces, and several
  letters are one axis: "HE D" is a matrix whose rows run over the heads and, within a head, over
  its elements. Each letter in `leaf_axes` is an axis. 1 is an axis of length 1, which the leaf does
  not have. Where a tensor holds several leaves one after another, brackets list what each takes of
  an axis: "(HE,KE,KE) D" holds queries, keys and values, and "H(E,E) D" has two leaves for each
  head.

  Attributes:
    hf_name: The name of the tensor. In a table, {i} stands for the layer and {x} for the expert.
    leaf_name: The path of the leaf, with {i} for the layer.
    hf_axes: The axes of the tensor.
    leaf_axes: The axes of the leaf. With {x}, each expert has a tensor of its own but one leaf
      holds them all, on a first axis X that `leaf_axes` does not list.
    offset: Added to the tensor: some norms multiply by 1 + w.
    part: Which of those in brackets the leaf is.
    layers: The layers that have the tensor: those with this name in `LayerKind.parts`.
    when: The model has the tensor only where all these fields of ModelConfig are set, such as
      "qkv_bias" or "latent.query_rank".
    unless: The model lacks the tensor where this field of ModelConfig is set. "" names no field.
    expert: The number of the expert, or None where the tensor is not an expert's.
  """

  hf_name: str
  leaf_name: str
  hf_axes: str
  leaf_axes: str
  offset: float = 0.0
  part: int = 0
  layers: str = "all"
  when: tuple[str, ...] = ()
  unless: str = ""
  expert: int | None = None

  def tensor_shape(self, sizes: Sizes) -> tuple[int, ...]:
    """The shape of the tensor, with all leaves that it holds."""
    return tuple(
      _length(axis.outer, sizes) * sum(_length(x, sizes) for x in axis.parts)
      for axis in _axes(self.hf_axes)
    )

  def hf_shape(self, sizes: Sizes) -> tuple[int, ...]:
    """The shape of the leaf's part of the tensor."""
    return tuple(_length(axis, sizes) for axis in self._own_axes)

  def leaf_shape(self, sizes: Sizes) -> tuple[int, ...]:
    """The shape of the leaf, which holds all experts."""
    return tuple(sizes[letter] for letter in self._experts_axis + self.leaf_axes)

  def starts(self, sizes: Sizes) -> tuple[int, ...] | None:
    """Where the leaf's part begins on each axis, or None where the tensor has it in pieces."""
    if any(axis.outer for axis in _axes(self.hf_axes)):
      return None
    return tuple(
      sum(_length(x, sizes) for x in axis.parts[: self.part if len(axis.parts) > 1 else 0])
      for axis in _axes(self.hf_axes)
    )

  def part_of(self, tensor: np.ndarray, sizes: Sizes) -> np.ndarray:
    """The leaf's part of the tensor."""
    for number, axis in enumerate(_axes(self.hf_axes)):
      if len(axis.parts) > 1:
        ends = np.cumsum([_length(x, sizes) for x in axis.parts])
        start = ends[self.part] - _length(axis.parts[self.part], sizes)
        shape = tensor.shape
        split = tensor.reshape(*shape[:number], _length(axis.outer, sizes), ends[-1], -1)
        split = split[..., start : ends[self.part], :]
        tensor = split.reshape(*shape[:number], -1, *shape[number + 1 :])
    return tensor

  def joined(self, parts: Sequence[np.ndarray], sizes: Sizes) -> np.ndarray:
    """The tensor of the parts of all its leaves, in their order. The inverse of `part_of`."""
    for number, axis in enumerate(_axes(self.hf_axes)):
      if len(axis.parts) > 1:
        shape = self.tensor_shape(sizes)
        outer = (*shape[:number], _length(axis.outer, sizes))
        rest = math.prod(shape[number + 1 :])
        split = [
          x.reshape(*outer, _length(letters, sizes), rest)
          for x, letters in zip(parts, axis.parts, strict=True)
        ]
        return np.concatenate(split, axis=-2).reshape(shape)
    return parts[0]

  def hf_sharding(self, leaf_sharding: NamedSharding) -> NamedSharding:
    """Splits the tensor so that each device reads the part that it holds of the leaf."""
    experts = leaf_sharding.spec[: len(self._experts_axis)]
    mesh_axes = dict(zip(self.leaf_axes, leaf_sharding.spec[len(experts) :]))
    # Of several letters in one axis, the mesh can only split the first.
    spec = PartitionSpec(*experts, *(mesh_axes.get(axis[0]) for axis in self._own_axes))
    return NamedSharding(leaf_sharding.mesh, spec)

  def from_hf(self, tensor: Array, sizes: Sizes) -> Array:
    """The leaf, from its part of the tensor. Those of experts come stacked on a first axis."""
    letters = self._experts_axis + self._own_letters
    order = [letters.index(letter) for letter in self._experts_axis + self.leaf_axes]
    leaf = tensor.reshape([sizes[letter] for letter in letters]).transpose(order)
    return leaf + np.float32(self.offset) if self.offset else leaf

  def to_hf(self, leaf: np.ndarray, sizes: Sizes) -> np.ndarray:
    """The leaf's part of the tensor.

    Args:
      leaf: The leaf. Of a leaf that holds all experts, it is the slice of number `expert`, without
        the axis X.
      sizes: The length of each axis letter.
    """
    order = [self.leaf_axes.index(letter) for letter in self._own_letters]
    values = leaf - np.float32(self.offset) if self.offset else leaf
    # A scalar would become an array of one number.
    return np.ascontiguousarray(values.transpose(order)).reshape(self.hf_shape(sizes))

  @property
  def _own_axes(self) -> list[str]:
    """The letters of each axis of the leaf's part."""
    return [
      axis.outer + axis.parts[self.part if len(axis.parts) > 1 else 0]
      for axis in _axes(self.hf_axes)
    ]

  @property
  def _own_letters(self) -> str:
    return "".join(self._own_axes).replace("1", "")

  @property
  def _experts_axis(self) -> str:
    return "" if self.expert is None else "X"


class _Axis(NamedTuple):
  """An axis of a tensor: the letters outside of the brackets, and what is listed in them."""

  outer: str
  parts: tuple[str, ...]


@functools.cache
def _axes(hf_axes: str) -> tuple[_Axis, ...]:
  """The axes of a tensor. One without brackets has one part."""
  axes = []
  for axis in hf_axes.split():
    outer, _, parts = axis.partition("(") if "(" in axis else ("", "", axis)
    axes.append(_Axis(outer, tuple(parts.rstrip(")").split(","))))
  return tuple(axes)


def _length(letters: str, sizes: Sizes) -> int:
  return math.prod(sizes[letter] for letter in letters if letter != "1")
