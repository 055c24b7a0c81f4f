"""A reward for programs that pass tests.

The code of a completion runs in a sandbox. Its tests run in another one, which sends calls to the
code and compares what comes back (see `sandbox/tests.py`). So the code

* never sees a test or an expected value, only the arguments of calls, as a program would,
* cannot pass by ending early, by printing, by changing builtins or modules, or by returning objects
  that equal everything: they exist only in its own process,
* cannot reach its tests, which run in another process in another sandbox.

It can still pass tests that it could know from its prompt, remember its earlier calls, and guess
where the possible answers are few. Keep tests that no prompt shows, and more than one.

**What a test compares.** A test can call functions and classes of the code with plain data, set
attributes of their objects, compare plain data, and expect exceptions, those of the code's own
classes included. Plain data are numbers, texts, bytes, lists, tuples, named tuples, sets, dicts,
Counter, OrderedDict, deque, range, iterators, Decimal, Fraction, arrays of numpy, and the types
int, str and so on. Of a value of a subclass, a test sees what the base class holds. Changes of an
argument in place are not seen, and objects of the code's own classes equal nothing but themselves.

**Whose names a test reads.** A name is the test's own if the test or `test_setup_code` defines or
imports it. It is the code's if it is no builtin. Where the tests and the setup of a row read no
such name, one name of Python is the code's: the only one that the row's solution (`code`) defines,
or, in a row without a solution, the only builtin that the tests read. So `assert sum(10, 15) == 6`
asks the code for `sum`. In all other tests `sum`, `all` and `len` are Python's, whatever the code
defines: otherwise a program could win by defining a helper of the tests. For the same reason a test
gets what the solution imports, and modules of which it only reads attributes, such as
`math.isclose`, from Python and not from the code. Other helpers of tests belong into the tests or
their setup: what a test asks the code for, the code decides.

A test that reads no name of the code does not count, and where none is left there is no reward. One
that reads names and calls nothing, such as a function for pytest that nobody calls, fails.
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

_THREADS = 32  # of a program
_TRIED, _TRIED_AT_ONCE, _SECONDS = 32, 8, 10.0  # rows at the start, and for how long
_NAMED = 3  # of the rows that pay nothing


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
  """Remarks about the first rows that have tests. "" if there is nothing to say.

  A row is tried with its own solution. One without a solution is tried with an empty program, which
  shows whether its tests can be read, and read anything of a program.

  Raises:
    ConfigError: None of the rows can pay a program, or the columns of one cannot be used.
  """
  deadline = time.monotonic() + _SECONDS
  tried, problems = 0, list[str]()
  rows = iter(rows)
  first = next(rows)
  if not {*MAIN_COLUMNS} & first[1].keys():
    raise ConfigError(
      f"{where}: the examples have no tests, which are in one of the columns"
      f" {', '.join(MAIN_COLUMNS)}"
    )
  all_of_them = itertools.chain([first], rows)
  with_tests = itertools.islice((one for one in all_of_them if layout_of(one[1])), _TRIED)
  while time.monotonic() < deadline:
    some = list(itertools.islice(with_tests, _TRIED_AT_ONCE))
    if not some:
      break
    fields = {name: [row.get(name) for _, row in some] for name in TEST_COLUMNS}
    solutions = [_solution(row) for _, row in some]
    places = [place for place, _ in some]
    try:
      scores = score(completions=solutions, place=places, code=solutions, **fields)
    except RewardError as error:
      raise ConfigError(f"{where}: {error}") from None
    for place, solution, given in zip(places, solutions, scores, strict=True):
      if given is None:
        problems.append(f"{place}: its tests read nothing of a program")
      elif isinstance(given, NoReward):
        raise ConfigError(f"{where}: {given.reason}")
      elif solution.strip() and given < 1:
        problems.append(f"{place}: its own solution fails its tests")
    tried += len(some)
  if not tried and time.monotonic() < deadline:
    return f"{where}: none of the rows that were looked at has tests"
  if not problems:
    return ""
  more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
  named = "; ".join(problems[:_NAMED]) + more
  if len(problems) == tried:
    raise ConfigError(f"{where}: no program can earn a reward in any of {tried} rows: {named}")
  return f"{where}: {len(problems)} of {tried} rows that were tried can pay no program: {named}"


def _solution(row: Mapping[str, Any]) -> str:
  """A program of the row's own that is right, or ""."""
  own = row.get("code")
  return own if isinstance(own, str) else layout_of(row).solution(row)


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
    test_setup_code: Code that these tests need first, such as imports: a text, or a list of lines.
    code: A solution of each problem, if there is one. It says which names tests read of a program.
    place: The names of the rows in messages, such as a file and its line.
    partial: Give the share of the tests that pass instead.
    fraction: The earlier name of `partial`.
    seconds: The time limit for a completion with its tests, wall clock and CPU. Tests that have not
      passed by then have failed.
    case_seconds: The time limit for each case, where tests are inputs with their outputs.
    memory: The memory limit in GiB, for the code and for the tests. numpy needs 0.25.
    at_once: How many completions run at once. At most their number times `seconds` / at_once goes
      by, so reward.timeout should be longer.
    sandboxed: False runs the code without a sandbox, with limits of resources alone. It can then
      read and delete all that the user can, and forge its reward.
    columns: The columns of the other layouts are read.

  Returns:
    The scores. None where a row has no test, or none that reads something of a program. No reward
    where tests cannot be read.

  Raises:
    ConfigError: There is no sandbox on this machine.
    RewardError: A sandbox did not start, or a setup fails.
  """
  judge = _ProgramScorer(
    sandbox=runner.find() if sandboxed else runner.NONE,
    limits=runner.SandboxLimits(math.ceil(seconds), int(memory * 2**30), threads=_THREADS),
    seconds=seconds,
    case_seconds=case_seconds,
    partial=partial or fraction,
  )
  own = {"test_list": test_list, "test_setup_code": test_setup_code, "code": code, "place": place}
  problems = _problems(len(completions), {**columns, **own})
  with ThreadPoolExecutor(at_once) as pool:
    return list(pool.map(judge, completions, problems))


class _Problem(NamedTuple):
  """The tests of a row, with the row's name in messages and its own solution, or ""."""

  place: str
  tests: ProgramTests
  solution: str


