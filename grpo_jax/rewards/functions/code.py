"""A reward for programs that pass tests.

The code of a completion runs in a sandbox. The tests run in a second sandbox, which sends calls to
the code and compares the results (see `sandbox/tests.py`). So the code

* sees the arguments of calls, but no test and no expected value,
* cannot pass by ending early, by printing, by changing builtins or modules, or by returning objects
  that equal everything, because all of these stay in the process of the code,
* cannot access the tests, which run in another process in another sandbox.

The code can still pass tests that the prompt shows, remember earlier calls, and guess if there are
few possible answers. So use several tests that no prompt shows.

**Values in tests.** A test can call functions and classes of the code with plain data, set
attributes of their objects, compare plain data, and expect exceptions, also of classes that the
code defines. Plain data are numbers, texts, bytes, lists, tuples, named tuples, sets, dicts,
Counter, OrderedDict, deque, range, iterators, Decimal, Fraction, numpy arrays, and types such as
int and str. A value of a subclass is converted to the base class. A test does not see in-place
changes of arguments, and an object of a class that the code defines equals only itself.

**Names in tests.** A name that the test or `test_setup_code` defines or imports belongs to the
test. Any other name that is not a builtin belongs to the code. If the tests and the setup of a row
read no such name, one builtin belongs to the code: the only one that the row's solution (`code`)
defines, or, without a solution, the only builtin that the tests read. So `assert sum(10, 15) == 6`
calls the code's `sum`. In all other tests `sum`, `all` and `len` are Python's, whatever the code
defines: otherwise a program could cheat by defining a helper of the tests. For the same reason
Python, not the code, provides imports of the solution, and modules of which a test only reads
attributes, such as `math.isclose`. Define other helpers in the tests or the setup: the code
controls all names that belong to it.

A test that reads no name of the code does not count. If no test counts, there is no reward. A test
that reads names but calls nothing, such as a pytest function that nobody calls, fails.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import itertools
import math
import re
import time
from typing import Annotated, Any, NamedTuple

from grpo_jax.problems.layouts import MAIN_COLUMNS, TEST_COLUMNS, layout_of
from grpo_jax.problems.programs import ProgramTests, Unreadable
from grpo_jax.rewards.answer import NoReward, RewardError
from grpo_jax.rewards.marks import checked_by, reads_one_of, rows_checked_by
from grpo_jax.rewards.sandbox import runner
from grpo_jax.rewards.sandbox.cases import TimeLimits, run_cases
from grpo_jax.rewards.sandbox.tests import run_tests
from grpo_jax.settings import ConfigError, at_least

_THREADS = 32  # the maximum number of threads of a program
# `_check_rows`: the most rows, rows per call, and the time after which no more calls begin.
_TRIED, _TRIED_AT_ONCE, _SECONDS = 32, 8, 10.0
_NAMED = 3  # how many rows without a reward a message lists


def _check_sandbox(where: str, options: dict[str, Any]) -> None:
  if not options["sandboxed"]:
    return
  try:
    runner.find()
  except ConfigError as error:
    raise ConfigError(
      f"{where}: {error}. Or let completions do what you may do, with code(sandboxed=False)"
    ) from None


def _check_rows(
  where: str, score: Callable[..., Any], rows: Iterable[tuple[str, Mapping[str, Any]]]
) -> str:
  """Tries the first rows that have tests. Returns a warning, or "": see `marks.rows_checked_by`.

  It scores the solution of a row, which must pass. Without a solution it scores an empty program,
  which shows whether the tests can be parsed, and whether they read a name of the program.

  Raises:
    ConfigError: No program can earn a reward in any of the rows, or a row has invalid columns.
  """
  deadline = time.monotonic() + _SECONDS
  tried, problems = 0, list[str]()
  rows = iter(rows)
  first = next(rows)  # it has the same columns as all other rows
  if not {*MAIN_COLUMNS} & first[1].keys():
    raise ConfigError(
      f"{where}: the examples have no tests, which are in one of the columns"
      f" {', '.join(MAIN_COLUMNS)}"
    )
  all_rows = itertools.chain([first], rows)
  with_tests = itertools.islice((one for one in all_rows if layout_of(one[1])), _TRIED)
  while time.monotonic() < deadline:
    batch = list(itertools.islice(with_tests, _TRIED_AT_ONCE))
    if not batch:
      break
    fields = {name: [row.get(name) for _, row in batch] for name in TEST_COLUMNS}
    solutions = [_solution(row) for _, row in batch]
    places = [place for place, _ in batch]
    try:
      scores = score(completions=solutions, place=places, code=solutions, **fields)
    except RewardError as error:
      raise ConfigError(f"{where}: {error}") from None
    for place, solution, row_score in zip(places, solutions, scores, strict=True):
      if row_score is None:
        problems.append(f"{place}: its tests read nothing of a program")
      elif isinstance(row_score, NoReward):
        raise ConfigError(f"{where}: {row_score.reason}")
      elif solution.strip() and row_score < 1:
        problems.append(f"{place}: its own solution fails its tests")
    tried += len(batch)
  if not tried and time.monotonic() < deadline:  # else there was no time to find rows with tests
    return f"{where}: none of the rows that were looked at has tests"
  if not problems:
    return ""
  more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
  named = "; ".join(problems[:_NAMED]) + more
  if len(problems) == tried:
    raise ConfigError(f"{where}: no program can earn a reward in any of {tried} rows: {named}")
  return (
    f"{where}: {len(problems)} of {tried} rows that were tried cannot reward any program: {named}"
  )


def _solution(row: Mapping[str, Any]) -> str:
  """The solution in a row, or ""."""
  solution = row.get("code")
  return solution if isinstance(solution, str) else layout_of(row).solution(row)


@checked_by(_check_sandbox)
@rows_checked_by(_check_rows)
@reads_one_of(*MAIN_COLUMNS)
def code(
  completions: list[str],
  test_list: list[Any] | None = None,
  test_setup_code: list[Any] | None = None,
  code: list[Any] | None = None,
  place: list[str | None] | None = None,
  *,
  partial: bool = False,
  fraction: bool = False,
  seconds: Annotated[float, at_least(0.1, at_most=86_400)] = 10.0,
  case_seconds: Annotated[float, at_least(0.1, at_most=86_400)] = 4.0,
  memory: Annotated[float, at_least(0.125, at_most=1024)] = 0.5,
  at_once: Annotated[int, at_least(1, at_most=256)] = 4,
  sandboxed: bool = True,
  **columns: Any,
) -> list[float | NoReward | None]:
  """1.0 if the code of the completion passes all tests, else 0.0.

  The code is the last block between ``` lines, or the whole text if there is none. The tests of a
  row are in the columns of one of the layouts in `grpo_jax/problems/layouts.py`.

  Args:
    completions: The texts.
    test_list: In the layout of MBPP: the tests of each completion. A text is one test.
    test_setup_code: Code that runs before these tests, such as imports: a text, or a list of lines.
    code: A solution of each problem, if there is one. It decides which names belong to the program.
    place: The names of the rows in messages, such as a file and a line.
    partial: Whether to score the fraction of tests that pass instead.
    fraction: The old name of `partial`.
    seconds: The time limit for a completion with all tests, wall clock and CPU. Tests that have not
      passed by then have failed.
    case_seconds: The time limit for each case, if the tests are inputs with outputs.
    memory: The memory limit in GiB, for the code and for the tests. numpy needs 0.25.
    at_once: How many completions run at once. A call may take completions * seconds / at_once, so
      set reward.timeout to more than that.
    sandboxed: False runs the code without a sandbox, only with resource limits. It can then read
      and delete all files of the user, and forge its reward.
    columns: The columns of the other layouts.

  Returns:
    The scores. None if a row has no test, or none that reads a name of the program. NoReward if
    tests cannot be parsed.

  Raises:
    ConfigError: No sandbox works on this machine.
    RewardError: A sandbox did not start, or a setup fails.
  """
  score_program = _ProgramScorer(
    sandbox=runner.find() if sandboxed else runner.NONE,
    limits=runner.SandboxLimits(math.ceil(seconds), int(memory * 2**30), threads=_THREADS),
    seconds=seconds,
    case_seconds=case_seconds,
    partial=partial or fraction,
  )
  named = {"test_list": test_list, "test_setup_code": test_setup_code, "code": code, "place": place}
  problems = _problems(len(completions), {**columns, **named})
  with ThreadPoolExecutor(at_once) as pool:
    return list(pool.map(score_program, completions, problems))


class _Problem(NamedTuple):
  """The tests of a row, the name of the row in messages, and the solution in the row, or ""."""

  place: str
  tests: ProgramTests
  solution: str


# The problem of a row, or why its tests cannot be parsed, or None if the row has no tests.
_Readable = _Problem | NoReward | None


@dataclasses.dataclass(frozen=True)
class _ProgramScorer:
  """Scores completions. The attributes are parameters of `code`, or derived from them."""

  sandbox: str
  limits: runner.SandboxLimits
  seconds: float
  case_seconds: float
  partial: bool

  def __call__(self, completion: str, problem: _Readable) -> float | NoReward | None:
    """Runs the tests of a problem on the program of a completion. None if no test counts."""
    if not isinstance(problem, _Problem):
      return problem
    place, tests, solution = problem
    program = _with_header(program_of(completion), tests)
    if tests.cases:
      clock = TimeLimits(self.seconds, self.case_seconds)
      verdict = run_cases(
        program,
        tests.cases,
        self.limits,
        self.sandbox,
        clock,
        place,
        stops=not self.partial,  # without `partial`, one failure decides the score
      )
    else:
      verdict = run_tests(
        program, tests, self.limits, self.sandbox, self.seconds, place, solution=solution
      )
    if not verdict.counted:
      return None
    share = verdict.passed / verdict.counted
    return share if self.partial else float(share == 1)


def _problems(count: int, columns: Mapping[str, Any]) -> list[_Readable]:
  """Parses the problem of each of `count` completions from the columns of `code`."""
  names = [name for name in (*TEST_COLUMNS, "code", "place") if columns.get(name) is not None]
  for name in names:
    if isinstance(columns[name], str) or len(columns[name]) != count:
      raise RewardError(f"code: {name} must have an entry for each of {count} completions")
  rows = [{name: columns[name][number] for name in names} for number in range(count)]
  found: list[_Readable] = []
  for number, row in enumerate(rows):
    is_as_before = number and row == rows[number - 1]  # another completion of the same prompt
    found.append(found[-1] if is_as_before else _problem(number, row))
  return found


def _problem(number: int, row: Mapping[str, Any]) -> _Readable:
  layout, place = layout_of(row), row.get("place") or f"row {number}"
  if layout is None:
    return None
  try:
    tests = layout.tests(row)
  except Unreadable as error:
    return NoReward(f"{place}: {error}")
  solution = row["code"] if isinstance(row.get("code"), str) else ""
  return _Problem(f"code: {place}", tests, solution)


def _with_header(program: str, tests: ProgramTests) -> str:
  """Puts `tests.header`, which the prompt shows, before the program.

  If the program does not define the function of the header, it continues that function. Then only
  the lines up to the first one without indentation belong to it.
  """
  if not tests.entry or re.search(rf"^(async\s+)?def\s+{re.escape(tests.entry)}\b", program, re.M):
    return f"{tests.header}\n{program}" if tests.header else program
  lines = itertools.takewhile(lambda line: not line[:1].strip(), program.split("\n"))
  return tests.header + "\n".join(lines)


def program_of(text: str) -> str:
  """The last code block between ``` lines, which may lack an end, or the whole text if none."""
  lines = text.split("\n")
  fences = [i for i, line in enumerate(lines) if line.lstrip().startswith("```")]
  if not fences:
    return text
  # Fences alternately open and close blocks. The last of an odd number opens one without an end.
  start = fences[(len(fences) - 1) // 2 * 2]
  end = next((i for i in fences if i > start), len(lines))
  return "\n".join(lines[start + 1 : end])
