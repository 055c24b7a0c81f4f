"""The pool: worker processes that call reward functions, and that can be killed at any time.

A call that hangs, crashes or raises something costs no other call its reward. `processes.py` starts
and ends the workers, `schedule.py` decides which worker makes which call, and `job.py` puts the
answers together.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from grpo_jax.rewards.answer import Answer
from grpo_jax.rewards.workers.job import CallBatch
from grpo_jax.rewards.workers.messages import WorkerCall, portable
from grpo_jax.rewards.workers.processes import WorkerProcesses
from grpo_jax.rewards.workers.schedule import Schedule

_SECONDS_TO_STOP = 5.0


class Pool:
  """Worker processes that make calls in the background, of several jobs at the same time."""

  def __init__(self, count: int, timeout: float, memory: float = 0) -> None:
    """Starts nothing yet.

    Args:
      count: How many workers there may be.
      timeout: Seconds that a call may take.
      memory: GiB that a worker may have, 0 for no limit.
    """
    self._processes = WorkerProcesses(count, int(memory * 2**30))
    self._schedule = Schedule(self._processes, timeout)

  def add(self, source: str, function: Callable[..., Any], is_named: bool) -> None:
    """Lets the workers call a function, whose key is `source`.

    Args:
      source: Its name in the config.
      function: The function.
      is_named: Whether any process finds it under that name.

    Raises:
      NotPortable: It cannot be sent to another process.
      ConfigError: It cannot be loaded there.
    """
    if source not in self._processes.functions:
      sent = portable(source, function, is_named)
      with self._schedule.lock:
        self._schedule.lock.wait_for(self._schedule.is_idle)
        self._processes.add(source, sent)

  def start(
    self, calls: Sequence[WorkerCall], stops_on_error: bool = False
  ) -> "Future[list[Answer]]":
    """Makes calls in the background.

    Args:
      calls: The calls.
      stops_on_error: Whether the first completion for which a function raises something ends all.

    Returns:
      The future answers, in the order of the calls.
    """
    return self._schedule.start(CallBatch(calls, stops_on_error))

  def close(self) -> None:
    """Ends all workers, and with them what is running."""
    self._processes.is_closed.set()
    self._schedule.wake()
    with self._schedule.lock:
      has_stopped = self._schedule.lock.wait_for(self._schedule.is_idle, _SECONDS_TO_STOP)
    self._processes.close()
    if has_stopped:
      self._schedule.close()
