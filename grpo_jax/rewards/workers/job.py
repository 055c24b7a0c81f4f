"""A job: calls of reward functions, which workers make side by side.

A worker makes one call after the other. It may get several at once, so that cheap functions do not
wait for messages. It must answer something within the time limit. If it does not, or if it ends,
the call that it was in has failed, and the calls behind it go to another worker.

A call that failed is made again, for one completion at a time, each in a new worker. What fails
there has no reward. A function that must see whole groups is called again with the whole group.
"""

import collections
from collections.abc import Sequence
import dataclasses
from multiprocessing import connection
import time
from typing import Any

from grpo_jax.rewards.answer import Answer, RewardError, joined, no_answer
from grpo_jax.rewards.call import rows_of
from grpo_jax.rewards.workers.messages import Call, answer_from_json
from grpo_jax.rewards.workers.processes import Processes, WorkerProcess

_SECONDS_TO_START = 120.0
_SECONDS_BETWEEN_LOOKS = 1.0  # at whether the pool is closed
_SECONDS_OF_CALLS = 0.05  # how much work a worker gets at once
_GRACE = 1.0  # seconds for the loop of an async function to notice that a call is over
_MOST_FAILED_STARTS = 3


@dataclasses.dataclass(frozen=True)
class _Task:
  """Some rows of a call, and how often calls with them have failed."""

  call: int
  rows: Sequence[int]
  failed: int = 0


