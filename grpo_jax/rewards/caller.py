"""Calls the reward functions of a run, each in the place where it belongs.

Functions that are marked `in_process`, such as the built-in ones whose time is linear in the length
of a text, and reward models are called in the process of the run. All others are called by workers,
unless reward.workers is 0.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from grpo_jax.rewards.answer import Answer, RewardError, joined
from grpo_jax.rewards.call import Columns, call_here, call_in_parts, is_async, rows_of
from grpo_jax.rewards.functions import Reward, is_named, name_of
from grpo_jax.rewards.job import Call
from grpo_jax.rewards.marks import has_mark
from grpo_jax.rewards.pool import Pool
from grpo_jax.rewards.workers import NotPortable


class Caller:
  """Calls reward functions."""

  def __init__(self, pool: Pool | None, stops_on_error: bool = True) -> None:
    """Calls them in workers of `pool`. None means always in this process.

    `stops_on_error`: whether what a function raises is raised, or costs the completions that fail
    alone their rewards.
    """
    self._pool, self.stops_on_error = pool, stops_on_error
    self._keys: dict[str, str] = {}  # of functions that workers call, by name

  def add(self, source: str, function: Reward) -> str:
    """Prepares a function for calls.

    Args:
      source: Its name in the config.
      function: The function.

    Returns:
      Why it is called in this process although workers should call it. Empty otherwise.

    Raises:
      ConfigError: A worker cannot load it.
    """
    name = name_of(function)
    if self._pool is None or has_mark(function, "in_process"):
      return ""
    try:
      self._pool.add(source, function, is_named(source))
    except NotPortable as error:
      return (
        f"reward function {name} is called in the process of the run, without limits of time and"
        f" memory, because it cannot be sent to a worker: {error}"
      )
    self._keys[name] = source
    return ""

  def uses_workers(self, name: str) -> bool:
    """Whether workers call the function of this name."""
    return name in self._keys

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
    groups = [range(start, start + group_size) for start in range(0, count, group_size)]
    sent = [function for function in functions if self.uses_workers(name_of(function))]
    calls = [self._call(function, columns, rows, step) for function in sent for rows in groups]
    answers = self._pool.start(calls) if calls else None

    def answer(function: Reward) -> Answer:
      name = name_of(function)
      if not self.uses_workers(name):
        found = self._call_here(function, columns, step, group_size)
      else:
        found = joined(count, zip(groups, _of_function(answers, sent.index(function), groups)))
      self._check(found)
      return found

    return answer

  def _call(self, function: Reward, columns: Columns, rows: range, step: int) -> Call:
    return Call(
      self._keys[name_of(function)],
      name_of(function),
      rows_of(columns, rows),
      step,
      is_async(function),
      has_mark(function, "whole_groups"),
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


def _of_function(
  answers: "Future[list[Answer]] | None", number: int, groups: Sequence[range]
) -> list[Answer]:
  """The answers for the groups by one of the functions."""
  if answers is None:  # there are no groups
    return []
  return answers.result()[number * len(groups) : (number + 1) * len(groups)]
