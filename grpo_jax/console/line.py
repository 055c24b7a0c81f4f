"""The status line of a terminal while a command works. This module imports fast."""

from collections.abc import Iterator, Sequence
import contextlib
import os
import re
import sys
import threading
import time
from typing import Any, TextIO
import unicodedata

from grpo_jax.console.text import visible
from grpo_jax.progress import PROGRESS, Work, describe

_NARROWEST = 20  # the least assumed width of a terminal
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # escape sequences, such as to show the cursor


class Line:
  """A `Display` that draws and redraws one status line on a terminal.

  Text that the process prints through `Above` appears above the line.
  """

  def __init__(self, stream: TextIO) -> None:
    """Draws nothing. `stream` is a terminal."""
    self._stream, self._drawn, self._is_at_start = stream, "", True
    self._lock = threading.RLock()  # a fork replaces it, because another thread may hold it
    os.register_at_fork(after_in_child=self._forget)

  def show(self, works: Sequence[Work]) -> None:
    text = fitting(describe(works, time.monotonic()), self._width() - 1) if works else ""
    with self._lock:
      if text != self._drawn and self._is_at_start:
        self._draw(text)

  def write_above(self, stream: TextIO, text: str) -> None:
    """Erases the line and writes to a stream. `show` redraws the line after a newline."""
    seen = _CONTROLS.sub("", text)
    with self._lock:
      if self._drawn:
        self._draw("")
      stream.write(text)
      if seen:
        self._is_at_start = seen.endswith("\n")

  def _draw(self, text: str) -> None:
    self._drawn = text
    with contextlib.suppress(OSError, ValueError):  # a closed terminal must not end the program
      self._stream.write(f"\r{text}\033[K")
      self._stream.flush()

  def _width(self) -> int:
    try:
      width = os.get_terminal_size(self._stream.fileno()).columns
    except (OSError, ValueError):
      width = 0
    return max(_NARROWEST, width or 80)

  def _forget(self) -> None:
    self._lock, self._drawn = threading.RLock(), ""


class Above:
  """Wraps a stream of a terminal so that its text appears above a status line."""

  def __init__(self, stream: TextIO, line: Line) -> None:
    self._stream, self._line = stream, line

  def write(self, text: str) -> int:
    """Writes above the line."""
    self._line.write_above(self._stream, text)
    return len(text)

  def writelines(self, texts: Sequence[str]) -> None:
    """Writes above the line."""
    self.write("".join(texts))

  def __iter__(self) -> Iterator[str]:
    return iter(self._stream)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)  # flush, isatty, encoding, fileno


def fitting(text: str, width: int) -> str:
  """The beginning of a text that fits into `width` terminal cells, without control characters."""
  cells, kept = 0, ""
  for character in visible(text):
    cells += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    if cells > width:
      return kept
    kept += character
  return kept


_starting, _for_ever = contextlib.ExitStack(), contextlib.ExitStack()


def start() -> None:
  """On a terminal, starts a status line, which says "starting" until `started` is called.

  The line exists until the program ends. If stderr is not a terminal, nothing is printed, so that
  an error is the only line of stderr, however long the imports take.
  """
  if not _can_be_drawn_on(sys.stderr):
    return
  line = Line(sys.stderr)
  for name in ("stdout", "stderr"):
    stream = getattr(sys, name)
    if stream is not None and stream.isatty():  # what goes to a file does not disturb the line
      setattr(sys, name, Above(stream, line))
  _for_ever.enter_context(PROGRESS.shown_by(line))
  _starting.enter_context(PROGRESS.doing("starting"))
  PROGRESS.show_now()


def started() -> None:
  """Removes "starting" from the status line."""
  _starting.close()


def _can_be_drawn_on(stream: TextIO | None) -> bool:
  """Whether the stream is a terminal that supports moving the cursor."""
  return (
    stream is not None and stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
  )
