"""Examples of programming problems with tests, in the layout of MBPP."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.settings import ConfigError


def code_example(row: Any, where: str) -> dict[str, Any]:
  """An example of a row of MBPP: `text` (or `prompt`), `test_list`, `code`, `test_setup_code`.

  The question holds the text and the first test, because the tests say how the function is called.
  The other tests are hidden from the policy: the reward function `code` runs all.

  Args:
    row: The row, with at least `text` and `test_list`. `code` is a solution for the warm start. In
      the sanitized MBPP, the text is `prompt` and what the tests need is the list `test_imports`.
    where: Its place, for error messages.

  Raises:
    ConfigError: A field is missing or has the wrong type.
  """
  text, tests = (
    _field(row, where, ("text", "prompt"), str),
    _field(row, where, ("test_list",), list),
  )
  if not tests or not all(isinstance(test, str) for test in tests):
    raise ConfigError(f"data.path: {where}: test_list must be a list of tests, each a text")
  setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
  solution = row.get("code") or ""
  if not isinstance(setup, str) or not isinstance(solution, str):
    raise ConfigError(f"data.path: {where}: test_setup_code and code must be texts")
  return {
    "question": f"{text}\n\nYour code should pass this test, and others like it:\n\n{tests[0]}\n",
    "solution": f"```python\n{solution.strip()}\n```" if solution else "",
    "answer": solution,
    "test_list": tests,
    "test_setup_code": setup,
  }


def _field(row: Any, where: str, names: tuple[str, ...], kind: type) -> Any:
  if isinstance(row, Mapping):
    for name in names:
      if isinstance(row.get(name), kind):
        return row[name]
  what = "text" if kind is str else "list"
  raise ConfigError(
    f"data.path: {where} has no {what} field {' or '.join(map(repr, names))}; each must have one"
  )
