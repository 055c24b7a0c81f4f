"""A job: the calls that one `Pool.start` was given, and their answers."""

from collections.abc import Sequence
from concurrent.futures import Future
import dataclasses

from grpo_jax.rewards.answer import Answer, RewardError, joined, no_answer
from grpo_jax.rewards.call import rows_of
from grpo_jax.rewards.workers.messages import WorkerCall


@dataclasses.dataclass(frozen=True, eq=False)
class CallTask:
  """Some rows of a call, and how often calls with them have failed.

  Attributes:
    job: The job of the call.
    place: Which of the job's calls it is.
    rows: The completions of the call that are scored.
    failed: How many calls with these rows have failed.
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
    """The key of tasks that any worker may take in any order: equal for tasks of one lane."""
    return self.call.key, self.failed

  def cut(self) -> WorkerCall:
    """The call with these rows alone."""
    return dataclasses.replace(self.call, columns=rows_of(self.call.columns, self.rows))


class CallBatch:
  """Calls and their answers so far.

  A call that failed is made again, for one completion at a time, each in a new worker. What fails
  there has no reward. A function that must see whole groups is called again with the whole group.

  Attributes:
    calls: The calls.
    future: Gets the answers, in the order of the calls, whichever comes first.
  """

  def __init__(self, calls: Sequence[WorkerCall], stops_on_error: bool) -> None:
    """`stops_on_error`: whether the first completion for which a function raises ends the job."""
    self.calls, self._stops_on_error = calls, stops_on_error
    self.future: Future[list[Answer]] = Future()
    self._parts: list[list[tuple[Sequence[int], Answer]]] = [[] for _ in calls]
    self._unanswered = len(calls)  # tasks
    self._end_if_done()

  def tasks(self) -> list[CallTask]:
    """A task for each call."""
    sizes = [len(call.columns["completions"]) for call in self.calls]
    return [CallTask(self, place, range(size)) for place, size in enumerate(sizes)]

  def answer(self, task: CallTask, answer: Answer) -> None:
    """Takes the answer for a task."""
    self._parts[task.place].append((task.rows, answer))
    self._unanswered -= 1
    self._end_if_done()

  def failed(self, task: CallTask, kind: str, text: str, retries: int) -> list[CallTask]:
    """A call failed.

    Args:
      task: Whose call it was.
      kind: As in `Failure`.
      text: As in `Failure`.
      retries: How often a call that fails is made again.

    Returns:
      The tasks in its place. There are none after so many retries.

    Raises:
      RewardError: It ends the job.
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
        # Sorted, so that sums over what was logged do not depend on which worker was faster.
        joined(len(call.columns["completions"]), sorted(parts, key=_first_row))
        for call, parts in zip(self.calls, self._parts)
      ]
    )


def _first_row(part: tuple[Sequence[int], Answer]) -> int:
  rows, _ = part
  return min(rows, default=0)
