"""A job: the calls of one `Pool.start`, and their answers."""

from collections.abc import Sequence
from concurrent.futures import Future
import dataclasses

from grpo_jax.rewards.answer import Answer, RewardError, joined, no_answer
from grpo_jax.rewards.call import rows_of
from grpo_jax.rewards.workers.messages import WorkerCall


@dataclasses.dataclass(frozen=True, eq=False)
class CallTask:
  """A task: to call a function with some rows of a call of a job.

  Attributes:
    job: The job.
    place: The index of the call in the job.
    rows: The indices of the completions of the call that this task scores.
    failed: How many attempts with these rows have failed.
  """

  job: "CallBatch"
  place: int
  rows: Sequence[int]
  failed: int = 0

  @property
  def call(self) -> WorkerCall:
    """The whole call."""
    return self.job.calls[self.place]

  @property
  def lane(self) -> tuple[str, int]:
    """The key of the task's lane: a queue of tasks that differ only in their completions."""
    return self.call.key, self.failed

  def cut(self) -> WorkerCall:
    """The call with only the rows of this task."""
    return dataclasses.replace(self.call, columns=rows_of(self.call.columns, self.rows))


class CallBatch:
  """A job: calls, and the answers so far.

  A call that fails is retried with one completion at a time, each in a new worker. A completion for
  which that fails has no reward. A function that must see whole groups is retried with the group.

  Attributes:
    calls: The calls.
    future: The answers, in the order of the calls.
  """

  def __init__(self, calls: Sequence[WorkerCall], stops_on_error: bool) -> None:
    """`stops_on_error`: whether an error for a single completion ends the job with RewardError."""
    self.calls, self._stops_on_error = calls, stops_on_error
    self.future: Future[list[Answer]] = Future()
    # By call: pairs of the rows of a task and the answer for them.
    self._parts: list[list[tuple[Sequence[int], Answer]]] = [[] for _ in calls]
    self._unanswered = len(calls)  # the number of tasks without an answer
    self._end_if_done()

  def tasks(self) -> list[CallTask]:
    """A task for each call, with all its rows."""
    sizes = [len(call.columns["completions"]) for call in self.calls]
    return [CallTask(self, place, range(size)) for place, size in enumerate(sizes)]

  def answer(self, task: CallTask, answer: Answer) -> None:
    """Stores the answer of a task. The last one sets the future."""
    self._parts[task.place].append((task.rows, answer))
    self._unanswered -= 1
    self._end_if_done()

  def failed(self, task: CallTask, kind: str, text: str, retries: int) -> list[CallTask]:
    """Handles a failed attempt of a task.

    Args:
      task: The task.
      kind: "error", "timeout" or "crash", as in `Failure`.
      text: The reason, as one line that names the function.
      retries: How many times a task may be retried.

    Returns:
      The tasks that replace it. Empty after the last retry, when its rows have no reward.

    Raises:
      RewardError: The error ends the job.
    """
    if task.failed >= retries:
      if kind == "error" and self._stops_on_error:
        raise RewardError(text)
      self.answer(task, no_answer(len(task.rows), kind, text))
      return []
    parts = [task.rows] if task.call.whole_groups else [[row] for row in task.rows]
    self._unanswered += len(parts) - 1
    return [dataclasses.replace(task, rows=rows, failed=task.failed + 1) for rows in parts]

  def _end_if_done(self) -> None:
    if self._unanswered:
      return
    self.future.set_result(
      [
        # Sorted, so that sums over logged values do not depend on the speed of workers.
        joined(len(call.columns["completions"]), sorted(parts, key=_first_row))
        for call, parts in zip(self.calls, self._parts)
      ]
    )


def _first_row(part: tuple[Sequence[int], Answer]) -> int:
  rows, _ = part
  return min(rows, default=0)
