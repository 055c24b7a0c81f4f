"""Examples that are made when they are read."""

from collections.abc import Callable, Sequence
from typing import Any

from grpo_jax.data.files.rows import Example


class Generated(Sequence[Example]):
  """The examples of a split, "train" or "test". Example i depends only on `make` and i."""

  def __init__(self, split: str, size: int, make: Callable[[int], Example]) -> None:
    """Makes nothing yet.

    Args:
      split: The name of the split, for error messages.
      size: How many examples it has.
      make: Makes an example from its number, which is at least 0.
    """
    self._split, self._size, self._make = split, size, make

  def __len__(self) -> int:
    return self._size

  def __getitem__(self, index: Any) -> Any:
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    if not -len(self) <= index < len(self):
      raise IndexError(f"{self._split} has {len(self)} examples, no number {index}")
    return self._make(int(index) % len(self))
