"""Stops a run before its last step: on a signal, or when nobody reads its output.

After a request, the run finishes its step, saves and stops. A second signal ends the process of a
program at once. In a notebook, it interrupts only the call.
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
_handlers_before: dict[signal.Signals, Any] = {}  # the handlers that the run's handlers replaced


def _be_no_run() -> None:
  """Restores, in a forked process, the handlers that the run's handlers replaced.

  With the run's handlers, `terminate()` of a multiprocessing.Pool would not end its processes but
  request a stop, and then wait for the processes forever.
  """
  if _handlers_before:
    signal.set_wakeup_fd(-1)
  for number, handler in _handlers_before.items():
    signal.signal(number, handler)


os.register_at_fork(after_in_child=_be_no_run)


class StopRequest:
  """A request to stop the run of this process. Any thread may make it."""

  def __init__(self) -> None:
    self.second = "a second signal leaves at once"  # the end of the message about the first signal
    self._asked = threading.Event()
    self._first = threading.Lock()  # the caller that acquires it prints the message

  def ask(self, reason: str) -> None:
    """Requests the stop. The first call prints the reason to stderr."""
    self._asked.set()
    if self._first.acquire(blocking=False):
      _write(2, f"{reason}: stopping after this step; {self.second}\n".encode())

  def __call__(self) -> bool:
    """Whether a stop was requested."""
    return self._asked.is_set()


@contextlib.contextmanager
def leaving_on_second_signal(request: StopRequest) -> Iterator[None]:
  """In the block, the first SIGTERM, Ctrl-C or SIGHUP requests a stop, and the second one exits.

  A SIGTERM within `_SAME_SECONDS` of the first signal does not count.

  A thread reads the signals, because the main thread may be inside a compiler or a function that
  does not return. The signals also have handlers, because their default would end the process. A
  signal that was already ignored, such as SIGHUP under `nohup`, stays ignored.
  """
  if threading.current_thread() is not threading.main_thread():
    yield  # only the main thread may handle signals
    return
  numbers = _not_ignored()

  # Both the signal's handler and `_watch` call this. `ask` prints the reason once.
  def on_signal(number: int, frame: FrameType | None) -> None:
    del frame
    request.ask(signal.Signals(number).name)

  reader, writer = socket.socketpair()
  writer.setblocking(False)  # as `set_wakeup_fd` demands
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
  """In the block, the first signal requests a stop, and the second one raises KeyboardInterrupt.

  The process continues. This is for a user's script, or a notebook whose stop button sends Ctrl-C.
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
  """In the block, `on_signal` handles the signals `numbers`, but not in forks of this process."""
  before = {number: signal.signal(number, on_signal) for number in numbers}
  _handlers_before.update(before)
  try:
    yield
  finally:
    _handlers_before.clear()
    for number, handler in before.items():
      signal.signal(number, handler)


def _not_ignored() -> list[signal.Signals]:
  """The signals that stop a run, without those that are ignored."""
  return [number for number in _HANDLED if signal.getsignal(number) is not signal.SIG_IGN]


def _watch(
  reader: socket.socket, numbers: list[signal.Signals], on_signal: Callable[[int, None], None]
) -> None:
  """Reads the signals that the interpreter's C handler writes to a socket, until it is closed.

  The first signal in `numbers` calls on_signal(number, None), and the next one exits. A SIGTERM
  within `_SAME_SECONDS` of the first does not count.
  """
  first_at: float | None = None
  while data := reader.recv(64):
    for number in data:
      if number not in numbers:
        continue  # a signal that another library handles
      now = time.monotonic()
      if first_at is None:
        first_at = now
        on_signal(number, None)
      elif number != signal.SIGTERM or now - first_at > _SAME_SECONDS:  # not Slurm's repetition
        _leave(number)


def _leave(number: int) -> None:
  """Exits at once because of a second signal, without cleanup."""
  if os.isatty(1):
    _write(1, _SHOW_CURSOR)
  name = signal.Signals(number).name
  line = f"{name} again: left at once; the same command goes on from the newest checkpoint\n"
  _write(2, line.encode())
  os._exit(128 + number)


def _write(fd: int, text: bytes) -> None:
  """Writes to a descriptor without the buffer of its stream, which the main thread may be using."""
  with contextlib.suppress(OSError):
    os.write(fd, text)
