"""The pool: worker processes that call reward functions, and that can be killed at any time.

A call that hangs, crashes or raises something costs no other call its reward. `processes.py` starts
and ends the workers, and `job.py` decides which worker makes which call.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
import threading
from typing import Any

from grpo_jax.rewards.answer import Answer
from grpo_jax.rewards.call import in_thread
from grpo_jax.rewards.workers.job import Job
from grpo_jax.rewards.workers.messages import Call, portable
from grpo_jax.rewards.workers.processes import Processes

_SECONDS_TO_STOP = 5.0


class Pool:
  """Worker processes that make calls in the background, one job after the other."""

  def __init__(self, count: int, timeout: float, memory: float = 0) -> None:
    """Starts nothing yet.

    Args:
      count: How many workers there may be.
      timeout: Seconds that a call may take.
      memory: GiB that a worker may have, 0 for no limit.
    """
    self._processes = Processes(count, int(memory * 2**30))
    self._timeout = timeout
    self._one_job = threading.Lock()

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
      with self._one_job:
        self._processes.add(source, sent)

  def start(self, calls: Sequence[Call], stops_on_error: bool = False) -> "Future[list[Answer]]":
    """Makes calls in the background.

    Args:
      calls: The calls.
      stops_on_error: Whether the first completion for which a function raises something ends all.

    Returns:
      The future answers, in the order of the calls.
    """

    def run() -> list[Answer]:
      with self._one_job:
        return Job(self._processes, calls, self._timeout, stops_on_error).run()

    return in_thread(run)

  def close(self) -> None:
    """Ends all workers, and with them what is running."""
    self._processes.is_closed.set()
    has_stopped = self._one_job.acquire(timeout=_SECONDS_TO_STOP)
    self._processes.close()
    if has_stopped:
      self._one_job.release()