# A row's problem, why its tests cannot be read, or None if it has none.
_Readable = _Problem | NoReward | None


@dataclasses.dataclass(frozen=True)
class _ProgramScorer:
  """Scores completions. The attributes are parameters of `code`, and what follows from them."""

  sandbox: str
  limits: runner.SandboxLimits
  seconds: float
  case_seconds: float
  partial: bool

  def __call__(self, completion: str, problem: _Readable) -> float | NoReward | None:
    """The score of a program by the tests of its problem, or None if no test counts."""
    if not isinstance(problem, _Problem):
      return problem
    place, tests, solution = problem
    program = _whole(program_of(completion), tests)
    if tests.cases:
      clock = TimeLimits(self.seconds, self.case_seconds)
      verdict = run_cases(
        program,
        tests.cases,
        self.limits,
        self.sandbox,
        clock,
        place,
        stops=not self.partial,
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
  """The problems of the rows, from the columns of `code`."""
  names = [name for name in (*TEST_COLUMNS, "code", "place") if columns.get(name) is not None]
  for name in names:
    if isinstance(columns[name], str) or len(columns[name]) != count:
      raise RewardError(f"code: {name} must have an entry for each of {count} completions")
  rows = [{name: columns[name][number] for name in names} for number in range(count)]
  found: list[_Readable] = []
  for number, row in enumerate(rows):
    is_as_before = number and row == rows[number - 1]  # the completions of a prompt
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


def _whole(program: str, tests: ProgramTests) -> str:
  """The program with what the prompt began. Where that is a function, it may only be its end."""
  if not tests.entry or re.search(rf"^(async\s+)?def\s+{re.escape(tests.entry)}\b", program, re.M):
    return f"{tests.header}\n{program}" if tests.header else program
  lines = itertools.takewhile(lambda line: not line[:1].strip(), program.split("\n"))
  return tests.header + "\n".join(lines)


def program_of(text: str) -> str:
  """The last block of code between ``` lines, which may be unfinished, or else the whole text."""
  lines = text.split("\n")
  fences = [i for i, line in enumerate(lines) if line.lstrip().startswith("```")]
  if not fences:
    return text
  # The fences open and close in turn; one that is left over opens a block without an end.
  start = fences[(len(fences) - 1) // 2 * 2]
  end = next((i for i in fences if i > start), len(lines))
  return "\n".join(lines[start + 1 : end])
