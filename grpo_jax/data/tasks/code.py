"""Examples of programming problems with tests, in the layouts of `grpo_jax/problems/layouts.py`."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.problems.layouts import MAIN_COLUMNS, TEST_COLUMNS, layout_of
from grpo_jax.problems.programs import Unreadable
from grpo_jax.settings import ConfigError


def code_example(row: Any, where: str) -> dict[str, Any]:
  """Makes an example of a row with a programming problem and its tests.

  The reward function `code` receives the columns of tests unchanged. The question says whether a
  function or a program is wanted. In the layout of MBPP, the question shows only the first test.

  Args:
    row: The row, in one of the layouts.
    where: The file and the number of the row, for error messages.

  Returns:
    `question`, `solution` (fenced code, or ""), `answer` and `code` (the solution as in the row),
    `place` (`where`), and the columns of tests.

  Raises:
    ConfigError: A column is missing or cannot be read.
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
