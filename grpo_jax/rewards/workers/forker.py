"""The forker: a small process that forks workers, and kills them with all processes they started.

It has no threads and no JAX, so it can fork safely, unlike the process of a run. It has already
loaded the reward functions, so a new worker starts within milliseconds. The run starts it with
`main` and sends it requests. When the run has ended for any reason, the forker kills all workers
and ends. While it imports a file of the user, which may hang, the kernel kills it as soon as the
run has ended.

The forker kills workers because it is their parent: the kernel does not reuse the process id of a
child before its parent has waited for it. On Linux the forker also becomes the parent of processes
that a worker started and left behind.
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

_SECONDS_BETWEEN_LOOKS = 1.0  # between checks whether the process of the run still exists
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(channel_number: int, run_process: int) -> None:
  """Serves the run until it has ended.

  Args:
    channel_number: The file descriptor of the socket to the run.
    run_process: The id of the process of the run.
  """
  # Only the run reacts to signals, even if Slurm sends them to every process.
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
  """Calls Linux's prctl. Does nothing on other systems."""
  if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class Forker:
  """Answers the requests of the run."""

  def __init__(self, channel: socket.socket, run_process: int) -> None:
    self._channel, self._run_process = channel, run_process
    self._functions: dict[str, Any] = {}
    self._workers: set[int] = set()
    # The processes that files of functions started when they were loaded.
    self._started_by_loading: set[int] = set()

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
    """Ends every worker, and the processes that loading started."""
    for process in list(self._workers):
      self._end(process)
    self._started_by_loading.clear()
    self._end_strays()

  def _load(self, key: str, kind: str, data: bytes) -> dict[str, Any]:
    """Loads a function, which new workers then have under this key.

    `kind` and `data` come from `messages.portable`. Returns {}, or {"error": a message}, or
    {"threads": True} if loading started a thread.
    """
    threads_before, children_before = _threads(), _children()
    try:
      with self._killed_with_the_run():
        function = messages.load(kind, data)
    except ConfigError as error:
      return {"error": str(error)}
    except BaseException as error:
      return {"error": describe(error)}
    if _threads() > threads_before:
      # A process with threads cannot fork safely: another thread may hold a lock.
      return {"threads": True}
    self._functions[key] = function
    self._started_by_loading |= _children() - children_before
    gc.collect()
    gc.freeze()  # so that collections in the workers do not copy the memory that they share
    return {}

  @contextlib.contextmanager
  def _killed_with_the_run(self) -> Iterator[None]:
    """Makes the kernel kill this process if the run ends during the block, whatever it is doing.

    The run sends nothing while it waits for an answer, so the only possible event on the channel is
    that the run has closed it. The kernel then sends SIGKILL to the process group. PR_SET_PDEATHSIG
    would not do: it kills this process when the thread of the run that started it ends.
    """
    if not hasattr(fcntl, "F_SETSIG"):  # not Linux: `main` checks the channel after the block
      yield
      return
    descriptor = self._channel.fileno()
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | fcntl.FASYNC)
    try:
      if os.getppid() != self._run_process:  # the run ended before the signal was set
        raise EOFError
      yield
    finally:
      fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)

  def _start(self, memory: int, to_load: dict[str, tuple[str, bytes]]) -> dict[str, Any]:
    """Forks a worker, which serves the socket that comes with the request. Returns its process id.

    For the arguments see `ForkerProcess.start`.
    """
    _, (descriptor,), _, _ = socket.recv_fds(self._channel, 1, 1)  # it comes with one byte
    process = os.fork()
    if process:
      os.close(descriptor)
      self._workers.add(process)
      return {"process": process}
    try:
      self._channel.close()
      prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
      functions = self._functions
      worker.set_up(memory)
      worker.serve(
        socket.socket(fileno=descriptor),
        lambda: functions | {key: messages.load(*one) for key, one in to_load.items()},
      )
    finally:
      os._exit(0)  # the worker must not go on with the code of the forker

  def _end(self, process: int) -> dict[str, Any]:
    """Kills a worker and all processes that it started. Returns its exit code."""
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
    """Kills processes that a dead worker left. Their children are then children of this process."""
    while strays := _children() - self._workers - self._started_by_loading:
      for process in strays:
        try:
          os.kill(process, signal.SIGKILL)
          os.waitpid(process, 0)
        except (ProcessLookupError, ChildProcessError):
          pass


def _children() -> set[int]:
  """The ids of the child processes. Empty if the system does not tell."""
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
