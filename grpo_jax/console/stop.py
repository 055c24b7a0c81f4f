"""Stopping a run before its end: on a signal, or when nobody reads what it prints.

A run that is asked to stop finishes its step, saves and leaves. A second signal ends it at once:
the process of a program, and in a notebook only the call.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], None]
_SHOW_CURSOR = b"\x1b[?25h"
# Slurm sends SIGTERM twice to a job that it preempts. Within this time, both count as one.
_SAME_SECONDS = 3.0
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_handlers_before: dict[signal.Signals, Any] = {}  # while a run's own are there


def _be_no_run() -> None:
  """Gives a fork the handlers from before the run's.

  With the run's own, `terminate()` of a multiprocessing.Pool would not end its processes but ask
  the run to stop, and wait for them for ever.
  """
  if _handlers_before:
    signal.set_wakeup_fd(-1)
  for number, handler in _handlers_before.items():
    signal.signal(number, handler)


os.register_at_fork(after_in_child=_be_no_run)


class StopRequest:
  """Whether this process was asked to stop its run. Any thread may ask."""

  def __init__(self) -> None:
    self.second = "a second signal leaves at once"  # what the first one says of it
    self._asked = threading.Event()
    self._first = threading.Lock()  # whoever gets it says why

  def ask(self, reason: str) -> None:
    """Asks, and says why on stderr the first time."""
    self._asked.set()
    if self._first.acquire(blocking=False):
      _write(2, f"{reason}: stopping after this step; {self.second}\n".encode())

  def __call__(self) -> bool:
    """True if somebody asked."""
    return self._asked.is_set()


@contextlib.contextmanager
def leaving_on_second_signal(request: StopRequest) -> Iterator[None]:
  """Until it is left, the first SIGTERM, Ctrl-C or SIGHUP asks to stop and the second one exits.

  A thread reads the signals, because the main thread may be inside a compiler or a function that
  does not return. A signal that was ignored before, as `nohup` ignores SIGHUP, stays ignored.
  """
  if threading.current_thread() is not threading.main_thread():
    yield  # only the main thread may handle signals
    return
  numbers = _not_ignored()

  def on_signal(number: int, frame: FrameType | None) -> None:
    del frame
    request.ask(signal.Signals(number).name)

  reader, writer = socket.socketpair()
  writer.setblocking(False)
  thread = threading.Thread(target=_watch, args=(reader, numbers, on_signal), daemon=True)
  wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
  thread.start()
  try:
    with _handling(numbers, on_signal):
      yield
  finally:
    signal.set_wakeup_fd(wakeup_before)
    writer.close()  # ends the thread
    thread.join()
    reader.close()


@contextlib.contextmanager
def raising_on_second_signal(request: StopRequest) -> Iterator[None]:
  """Stops at signals, but the second one raises KeyboardInterrupt, so that the process goes on.

  This is for programs that are not ours: a script, or a notebook whose stop button sends Ctrl-C.
  """
  if threading.current_thread() is not threading.main_thread():
    yield  # only the main thread may handle signals
    return
  request.second = "a second signal interrupts it"
  received = 0

  def on_signal(number: int, frame: FrameType | None) -> None:
    del frame
    nonlocal received
    received += 1
    if received > 1:
      raise KeyboardInterrupt
    request.ask(signal.Signals(number).name)

  with _handling(_not_ignored(), on_signal):
    yield


@contextlib.contextmanager
def _handling(numbers: list[signal.Signals], on_signal: Handler) -> Iterator[None]:
  """In the block, this process handles signals so, and its forks do not."""
  before = {number: signal.signal(number, on_signal) for number in numbers}
  _handlers_before.update(before)
  try:
    yield
  finally:
    _handlers_before.clear()
    for number, handler in before.items():
      signal.signal(number, handler)


def _not_ignored() -> list[signal.Signals]:
  return [number for number in _HANDLED if signal.getsignal(number) is not signal.SIG_IGN]


def _watch(
  reader: socket.socket, numbers: list[signal.Signals], on_signal: Callable[[int, None], None]
) -> None:
  """Reads the numbers of signals as the interpreter's handler in C writes them."""
  first_at: float | None = None
  while data := reader.recv(64):
    for number in data:
      if number not in numbers:
        continue  # another library's signal
      now = time.monotonic()
      if first_at is None:
        first_at = now
        on_signal(number, None)
      elif number != signal.SIGTERM or now - first_at > _SAME_SECONDS:
        _leave(number)


def _leave(number: int) -> None:
  if os.isatty(1):
    _write(1, _SHOW_CURSOR)
  name = signal.Signals(number).name
  line = f"{name} again: left at once; the same command goes on from the newest checkpoint\n"
  _write(2, line.encode())
  os._exit(128 + number)


def _write(fd: int, text: bytes) -> None:
  """Writes to a stream past its buffer, which the interrupted thread may be writing to."""
  with contextlib.suppress(OSError):
    os.write(fd, text)
