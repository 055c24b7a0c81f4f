"""Calls the reward functions of a run, each in a worker process or in the process of the run.

The process of the run calls reward models and functions that are marked `in_process`, such as
built-in functions whose time is linear in the length of a text. Workers call all others, unless
reward.workers is 0.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import dataclasses
import functools

from grpo_jax.pending import Pending, there
from grpo_jax.progress import doing
from grpo_jax.rewards import conversation
from grpo_jax.rewards.answer import Answer, RewardError, joined
from grpo_jax.rewards.asking import asking
from grpo_jax.rewards.call import Columns, call_here, call_in_parts, is_async, rows_of
from grpo_jax.rewards.marks import has_mark
from grpo_jax.rewards.names import Reward, is_named, name_of
from grpo_jax.rewards.votes import voting
from grpo_jax.rewards.workers.messages import NotPortable, WorkerCall
from grpo_jax.rewards.workers.pool import Pool
from grpo_jax.settings import ConfigError

_SECONDS_TO_ASK = 60.0  # the timeout for a fork of this process, see `asking`


class Caller:
  """Calls reward functions.

  Attributes:
    pool: The workers. None if this process calls all functions.
    stops_on_error: Whether an error of a reward function is raised. Else the completion for which
      the function failed has no reward.
  """

  def __init__(self, pool: Pool | None, stops_on_error: bool = True) -> None:
    """Makes a caller without functions: see the class for the arguments."""
    self.pool, self.stops_on_error = pool, stops_on_error
    self._for_workers: list[tuple[Reward, str]] = []  # with their keys in the pool
    # The user's functions that have been tried, with whether they read messages.
    self._conversational: list[tuple[Reward, bool]] = []

  def add(self, functions: Mapping[str, Reward]) -> tuple[str, ...]:
    """Sends functions to the pool, except for those that this process calls.

    Args:
      functions: The functions by their names in the config.

    Returns:
      A line for each function that cannot be sent to a worker. It says why. This process calls it.

    Raises:
      ConfigError: A worker cannot load a function.
    """
    remarks = []
    for source, function in functions.items():
      if self.pool is None or has_mark(function, "in_process"):
        continue
      name = name_of(function)
      try:
        self.pool.add(source, function, is_named(source))
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
    if self.pool is not None:
      self.pool.close()

  def uses_workers(self, function: Reward) -> bool:
    """Whether workers call a function."""
    return any(one is function for one, _ in self._for_workers)

  def see_what_it_reads(self, function: Reward, trials: Iterable[Columns]) -> str:
    """Finds out whether a function of the user reads messages or texts, if that is not known yet.

    Args:
      function: The reward function.
      trials: The arguments of trial calls with made-up completions. They include the column
        `messages`. No more calls are made after the function reads a message, crashes or times out.

    Returns:
      Why a trial call failed without an answer. The function then gets texts. "" if the function is
      known to read messages or texts.

    Raises:
      RewardError: A worker cannot start.
    """
    known = any(one is function for one, _ in self._conversational)
    if known or not conversation.is_asked(function):
      return ""
    with doing(f"calling reward function {name_of(function)} for the first time"):
      problem, has_read = "", False
      for columns in trials:
        answer = self._asked(function, columns)
        # `_asked` gives a reward of 1 if the function reads messages.
        has_read = any(reward > 0 for steps in answer.steps for _, reward in steps)
        problem = answer.failures[0].text if answer.failures else problem
        # Another trial of a function that hangs would take as long again.
        if has_read or any(one.kind in ("timeout", "crash") for one in answer.failures):
          break
    self._conversational.append((function, has_read))
    return "" if has_read else problem

  def reads_messages(self, function: Reward) -> bool:
    """Whether a function gets messages, rather than texts, if the prompts are conversations."""
    found = next((found for one, found in self._conversational if one is function), False)
    return found or has_mark(function, "conversational")

  def _asked(self, function: Reward, columns: Columns) -> Answer:
    """Makes a trial call. The answer has rewards of 1 if the function reads messages, else of 0."""
    if self.uses_workers(function):
      call = self._call(function, columns, 0)
      # `asking` makes a sync function. A failed trial may have had side effects: no retry.
      call = dataclasses.replace(call, asks=True, again=False, is_async=False)
      return self.pool.start([call]).result()[0]
    ask = asking(function, _SECONDS_TO_ASK)
    return call_in_parts(ask, name_of(function), columns, 0, 1)

  def _columns_of(self, function: Reward, columns: Columns) -> Columns:
    """Converts prompts and completions to messages if there are any and the function reads them."""
    is_conversation = "messages" in columns and self.reads_messages(function)
    return conversation.as_messages(columns) if is_conversation else columns

  def start(
    self,
    functions: Sequence[Reward],
    columns: Columns,
    step: int,
    group_size: int,
    *,
    votes: bool = False,
  ) -> list[Pending[Answer]]:
    """Starts calls of reward functions. The workers begin at once.

    Args:
      functions: The reward functions.
      columns: The arguments: lists with one entry for each completion, in the order of the groups.
      step: The number of the step.
      group_size: How many completions a group has.
      votes: Whether the functions return votes, which say which completions have equal answers,
        instead of scores: see `votes.py`.

    Returns:
      A pending answer for each function. `result()` calls the function first if no worker does. It
      raises RewardError if the run must stop.
    """
    count = len(columns["completions"])
    groups = [range(start, min(start + group_size, count)) for start in range(0, count, group_size)]
    calls = list[WorkerCall]()  # by function, then by group
    for function in filter(self.uses_workers, functions):
      read_columns = self._columns_of(function, columns)
      calls += [self._call(function, rows_of(read_columns, rows), step, votes) for rows in groups]
    # All calls are one job of the pool, so `futures` has one entry, or none without calls.
    futures = [self.pool.start(calls, self.stops_on_error)] if calls else []

    def of_workers(place: int) -> Answer:  # place: the index among functions that workers call
      answers = [answer for future in futures for answer in future.result()]
      first = place * len(groups)
      return joined(count, zip(groups, answers[first : first + len(groups)]))

    def of_this_process(function: Reward) -> Answer:  # workers apply `voting` themselves
      scorer = voting(function, group_size) if votes else function
      return self._call_here(scorer, self._columns_of(function, columns), step, group_size)

    pending_answers, place = list[Pending[Answer]](), 0
    for function in functions:
      if self.uses_workers(function):
        pending = Pending(functools.partial(of_workers, place), futures)
        place += 1
      else:
        pending = Pending(functools.partial(of_this_process, function))
      pending_answers.append(pending.then(self._checked))
    return pending_answers

  def _checked(self, answer: Answer) -> Answer:
    errors = [failure for failure in answer.failures if failure.kind == "error"]
    if errors and self.stops_on_error:
      raise RewardError(errors[0].text)
    return answer

  def _call(self, function: Reward, columns: Columns, step: int, votes: bool = False) -> WorkerCall:
    return WorkerCall(
      key=next(key for one, key in self._for_workers if one is function),
      name=name_of(function),
      columns=columns,
      step=step,
      is_async=is_async(function) and not votes,  # `voting` makes a function that is not async
      whole_groups=has_mark(function, "whole_groups") or votes,
      one_worker=has_mark(function, "one_worker"),
      at_once=getattr(function, "keywords", {}).get("at_once", 0),  # see `options.bind`
      votes=votes,
    )

  def _call_here(self, function: Reward, columns: Columns, step: int, group_size: int) -> Answer:
    if self.stops_on_error:
      return call_here(function, name_of(function), columns, step)
    return call_in_parts(function, name_of(function), columns, step, group_size)


# This value of eval.function means the first reward function that is for a problem's task.
FIRST_OF_TASK = "rewards"


def tasks_in(entry: str) -> list[str]:
  """Splits an entry of reward.tasks, such as "gsm8k,svamp", into tasks. "" has none."""
  return [name.strip() for name in entry.split(",") if name.strip()]


def check_tasks(
  tasks: Sequence[str], functions: Sequence[str], sources: Sequence[str], eval_function: str
) -> None:
  """Checks reward.tasks against other settings.

  Without data.mixture only the data tells which tasks there are: see `check_names`.

  Args:
    tasks: The value of reward.tasks.
    functions: The value of reward.functions.
    sources: The names of the sources of data.mixture.
    eval_function: The value of eval.function.

  Raises:
    ConfigError: reward.tasks conflicts with the other settings.
  """
  if len(tasks) not in (0, len(functions)):
    raise ConfigError(
      f"config key reward.tasks is {tuple(tasks)}: it must hold an entry for each of"
      f" reward.functions = {tuple(functions)}, or none"
    )
  for name in (name for entry in tasks for name in tasks_in(entry)):
    if sources and name not in sources:
      raise ConfigError(
        f"config key reward.tasks is {tuple(tasks)}: {name!r} is no source of data.mixture, which"
        f" has {', '.join(sources)}"
      )
  if eval_function == FIRST_OF_TASK and not tasks:
    raise ConfigError(
      f"config key eval.function is {eval_function!r}: it takes the function for a problem's task"
      " from reward.tasks, which is empty"
    )


def check_names(entries: Sequence[str], found: Collection[str] | None) -> list[str]:
  """Checks the names in reward.tasks against the field `task` of the examples.

  Args:
    entries: The entries of reward.tasks.
    found: The tasks of the training examples. None if they are not known yet.

  Returns:
    The tasks of examples that no function scores, sorted. Empty if `found` is None.

  Raises:
    ConfigError: No example has a task that reward.tasks names.
  """
  named = [name for entry in entries for name in tasks_in(entry)]
  if found is None:
    return []
  for name in named:
    if name not in found:
      raise ConfigError(
        f"config key reward.tasks is {tuple(entries)}: no training example has the task {name!r};"
        f" they have {', '.join(sorted(found)):.400}"
      )
  if not all(map(tasks_in, entries)):  # a function without tasks scores all examples
    return []
  return sorted({*found} - {*named})


def start_for_tasks(
  caller: Caller,
  functions: Sequence[tuple[Reward, str]],
  columns: Columns,
  step: int,
  group_size: int,
  *,
  votes: bool = False,
) -> list[Pending[Answer]]:
  """As `Caller.start`, but each function gets and scores only the rows of the tasks that it is for.

  Args:
    caller: Calls the functions.
    functions: Pairs of a reward function and the entry of reward.tasks for it.
    columns: The arguments. The column `task` has the task of each row.
    step: The number of the step.
    group_size: How many completions a group has. They have the same prompt, so the same task.
    votes: As for `Caller.start`.
  """
  start = functools.partial(caller.start, step=step, group_size=group_size, votes=votes)
  # Functions for all tasks are started together, so that their calls are one job of the pool: an
  # error that stops the run then ends the calls of all of them.
  for_all_tasks = [function for function, entry in functions if not tasks_in(entry)]
  answers_for_all = iter(start(for_all_tasks, columns))
  pending_answers = []
  for function, entry in functions:
    if tasks_in(entry):
      rows = [row for row, task in enumerate(columns["task"]) if task in tasks_in(entry)]
      pending_answers.append(_start_for(start, function, columns, rows))
    else:
      pending_answers.append(next(answers_for_all))
  return pending_answers


def _start_for(
  start: Callable[..., list[Pending[Answer]]], function: Reward, columns: Columns, rows: list[int]
) -> Pending[Answer]:
  """Starts the calls of a function for some rows. All other rows get no steps."""
  count = len(columns["completions"])
  if has_mark(function, "needs_every_row"):
    (for_all,) = start([function], columns)
    return for_all.then(lambda answer: _without_others(answer, set(rows)))
  if not rows:
    return there(Answer([[] for _ in range(count)]))
  (for_rows,) = start([function], rows_of(columns, rows))
  return for_rows.then(lambda answer: joined(count, [(rows, answer)]))


def _without_others(answer: Answer, rows: set[int]) -> Answer:
  """Drops the steps of all rows that are not in `rows`."""
  steps = [one if row in rows else [] for row, one in enumerate(answer.steps)]
  return dataclasses.replace(answer, steps=steps)
