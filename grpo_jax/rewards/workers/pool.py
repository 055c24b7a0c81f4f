"""The pool: worker processes that call reward functions, and that can be killed at any time.

A call that hangs, crashes or raises an exception does not affect the rewards of other calls.
`processes.py` starts and kills the workers, `schedule.py` assigns calls to workers, and `job.py`
combines the answers.
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
  """Worker processes that make the calls of any number of jobs in the background."""

  def __init__(self, count: int, timeout: float, memory: float = 0) -> None:
    """Makes a pool. It starts no process before `add`.

    Args:
      count: The maximum number of workers.
      timeout: The time limit of a call, in seconds.
      memory: The memory limit of a worker, in GiB. 0 for no limit.
    """
    self._processes = WorkerProcesses(count, int(memory * 2**30))
    self._schedule = Schedule(self._processes, timeout)

  def add(self, source: str, function: Callable[..., Any], is_named: bool) -> None:
    """Adds a function that workers can call, with the key `source`.

    Waits until no job runs, because it replaces the workers, which lack the function.

    Args:
      source: The name of the function in the config.
      function: The function.
      is_named: Whether other processes can find it by that name.

    Raises:
      NotPortable: The function cannot be sent to another process.
      ConfigError: The function cannot be loaded in another process.
    """
    if source not in self._processes.functions:
      sent = portable(source, function, is_named)
      with self._schedule.lock:
        self._schedule.lock.wait_for(self._schedule.is_idle)
        self._processes.add(source, sent)

  def start(
    self, calls: Sequence[WorkerCall], stops_on_error: bool = False
  ) -> "Future[list[Answer]]":
    """Starts a job, whose calls are made in the background.

    Args:
      calls: The calls.
      stops_on_error: Whether an error for a single completion ends the job with RewardError.

    Returns:
      The future answers, in the order of the calls.
    """
    return self._schedule.start(CallBatch(calls, stops_on_error))

  def close(self) -> None:
    """Ends all workers and jobs."""
    self._processes.is_closed.set()
    self._schedule.wake()
    with self._schedule.lock:
      has_stopped = self._schedule.lock.wait_for(self._schedule.is_idle, _SECONDS_TO_STOP)
    self._processes.close()
    if has_stopped:
      self._schedule.close()
