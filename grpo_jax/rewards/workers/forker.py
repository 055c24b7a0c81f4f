"""The forker: a small process that starts workers by fork, and ends them with all they started.

It has no threads and no JAX, so it can fork safely, which the process of a run cannot. It has
loaded the reward functions, so a new worker takes milliseconds. The run starts it with `main` and
sends it requests. It ends, and ends all workers, when the run has ended in whatever way. While it
imports a file of the user, which may never end, the kernel kills it as soon as the run is gone.

It does the killing, too: it is the parent of the workers, so a process number that it holds cannot
have been given to another process. On Linux it also becomes the parent of what a worker started and
left behind.
"""

from collections.abc import Callable, Iterator
import contextlib
import ctypes
import fcntl
import gc
import os
from pathlib import Path
import select
import signal
import socket
import sys
import threading
from typing import Any

from grpo_jax.foreign import describe
from grpo_jax.rewards.workers import messages, worker
from grpo_jax.settings import ConfigError

_SECONDS_BETWEEN_LOOKS = 1.0  # at whether the process of the run still exists
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(channel_number: int, run_process: int) -> None:
  """Serves the run until it has ended.

  Args:
    channel_number: The file descriptor of the socket to the run.
    run_process: The process of the run.
  """
  # The run decides what a signal means, also where Slurm sends it to every process.
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda *_: None)
  prctl(_PR_SET_CHILD_SUBREAPER, 1)
  forker = Forker(socket.socket(fileno=channel_number), run_process)
  try:
    while os.getppid() == run_process:
      if select.select([channel_number], [], [], _SECONDS_BETWEEN_LOOKS)[0]:
        forker.serve()
  except (EOFError, OSError):
    pass  # the run has ended
  finally:
    forker.end_all()


def prctl(option: int, value: int) -> None:
  """Linux's prctl. Does nothing on other systems."""
  if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class Forker:
  """Answers the requests of the run."""

  def __init__(self, channel: socket.socket, run_process: int) -> None:
    self._channel, self._run_process = channel, run_process
    self._functions: dict[str, Any] = {}
    self._workers: set[int] = set()

  def serve(self) -> None:
    """Receives one request and sends its result."""
    kind, *details = messages.receive(self._channel)
    requests: dict[str, Callable[..., dict[str, Any]]] = {
      "load": self._load,
      "start": self._start,
      "end": self._end,
    }
    messages.send_line(self._channel, requests[kind](*details))

  def end_all(self) -> None:
    """Ends every worker."""
    for process in list(self._workers):
      self._end(process)

  def _load(self, key: str, kind: str, data: bytes) -> dict[str, Any]:
    """Loads a function, which workers then have under this key."""
    threads = _threads()
    try:
      with self._killed_with_the_run():
        function = messages.load(kind, data)
    except ConfigError as error:
      return {"error": str(error)}
    except BaseException as error:
      return {"error": describe(error)}
    if _threads() > threads:
      # A process with threads cannot fork safely: another thread may hold a lock.
      return {"threads": True}
    self._functions[key] = function
    gc.collect()
    gc.freeze()  # so that collections in the workers do not copy the memory that they share
    return {}

  @contextlib.contextmanager
  def _killed_with_the_run(self) -> Iterator[None]:
    """While the block runs, the end of the run kills this process, whatever it is doing.

    The run sends nothing while it waits, so the only event on the channel is that the other side is
    closed. The kernel answers it with a signal to this process and to what it has started. Not
    PR_SET_PDEATHSIG, which kills when the thread of the run ends that started this process.
    """
    if not hasattr(fcntl, "F_SETSIG"):  # not Linux: the channel is looked at after the block
      yield
      return
    number = self._channel.fileno()
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    fcntl.fcntl(number, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(number, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(number, fcntl.F_SETFL, flags | fcntl.FASYNC)
    try:
      if os.getppid() != self._run_process:  # it ended before that
        raise EOFError
      yield
    finally:
      fcntl.fcntl(number, fcntl.F_SETFL, flags)

  def _start(self, memory: int, to_load: dict[str, tuple[str, bytes]]) -> dict[str, Any]:
    """Forks a worker, which loads functions and serves the socket that comes with the request."""
    _, (number,), _, _ = socket.recv_fds(self._channel, 1, 1)
    process = os.fork()
    if process:
      os.close(number)
      self._workers.add(process)
      return {"process": process}
    try:
      self._channel.close()
      prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
      functions = self._functions
      worker.set_up(memory)
      worker.serve(
        socket.socket(fileno=number),
        lambda: functions | {key: messages.load(*one) for key, one in to_load.items()},
      )
    finally:
      os._exit(0)

  def _end(self, process: int) -> dict[str, Any]:
    """Kills a worker and all that it started."""
    self._workers.discard(process)
    for kill in (os.killpg, os.kill):
      try:
        kill(process, signal.SIGKILL)
      except ProcessLookupError:
        pass
    _, status = os.waitpid(process, 0)
    self._end_strays()
    return {"code": os.waitstatus_to_exitcode(status)}

  def _end_strays(self) -> None:
    """Kills processes whose parent, a worker, has ended. Their own children come after them."""
    while strays := _children() - self._workers:
      for process in strays:
        try:
          os.kill(process, signal.SIGKILL)
          os.waitpid(process, 0)
        except (ProcessLookupError, ChildProcessError):
          pass


def _children() -> set[int]:
  """The processes whose parent this one is. Empty where the system does not say."""
  try:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
  except OSError:
    return set()
  return {int(number) for number in text.split()}


def _threads() -> int:
  try:
    return len(os.listdir("/proc/self/task"))
  except OSError:
    return threading.active_count()
