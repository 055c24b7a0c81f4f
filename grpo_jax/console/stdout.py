"""Stdout that may be closed while a program runs, as in `train | head -1`."""

from collections.abc import Callable
import contextlib
import os
import sys
from typing import Any, TextIO


class Stdout:
  """A text stream to sys.stdout. The first failed write is reported, and no error is raised."""

  def __init__(self, on_lost: Callable[[str], None]) -> None:
    """`on_lost` is called once with the reason when a write to stdout fails."""
    self._on_lost = on_lost
    self._is_lost = False
    self._stream = sys.stdout  # a progress bar replaces sys.stdout while it is drawn

  def write(self, text: str) -> int:
    """Writes to sys.stdout, or drops the text if an earlier write failed."""
    self._attempt(lambda: self._stream.write(text))
    return len(text)

  def flush(self) -> None:
    """Flushes sys.stdout."""
    self._attempt(self._stream.flush)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)  # isatty, encoding, fileno

  def _attempt(self, write: Callable[[], Any]) -> None:
    """Calls `write` unless an earlier call failed. Reports an OSError."""
    if self._is_lost:
      return
    try:
      write()
    except OSError as error:
      self._is_lost = True
      discard(sys.stdout)
      reason = "was closed" if isinstance(error, BrokenPipeError) else f"fails ({error.strerror})"
      self._on_lost(f"stdout {reason}")


def discard(stream: TextIO) -> None:
  """Redirects a stream to /dev/null, so that the interpreter can flush its buffer at exit."""
  with contextlib.suppress(OSError, ValueError):
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
