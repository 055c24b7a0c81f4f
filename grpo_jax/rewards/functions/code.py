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
import itertools
import math
import time
from typing import Annotated, Any

from grpo_jax.rewards.answer import NoReward, RewardError
from grpo_jax.rewards.marks import checked_by, reads, rows_checked_by
from grpo_jax.rewards.sandbox import runner
from grpo_jax.rewards.sandbox.tests import Problem, run_tests
from grpo_jax.settings import ConfigError, at_least, shown

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
  """What a user should know of the first rows that have tests. "" if there is nothing to say.

  A row is tried with its own solution. One without a solution is tried with an empty program, which
  shows whether its tests read anything of a program.

  Raises:
    ConfigError: None of the rows can pay a program, or the columns of one cannot be used.
  """
  deadline = time.monotonic() + _SECONDS
  tried, problems = 0, list[str]()
  with_tests = itertools.islice((one for one in rows if one[1].get("test_list")), _TRIED)
  while time.monotonic() < deadline:
    some = list(itertools.islice(with_tests, _TRIED_AT_ONCE))
    if not some:
      break
    names = ("test_list", "test_setup_code", "code")
    fields = {name: [row.get(name) for _, row in some] for name in names}
    solutions = [given if isinstance(given, str) else "" for given in fields["code"]]
    places = [place for place, _ in some]
    try:
      scores = score(completions=solutions, place=places, **fields)
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
  if not problems:
    return ""
  more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
  named = "; ".join(problems[:_NAMED]) + more
  if len(problems) == tried:
    raise ConfigError(f"{where}: no program can earn a reward in any of {tried} rows: {named}")
  return f"{where}: {len(problems)} of {tried} rows that were tried can pay no program: {named}"


@checked_by(_check_sandbox)
@rows_checked_by(_check_rows)
@reads(test_list=(str, list, tuple))
def code(
  completions: list[str],
  test_list: list[Any],
  test_setup_code: list[Any] | None = None,
  code: list[Any] | None = None,
  place: list[str | None] | None = None,
  *,
  fraction: bool = False,
  seconds: Annotated[float, at_least(0.1, at_most=86_400)] = 10.0,
  memory: Annotated[float, at_least(0.125, at_most=1024)] = 0.5,
  at_once: Annotated[int, at_least(1, at_most=256)] = 4,
  sandboxed: bool = True,
  **columns: Any,
) -> list[float | NoReward | None]:
  """1.0 if the code of the completion passes all tests, else 0.0.

  The code is the last block between ``` lines, or the whole text if there is none. The columns are
  those of MBPP: each test is an `assert`.

  Args:
    completions: The texts.
    test_list: The tests of each completion. A text is one test.
    test_setup_code: What the tests of each completion need before them, such as imports: a text, or
      a list of lines.
    code: A solution of each problem, if there is one. It says which names tests read of a program.
    place: What messages call the rows, such as a file and its line.
    fraction: Give the fraction of the tests that pass instead.
    seconds: The time limit for a completion with its tests, wall clock and CPU. Tests that have not
      passed by then have failed.
    memory: The memory limit in GiB, for the code and for the tests. numpy needs 0.25.
    at_once: How many completions run at once. At most their number times `seconds` / at_once goes
      by, so reward.timeout should be longer.
    sandboxed: False runs the code without a sandbox, with limits of resources alone. It can then
      read and delete all that the user can, and forge its reward.
    columns: Not read.

  Returns:
    The scores. None where there is no test that reads something of a program. No reward where the
    tests or their setup are no texts.

  Raises:
    ConfigError: There is no sandbox on this machine.
    RewardError: A sandbox did not start, or a setup fails.
  """
  sandbox = runner.find() if sandboxed else runner.NONE
  limits = runner.Limits(seconds=math.ceil(seconds), memory=int(memory * 2**30), threads=_THREADS)
  problems = _problems(len(completions), test_list, test_setup_code, code, place)

  def score(completion: str, problem: Problem | NoReward) -> float | NoReward | None:
    if isinstance(problem, NoReward):
      return problem
    verdict = run_tests(program_of(completion), problem, limits, sandbox, seconds)
    if not verdict.counted:
      return None
    passed = verdict.passed
    return passed / verdict.counted if fraction else float(passed == verdict.counted)

  with ThreadPoolExecutor(at_once) as pool:
    return list(pool.map(score, completions, problems))


def _problems(count: int, tests: Any, *others: Any) -> list[Problem | NoReward]:
  """The problems of the rows, from the columns of `code`. All but the tests may be None."""
  columns = [tests, *(column or [None] * count for column in others)]
  if isinstance(tests, str) or any(len(column) != count for column in columns):
    raise RewardError(f"code: test_list must have an entry for each of {count} completions")
  return [_problem(number, *row) for number, row in enumerate(zip(*columns, strict=True))]


def _problem(number: int, tests: Any, setup: Any, solution: Any, place: Any) -> Problem | NoReward:
  """The problem of a row, from its entries in the columns of `code`, or why it has none."""
  place = place or f"row {number}"
  tests = [tests] if isinstance(tests, str) else tests or []
  setup = [setup] if isinstance(setup, str) else setup or []
  for name, value in (("test_list", tests), ("test_setup_code", setup)):
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
      return NoReward(f"{place}: {name} must be a text or a list of texts: {shown(value)}")
  solution = solution if isinstance(solution, str) else ""
  return Problem(f"code: {place}", tuple(tests), "\n".join(setup), solution)


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
