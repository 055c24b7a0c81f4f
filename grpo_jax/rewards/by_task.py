"""Reward functions that are for some of the tasks of a mixture (reward.tasks)."""

from collections.abc import Callable, Sequence
import dataclasses

from grpo_jax.rewards.answer import Answer, joined
from grpo_jax.rewards.call import Columns, rows_of
from grpo_jax.rewards.caller import Caller
from grpo_jax.rewards.functions import Reward
from grpo_jax.rewards.marks import has_mark
from grpo_jax.settings import ConfigError

FIRST_OF_TASK = "rewards"  # as eval.function: the first function that is for a problem's task


def names_in(entry: str) -> list[str]:
  """The tasks in an entry of reward.tasks, such as "gsm8k,svamp". An empty one has none."""
  return [name.strip() for name in entry.split(",") if name.strip()]


def check(
  tasks: Sequence[str], functions: Sequence[str], sources: Sequence[str], eval_function: str
) -> None:
  """Checks reward.tasks.

  Args:
    tasks: Its value.
    functions: That of reward.functions.
    sources: The names of the sources of data.mixture.
    eval_function: The value of eval.function.

  Raises:
    ConfigError: It does not fit the other settings.
  """
  if len(tasks) not in (0, len(functions)):
    raise ConfigError(
      f"config key reward.tasks is {tuple(tasks)}: it must hold an entry for each of"
      f" reward.functions = {tuple(functions)}, or none"
    )
  for name in (name for entry in tasks for name in names_in(entry)):
    if name not in sources:
      raise ConfigError(
        f"config key reward.tasks is {tuple(tasks)}: {name!r} is no source of data.mixture, which"
        f" has {', '.join(sources) or 'none'}"
      )
  if eval_function == FIRST_OF_TASK and not tasks:
    raise ConfigError(
      f"config key eval.function is {eval_function!r}: it takes the function for a problem's task"
      " from reward.tasks, which is empty"
    )


def start(
  caller: Caller,
  functions: Sequence[tuple[Reward, str]],
  columns: Columns,
  step: int,
  group_size: int,
) -> Callable[[Reward], Answer]:
  """As `Caller.start`, but a function gets only the rows of its tasks, and scores no others.

  Args:
    caller: What calls the functions.
    functions: Each with its entry of reward.tasks.
    columns: The arguments. `task` holds the task of each row.
    step: The number of the step.
    group_size: How many completions a group has. They are of one prompt, and so of one task.
  """
  everyone = [function for function, entry in functions if not names_in(entry)]
  answer_everyone = caller.start(everyone, columns, step, group_size)
  some: list[tuple[Reward, Callable[[], Answer]]] = []
  for function, entry in functions:
    if names_in(entry):
      own = [row for row, task in enumerate(columns["task"]) if task in names_in(entry)]
      some.append((function, _start_for(caller, function, columns, own, (step, group_size))))

  def answer(function: Reward) -> Answer:
    for one, answer_rows in some:
      if one is function:
        return answer_rows()
    return answer_everyone(function)

  return answer


def _start_for(
  caller: Caller, function: Reward, columns: Columns, rows: list[int], place: tuple[int, int]
) -> Callable[[], Answer]:
  """Starts the calls of a function for some rows. `place` is the step and the size of a group."""
  count = len(columns["completions"])
  if has_mark(function, "needs_every_row"):
    answer_all = caller.start([function], columns, *place)
    return lambda: _without_others(answer_all(function), set(rows))
  if not rows:
    return lambda: Answer([[] for _ in range(count)])
  answer_rows = caller.start([function], rows_of(columns, rows), *place)
  return lambda: joined(count, [(rows, answer_rows(function))])


def _without_others(answer: Answer, rows: set[int]) -> Answer:
  steps = [own if row in rows else [] for row, own in enumerate(answer.steps)]
  return dataclasses.replace(answer, steps=steps)
