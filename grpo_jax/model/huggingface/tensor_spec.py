"""How one tensor of a Hugging Face checkpoint becomes a leaf of the parameters, and back.

In this and the neighbouring files, a "tensor" is an array in a Hugging Face folder, and a "leaf" is
an array in the tree of parameters. "hf" marks what belongs to the tensor.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import TypeVar

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
  its elements. Each letter in `leaf_axes` is an axis.

  Attributes:
    hf_name: The name of the tensor. In a table, {i} stands for the layer and {x} for the expert.
    leaf_name: The path of the leaf, with {i} for the layer.
    hf_axes: The axes of the tensor, or of the leaf's part of it (see `before`).
    leaf_axes: The axes of the leaf. With {x}, each expert has a tensor of its own but one leaf
      holds them all, on a first axis X that `leaf_axes` does not list.
    offset: Added to the tensor: some norms multiply by 1 + w.
    before: The first axes, such as "HE KE", of other leaves that come before this one, where one
      tensor holds several leaves one after another on its first axis.
    after: The same for those that come after it.
    layers: The layers that have the tensor: "all", "dense" (with an MLP) or "sparse" (with
      experts).
    when: The field of ModelConfig that says whether layers have the tensor, or "" if all do.
    expert: The number of the expert, or None where the tensor is not an expert's.
  """

  hf_name: str
  leaf_name: str
  hf_axes: str
  leaf_axes: str
  offset: float = 0.0
  before: str = ""
  after: str = ""
  layers: str = "all"
  when: str = ""
  expert: int | None = None

  def hf_shape(self, sizes: Sizes) -> tuple[int, ...]:
    """The shape of the tensor, or of the leaf's part of it."""
    return tuple(math.prod(sizes[letter] for letter in axis) for axis in self.hf_axes.split())

  def leaf_shape(self, sizes: Sizes) -> tuple[int, ...]:
    """The shape of the leaf, which holds all experts."""
    return tuple(sizes[letter] for letter in self._experts_axis + self.leaf_axes)

  def hf_range(self, sizes: Sizes) -> tuple[int, int, int]:
    """Where the leaf's part lies on the tensor's first axis: (start, end, length of the axis)."""

    def length(axes: str) -> int:
      return sum(math.prod(sizes[letter] for letter in axis) for axis in axes.split())

    start = length(self.before)
    end = start + self.hf_shape(sizes)[0]
    return start, end, end + length(self.after)

  def hf_sharding(self, leaf_sharding: NamedSharding) -> NamedSharding:
    """Splits the tensor so that each device reads the part that it holds of the leaf."""
    experts = leaf_sharding.spec[: len(self._experts_axis)]
    mesh_axes = dict(zip(self.leaf_axes, leaf_sharding.spec[len(experts) :]))
    # Of several letters in one axis, the mesh can only split the first.
    spec = PartitionSpec(*experts, *(mesh_axes[axis[0]] for axis in self.hf_axes.split()))
    return NamedSharding(leaf_sharding.mesh, spec)

  def from_hf(self, tensor: Array, sizes: Sizes) -> Array:
    """The leaf. Tensors of experts come stacked on a first axis."""
    letters = self._experts_axis + self.hf_axes.replace(" ", "")
    order = [letters.index(letter) for letter in self._experts_axis + self.leaf_axes]
    leaf = tensor.reshape([sizes[letter] for letter in letters]).transpose(order)
    return leaf + np.float32(self.offset) if self.offset else leaf

  def to_hf(self, leaf: np.ndarray, sizes: Sizes) -> np.ndarray:
    """The tensor, or the leaf's part of it.

    Args:
      leaf: The leaf. Of a leaf that holds all experts, it is the slice of number `expert`, without
        the axis X.
      sizes: The length of each axis letter.
    """
    letters = self.hf_axes.replace(" ", "")
    order = [self.leaf_axes.index(letter) for letter in letters]
    values = leaf - np.float32(self.offset) if self.offset else leaf
    return np.ascontiguousarray(values.transpose(order).reshape(self.hf_shape(sizes)))

  @property
  def _experts_axis(self) -> str:
    return "" if self.expert is None else "X"
