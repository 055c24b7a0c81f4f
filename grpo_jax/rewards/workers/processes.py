"""The run's side of the forker and of its workers."""

from collections.abc import Callable, Sequence
import dataclasses
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from typing import Any

from grpo_jax.rewards.answer import RewardError
from grpo_jax.rewards.call import Columns
from grpo_jax.rewards.workers import messages
from grpo_jax.rewards.workers.worker import Request
from grpo_jax.settings import ConfigError
from grpo_jax.timing import told_if_slow

_SECONDS_TO_END = 10.0
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


@dataclasses.dataclass(frozen=True)
class Call:
  """A call of a function with the completions of one prompt.

  Attributes:
    key: What the pool calls the function.
    name: What messages call it.
    columns: Its arguments.
    step: The number of the step.
    is_async: Whether it is an async function.
    whole_groups: Whether it must not be called with a part of these completions.
  """

  key: str
  name: str
  columns: Columns
  step: int = 0
  is_async: bool = False
  whole_groups: bool = False


class NotPortable(Exception):
  """A function that cannot be sent to another process. The text says why."""


class ForkerEnded(Exception):
  """The forker has ended, for example because the machine had no memory left."""


def portable(source: str, function: Callable[..., Any], is_named: bool) -> tuple[str, bytes]:
  """What `grpo_jax.rewards.workers.forker.load` makes the function of.

  Args:
    source: The name of the function in the config.
    function: The function.
    is_named: Whether any process finds it under that name.

  Raises:
    NotPortable: It is of a notebook or of the program that started the run, and cannot be pickled.
  """
  if is_named:
    return "name", source.encode()
  try:
    import cloudpickle  # imported here because it is an optional package
  except ImportError:
    raise NotPortable("it needs the package cloudpickle: pip install -e '.[workers]'") from None
  try:
    return "value", cloudpickle.dumps(function)
  except Exception as error:  # whatever the parts of an object raise
    raise NotPortable(f"{type(error).__name__}: {' '.join(str(error).split()):.100}") from None


class Forker:
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
    self._lines = messages.Lines(self._channel)

  def load(self, source: str, kind: str, data: bytes) -> bool:
    """Loads a function. Returns False if that started a thread.

    Raises:
      ConfigError: It cannot be loaded.
    """
    with told_if_slow(f"loading reward function {source} for the workers"):
      try:
        result = self._ask("load", source, kind, data)
      except ForkerEnded:
        result = {"error": "the process ended"}
    if "error" in result:
      raise ConfigError(
        f"reward.functions: {source} cannot be loaded in a worker process ({result['error']}):"
        " set reward.workers=0 to call it in the process of the run"
      )
    return "threads" not in result

  def start(self, memory: int, late: dict[str, tuple[str, bytes]]) -> "Worker":
    """Starts a worker.

    Args:
      memory: Its limit in bytes, 0 for none.
      late: The functions that it loads for itself.
    """
    ours, theirs = socket.socketpair()
    with theirs:
      result = self._ask("start", memory, late, number=theirs.fileno())
    return Worker(int(result["process"]), ours)

  def end(self, worker: "Worker") -> str:
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
      self._process.kill()
      self._process.wait()

  def _ask(self, *request: Any, number: int | None = None) -> dict[str, Any]:
    try:
      messages.send(self._channel, request)
      if number is not None:
        socket.send_fds(self._channel, [b"f"], [number])
      while not (results := self._lines.read()):
        pass
    except (OSError, EOFError, ValueError) as error:
      self._process.kill()
      raise ForkerEnded from error
    return results[0]


class Worker:
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
    self._lines = messages.Lines(channel)

  def send(self, requests: Sequence[Request], at_once: bool, timeout: float) -> None:
    """Sends calls.

    Raises:
      OSError: It has ended, or does not read.
      RewardError: The arguments cannot be sent.
    """
    try:
      data = pickle.dumps((requests, at_once, timeout))
    except Exception as error:
      raise RewardError(
        f"reward function {requests[0].name}: its arguments cannot be sent to a worker process"
        f" ({type(error).__name__}: {error}): set reward.workers=0"
      ) from None
    self.is_new = False
    self.channel.settimeout(timeout)
    messages.send_data(self.channel, data)
    self.channel.settimeout(None)

  def read(self) -> list[dict[str, Any]]:
    """What it has answered. Raises EOFError, OSError or ValueError if it has failed."""
    return self._lines.read()