class Job:
  """Makes calls with worker processes."""

  def __init__(
    self, processes: Processes, calls: Sequence[Call], timeout: float, stops_on_error: bool
  ) -> None:
    self._processes, self._timeout = processes, timeout
    self._calls, self._stops_on_error = calls, stops_on_error
    self._tasks = [
      _Task(i, range(len(call.columns["completions"]))) for i, call in enumerate(calls)
    ]
    self._queue = collections.deque(range(len(calls)))  # indices of tasks
    self._unanswered = len(calls)  # how many tasks
    self._parts: list[list[tuple[Sequence[int], Answer]]] = [[] for _ in calls]
    self._seconds: dict[str, float] = {}  # of a call, by key
    self._failed_starts = 0

  def run(self) -> list[Answer]:
    """The answers, in the order of the calls.

    Raises:
      RewardError: No call can be made, or a function raised something and that stops the run.
    """
    try:
      while self._unanswered:
        if self._processes.is_closed.is_set():
          raise RewardError("the worker processes of the reward functions are closed")
        self._hand_out()
        self._wait()
    finally:
      for worker in [worker for worker in self._processes.workers if worker.pending]:
        self._processes.end(worker)
    return [
      joined(len(call.columns["completions"]), parts)
      for call, parts in zip(self._calls, self._parts)
    ]

  def _hand_out(self) -> None:
    """Gives tasks to the workers that have none."""
    self._retire()
    workers = self._processes.workers
    busy = sum(bool(worker.pending) for worker in workers)
    self._processes.fill(busy + len(self._queue))
    for worker in list(workers):
      if not worker.deadline:
        worker.deadline = time.monotonic() + max(_SECONDS_TO_START, self._timeout)
      is_idle = worker.is_ready and not worker.pending
      if is_idle and self._queue and (worker.is_new or not self._next_needs_new_worker()):
        self._give(worker, self._batch())

  def _retire(self) -> None:
    """Ends idle workers where calls that failed need new ones."""
    if not self._next_needs_new_worker():
      return
    missing = len(self._queue) - sum(worker.is_new for worker in self._processes.workers)
    idle = [one for one in self._processes.workers if not one.is_new and not one.pending]
    for worker in idle[: max(0, missing)]:
      self._processes.end(worker)

  def _next_needs_new_worker(self) -> bool:
    return bool(self._queue) and self._tasks[self._queue[0]].failed > 0

  def _batch(self) -> list[int]:
    """The next tasks of the queue for one worker, all of one function."""
    first = self._tasks[self._queue[0]]
    call = self._calls[first.call]
    if call.is_async:
      most = 1 if first.failed > 1 else len(self._queue)
    elif first.failed:
      most = 1
    else:
      share = -(-len(self._queue) // (2 * len(self._processes.workers)))
      fitting = int(_SECONDS_OF_CALLS / self._seconds.get(call.key, _SECONDS_OF_CALLS))
      most = max(1, min(share, fitting))
    batch = [self._queue.popleft()]
    while len(batch) < most and self._queue:
      task = self._tasks[self._queue[0]]
      if self._calls[task.call].key != call.key or task.failed != first.failed:
        break
      batch.append(self._queue.popleft())
    return batch

  def _give(self, worker: WorkerProcess, batch: list[int]) -> None:
    calls = []
    for number in batch:
      task = self._tasks[number]
      call = self._calls[task.call]
      calls.append((number, dataclasses.replace(call, columns=rows_of(call.columns, task.rows))))
    worker.pending, worker.is_async = list(batch), calls[0][1].is_async
    self._extend(worker)
    try:
      worker.send(calls, self._timeout)
    except OSError:
      self._worker_failed(worker, "crash")

  def _extend(self, worker: WorkerProcess) -> None:
    worker.answered_at = time.monotonic()
    grace = _GRACE if worker.is_async else 0
    worker.deadline = worker.answered_at + self._timeout + grace

  def _wait(self) -> None:
    """Waits for an answer or for the end of a time limit."""
    waiting = [one for one in self._processes.workers if one.pending or not one.is_ready]
    if not waiting:
      return
    first_deadline = min(one.deadline for one in waiting)
    seconds = min(first_deadline - time.monotonic(), _SECONDS_BETWEEN_LOOKS)
    by_channel: dict[Any, WorkerProcess] = {one.channel: one for one in waiting}
    for channel in connection.wait(list(by_channel), max(0.0, seconds)):
      self._read(by_channel[channel])
    for worker in waiting:
      is_waited_for = worker in self._processes.workers and (worker.pending or not worker.is_ready)
      if is_waited_for and time.monotonic() > worker.deadline:
        self._worker_failed(worker, "timeout")

  def _read(self, worker: WorkerProcess) -> None:
    try:
      for message in worker.read():
        if worker in self._processes.workers:
          self._take(worker, message)
    except (EOFError, OSError):
      self._worker_failed(worker, "crash")
    except (ValueError, KeyError, TypeError):  # it is no answer
      self._worker_failed(worker, "crash", "sent something that is no answer")

  def _take(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
    """Takes a message. Raises ValueError, KeyError or TypeError if it is none."""
    if not worker.is_ready:
      if "failed" in message:
        raise RewardError(f"a worker process cannot load its functions: {message['failed']:.500}")
      worker.is_ready = bool(message["ready"])
      return
    number = message["number"]
    if number not in (worker.pending if worker.is_async else worker.pending[:1]):
      raise ValueError(number)
    task = self._tasks[number]
    call = self._calls[task.call]
    if "answer" in message:
      answer = answer_from_json(message["answer"], len(task.rows))
      self._note_seconds(call.key, time.monotonic() - worker.answered_at)
      self._parts[task.call].append((task.rows, answer))
      self._unanswered -= 1
    else:
      kind, text = str(message["kind"]), str(message["text"])
      if kind == "config":
        raise RewardError(text)
      if kind == "crash":
        self._worker_failed(worker, kind, text=text)
        return
      self._failed(task, kind, text or self._too_late(call), 1, bool(message.get("final")))
    worker.pending.remove(number)
    self._extend(worker)

  def _note_seconds(self, key: str, seconds: float) -> None:
    before = self._seconds.get(key, seconds)
    self._seconds[key] = max(1e-6, 0.8 * before + 0.2 * seconds)

  def _worker_failed(
    self, worker: WorkerProcess, kind: str, what: str = "", text: str = ""
  ) -> None:
    """A worker has ended, hangs or sends nonsense. The calls that it was not in are made again."""
    pending, worker.pending = worker.pending, []
    how = self._processes.end(worker)
    if not worker.is_ready:
      self._failed_starts += 1
      if self._failed_starts >= _MOST_FAILED_STARTS:
        raise RewardError(f"a worker process {how} before it was ready: is reward.memory too low?")
    suspects = pending if worker.is_async else pending[:1]
    self._queue.extendleft(reversed(pending[len(suspects) :]))
    for number in suspects:
      task = self._tasks[number]
      call = self._calls[task.call]
      said = text or f"the worker process of reward function {call.name} {what or how}"
      if kind == "timeout":
        said = self._too_late(call)
      # With an async function, all that ran side by side is suspect. It is called alone at last.
      self._failed(task, kind, said, 2 if call.is_async else 1)

  def _too_late(self, call: Call) -> str:
    limit = f"reward.timeout = {self._timeout:g} s"
    return f"reward function {call.name} has not returned within {limit}"

  def _failed(
    self, task: _Task, kind: str, text: str, retries: int, is_final: bool = False
  ) -> None:
    """A call failed. It is made again unless that was done `retries` times."""
    if is_final or task.failed >= retries:
      if kind == "error" and self._stops_on_error:
        raise RewardError(text)
      self._parts[task.call].append((task.rows, no_answer(len(task.rows), kind, text)))
      self._unanswered -= 1
      return
    whole = self._calls[task.call].whole_groups
    parts = [task.rows] if whole else [[row] for row in task.rows]
    for rows in parts:
      self._queue.append(len(self._tasks))
      self._tasks.append(_Task(task.call, rows, task.failed + 1))
    self._unanswered += len(parts) - 1
