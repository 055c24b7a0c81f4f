"""Reads programming problems from the layouts of published data sets into one format.

`LAYOUTS` has a record for each layout. To add a layout, add a record: the task `code` then reads
its rows, and the reward function `code` runs its tests.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
from typing import Any

from grpo_jax.problems.cases import cases_in, decompressed
from grpo_jax.problems.programs import ProgramTests, Row, Unreadable, json_in, text_in
from grpo_jax.problems.pytest_file import pytest_file, pytest_tests


@dataclasses.dataclass(frozen=True)
class ProblemLayout:
  """The columns in which a data set stores programming problems.

  Attributes:
    name: The name of the data set.
    fits: fits(row) -> whether the row has this layout.
    tests: tests(row) -> the tests of its program. Raises Unreadable if they cannot be read.
    question: question(row) -> the question for the policy: a text or messages. Raises Unreadable if
      the question or the tests cannot be read.
    solution: solution(row) -> a correct program, or "" if the row has none.
  """

  name: str
  fits: Callable[[Row], bool]
  tests: Callable[[Row], ProgramTests]
  question: Callable[[Row], Any]
  solution: Callable[[Row], str]


def layout_of(row: Row) -> ProblemLayout | None:
  """The first layout that a row fits, or None if the row fits none and so has no tests."""
  return next((layout for layout in LAYOUTS if layout.fits(row)), None)


def _has(*columns: str) -> Callable[[Row], bool]:
  """A `ProblemLayout.fits` for rows in which none of `columns` is missing or None."""
  return lambda row: all(row.get(name) is not None for name in columns)


# Questions and solutions.

_WHOLE = "Write a Python program that reads standard input and writes to standard output."
_IN_A_BLOCK = " Give it in one block of code, after ```python."


def _asked(text: str, function: str, starter: Any) -> str:
  """A question: the problem, and which function, completed starter code or program to write."""
  if isinstance(starter, str) and starter.strip():
    begin = f"Write Python code that completes this:\n\n```python\n{starter.rstrip()}\n```\n\n"
    return f"{text.strip()}\n\n{begin}{_IN_A_BLOCK.strip()}\n"
  what = f"Write Python code that defines {function}." if function else _WHOLE
  return f"{text.strip()}\n\n{what}{_IN_A_BLOCK}\n"


def _first_solution(row: Row) -> str:
  """The first of `solutions`, a list or a JSON list, or else `solution`. "" if there is none."""
  found = row.get("solutions") or row.get("solution")
  if isinstance(found, str) and found.lstrip().startswith("["):
    try:
      found = json.loads(found)
    except (ValueError, RecursionError):
      return found
  if isinstance(found, list):
    found = found[0] if found else ""
  return found if isinstance(found, str) else ""


def _with_starter(column: str, *names: str) -> Callable[[Row], str]:
  """A `ProblemLayout.question` for cases in `column` and the problem in one of `names`."""

  def question(row: Row) -> str:
    cases = cases_in(row[column], column)
    return _asked(text_in(row, *names), cases[0].function, row.get("starter_code"))

  return question


# MBPP.


def _mbpp_tests(row: Row) -> ProgramTests:
  """Reads asserts from `test_list`, and their setup from `test_setup_code` and `test_imports`."""
  tests, setup = row["test_list"], row.get("test_setup_code") or ""
  tests = [tests] if isinstance(tests, str) else tests
  setup = [setup] if isinstance(setup, str) else setup
  for name, value in (("test_list", tests), ("test_setup_code", setup)):
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
      raise Unreadable(f"{name} must be a text or a list of texts")
  return ProgramTests(asserts=tuple(tests), setup="\n".join([*_imports(row), *setup]).strip())


def _imports(row: Row) -> list[str]:
  """The import lines for the tests in the sanitized version of MBPP."""
  imports = row.get("test_imports") or []
  imports = [imports] if isinstance(imports, str) else imports
  if not isinstance(imports, list) or not all(isinstance(line, str) for line in imports):
    raise Unreadable("test_imports must be a list of lines, each a text")
  return imports


def _mbpp_question(row: Row) -> str:
  """The problem and the first test, because only the tests say how the function is called."""
  text = text_in(row, "text", "prompt")
  if isinstance(row["test_list"], str):
    raise Unreadable("test_list is a text; it must be a list of tests")
  tests = _mbpp_tests(row).asserts
  if not tests:
    raise Unreadable("test_list must be a list of tests, each a text")
  return f"{text}\n\nYour code should pass this test, and others like it:\n\n{tests[0]}\n"


def _code(row: Row) -> str:
  code = row.get("code") or ""
  if not isinstance(code, str):
    raise Unreadable("code must be a text")
  return code


# HumanEval.


def _humaneval_tests(row: Row) -> ProgramTests:
  entry, test = text_in(row, "entry_point"), text_in(row, "test")
  header = row.get("prompt")
  return ProgramTests(
    asserts=(f"{test}\ncheck({entry})",),
    header=header if isinstance(header, str) else "",
    entry=entry,
  )


def _humaneval_question(row: Row) -> str:
  head = text_in(row, "prompt").rstrip()
  return (
    f"Complete this Python function:\n\n```python\n{head}\n```\n\n"
    "Give the whole function in one block of code, after ```python.\n"
  )


def _humaneval_solution(row: Row) -> str:
  end = row.get("canonical_solution")
  return f"{row.get('prompt')}{end}" if isinstance(end, str) else ""


# KodCode.


def _kodcode_question(row: Row) -> str:
  names = ", ".join(pytest_file(row).names)
  return _asked(text_in(row, "question", "problem"), names, None)


# LiveCodeBench.


def _livecodebench_tests(row: Row) -> ProgramTests:
  """Reads the public cases, and the private cases, which may be compressed."""
  function = _livecodebench_function(row)
  cases = cases_in(row["public_test_cases"], "public_test_cases", function)
  private = row.get("private_test_cases")
  if isinstance(private, str) and not private.lstrip().startswith("["):
    private = decompressed(private) if private.strip() else "[]"
  private = json_in(private, "private_test_cases")
  if private:
    cases += cases_in(private, "private_test_cases", function)
  return ProgramTests(cases=cases)


def _livecodebench_function(row: Row) -> str:
  metadata = json_in(row.get("metadata") or "{}", "metadata")
  return (metadata.get("func_name") or "") if isinstance(metadata, Mapping) else ""


def _livecodebench_question(row: Row) -> str:
  function = _livecodebench_function(row)
  cases_in(row["public_test_cases"], "public_test_cases", function)
  return _asked(text_in(row, "question_content"), function, row.get("starter_code"))


# APPS, TACO, DeepCoder, PRIME.


def _cases_in(column: str) -> Callable[[Row], ProgramTests]:
  return lambda row: ProgramTests(cases=cases_in(row[column], column))


def _near_cases(row: Row) -> ProgramTests:
  """Cases that tolerate small differences of printed numbers, as the published judges do."""
  cases = cases_in(row["input_output"], "input_output")
  return ProgramTests(cases=tuple(dataclasses.replace(case, near=True) for case in cases))


_GROUND_TRUTH = "reward_model.ground_truth"


def _ground_truth(row: Row) -> Any:
  model = row.get("reward_model")
  return model.get("ground_truth") if isinstance(model, Mapping) else None


def _has_ground_truth(row: Row) -> bool:
  """Whether the ground truth looks like cases. PRIME also has rows with the answer of a sum."""
  found = _ground_truth(row)
  text = found.lstrip()[:1] if isinstance(found, str) else ""
  return text in ("{", "[") if text else isinstance(found, (Mapping, list))


def _prime_question(row: Row) -> Any:
  prompt = row.get("prompt")
  cases_in(_ground_truth(row), _GROUND_TRUTH)
  if not isinstance(prompt, (str, list)):
    raise Unreadable("it has no text or messages prompt")
  return prompt


LAYOUTS: Sequence[ProblemLayout] = (
  ProblemLayout(
    name="MBPP",
    fits=_has("test_list"),
    tests=_mbpp_tests,
    question=_mbpp_question,
    solution=_code,
  ),
  ProblemLayout(
    name="HumanEval",
    fits=_has("test", "entry_point"),
    tests=_humaneval_tests,
    question=_humaneval_question,
    solution=_humaneval_solution,
  ),
  ProblemLayout(
    name="KodCode",
    fits=_has("test"),
    tests=pytest_tests,
    question=_kodcode_question,
    solution=_first_solution,
  ),
  ProblemLayout(
    name="LiveCodeBench",
    fits=_has("public_test_cases"),
    tests=_livecodebench_tests,
    question=_livecodebench_question,
    solution=_first_solution,
  ),
  ProblemLayout(
    name="APPS and TACO",
    fits=_has("input_output"),
    tests=_near_cases,
    question=_with_starter("input_output", "question", "problem"),
    solution=_first_solution,
  ),
  ProblemLayout(
    name="DeepCoder",
    fits=_has("tests"),
    tests=_cases_in("tests"),
    question=_with_starter("tests", "problem", "question"),
    solution=_first_solution,
  ),
  ProblemLayout(
    name="PRIME",
    fits=_has_ground_truth,
    tests=lambda row: ProgramTests(cases=cases_in(_ground_truth(row), _GROUND_TRUTH)),
    question=_prime_question,
    solution=_first_solution,
  ),
)

# The columns with tests, of which each layout has one, and all columns that tests are read from.
MAIN_COLUMNS = (
  "test_list",
  "test",
  "public_test_cases",
  "input_output",
  "tests",
  "reward_model",
)
TEST_COLUMNS = (
  *MAIN_COLUMNS,
  *("test_setup_code", "test_imports", "entry_point", "prompt", "private_test_cases", "metadata"),
)
