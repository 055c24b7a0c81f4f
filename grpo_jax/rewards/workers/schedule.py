"""The schedule: decides which worker makes which call.

All jobs share the workers, so calls of one job run while calls of another wait. A worker makes one
call after the other. It may get several calls in one message, to save round trips for cheap
functions. It must answer a call within the time limit. If it does not, or if it ends, the call that
it was making has failed, and its other calls go to another worker.

A worker makes calls of async functions concurrently, even of different jobs. When a worker has the
maximum number, the next worker gets calls. One worker, its home, makes all calls of a function that
is marked `one_worker`, because it may keep state for later calls. Only retries go to other workers.
"""

import collections
from concurrent.futures import Future
import contextlib
import itertools
from multiprocessing import connection
import socket
import threading
import time
from typing import Any

from grpo_jax.rewards.answer import Answer, RewardError
from grpo_jax.rewards.names import SECONDS_TO_LOAD
from grpo_jax.rewards.workers.job import CallBatch, CallTask
from grpo_jax.rewards.workers.messages import WorkerCall, answer_from_json
from grpo_jax.rewards.workers.processes import WorkerProcess, WorkerProcesses

CALLS_AT_ONCE = 64  # the maximum number of concurrent async calls in a worker
_SECONDS_BETWEEN_LOOKS = 1.0  # between checks whether the pool is closed
_SECONDS_OF_CALLS = 0.05  # about how much work a worker gets in one message
_GRACE = 1.0  # seconds that an event loop may take to cancel a call after its time limit
_MOST_FAILED_STARTS = 3


