"""Calls the reward functions of a run, each in the place where it belongs.

Functions that are marked `in_process`, such as the built-in ones whose time is linear in the length
of a text, and reward models are called in the process of the run. All others are called by workers,
unless reward.workers is 0.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from grpo_jax.rewards.answer import Answer, RewardError, joined
from grpo_jax.rewards.call import Columns, call_here, call_in_parts, is_async, rows_of
from grpo_jax.rewards.functions import Reward, is_named, name_of
from grpo_jax.rewards.marks import has_mark
from grpo_jax.rewards.pool import Pool
from grpo_jax.rewards.workers import Call, NotPortable


class Caller:
  """Calls reward functions."""

  def __init__(self, pool: Pool | None, stops_on_error: bool = True) -> None:
    """Calls them in workers of `pool`. None means always in this process.

    `stops_on_error`: whether what a function raises is raised, or costs the completions that fail
    alone their rewards.
    """
    self._pool, self.stops_on_error = pool, stops_on_error
    self._for_workers: list[tuple[Reward, str]] = []  # with their keys in the pool

  def add(self, functions: Mapping[str, Reward]) -> tuple[str, ...]:
    """Prepares functions, by their names in the config.

    Returns:
      For each function that should be called by workers and cannot, a line that says why.

    Raises:
      ConfigError: A worker cannot load one of them.
    """
    remarks = []
    for source, function in functions.items():
      if self._pool is None or has_mark(function, "in_process"):
        continue
      name = name_of(function)
      try:
        self._pool.add(source, function, is_named(source))
      except NotPortable as error:
        remarks.append(
          f"reward function {name} is called in the process of the run, without limits of time and"
          f" memory, because it cannot be sent to a worker: {error}"
        )
      else:
        self._for_workers.append((function, source))
    return tuple(remarks)

  def close(self) -> None:
    """Ends the workers."""
    if self._pool is not None:
      self._pool.close()

  def uses_workers(self, function: Reward) -> bool:
    """Whether workers call a function."""
    return any(one is function for one, _ in self._for_workers)

  def start(
    self, functions: Sequence[Reward], columns: Columns, step: int, group_size: int
  ) -> Callable[[Reward], Answer]:
    """Starts calls. The workers begin at once.

    Args:
      functions: The functions.
      columns: Their arguments: completions and other lists, with the groups one after the other.
      step: The number of the step.
      group_size: How many completions a group has.

    Returns:
      A function that waits for the answer of one of the functions, or makes its call. It raises
      RewardError if the run must stop.
    """
    count = len(columns["completions"])
    groups = [range(start, min(start + group_size, count)) for start in range(0, count, group_size)]
    sent = [function for function in functions if self.uses_workers(function)]
    calls = [
      self._call(function, rows_of(columns, rows), step) for function in sent for rows in groups
    ]
    answers = self._pool.start(calls, self.stops_on_error) if calls else None

    def answer(function: Reward) -> Answer:
      if not self.uses_workers(function):
        found = self._call_here(function, columns, step, group_size)
      else:
        found = joined(count, zip(groups, _of_function(answers, _index(sent, function), groups)))
      self._check(found)
      return found

    return answer

  def _call(self, function: Reward, columns: Columns, step: int) -> Call:
    return Call(
      key=next(key for one, key in self._for_workers if one is function),
      name=name_of(function),
      columns=columns,
      step=step,
      is_async=is_async(function),
      whole_groups=has_mark(function, "whole_groups"),
    )

  def _call_here(self, function: Reward, columns: Columns, step: int, group_size: int) -> Answer:
    if self.stops_on_error:
      return call_here(function, name_of(function), columns, step)
    return call_in_parts(function, name_of(function), columns, step, group_size)

  def _check(self, answer: Answer) -> None:
    """Raises RewardError for the first failure that must stop the run."""
    errors = [one for one in answer.failures if one.kind == "error"]
    if errors and self.stops_on_error:
      raise RewardError(errors[0].text)


def _index(functions: Sequence[Reward], function: Reward) -> int:
  """Not list.index, because objects of users may compare in any way."""
  return next(i for i, one in enumerate(functions) if one is function)


def _of_function(
  answers: "Future[list[Answer]] | None", number: int, groups: Sequence[range]
) -> list[Answer]:
  """The answers for the groups by one of the functions."""
  if answers is None:  # there are no groups
    return []
  return answers.result()[number * len(groups) : (number + 1) * len(groups)]
