"""Says on stderr what takes long, so that no program is silent while it waits."""

from collections.abc import Iterator
import contextlib
import sys
import threading
from time import monotonic

_SECONDS = 8.0


@contextlib.contextmanager
def told_if_slow(what: str) -> Iterator[None]:
  """Prints `what`, such as "reading FILE", after each 8 seconds that the block has not ended."""
  ended = threading.Event()
  start = monotonic()

  def tell() -> None:
    while not ended.wait(_SECONDS):
      print(f"still {what} after {monotonic() - start:.0f} seconds", file=sys.stderr, flush=True)

  teller = threading.Thread(target=tell, daemon=True)
  teller.start()
  try:
    yield
  finally:
    ended.set()
    teller.join()
