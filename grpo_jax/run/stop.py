"""Stopping a run: SIGTERM and Ctrl-C ask it to finish its step, save and leave."""

from collections.abc import Callable, Iterator
import contextlib
import signal
from types import FrameType


@contextlib.contextmanager
def stop_signals(warn: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
  """Yields a function that says whether this process was asked to stop.

  A second Ctrl-C leaves at once.
  """
  received: list[int] = []

  def on_signal(number: int, frame: FrameType | None) -> None:
    del frame
    if received and number == signal.SIGINT:
      raise KeyboardInterrupt
    received.append(number)
    hint = "; Ctrl-C again leaves at once" if number == signal.SIGINT else ""
    warn(f"stopping after this step{hint}")

  handled = (signal.SIGTERM, signal.SIGINT)
  before = {number: signal.signal(number, on_signal) for number in handled}
  try:
    yield lambda: bool(received)
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
