"""Examples that are made when they are read."""

from collections.abc import Callable

from grpo_jax.data.files.rows import Example, MadeExamples


class Generated(MadeExamples):
  """The examples of a split, "train" or "test". Example i depends only on `make` and i."""

  def __init__(self, split: str, size: int, make: Callable[[int], Example]) -> None:
    """Makes nothing yet.

    Args:
      split: The name of the split, for error messages.
      size: How many examples it has.
      make: Makes an example from its number, which is at least 0.
    """
    self.there_are = f"{split} has"
    self._split, self._size, self._make = split, size, make

  def __len__(self) -> int:
    return self._size

  def made(self, index: int) -> Example:
    """The example of a number."""
    return self._make(index)
