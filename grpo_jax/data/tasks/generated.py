"""Examples that are generated when they are read."""

from collections.abc import Callable, Sequence
from typing import Any

from grpo_jax.data.files.rows import Example


class Generated(Sequence[Example]):
  """The examples of a split, "train" or "test". Example i depends only on `make` and i."""

  def __init__(self, split: str, size: int, make: Callable[[int], Example]) -> None:
    """Stores the arguments. Reading an example makes it.

    Args:
      split: The name of the split, for error messages.
      size: How many examples the split has.
      make: Maps the number of an example, from 0, to the example.
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