class Schedule:
  """Makes the calls of jobs with worker processes, in a thread that runs while there are jobs.

  Attributes:
    lock: Another thread may use the processes only while it holds this lock and `is_idle()`.
  """

  def __init__(self, processes: WorkerProcesses, timeout: float) -> None:
    """`timeout`: the time limit of a call, in seconds."""
    self.lock = threading.Condition()
    self._processes, self._timeout = processes, timeout
    self._new: list[CallBatch] = []  # jobs whose tasks are not in `_tasks` yet
    self._runs = False  # whether the thread runs
    self._wakes, self._waker = socket.socketpair()  # `_wait` waits for a byte that `wake` sends
    self._waker.setblocking(False)  # so that `wake` does not wait while the buffer is full
    self._numbers = itertools.count()
    self._tasks: dict[int, CallTask] = {}  # the unanswered tasks by number
    # Queues with the numbers of tasks that no worker has, by `CallTask.lane`.
    self._lanes: dict[tuple[str, int], collections.deque[int]] = {}
    self._seconds: dict[str, float] = {}  # a moving average of the time of a call, by key
    self._failed_starts = 0
    # By key of a function that is marked `one_worker`: its home. It may have ended.
    self._homes: dict[str, WorkerProcess] = {}

  def start(self, job: CallBatch) -> "Future[list[Answer]]":
    """Makes the calls of a job in the background. Returns the job's future."""
    with self.lock:
      self._new.append(job)
      if not self._runs:
        self._runs = True
        # A daemon, so that Python can exit after Ctrl-C. It would wait for an executor's thread.
        threading.Thread(target=self._run, name="rewards", daemon=True).start()
    self.wake()
    return job.future

  def wake(self) -> None:
    """Makes the thread check for new jobs, and whether the pool is closed."""
    try:
      self._waker.send(b"w")
    except OSError:  # the buffer is full of earlier wakes, or the socket is closed
      pass

  def is_idle(self) -> bool:
    """Whether no job runs. The caller must hold the lock."""
    return not self._runs

  def close(self) -> None:
    """Closes the sockets that wake the thread. The thread must have ended."""
    self._wakes.close()
    self._waker.close()

  def _run(self) -> None:
    while True:
      with self.lock:
        for job in self._new:
          self._queue(job.tasks())
        self._new.clear()
        if not self._tasks:
          self._runs, self._failed_starts = False, 0
          self.lock.notify_all()
          return
      try:
        self._step()
      except BaseException as error:  # no call of any job can be made
        self._drop({task.job for task in self._tasks.values()}, error)

  def _step(self) -> None:
    if self._processes.is_closed.is_set():
      raise RewardError("the worker processes of the reward functions are closed")
    self._hand_out()
    self._retire()
    self._processes.fill(self._wanted())
    for worker in self._processes.workers:
      if not worker.deadline:
        worker.deadline = time.monotonic() + max(SECONDS_TO_LOAD, self._timeout)
    self._wait()

  def _queue(self, tasks: list[CallTask]) -> None:
    for task in tasks:
      number = next(self._numbers)
      self._tasks[number] = task
      self._lanes.setdefault(task.lane, collections.deque()).append(number)

  def _drop(self, jobs: set[CallBatch], error: BaseException) -> None:
    """Ends jobs with an error. Kills workers that have calls of these jobs, to end these calls."""
    dropped = {number for number, task in self._tasks.items() if task.job in jobs}
    for lane, numbers in self._lanes.items():
      self._lanes[lane] = collections.deque(one for one in numbers if one not in dropped)
    workers = [one for one in self._processes.workers if dropped & set(one.pending)]
    for worker in workers:
      self._give_back([number for number in worker.pending if number not in dropped])
      worker.pending = []
    for number in dropped:
      del self._tasks[number]
    for worker in workers:
      with contextlib.suppress(Exception):  # if the forker is broken, the next step raises it again
        self._processes.end(worker)
    for job in jobs:
      job.future.set_exception(error)

  def _give_back(self, numbers: list[int]) -> None:
    """Puts tasks back at the front of their lanes, because a worker did not make their calls."""
    for number in reversed(numbers):
      self._lanes[self._tasks[number].lane].appendleft(number)

  # Assigning tasks to workers.

  def _waiting(self) -> list[collections.deque[int]]:
    """The lanes that hold tasks, sorted by the number of their first task."""
    return sorted((numbers for numbers in self._lanes.values() if numbers), key=lambda one: one[0])

  def _hand_out(self) -> None:
    """Sends tasks to workers that have room, first to workers that already run async calls."""
    for worker in sorted(self._processes.workers, key=lambda one: not one.pending):
      while worker in self._processes.workers and (batch := self._batch_for(worker)):
        self._give(worker, batch)

  def _batch_for(self, worker: WorkerProcess) -> list[int]:
    """Removes the next tasks for a worker from a lane. Empty if the worker has no room for any."""
    if worker.is_ready:
      for numbers in self._waiting():
        room = min(self._room(worker, self._tasks[numbers[0]], len(numbers)), len(numbers))
        if room > 0:
          return [numbers.popleft() for _ in range(room)]
    return []

  def _room(self, worker: WorkerProcess, task: CallTask, waiting: int) -> int:
    """How many of the `waiting` tasks of a lane, whose first is `task`, a worker may get now."""
    call = task.call
    # A retry needs a new worker. A worker of sync calls gets more when it has answered them all.
    if (task.failed and not worker.is_new) or (worker.pending and not worker.is_async):
      return 0
    if call.is_async:
      # A worker makes either first attempts or retries.
      if worker.pending and (task.failed or self._tasks[worker.pending[0]].failed):
        return 0
      if call.one_worker and not self._may_begin(worker, task):
        return 0
      # A second retry is alone in its worker. `_may_begin` allows only one more call.
      one_by_one = task.failed > 1 or call.one_worker
      return min(1 if one_by_one else waiting, CALLS_AT_ONCE - len(worker.pending))
    if worker.pending:  # async calls, which must end before a sync call may begin
      return 0
    if task.failed:  # a retry has a worker for itself
      return 1
    # Half of an equal share: workers that are faster than others come back for the rest.
    share = -(-waiting // (2 * len(self._processes.workers)))
    # As many calls as take _SECONDS_OF_CALLS. One if no call of the function has ended yet.
    fitting = int(_SECONDS_OF_CALLS / self._seconds.get(call.key, _SECONDS_OF_CALLS))
    return max(1, min(share, fitting))

  def _home(self, call: WorkerCall) -> WorkerProcess | None:
    """The worker that keeps the state of the call's function. None if it has none, or has ended."""
    home = self._homes.get(call.key)
    return home if home in self._processes.workers else None

  def _may_begin(self, worker: WorkerProcess, task: CallTask) -> bool:
    """Whether a worker may start one more call of a function that is marked `one_worker`."""
    call, under_way = task.call, 0
    if not task.failed and self._home(call) not in (None, worker):
      return False
    for other in self._processes.workers:
      tasks = [t for t in map(self._tasks.__getitem__, other.pending) if t.call.key == call.key]
      if tasks and other is not worker:
        return False
      under_way += sum(len(task.rows) for task in tasks)
    # Twice as many, so that a call with one slow request does not leave request slots unused.
    return not under_way or not call.at_once or under_way < 2 * call.at_once

  def _retire(self) -> None:
    """Ends idle workers to make room for new ones, which retries need.

    A home loses its state when it ends. So homes end only if no other worker could make room.
    """
    missing = sum(len(one) for one in self._waiting() if self._tasks[one[0]].failed)
    missing -= sum(worker.is_new for worker in self._processes.workers)
    idle = [one for one in self._processes.workers if not one.is_new and not one.pending]
    homes = self._living_homes()
    if len(homes) < self._processes.count:
      idle = [one for one in idle if one not in homes]
    for worker in idle[: max(0, missing)]:
      self._processes.end(worker)

  def _living_homes(self) -> set[WorkerProcess]:
    return {worker for worker in self._processes.workers if worker in self._homes.values()}

  def _wanted(self) -> int:
    """How many workers there should be: busy ones, homes, and those for the waiting tasks."""
    busy = {worker for worker in self._processes.workers if worker.pending}
    wanted = len(busy | self._living_homes())
    for numbers in self._waiting():
      task = self._tasks[numbers[0]]
      if task.call.is_async and task.call.one_worker:
        wanted += 1 if task.failed or self._home(task.call) is None else 0
      elif task.call.is_async and task.failed < 2:
        wanted += -(-len(numbers) // CALLS_AT_ONCE)
      else:  # a worker for each task: `fill` applies the limit
        wanted += len(numbers)
    return wanted

  def _give(self, worker: WorkerProcess, batch: list[int]) -> None:
    had_none = not worker.pending
    worker.pending += batch
    call = self._tasks[batch[0]].call
    worker.is_async = call.is_async
    if call.is_async and call.one_worker and self._home(call) is None:
      self._homes[call.key] = worker
    if had_none:  # else the deadline is that of an earlier call
      self._extend(worker)
    try:
      worker.send([(number, self._tasks[number].cut()) for number in batch], self._timeout)
    except OSError:
      self._worker_failed(worker, "crash")
    except RewardError as error:
      self._drop({self._tasks[number].job for number in batch}, error)

  def _extend(self, worker: WorkerProcess) -> None:
    worker.answered_at = time.monotonic()
    grace = _GRACE if worker.is_async else 0
    worker.deadline = worker.answered_at + self._timeout + grace

  # Handling messages from workers.

  def _wait(self) -> None:
    """Waits at most a second for a message, a deadline or `wake`. Then handles messages, and
    workers whose deadlines have passed.
    """
    awaited = [one for one in self._processes.workers if one.pending or not one.is_ready]
    first_deadline = min((one.deadline for one in awaited), default=float("inf"))
    seconds = min(first_deadline - time.monotonic(), _SECONDS_BETWEEN_LOOKS)
    by_channel: dict[Any, WorkerProcess | None] = {one.channel: one for one in awaited}
    by_channel[self._wakes] = None
    for channel in connection.wait(list(by_channel), max(0.0, seconds)):
      worker = by_channel[channel]
      if worker is None:
        self._wakes.recv(2**10)  # drops the bytes that `wake` sent
      elif worker in self._processes.workers:  # a message of another worker may have ended it
        self._read(worker)
    for worker in awaited:
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
    except (ValueError, KeyError, TypeError):  # the message is not an answer
      self._worker_failed(worker, "crash", "sent something that is no answer")

  def _take(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
    """Handles a message from a worker: it is ready, an answer, or the reason why a call failed.

    Raises:
      ValueError, KeyError or TypeError: The message is invalid.
      RewardError: The worker cannot load its functions.
    """
    if not worker.is_ready:
      if "failed" in message:
        raise RewardError(f"a worker process cannot load its functions: {message['failed']:.500}")
      worker.is_ready = bool(message["ready"])
      return
    number = message["number"]
    # Async calls may be answered in any order, others only in the order of sending.
    expected = worker.pending if worker.is_async else worker.pending[:1]
    if number not in expected:
      raise ValueError(number)
    task = self._tasks[number]
    if "answer" in message:
      answer = answer_from_json(message["answer"], len(task.rows))
      self._note_seconds(task.call.key, time.monotonic() - worker.answered_at)
      self._ended(worker, number)
      task.job.answer(task, answer)
      return
    kind, text = str(message["kind"]), str(message["text"])
    if kind == "config":  # no other call would succeed
      self._drop({task.job}, RewardError(text))
    elif kind == "crash":  # the worker cannot be used any more
      self._worker_failed(worker, kind, text=text)
    else:
      self._ended(worker, number)
      retries = 0 if message.get("final") else 1  # see `worker._send`
      self._failed(task, kind, text or self._too_late(task.call), retries)

  def _ended(self, worker: WorkerProcess, number: int) -> None:
    """Removes a task that a worker has answered, and extends the worker's deadline."""
    worker.pending.remove(number)
    del self._tasks[number]
    self._extend(worker)

  def _note_seconds(self, key: str, seconds: float) -> None:
    before = self._seconds.get(key, seconds)
    self._seconds[key] = max(1e-6, 0.8 * before + 0.2 * seconds)

  def _worker_failed(
    self, worker: WorkerProcess, kind: str, what: str = "", text: str = ""
  ) -> None:
    """Kills a worker that has failed. The calls that it was making count as failed.

    These are all pending async calls, or else the first pending call. Other workers get the rest.
    `kind` is "crash" or "timeout", which has a message of its own. `what` completes the message
    "the worker process of reward function NAME ...", and "" says how the process ended. `text`
    replaces the message.
    """
    pending, worker.pending = worker.pending, []
    how = self._processes.end(worker)
    if not worker.is_ready:
      self._failed_starts += 1
      if self._failed_starts >= _MOST_FAILED_STARTS:
        raise RewardError(f"a worker process {how} before it was ready: is reward.memory too low?")
    suspects = pending if worker.is_async else pending[:1]
    self._give_back(pending[len(suspects) :])
    failed = [self._tasks.pop(number) for number in suspects]
    for task in failed:
      name = task.call.name
      message = text or f"the worker process of reward function {name} {what or how}"
      if kind == "timeout":
        message = self._too_late(task.call)
      # Any of the concurrent async calls may be at fault, so the second retry makes each one alone.
      self._failed(task, kind, message, 2 if task.call.is_async else 1)

  def _too_late(self, call: WorkerCall) -> str:
    limit = f"reward.timeout = {self._timeout:g} s"
    return f"reward function {call.name} has not returned within {limit}"

  def _failed(self, task: CallTask, kind: str, text: str, retries: int) -> None:
    if task.job.future.done():  # another call of the job has just ended the job
      return
    try:
      # Async calls are always retried, because a concurrent call may have caused the failure.
      is_over = not task.call.again and not task.call.is_async
      self._queue(task.job.failed(task, kind, text, 0 if is_over else retries))
    except RewardError as error:
      self._drop({task.job}, error)
