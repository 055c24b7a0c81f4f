"""Tracks which versions of a learner's weights a sampler process has and still needs.

The learner sends each version to a process once, even while the process draws. The message has the
numbers of all leaves, the arrays that the process lacks, and the versions that it must keep.
"""

from collections.abc import Mapping
import dataclasses
import threading
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.asynchronous.messages import BadMessage, Shapes
from grpo_jax.settings import shown


class Leaf(NamedTuple):
  """An array of the weights on the host. Leaves with the same number have the same array."""

  number: int
  array: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
  """The weights of a policy on the host. Processes keep them while this object is referenced.

  Attributes:
    version: A number that is unique among all versions and leaves of this learner.
    leaves: The arrays, in the order of the leaves of the parameter tree.
  """

  version: int
  leaves: tuple[Leaf, ...]

  @property
  def numbers(self) -> list[int]:
    """The numbers of the leaves."""
    return [leaf.number for leaf in self.leaves]


class SentVersions:
  """The learner's record of the versions, and thus the leaves, that one process has."""

  def __init__(self) -> None:
    self._numbers: dict[int, list[int]] = {}  # the numbers of the leaves, by version

  def __contains__(self, version: int) -> bool:
    return version in self._numbers

  def add(self, weights: Weights, needed: set[int]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Makes the message that sends a version: the fields, and the arrays that the process lacks.

    Args:
      weights: A version that was not sent yet.
      needed: The versions that the process must keep, besides this one.
    """
    sent = {number for numbers in self._numbers.values() for number in numbers}
    arrays = {
      str(place): leaf.array for place, leaf in enumerate(weights.leaves) if leaf.number not in sent
    }
    self._numbers[weights.version] = weights.numbers
    for version in self._numbers.keys() - needed - {weights.version}:
      del self._numbers[version]
    fields = {"version": weights.version, "leaves": weights.numbers, "keep": [*self._numbers]}
    return fields, arrays


class KeptVersions:
  """The versions that a sampler process has. One thread adds new ones while another one draws.

  Each leaf exists once: on the devices if the drawing version contains it, else on the host.
  """

  def __init__(self, wanted: list[jax.ShapeDtypeStruct]):
    """`wanted` has the shape, dtype and sharding of each leaf."""
    self._wanted, self._lock = wanted, threading.Lock()
    self._numbers: dict[int, list[int]] = {}  # the numbers of the leaves, by version
    self._leaves: dict[int, Any] = {}  # the arrays, by the numbers of the leaves

  def check(self, fields: Mapping[str, Any], shapes: Shapes) -> None:
    """Checks a learner's message with weights before its arrays are read.

    Raises:
      BadMessage: A field is invalid, a leaf is missing, or the weights do not match this config.
    """
    if not _is_number(fields.get("version")):
      raise BadMessage(f"it sent version {shown(fields.get('version'))} of the weights")
    numbers, count = fields.get("leaves"), len(self._wanted)
    if not _are_numbers(numbers) or len(numbers) != count or len({*numbers}) != count:
      raise BadMessage(f"it sent weights of other leaves than {count} with a number each")
    if not _are_numbers(fields.get("keep")):
      raise BadMessage("it sent weights and did not say which versions stay")
    for name in shapes:  # a name is the index of a leaf. `int` refuses very long ones
      if not (name.isascii() and name.isdecimal() and len(name) < 9 and int(name) < count):
        raise BadMessage(f"it sent a leaf of the weights called {name[:20]!r}")
    for index, (number, wanted) in enumerate(zip(numbers, self._wanted, strict=True)):
      if str(index) in shapes:
        dtype, shape = shapes[str(index)]
      elif number in self._leaves:
        dtype, shape = self._leaves[number].dtype, self._leaves[number].shape
      else:
        raise BadMessage(f"it left out leaf {index} of its weights")
      if (dtype, shape) != (wanted.dtype, wanted.shape):
        raise BadMessage(
          f"it sent leaf {index} of its weights as {dtype} of shape {shape}, not {wanted.dtype} of"
          f" {wanted.shape}"
        )

  def take(self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Adds a version that passed `check`, and drops versions that the learner does not keep."""
    numbers = fields["leaves"]
    with self._lock:
      self._numbers[fields["version"]] = numbers
      self._leaves |= {numbers[int(place)]: array for place, array in arrays.items()}
      kept = {*fields["keep"], fields["version"]}
      self._numbers = {version: own for version, own in self._numbers.items() if version in kept}
      needed = {number for own in self._numbers.values() for number in own}
      self._leaves = {number: leaf for number, leaf in self._leaves.items() if number in needed}

  def use(self, version: Any) -> list[jax.Array]:
    """Puts a version's leaves on the devices and all others on the host, or raises BadMessage."""
    with self._lock:
      numbers = self._numbers.get(version) if _is_number(version) else None
      if numbers is None:
        raise BadMessage(f"it wants completions of weights that it has not sent: {shown(version)}")
      for number in self._leaves.keys() - {*numbers}:
        self._leaves[number] = np.asarray(self._leaves[number])
      for number, wanted in zip(numbers, self._wanted, strict=True):
        if not isinstance(self._leaves[number], jax.Array):
          self._leaves[number] = jax.device_put(self._leaves[number], wanted.sharding)
      return [self._leaves[number] for number in numbers]


def _is_number(value: Any) -> bool:
  return type(value) is int and value >= 0


def _are_numbers(values: Any) -> bool:
  return isinstance(values, list) and all(map(_is_number, values))
