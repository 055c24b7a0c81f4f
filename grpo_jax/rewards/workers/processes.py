"""Starts, kills and talks to the forker and the workers, from the process of the run."""

from collections.abc import Sequence
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from typing import Any
import weakref

from grpo_jax.progress import doing
from grpo_jax.rewards import names
from grpo_jax.rewards.answer import RewardError
from grpo_jax.rewards.workers import messages
from grpo_jax.settings import ConfigError

_SECONDS_TO_END = 10.0
_MOST_RESTARTS = 3  # restarts of the forker, which ends early only if something kills it
_PROGRAM = (
  "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
  " from grpo_jax.rewards.workers.forker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
# Numerical libraries use one thread per worker, and workers must not use the devices of the run.
_ENVIRONMENT = {
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
  "MKL_NUM_THREADS": "1",
  "JAX_PLATFORMS": "cpu",
}


class ForkerEnded(Exception):
  """The forker has ended, for example because the machine had no memory left."""


class ForkerProcess:
  """The process that starts and kills workers. See `grpo_jax/rewards/workers/forker.py`."""

  def __init__(self) -> None:
    """Starts the process."""
    self._channel, forker_end = socket.socketpair()
    fd = forker_end.fileno()
    paths = json.dumps([os.path.abspath(path) for path in sys.path])
    with forker_end:
      # A new session has a new process group, so that Ctrl-C reaches only the process of the run.
      self._process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, paths, str(fd), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=2,  # stderr, so that prints of functions do not mix with the lines of the run
        pass_fds=(fd,),
        env=os.environ | _ENVIRONMENT,
        start_new_session=True,
      )
    self._lines = messages.LineReader(self._channel)

  def load(self, source: str, kind: str, data: bytes) -> bool:
    """Loads a function in the forker, so that new workers have it.

    `source` is the name in the config, and (kind, data) come from `messages.portable`. Returns
    False if loading started a thread, because the forker can then no longer fork safely.

    Raises:
      ConfigError: The function cannot be loaded, or not in time.
    """
    with doing(f"loading reward function {source} for the workers"):
      # The forker has a shorter time limit, whose error says more.
      limit = names.SECONDS_TO_LOAD + _SECONDS_TO_END
      self._channel.settimeout(limit)
      try:
        result = self._ask("load", source, kind, data)
      except ForkerEnded as ended:
        is_late = isinstance(ended.__cause__, TimeoutError)
        what = f"has not loaded it after {limit:g} s" if is_late else "ended"
        result = {"error": f"the process {what}"}
      finally:
        self._channel.settimeout(None)
    if "error" in result:
      raise ConfigError(
        f"reward.functions: {source} cannot be loaded in a worker process ({result['error']}):"
        " set reward.workers=0 to call it in the process of the run"
      )
    return "threads" not in result

  def start(self, memory: int, to_load: dict[str, tuple[str, bytes]]) -> "WorkerProcess":
    """Starts a worker.

    Args:
      memory: The worker's memory limit in bytes, 0 for none.
      to_load: The functions that the worker loads itself: (kind, data) by key.
    """
    run_end, worker_end = socket.socketpair()
    with worker_end:
      result = self._ask("start", memory, to_load, number=worker_end.fileno())
    return WorkerProcess(int(result["process"]), run_end)

  def end(self, worker: "WorkerProcess") -> str:
    """Kills a worker and the processes that it started. Returns how it ended, for a message."""
    worker.channel.close()
    if worker.is_orphan:
      return "was killed"
    code = int(self._ask("end", worker.process)["code"])
    if code == -signal.SIGKILL:
      return "was killed"
    if code < 0:
      return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"

  def close(self) -> None:
    """Ends the forker and all workers, by closing the channel. Waits until they have ended."""
    self._channel.close()
    try:
      self._process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
      self._kill()
      self._process.wait()

  def _ask(self, *request: Any, number: int | None = None) -> dict[str, Any]:
    try:
      messages.send(self._channel, request)
      if number is not None:
        socket.send_fds(self._channel, [b"f"], [number])
      while not (results := self._lines.read()):
        pass
    except (OSError, EOFError, ValueError) as error:
      self._kill()
      raise ForkerEnded from error
    return results[0]

  def _kill(self) -> None:
    """Kills the forker, and processes that a file started while the forker imported it."""
    with contextlib.suppress(OSError):  # the forker has already ended
      os.killpg(self._process.pid, signal.SIGKILL)


