"""A worker: a process that calls reward functions, one call after the other.

It may hang, crash or be killed at any time. The process of the run then knows which call it was in,
because the worker answers each call as soon as it has returned.
"""

import asyncio
from collections.abc import Callable, Sequence
import contextlib
import os
from pathlib import Path
import random
import signal
import socket
import sys
from typing import Any, NamedTuple

from grpo_jax.rewards.answer import ContractError, RewardError, to_json
from grpo_jax.rewards.call import Columns, call, call_async
from grpo_jax.rewards.user_errors import describe
from grpo_jax.rewards.workers import messages
from grpo_jax.settings import ConfigError

CALLS_AT_ONCE = 64  # of an async function
# What counts as the end of a worker, though Python lets a function raise it.
_ENDINGS = (MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit)


class Request(NamedTuple):
  """A call.

  Attributes:
    number: Of the call. The answer has it, too.
    key: Of the function.
    name: What messages call the function.
    columns: Its arguments.
    step: The number of the step.
  """

  number: int
  key: str
  name: str
  columns: Columns
  step: int


def prepare(memory: int) -> None:
  """Makes this process, which was just forked, one that can be killed with all that it starts.

  Args:
    memory: The limit in bytes, 0 for none.
  """
  os.setpgid(0, 0)
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
  # Of all processes, the kernel takes this one when the machine has no memory left.
  with contextlib.suppress(OSError):
    Path("/proc/self/oom_score_adj").write_text("1000")
  if sys.platform != "win32":
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
      # Not RLIMIT_AS: it counts addresses that are reserved and never used, of which libraries of
      # numbers have many times more than memory.
      resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
  random.seed()
  if "numpy" in sys.modules:
    sys.modules["numpy"].random.seed()


def serve(channel: socket.socket, load: Callable[[], dict[str, Any]]) -> None:
  """Answers calls until the run closes the channel.

  Args:
    channel: The socket to the process of the run.
    load: Loads the functions, by key.
  """
  # A process that a function forks and leaves behind must not keep the channel open.
  os.register_at_fork(after_in_child=channel.close)
  try:
    functions = load()
  except BaseException as error:
    messages.send_line(channel, {"failed": describe(error)})
    return
  messages.send_line(channel, {"ready": True})
  while True:
    try:
      requests, at_once, timeout = messages.receive(channel)
    except (EOFError, OSError):
      return
    if at_once:
      asyncio.run(_answer_at_once(channel, functions, requests, timeout))
    else:
      for request in requests:
        _answer(channel, request, lambda one=request: call(functions[one.key], *one[2:]))


def _answer(channel: socket.socket, request: Request, make: Callable[[], Any]) -> None:
  """Makes a call and sends its answer. After a "crash" the run ends this process."""
  reply: dict[str, Any]
  try:
    reply = {"answer": to_json(make())}
  except TimeoutError:
    reply = {"kind": "timeout", "text": ""}
  except RewardError as error:
    cause = error.__cause__
    is_config = isinstance(cause, ConfigError)
    kind = "crash" if isinstance(cause, _ENDINGS) else "config" if is_config else "error"
    reply = {"kind": kind, "text": str(error), "final": isinstance(error, ContractError)}
  except KeyboardInterrupt:
    reply = {"kind": "crash", "text": f"reward function {request.name} raised KeyboardInterrupt"}
  messages.send_line(channel, {"number": request.number, **reply})


async def _answer_at_once(
  channel: socket.socket, functions: dict[str, Any], requests: Sequence[Request], timeout: float
) -> None:
  """Makes calls of an async function side by side, and sends each answer when it is there."""
  free = asyncio.Semaphore(CALLS_AT_ONCE)

  async def make(request: Request) -> None:
    async with free:
      try:
        answer = await call_async(functions[request.key], *request[2:], timeout)
        outcome: Callable[[], Any] = lambda: answer  # noqa: E731
      except (TimeoutError, RewardError, KeyboardInterrupt) as error:
        outcome = _raising(error)
      _answer(channel, request, outcome)

  await asyncio.gather(*(make(request) for request in requests))


def _raising(error: BaseException) -> Callable[[], Any]:
  def make() -> Any:
    raise error

  return make
