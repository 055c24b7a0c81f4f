"""A worker: a process that calls reward functions, one call after the other.

Calls of async functions run side by side, and others may come while they run. They share an event
loop that lives as long as the worker, so what such a function keeps for its loop stays valid.

It may hang, crash or be killed at any time. The process of the run then knows which call it was in,
because the worker answers each call as soon as it has returned.
"""

import asyncio
from collections.abc import Callable
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

# Exceptions that count as the end of a worker, though a function can raise them.
_ENDINGS = (MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit)

# The result of a call, or the error that it raised.
Outcome = Answer | TimeoutError | RewardError | KeyboardInterrupt


def set_up(memory: int) -> None:
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
  runner = asyncio.Runner()
  while True:
    try:
      calls, timeout = messages.receive(channel)
    except (EOFError, OSError):
      return
    if calls[0][1].is_async:
      runner.run(_answer_side_by_side(channel, functions, calls, timeout))
      continue
    for number, one in calls:
      try:
        outcome: Outcome = call(_function(functions, one), one.name, one.columns, one.step)
      except (RewardError, KeyboardInterrupt) as error:
        outcome = error
      _send(channel, number, one.name, outcome)


def _function(functions: dict[str, Any], one: WorkerCall) -> Any:
  """The function that a call is for, or what asks it what it reads, or counts its answers."""
  function = functions[one.key]
  return asking(function) if one.asks else voting(function) if one.votes else function


def _send(channel: socket.socket, number: int, name: str, outcome: Outcome) -> None:
  """Sends what a call of the function `name` gave or raised. After a "crash" the run kills us."""
  reply: dict[str, Any]
  if isinstance(outcome, Answer):
    reply = {"answer": messages.answer_to_json(outcome)}
  elif isinstance(outcome, TimeoutError):
    reply = {"kind": "timeout", "text": ""}
  elif isinstance(outcome, RewardError):
    cause = outcome.__cause__
    is_config = isinstance(cause, ConfigError)
    kind = "crash" if isinstance(cause, _ENDINGS) else "config" if is_config else "error"
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
  """Makes calls of async functions, and those that come meanwhile, until none is left."""
  loop = asyncio.get_running_loop()
  running: set[asyncio.Task[None]] = set()

  async def make(number: int, one: WorkerCall) -> None:
    function = _function(functions, one)
    try:
      if one.is_async:
        outcome: Outcome = await call_async(function, one.name, one.columns, one.step, timeout)
      else:  # the run sends it as soon as it has all answers, and the loop may not have ended yet
        outcome = call(function, one.name, one.columns, one.step)
    except (TimeoutError, RewardError, KeyboardInterrupt) as error:
      outcome = error
    _send(channel, number, one.name, outcome)

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
        task.result()
  finally:
    loop.remove_reader(channel)