class WorkerProcess:
  """A worker process.

  Attributes:
    process: The process id.
    channel: The socket to the worker.
    pending: The numbers of the calls that it has not answered yet, in the order of sending.
    is_ready: Whether it has started and loaded its functions.
    is_new: Whether no call has been sent to it yet.
    is_orphan: Whether the forker that started it has ended.
    is_async: Whether the pending calls run concurrently.
    deadline: When it must have answered a call, or started, in time.monotonic(). 0 before
      the first of the two begins.
    answered_at: When it last answered a call, or got one while idle, in time.monotonic().
  """

  def __init__(self, process: int, channel: socket.socket) -> None:
    self.process, self.channel = process, channel
    self.pending: list[int] = []
    self.is_ready, self.is_new, self.is_async = False, True, False
    self.deadline, self.answered_at, self.is_orphan = 0.0, 0.0, False
    self._lines = messages.LineReader(channel)

  def send(self, calls: Sequence[tuple[int, messages.WorkerCall]], timeout: float) -> None:
    """Sends pairs (number, call). `timeout` is the limit of a call, and of sending, in seconds.

    Raises:
      OSError: The worker has ended, or does not read.
      RewardError: The arguments cannot be pickled.
    """
    try:
      data = pickle.dumps((calls, timeout))
    except Exception as error:
      raise RewardError(
        f"reward function {calls[0][1].name}: its arguments cannot be sent to a worker process"
        f" ({type(error).__name__}: {error}): set reward.workers=0"
      ) from None
    self.is_new = False
    self.channel.settimeout(timeout)
    messages.send_data(self.channel, data)
    self.channel.settimeout(None)

  def read(self) -> list[dict[str, Any]]:
    """Reads answers. Raises EOFError, OSError or ValueError if the worker has failed."""
    return self._lines.read()


class WorkerProcesses:
  """The worker processes of a run, and the forker that starts and ends them.

  Attributes:
    workers: The workers that exist.
    count: The maximum number of workers.
    forkers: The last forker is in use; the others have ended.
    functions: The functions that workers can call, by key, as `messages.portable` returned them.
    is_closed: Set when no more calls may be made.
  """

  def __init__(self, count: int, memory: int) -> None:
    """Limits the number of workers and the bytes of memory of each, 0 for no limit."""
    self.workers: list[WorkerProcess] = []
    self.forkers: list[ForkerProcess] = []
    self.functions: dict[str, tuple[str, bytes]] = {}
    self.is_closed = threading.Event()
    self.count, self._memory = count, memory
    # The keys of functions that start threads when they are loaded, so that no forker may do that.
    self._loaded_by_workers: set[str] = set()
    # Ends the forkers even if nobody calls `close`, at the latest when Python exits.
    self._finalizer = weakref.finalize(self, _close, self.forkers)

  def add(self, source: str, function: tuple[str, bytes]) -> None:
    """Adds a function, as (kind, data). Raises ConfigError if it cannot be loaded."""
    self.functions[source] = function
    for worker in list(self.workers):  # existing workers lack the function
      self.end(worker)
    if not self.forkers:
      self._start_forker()
    elif not self.forkers[-1].load(source, *function):
      self._loaded_by_workers.add(source)
      self.forkers.pop().close()
      self._start_forker()

  def fill(self, wanted: int) -> None:
    """Starts workers until there are `wanted`, or the maximum number."""
    while len(self.workers) < min(self.count, wanted):
      self.workers.append(self._start_worker())

  def end(self, worker: WorkerProcess) -> str:
    """Kills a worker and the processes that it started. Returns how it ended, for a message."""
    self.workers.remove(worker)
    try:
      return self.forkers[-1].end(worker)
    except ForkerEnded:
      self._start_forker()
      return "was killed"

  def close(self) -> None:
    """Ends the forker, and with it all workers."""
    self._finalizer()

  def _start_worker(self) -> WorkerProcess:
    while True:
      to_load = {source: self.functions[source] for source in self._loaded_by_workers}
      try:
        return self.forkers[-1].start(self._memory, to_load)
      except ForkerEnded:
        self._start_forker()

  def _start_forker(self) -> None:
    """Starts a forker that has loaded the functions. The workers of the previous one have ended.

    Raises:
      RewardError: Too many forkers have been killed.
    """
    if len(self.forkers) > _MOST_RESTARTS:
      raise RewardError("the process that starts workers for reward functions was killed again")
    for worker in self.workers:
      worker.is_orphan = True
    while True:
      forker = ForkerProcess()
      preloaded = [source for source in self.functions if source not in self._loaded_by_workers]
      with_threads = [one for one in preloaded if not forker.load(one, *self.functions[one])]
      if not with_threads:
        break
      # A forker with threads cannot fork safely. The next one leaves these functions to workers.
      self._loaded_by_workers.update(with_threads)
      forker.close()
    self.forkers.append(forker)


def _close(forkers: Sequence[ForkerProcess]) -> None:
  for forker in forkers:
    forker.close()
