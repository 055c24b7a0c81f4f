"""The tensors of PEFT's adapters: A [r, inputs] and B [outputs, r] of each module.

A module of Hugging Face may hold several kernels, such as Phi-3's qkv_proj. PEFT has one adapter
for the module, while grpo_jax has one for each kernel. When PEFT's adapter is read, each kernel
gets A and the kernel's rows of B. When the adapters of n kernels are saved, their A are
concatenated to [n r, inputs], and B [outputs, n r] has a block of r columns for each kernel, which
is 0 in the rows of the other kernels. This adapter of rank n r computes the same. When it is read
again, each kernel gets back its block of A and B.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from grpo_jax.model.config import ModelConfig
from grpo_jax.model.huggingface.config_json import saved_tensors
from grpo_jax.model.huggingface.tensor_spec import Sizes, TensorSpec
from grpo_jax.model.lora import can_adapt

PREFIX = "base_model.model."  # how PEFT's tensor names begin
RANK = "r"  # the axis letter of the rank


class Part(NamedTuple):
  """The adapter of one kernel.

  Attributes:
    kernel: The name of the kernel, such as "q".
    a: The spec of lora_a.
    b: The spec of lora_b. Its tensor also holds the rows of the module's other kernels.
  """

  kernel: str
  a: TensorSpec
  b: TensorSpec


class ModuleAdapter(NamedTuple):
  """The adapter of one module of one layer, which holds the kernels of `parts`."""

  parts: tuple[Part, ...]

  @property
  def module(self) -> str:
    """The last part of the module's name, such as "qkv_proj"."""
    return self.a_name.split(".")[-3]

  @property
  def a_name(self) -> str:
    """The name of the tensor of A."""
    return self.parts[0].a.hf_name

  @property
  def b_name(self) -> str:
    """The name of the tensor of B."""
    return self.parts[0].b.hf_name

  def shapes(self, sizes: Sizes, blocks: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors A and B, by their names.

    Args:
      sizes: The length of each axis letter, including RANK.
      blocks: How many blocks of that rank the adapter has: 1, or one for each kernel.
    """
    sizes = _widened(sizes, blocks)
    return {spec.hf_name: spec.tensor_shape(sizes) for spec in self.parts[0][1:]}

  def split(self, a: np.ndarray, b: np.ndarray, sizes: Sizes) -> dict[str, np.ndarray] | None:
    """Splits the tensors A and B into the leaves of all kernels.

    Args:
      a: The tensor A, [rank, inputs].
      b: The tensor B, [outputs, rank]. The adapter has blocks if the rank exceeds that in `sizes`.
      sizes: The length of each axis letter, including RANK.

    Returns:
      The leaves by their names, or None if B is not zero outside of the blocks.
    """
    r, leaves = sizes[RANK], {}
    for number, part in enumerate(self.parts):
      rows, block = part.b.part_of(b, sizes), slice(None)
      if len(a) > r:
        block = slice(number * r, (number + 1) * r)
        if np.delete(rows, block, axis=1).any():
          return None
      leaves[part.a.leaf_name] = part.a.from_hf(a[block], sizes)
      leaves[part.b.leaf_name] = part.b.from_hf(rows[:, block], sizes)
    return leaves

  def joined(self, leaf: Callable[[TensorSpec], np.ndarray], sizes: Sizes) -> dict[str, np.ndarray]:
    """Joins the leaves of all kernels into the tensors A and B, with a block for each kernel.

    `split` inverts it. `leaf(spec)` returns the leaf of a spec as an array on the host.
    """
    r, n = sizes[RANK], len(self.parts)
    a = [part.a.to_hf(leaf(part.a), sizes) for part in self.parts]
    b = [
      np.pad(part.b.to_hf(leaf(part.b), sizes), ((0, 0), (number * r, (n - 1 - number) * r)))
      for number, part in enumerate(self.parts)
    ]
    joined_b = self.parts[0].b.joined(b, _widened(sizes, n))
    return {self.a_name: np.concatenate(a), self.b_name: joined_b}


def module_adapters(config: ModelConfig) -> Iterator[ModuleAdapter]:
  """Yields an adapter for each module with at least one of the kernels in `config.lora`.

  Its `parts` also include the module's other kernels, which have no adapter in the model.
  """
  modules: dict[str, list[Part]] = {}
  for spec in saved_tensors(config):
    if can_adapt(spec.leaf_name, config):
      modules.setdefault(spec.hf_name, []).append(_part(spec))
  for parts in modules.values():
    if any(part.kernel in config.lora.targets for part in parts):
      yield ModuleAdapter(tuple(parts))


def _part(spec: TensorSpec) -> Part:
  """The adapter of the kernel that `spec` describes.

  For the axes "HE D" and the leaf "DHE", A has "r D" and the leaf "Dr", and B "HE r" and "rHE".
  """
  *_, kernel, _ = spec.leaf_name.split("/")
  outputs, inputs = spec.hf_axes.split()
  a_axes = "".join(letter for letter in spec.leaf_axes if letter in inputs) + RANK
  b_axes = RANK + "".join(letter for letter in spec.leaf_axes if letter not in inputs)
  hf_name = PREFIX + spec.hf_name.removesuffix("weight")
  leaf_name = spec.leaf_name.removesuffix("kernel")
  return Part(
    kernel,
    TensorSpec(f"{hf_name}lora_A.weight", f"{leaf_name}lora_a", f"{RANK} {inputs}", a_axes),
    TensorSpec(
      f"{hf_name}lora_B.weight", f"{leaf_name}lora_b", f"{outputs} {RANK}", b_axes, part=spec.part
    ),
  )


def _widened(sizes: Sizes, blocks: int) -> Mapping[str, int]:
  """`sizes` with a rank that is `blocks` times as large."""
  return {**sizes, RANK: blocks * sizes[RANK]}
