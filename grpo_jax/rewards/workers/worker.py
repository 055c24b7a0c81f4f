"""A worker: a process that calls reward functions, one call after the other.

Calls of async functions run concurrently, and more calls may come while they run. They share an
event loop that lives as long as the worker, so a function may keep objects that depend on the loop.

A worker may hang, crash or be killed at any time. It answers each call as soon as the function has
returned, so the process of the run knows which call it was making.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import contextlib
import os
from pathlib import Path
import random
import signal
import socket
import sys
from typing import Any

from grpo_jax.foreign import describe
from grpo_jax.rewards.answer import Answer, ContractError, RewardError
from grpo_jax.rewards.asking import asking
from grpo_jax.rewards.call import call, call_async
from grpo_jax.rewards.votes import voting
from grpo_jax.rewards.workers import messages
from grpo_jax.rewards.workers.messages import WorkerCall
from grpo_jax.settings import ConfigError

# If a function raises one of these, that counts as a crash of the worker.
_ENDINGS = (MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit)

# The result of a call, or the error that it raised.
Outcome = Answer | TimeoutError | RewardError | KeyboardInterrupt


def set_up(memory: int) -> None:
  """Sets up this process, which was just forked: process group, signals, limits and random seeds.

  Args:
    memory: The memory limit in bytes, 0 for none.
  """
  os.setpgid(0, 0)  # so that the forker can kill the group with all that this process starts
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)  # instead of the forker's handlers, which do nothing
  # If the machine runs out of memory, the kernel kills this process before all others.
  with contextlib.suppress(OSError):
    Path("/proc/self/oom_score_adj").write_text("1000")
  if sys.platform != "win32":
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
      # Not RLIMIT_AS: numerical libraries reserve far more address space than they use memory.
      resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
  # Otherwise all workers would draw the same numbers, from the state that the forker had.
  random.seed()
  if "numpy" in sys.modules:
    sys.modules["numpy"].random.seed()


def serve(channel: socket.socket, load: Callable[[], dict[str, Any]]) -> None:
  """Answers calls until the run closes the channel.

  Args:
    channel: The socket to the process of the run.
    load: load() returns the functions by key.
  """
  # A process that a function forks and leaves behind must not keep the channel open.
  os.register_at_fork(after_in_child=channel.close)
  try:
    functions = load()
  except BaseException as error:
    messages.send_line(channel, {"failed": describe(error)})
    return
  messages.send_line(channel, {"ready": True})
  runner = asyncio.Runner()
  while True:
    try:
      calls, timeout = messages.receive(channel)
    except (EOFError, OSError):
      return
    if calls[0][1].is_async:  # all calls of a message are of one function
      runner.run(_answer_side_by_side(channel, functions, calls, timeout))
      continue
    for number, one in calls:
      try:
        outcome: Outcome = call(_function(functions, one), one.name, one.columns, one.step)
      except (RewardError, KeyboardInterrupt) as error:
        outcome = error
      _send(channel, number, one.name, outcome)


def _function(functions: dict[str, Any], one: WorkerCall) -> Any:
  """The function of a call, wrapped by `asking` or `voting` if the call asks for that."""
  function = functions[one.key]
  return asking(function) if one.asks else voting(function) if one.votes else function


def _send(channel: socket.socket, number: int, name: str, outcome: Outcome) -> None:
  """Sends the outcome of a call of the function `name`.

  After a "crash" the run kills this process. "config" means that every call would fail, such as for
  a missing package, and "final" that a retry would. The run itself writes the text for a timeout.
  """
  reply: dict[str, Any]
  if isinstance(outcome, Answer):
    reply = {"answer": messages.answer_to_json(outcome)}
  elif isinstance(outcome, TimeoutError):
    reply = {"kind": "timeout", "text": ""}
  elif isinstance(outcome, RewardError):
    cause = outcome.__cause__
    kind = "config" if isinstance(cause, ConfigError) else "error"
    kind = "crash" if isinstance(cause, _ENDINGS) else kind
    reply = {"kind": kind, "text": str(outcome), "final": isinstance(outcome, ContractError)}
  else:
    reply = {"kind": "crash", "text": f"reward function {name} raised KeyboardInterrupt"}
  messages.send_line(channel, {"number": number, **reply})


async def _answer_side_by_side(
  channel: socket.socket,
  functions: dict[str, Any],
  calls: list[tuple[int, WorkerCall]],
  timeout: float,
) -> None:
  """Makes calls of async functions concurrently, and calls that come meanwhile, until all are done.

  `calls` are the first calls, with numbers, and `timeout` is the limit of a call in seconds.
  """
  loop = asyncio.get_running_loop()
  running: set[asyncio.Task[None]] = set()
  # Another thread sends. If this thread waited until the run reads, and the run until this thread
  # reads, neither would go on.
  sender = ThreadPoolExecutor(1)

  async def make(number: int, one: WorkerCall) -> None:
    function = _function(functions, one)
    try:
      if one.is_async:
        outcome: Outcome = await call_async(function, one.name, one.columns, one.step, timeout)
      else:  # a sync call may come after the last answer, before this loop has ended
        outcome = call(function, one.name, one.columns, one.step)
    except (TimeoutError, RewardError, KeyboardInterrupt) as error:
      outcome = error
    await loop.run_in_executor(sender, _send, channel, number, one.name, outcome)

  def begin(calls: list[tuple[int, WorkerCall]]) -> None:
    running.update(loop.create_task(make(number, one)) for number, one in calls)

  def receive() -> None:
    try:
      begin(messages.receive(channel)[0])
    except (EOFError, OSError):  # the run has ended this worker
      loop.remove_reader(channel)

  begin(calls)
  loop.add_reader(channel, receive)
  try:
    while running:
      done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
      running -= done
      for task in done:
        task.result()  # an error that `make` does not expect ends this worker
  finally:
    loop.remove_reader(channel)
    sender.shutdown(wait=False)
