"""The messages between the process of a run, the forker and the workers, over stream sockets.

The run sends functions and calls as pickles, because columns may hold any objects. It receives
answers as lines of JSON, because unpickling what a faulty or malicious worker sends could run code.
"""

from collections.abc import Callable
import dataclasses
import json
import pickle
import socket
import struct
import sys
from typing import Any

from grpo_jax.rewards.answer import LARGEST, Answer, Failure
from grpo_jax.rewards.call import Columns
from grpo_jax.rewards.marks import has_mark
from grpo_jax.rewards.names import resolve

_LENGTH = struct.Struct("!Q")
_LONGEST_LINE = 2**28  # bytes of an answer


@dataclasses.dataclass(frozen=True)
class WorkerCall:
  """A call of a reward function with the completions of one prompt.

  Attributes:
    key: The key of the function in the pool.
    name: The name of the function in messages.
    columns: The arguments of the function.
    step: The number of the step.
    is_async: Whether the function is async.
    whole_groups: Whether a retry must have all of these completions.
    one_worker: Whether one worker must make all calls of this function.
    at_once: With one_worker: about half the limit of completions in flight. 0 for no limit.
    again: Whether a call that failed is retried. False if it may have side effects.
    asks: Whether to find out whether the function reads messages, see `asking.asking`.
    votes: Whether to return votes instead of scores, see `votes.voting`.
  """

  key: str
  name: str
  columns: Columns
  step: int = 0
  is_async: bool = False
  whole_groups: bool = False
  one_worker: bool = False
  at_once: int = 0
  again: bool = True
  asks: bool = False
  votes: bool = False


class NotPortable(Exception):
  """A function that cannot be sent to another process. The text says why."""


def portable(source: str, function: Callable[..., Any], is_named: bool) -> tuple[str, bytes]:
  """Converts a function to (kind, data), from which `load` makes it in another process.

  Args:
    source: The name of the function in the config.
    function: The function.
    is_named: Whether other processes can find it by that name. Else it is pickled.

  Raises:
    NotPortable: The function cannot be pickled, or cloudpickle is not installed.
  """
  if is_named:
    return "name", source.encode()
  try:
    import cloudpickle  # imported here because it is an optional package
  except ImportError:
    raise NotPortable("it needs the package cloudpickle: pip install -e '.[workers]'") from None
  # By default, a pickle only names the module of a function, for the other process to import.
  module = sys.modules.get(getattr(function, "__module__", None) or "")
  pickles_module = module is not None and not _is_found(module.__name__)
  if pickles_module:
    cloudpickle.register_pickle_by_value(module)
  try:
    return "value", cloudpickle.dumps(function)
  except Exception as error:  # whatever the parts of an object raise
    raise NotPortable(f"{type(error).__name__}: {' '.join(str(error).split()):.100}") from None
  finally:
    if pickles_module:
      cloudpickle.unregister_pickle_by_value(module)


def _is_found(name: str) -> bool:
  """Whether the module's functions need no help to be pickled: other processes can import it.

  The file of a --config is a module in this process only.
  """
  first, *inner = name.split(".")
  if inner or first == "__main__":  # cloudpickle pickles functions of __main__ by value anyway
    return True
  return any(finder.find_spec(first, None) is not None for finder in sys.meta_path)


def load(kind: str, data: bytes) -> Any:
  """Loads a function from the result of `portable`, and calls its mark `prepare`."""
  function: Any
  if kind == "name":
    function = resolve(data.decode(), "reward.functions", lambda name: False)
  else:
    function = pickle.loads(data)
  if has_mark(function, "prepare"):
    function.prepare()
  return function


def answer_to_json(answer: Answer) -> dict[str, Any]:
  """Converts an answer to JSON."""
  return dataclasses.asdict(answer)


def answer_from_json(values: Any, count: int) -> Answer:
  """Converts JSON that a worker sent to an answer, with checks, because a worker may send anything.

  Raises:
    ValueError: `values` is not an answer for `count` completions.
  """
  try:
    steps = [[(int(end), float(reward)) for end, reward in one] for one in values["steps"]]
    failures = [
      Failure(int(one["row"]), str(one["kind"]), str(one["text"])) for one in values["failures"]
    ]
    metrics = [(str(name), float(value)) for name, value in values["metrics"]]
    extras = {
      str(column): list(column_values) for column, column_values in values["extras"].items()
    }
  except (TypeError, KeyError, AttributeError, OverflowError) as error:
    raise ValueError(str(error)) from None
  rewards = [reward for one in steps for _, reward in one]
  if (
    len(steps) != count
    or not all(abs(reward) <= LARGEST for reward in rewards)
    or not all(0 <= one.row < count for one in failures)
    or not all(len(column_values) == count for column_values in extras.values())
  ):
    raise ValueError("the numbers do not fit the call")
  return Answer(steps, failures, metrics, extras)


def send(channel: socket.socket, message: Any) -> None:
  """Sends a pickled message."""
  send_data(channel, pickle.dumps(message))


def send_data(channel: socket.socket, data: bytes) -> None:
  """Sends a message that is pickled already."""
  channel.sendall(_LENGTH.pack(len(data)) + data)


def receive(channel: socket.socket) -> Any:
  """Receives a pickled message. Raises EOFError if the other process has closed the socket."""
  (length,) = _LENGTH.unpack(_read(channel, _LENGTH.size))
  return pickle.loads(_read(channel, length))


def send_line(channel: socket.socket, values: dict[str, Any]) -> None:
  """Sends an object as a line of JSON."""
  channel.sendall(json.dumps(values).encode() + b"\n")


class LineReader:
  """Reads lines of JSON from a socket."""

  def __init__(self, channel: socket.socket) -> None:
    self._channel = channel
    self._buffer = bytearray()

  def read(self) -> list[dict[str, Any]]:
    """Waits for bytes, and returns the objects whose lines are complete, which may be none.

    Raises:
      EOFError: The other process has closed the socket.
      ValueError: The other process sent something other than lines of JSON objects.
    """
    data = self._channel.recv(2**20)
    if not data:
      raise EOFError
    start = len(self._buffer)  # the bytes before it hold no line break
    self._buffer += data
    end = self._buffer.rfind(b"\n", start)
    if end < 0:
      if len(self._buffer) > _LONGEST_LINE:
        raise ValueError("a line has no end")
      return []
    complete, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
    try:
      objects = [json.loads(line) for line in complete.split(b"\n")]
    except RecursionError as error:
      raise ValueError(str(error)) from None
    if not all(isinstance(one, dict) for one in objects):
      raise ValueError("a line holds no object")
    return objects


def _read(channel: socket.socket, length: int) -> bytes:
  parts = []
  while length:
    part = channel.recv(min(length, 2**20))
    if not part:
      raise EOFError
    parts.append(part)
    length -= len(part)
  return b"".join(parts)
