"""Examples of programming problems with tests, in the layout of MBPP."""

from collections.abc import Mapping
from typing import Any

from grpo_jax.settings import ConfigError


def code_example(row: Any, where: str) -> dict[str, Any]:
  """An example of a row of MBPP: `text` (or `prompt`), `test_list`, `code`, `test_setup_code`.

  The question holds the text and the first test, because the tests say how the function is called.
  The other tests are hidden from the policy: the reward function `code` runs all.

  Args:
    row: The row, with at least `text` and `test_list`. `code` is a solution, for the warm start and
      for the reward function. In the sanitized MBPP, the text is `prompt` and what the tests import
      is the list `test_imports`.
    where: Its place, for error messages.

  Raises:
    ConfigError: A field is missing or has the wrong type.
  """
  text = _field(row, where, ("text", "prompt"), str)
  if isinstance(row.get("test_list"), str):
    raise ConfigError(f"data.path: {where}: test_list is a text; it must be a list of tests")
  tests = _field(row, where, ("test_list",), list)
  if not tests or not all(isinstance(test, str) for test in tests):
    raise ConfigError(f"data.path: {where}: test_list must be a list of tests, each a text")
  imports = row.get("test_imports") or []
  imports = [imports] if isinstance(imports, str) else imports
  if not isinstance(imports, list) or not all(isinstance(line, str) for line in imports):
    raise ConfigError(f"data.path: {where}: test_imports must be a list of lines, each a text")
  setup, solution = row.get("test_setup_code") or "", row.get("code") or ""
  if not isinstance(setup, str) or not isinstance(solution, str):
    raise ConfigError(f"data.path: {where}: test_setup_code and code must be texts")
  setup = "\n".join([*imports, setup]) if setup else "\n".join(imports)
  return {
    "question": f"{text}\n\nYour code should pass this test, and others like it:\n\n{tests[0]}\n",
    "solution": f"```python\n{solution.strip()}\n```" if solution else "",
    "answer": solution,
    "test_list": tests,
    "test_setup_code": setup,
    "code": solution,
    "place": where,
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
