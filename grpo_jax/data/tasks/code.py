"""Examples of programming problems with tests, in the layouts of `grpo_jax/problems/layouts.py`."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.problems.layouts import MAIN_COLUMNS, TEST_COLUMNS, layout_of
from grpo_jax.problems.programs import Unreadable
from grpo_jax.settings import ConfigError


def code_example(row: Any, where: str) -> dict[str, Any]:
  """An example of a row that has tests.

  Its columns of tests go to the reward function `code` as they are. The question says what kind of
  program is asked for. In the layout of MBPP it holds the first test: the others are hidden.

  Args:
    row: The row, in one of the layouts.
    where: Its place, for error messages.

  Raises:
    ConfigError: A column is missing, or cannot be read.
  """
  layout = layout_of(row) if isinstance(row, Mapping) else None
  if layout is None:
    raise ConfigError(
      f"data.path: {where} has no tests: it needs one of the columns {', '.join(MAIN_COLUMNS)}"
    )
  try:
    question, solution = layout.question(row), layout.solution(row)
  except Unreadable as error:
    raise ConfigError(f"data.path: {where}: {error} (in the layout of {layout.name})") from None
  is_fenced = "```" in solution
  return {
    **{name: row.get(name) for name in TEST_COLUMNS},
    "question": question,
    "solution": solution if is_fenced or not solution else f"```python\n{solution.strip()}\n```",
    "answer": solution,
    "code": solution,
    "place": where,
  }
