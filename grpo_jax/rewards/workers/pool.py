"""The pool: worker processes that call reward functions, and that can be killed at any time.

A call that hangs, crashes or raises something costs no other call its reward. `Pool` owns the
processes, and `grpo_jax/rewards/workers/job.py` decides which worker makes which call.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
import threading
from typing import Any
import weakref

from grpo_jax.rewards.answer import Answer, RewardError
from grpo_jax.rewards.workers.job import Job
from grpo_jax.rewards.workers.processes import Call, Forker, ForkerEnded, Worker, portable

_MOST_RESTARTS = 3  # of the forker, which ends only if something kills it
_SECONDS_TO_STOP = 5.0


class Pool:
  """Worker processes.

  Attributes:
    timeout: Seconds that a call may take.
    workers: Those that exist.
  """

  def __init__(self, count: int, timeout: float, memory: float = 0) -> None:
    """Starts nothing yet.

    Args:
      count: How many workers there may be.
      timeout: Seconds that a call may take.
      memory: GiB that a worker may have, 0 for no limit.
    """
    self.timeout = timeout
    self.workers: list[Worker] = []
    self._count, self._memory = count, int(memory * 2**30)
    self._functions: dict[str, tuple[str, bytes]] = {}
    self._late: set[str] = set()  # what each worker loads for itself
    self._forkers: list[Forker] = []  # the last one serves; the others have ended
    self._one_job = threading.Lock()
    self._is_closed = threading.Event()
    # Also where nobody calls `close`: at the latest when the interpreter exits.
    self._finalizer = weakref.finalize(self, _close, self._forkers)

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
    if source in self._functions:
      return
    self._functions[source] = portable(source, function, is_named)
    with self._one_job:
      self._end_workers()  # they do not have the function
      if not self._forkers:
        self._start_forker()
      elif not self._forkers[-1].load(source, *self._functions[source]):
        self._late.add(source)
        self._forkers.pop().close()
        self._start_forker()

  def start(self, calls: Sequence[Call], stops_on_error: bool = False) -> "Future[list[Answer]]":
    """Makes calls in the background.

    Args:
      calls: The calls.
      stops_on_error: Whether the first completion for which a function raises something ends all.

    Returns:
      The future answers, in the order of the calls.
    """
    future: Future[list[Answer]] = Future()

    def run() -> None:
      try:
        with self._one_job:
          future.set_result(Job(self, calls, stops_on_error).run())
      except BaseException as error:
        future.set_exception(error)

    threading.Thread(target=run, name="rewards", daemon=True).start()
    return future

  def close(self) -> None:
    """Ends all workers, and with them what is running."""
    self._is_closed.set()
    has_stopped = self._one_job.acquire(timeout=_SECONDS_TO_STOP)
    self._finalizer()
    if has_stopped:
      self._one_job.release()

  def check_open(self) -> None:
    """Raises RewardError after `close`."""
    if self._is_closed.is_set():
      raise RewardError("the worker processes of the reward functions are closed")

  def fill(self, wanted: int) -> None:
    """Starts workers until there are as many as wanted, or as there may be."""
    while len(self.workers) < min(self._count, wanted):
      self.workers.append(self._start_worker())

  def end(self, worker: Worker) -> str:
    """Kills a worker with all that it started. Returns how it had ended, if it had before."""
    self.workers.remove(worker)
    try:
      return self._forkers[-1].end(worker)
    except ForkerEnded:
      self._start_forker()
      return "was killed"

  def _start_worker(self) -> Worker:
    while True:
      late = {key: self._functions[key] for key in self._late}
      try:
        return self._forkers[-1].start(self._memory, late)
      except ForkerEnded:
        self._start_forker()

  def _start_forker(self) -> None:
    """Starts a forker. The workers of the one before have ended with it."""
    if len(self._forkers) > _MOST_RESTARTS:
      raise RewardError("the process that starts workers for reward functions was killed again")
    for worker in self.workers:
      worker.is_orphan = True
    while True:
      forker = Forker()
      early = [source for source in self._functions if source not in self._late]
      with_threads = [one for one in early if not forker.load(one, *self._functions[one])]
      if not with_threads:
        break
      # A forker with threads cannot fork. The next one leaves these functions to the workers.
      self._late.update(with_threads)
      forker.close()
    self._forkers.append(forker)

  def _end_workers(self) -> None:
    for worker in list(self.workers):
      self.end(worker)


def _close(forkers: Sequence[Forker]) -> None:
  for forker in forkers:
    forker.close()
