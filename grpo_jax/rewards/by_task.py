"""Reward functions that apply to some of the tasks of a mixture (reward.tasks)."""

from collections.abc import Mapping, Sequence
from typing import Any


def rows_for(tasks: str, columns: Mapping[str, Sequence[Any]]) -> list[int] | None:
  """The rows of a function that is for some tasks only.

  Args:
    tasks: Their names with commas between them, such as "gsm8k,svamp". Empty means every task.
    columns: What the function would be called with. `task` holds the task of each row.

  Returns:
    The rows, or None for all of them.
  """
  if not tasks:
    return None
  names = {name.strip() for name in tasks.split(",")}
  return [row for row, task in enumerate(columns["task"]) if task in names]


def select(columns: Mapping[str, Sequence[Any]], rows: Sequence[int]) -> dict[str, list[Any]]:
  """The columns with these rows alone."""
  return {name: [values[row] for row in rows] for name, values in columns.items()}
