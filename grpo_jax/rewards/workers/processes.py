"""The run's side of the forker and of its workers."""

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
_MOST_RESTARTS = 3  # of the forker, which ends only if something kills it
_PROGRAM = (
  "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
  " from grpo_jax.rewards.workers.forker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
# One thread for each worker's libraries of numbers, and no worker may take the devices of the run.
_ENVIRONMENT = {
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
  "MKL_NUM_THREADS": "1",
  "JAX_PLATFORMS": "cpu",
}


class ForkerEnded(Exception):
  """The forker has ended, for example because the machine had no memory left."""


class ForkerProcess:
  """The process that starts and ends workers. See `grpo_jax/rewards/workers/forker.py`."""

  def __init__(self) -> None:
    """Starts it."""
    self._channel, theirs = socket.socketpair()
    number = theirs.fileno()
    paths = json.dumps([os.path.abspath(path) for path in sys.path])
    with theirs:
      # A process group of its own, so that Ctrl-C reaches only the process of the run.
      self._process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, paths, str(number), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=2,  # stderr: what functions print must not get between the lines of the run
        pass_fds=(number,),
        env=os.environ | _ENVIRONMENT,
        start_new_session=True,
      )
    self._lines = messages.LineReader(self._channel)

  def load(self, source: str, kind: str, data: bytes) -> bool:
    """Loads a function. Returns False if that started a thread.

    Raises:
      ConfigError: It cannot be loaded.
    """
    with doing(f"loading reward function {source} for the workers"):
      # Longer than the limit in the process itself, which says more.
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
      memory: Its limit in bytes, 0 for none.
      to_load: The functions that it loads for itself.
    """
    ours, theirs = socket.socketpair()
    with theirs:
      result = self._ask("start", memory, to_load, number=theirs.fileno())
    return WorkerProcess(int(result["process"]), ours)

  def end(self, worker: "WorkerProcess") -> str:
    """Kills a worker and what it started. Returns how it had ended, if it had before."""
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
    """Ends it and all workers. Waits until they have ended."""
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
    """Kills it, and what a file that it imports has started."""
    with contextlib.suppress(OSError):  # it has ended
      os.killpg(self._process.pid, signal.SIGKILL)


class WorkerProcess:
  """A worker process.

  Attributes:
    process: Its number.
    channel: The socket to it.
    pending: The numbers of the calls that it has not answered yet.
    is_ready: Whether it has started.
    is_new: Whether it has made no call yet.
    is_orphan: Whether its forker has ended.
    is_async: Whether its calls run side by side.
    deadline: When it must have answered something, or started. 0 before that is known.
    answered_at: When it answered the last call, or got the first one.
  """

  def __init__(self, process: int, channel: socket.socket) -> None:
    self.process, self.channel = process, channel
    self.pending: list[int] = []
    self.is_ready, self.is_new, self.is_async = False, True, False
    self.deadline, self.answered_at, self.is_orphan = 0.0, 0.0, False
    self._lines = messages.LineReader(channel)

  def send(self, calls: Sequence[tuple[int, messages.WorkerCall]], timeout: float) -> None:
    """Sends calls with their numbers.

    Raises:
      OSError: It has ended, or does not read.
      RewardError: The arguments cannot be sent.
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
    """The answers that it has sent. Raises EOFError, OSError or ValueError if it has failed."""
    return self._lines.read()


class WorkerProcesses:
  """The worker processes of a run, and the forker that starts and ends them.

  Attributes:
    workers: The workers that exist.
    forkers: The last one serves; the others have ended.
    functions: The functions that workers can call, as `messages.portable` made them.
    is_closed: Is set when no call may be made any more.
  """

  def __init__(self, count: int, memory: int) -> None:
    """Starts nothing yet. There may be `count` workers of `memory` bytes each, 0 for no limit."""
    self.workers: list[WorkerProcess] = []
    self.forkers: list[ForkerProcess] = []
    self.functions: dict[str, tuple[str, bytes]] = {}
    self.is_closed = threading.Event()
    self._count, self._memory = count, memory
    self._loaded_by_workers: set[str] = set()  # those that the forker must not load
    # Also where nobody calls `close`: at the latest when the interpreter exits.
    self._finalizer = weakref.finalize(self, _close, self.forkers)

  def add(self, source: str, function: tuple[str, bytes]) -> None:
    """Lets workers call a function. Raises ConfigError if it cannot be loaded."""
    self.functions[source] = function
    for worker in list(self.workers):  # they do not have it
      self.end(worker)
    if not self.forkers:
      self._start_forker()
    elif not self.forkers[-1].load(source, *function):
      self._loaded_by_workers.add(source)
      self.forkers.pop().close()
      self._start_forker()

  def fill(self, wanted: int) -> None:
    """Starts workers until there are as many as wanted, or as there may be."""
    while len(self.workers) < min(self._count, wanted):
      self.workers.append(self._start_worker())

  def end(self, worker: WorkerProcess) -> str:
    """Kills a worker with all that it started. Returns how it had ended, if it had before."""
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
    """Starts a forker. The workers of the one before have ended with it."""
    if len(self.forkers) > _MOST_RESTARTS:
      raise RewardError("the process that starts workers for reward functions was killed again")
    for worker in self.workers:
      worker.is_orphan = True
    while True:
      forker = ForkerProcess()
      early = [source for source in self.functions if source not in self._loaded_by_workers]
      with_threads = [one for one in early if not forker.load(one, *self.functions[one])]
      if not with_threads:
        break
      # A forker with threads cannot fork. The next one leaves these functions to the workers.
      self._loaded_by_workers.update(with_threads)
      forker.close()
    self.forkers.append(forker)


def _close(forkers: Sequence[ForkerProcess]) -> None:
  for forker in forkers:
    forker.close()
