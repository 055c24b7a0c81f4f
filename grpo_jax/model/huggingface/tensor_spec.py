"""Converts a tensor of a Hugging Face checkpoint to a leaf of the parameters, and back.

In this folder, a "tensor" is an array in a Hugging Face checkpoint, and a "leaf" is an array in the
tree of parameters. Names, axes and shapes that begin with "hf" are those of the tensor.
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
  """Describes the names and axes of a tensor and of a leaf that it holds.

  Axes are letters, whose lengths `families.sizes` defines. Spaces separate the axes of a tensor,
  and several letters are one axis: "HE D" is a matrix whose rows run over the heads and, within a
  head, over its elements. Each letter in `leaf_axes` is an axis. 1 is an axis of length 1, which
  the leaf does not have. If a tensor concatenates several leaves along an axis, brackets list the
  letters of each leaf: "(HE,KE,KE) D" holds queries, keys and values, and "H(E,E) D" has two leaves
  for each head.

  Attributes:
    hf_name: The name of the tensor. In a table, {i} stands for the layer and {x} for the expert.
    leaf_name: The path of the leaf, with {i} for the layer.
    hf_axes: The axes of the tensor.
    leaf_axes: The axes of the leaf. With {x}, each expert has a separate tensor, but one leaf holds
      all experts on a first axis X, which `leaf_axes` omits.
    offset: A number that the leaf is larger than the tensor by: some norms multiply by 1 + w.
    part: The position of the leaf in the brackets of `hf_axes`.
    layers: A name in `LayerKind.parts`. Only layers with this part have the tensor.
    when: The model has the tensor only if all these fields of ModelConfig are set, such as
      "qkv_bias" or "latent.query_rank".
    unless: The model lacks the tensor if this field of ModelConfig is set. "" names no field.
    expert: The number of the expert, or None if the tensor is not one expert's.
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
    """The shape of the whole tensor, including all leaves that it holds."""
    return tuple(
      _length(axis.outer, sizes) * sum(_length(x, sizes) for x in axis.parts)
      for axis in _axes(self.hf_axes)
    )

  def hf_shape(self, sizes: Sizes) -> tuple[int, ...]:
    """The shape of the leaf's part of the tensor."""
    return tuple(_length(axis, sizes) for axis in self._own_axes)

  def leaf_shape(self, sizes: Sizes) -> tuple[int, ...]:
    """The shape of the leaf, with an axis for all experts if it has one."""
    return tuple(sizes[letter] for letter in self._experts_axis + self.leaf_axes)

  def starts(self, sizes: Sizes) -> tuple[int, ...] | None:
    """Where the leaf's part of the tensor begins on each axis. None if it is not contiguous."""
    if any(axis.outer for axis in _axes(self.hf_axes)):
      return None
    return tuple(
      sum(_length(x, sizes) for x in axis.parts[: self.part if len(axis.parts) > 1 else 0])
      for axis in _axes(self.hf_axes)
    )

  def part_of(self, tensor: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Cuts the leaf's part out of the whole tensor."""
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
    """Joins the parts of all leaves, in the order of the brackets. Inverts `part_of`."""
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
    """The sharding with which each device reads the values that it will hold of the leaf."""
    experts = leaf_sharding.spec[: len(self._experts_axis)]
    mesh_axes = dict(zip(self.leaf_axes, leaf_sharding.spec[len(experts) :]))
    # If several letters form one axis, the mesh can split only the first letter.
    spec = PartitionSpec(*experts, *(mesh_axes.get(axis[0]) for axis in self._own_axes))
    return NamedSharding(leaf_sharding.mesh, spec)

  def from_hf(self, tensor: Array, sizes: Sizes) -> Array:
    """Turns a part of the tensor into the leaf. Experts are already stacked on a first axis."""
    letters = self._experts_axis + self._own_letters
    order = [letters.index(letter) for letter in self._experts_axis + self.leaf_axes]
    leaf = tensor.reshape([sizes[letter] for letter in letters]).transpose(order)
    return leaf + np.float32(self.offset) if self.offset else leaf

  def to_hf(self, leaf: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Turns the leaf into its part of the tensor, as a contiguous array.

    Args:
      leaf: The leaf, or its slice for `expert`, without the axis X.
      sizes: The length of each axis letter.
    """
    order = [self.leaf_axes.index(letter) for letter in self._own_letters]
    values = leaf - np.float32(self.offset) if self.offset else leaf
    # The reshape is for scalars, which ascontiguousarray turns into arrays of one number.
    return np.ascontiguousarray(values.transpose(order)).reshape(self.hf_shape(sizes))

  @property
  def _own_axes(self) -> list[str]:
    """The letters of each axis of the leaf's part of the tensor."""
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
  """An axis of a tensor: the letters before the brackets, and the letters of each leaf in them."""

  outer: str
  parts: tuple[str, ...]


@functools.cache
def _axes(hf_axes: str) -> tuple[_Axis, ...]:
  """Parses `TensorSpec.hf_axes`. An axis without brackets has one part and no outer letters."""
  axes = []
  for axis in hf_axes.split():
    outer, _, parts = axis.partition("(") if "(" in axis else ("", "", axis)
    axes.append(_Axis(outer, tuple(parts.rstrip(")").split(","))))
  return tuple(axes)


def _length(letters: str, sizes: Sizes) -> int:
  return math.prod(sizes[letter] for letter in letters if letter != "1")
