"""Values that are still being computed, such as rewards by other processes."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
import threading
from typing import Generic, TypeVar

# Seconds for which work that does not need a value may wait for it. Most values arrive within this
# time, so that a repeated run samples its rows in the same chunks.
SOON = 0.1

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
  """A value whose inputs are still being computed. The first call of `result` finishes it.

  Any thread may call `result`. If finishing the value is a collective operation, all processes of
  the run call it together.
  """

  def __init__(self, finish: Callable[[], T], futures: Sequence["Future"] = ()):
    """Stores how to compute the value, and does not wait.

    Args:
      finish: () -> the value. It waits for `futures` itself. If it raises, the next call of
        `result` calls it again.
      futures: The futures that `finish` reads. Without futures, the value is ready at once.
    """
    self._finish: Callable[[], T] | None = finish
    self._lock = threading.Lock()
    self._value: T
    self.futures = futures

  @property
  def is_ready(self) -> bool:
    """Whether all futures are done, so that `result` need not wait for them."""
    return all(future.done() for future in self.futures)

  def result(self) -> T:
    """Waits for the value and returns it. It is computed once."""
    with self._lock:
      if self._finish is not None:
        self._value = self._finish()
        self._finish = None
      return self._value

  def then(self, function: Callable[[T], U]) -> "Pending[U]":
    """Returns `function(value)` as a pending value. Its first `result` calls the function."""
    return Pending(lambda: function(self.result()), self.futures)


def there(value: T) -> Pending[T]:
  """Wraps a value that is known already."""
  return Pending(lambda: value)


def together(pending: Sequence[Pending[T]]) -> Pending[list[T]]:
  """Combines pending values into a pending list in the same order."""
  futures = [future for one in pending for future in one.futures]
  return Pending(lambda: [one.result() for one in pending], futures)


def wait_for_all(pending: Iterable[Pending], seconds: float) -> None:
  """Waits until all values are ready, but at most for `seconds`."""
  wait([future for one in pending for future in one.futures], seconds)


def wait_for_one(pending: Sequence[Pending]) -> None:
  """Waits until at least one value is ready. Returns at once if there are none."""
  while pending and not any(one.is_ready for one in pending):
    wait([f for one in pending for f in one.futures if not f.done()], None, FIRST_COMPLETED)
