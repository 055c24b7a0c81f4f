"""Values that are not there yet."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
import threading
from typing import Generic, TypeVar

# Seconds for which a value may hold up what does not need it. Most come sooner, so that the rows of
# a sampler draw in the same chunks when a run is repeated.
SOON = 0.1

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
  """A value that others compute, and the last steps towards it, which whoever asks first takes.

  Any thread may ask. In a run of several processes, all ask together for what they make together.
  """

  def __init__(self, finish: Callable[[], T], futures: Sequence["Future"] = ()):
    """Begins to wait.

    Args:
      finish: Returns the value, or raises why there is none. It is called until it has returned
        once.
      futures: The results that it waits for. Without them, it does not wait for others.
    """
    self._finish: Callable[[], T] | None = finish
    self._lock = threading.Lock()
    self._value: T
    self.futures = futures

  @property
  def is_ready(self) -> bool:
    """Whether nobody else need do anything for the value."""
    return all(future.done() for future in self.futures)

  def result(self) -> T:
    """The value. Waits for it."""
    with self._lock:
      if self._finish is not None:
        self._value = self._finish()
        self._finish = None
      return self._value

  def then(self, function: Callable[[T], U]) -> "Pending[U]":
    """The result of a function of the value. Whoever asks for it calls the function."""
    return Pending(lambda: function(self.result()), self.futures)


def there(value: T) -> Pending[T]:
  """A value that is there."""
  return Pending(lambda: value)


def together(pending: Sequence[Pending[T]]) -> Pending[list[T]]:
  """All values, in their order."""
  futures = [future for one in pending for future in one.futures]
  return Pending(lambda: [one.result() for one in pending], futures)


def wait_for_all(pending: Iterable[Pending], seconds: float) -> None:
  """Waits for so long, or until all are ready."""
  wait([future for one in pending for future in one.futures], seconds)


def wait_for_one(pending: Sequence[Pending]) -> None:
  """Waits until one of them is ready."""
  while pending and not any(one.is_ready for one in pending):
    wait([f for one in pending for f in one.futures if not f.done()], None, FIRST_COMPLETED)
