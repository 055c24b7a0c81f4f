"""A reward for programs that pass tests.

The code of a completion runs in a sandbox. Its tests run in another one, which sends calls to the
code and compares what comes back (see `sandbox/tests.py`). So the code

* never sees a test or an expected value, only the arguments of calls, as a program would,
* cannot pass by ending early, by printing, by changing builtins or modules, or by returning objects
  that equal everything: they exist only in its own process,
* cannot reach its tests, which run in another process in another sandbox.

It can still pass tests that it could know from its prompt, remember its earlier calls, and guess
where the possible answers are few. Keep tests that no prompt shows, and more than one.

A test can call functions and classes of the code with plain data, and compare plain data: numbers,
texts, lists, tuples, sets, dicts, bytes, iterators. Changes of an argument in place are not seen.
Where the code has the name of a builtin, such as `sum`, tests call the builtin.
"""

from concurrent.futures import ThreadPoolExecutor
import math
from typing import Annotated, Any

from grpo_jax.rewards.marks import checked_by
from grpo_jax.rewards.sandbox import runner
from grpo_jax.rewards.sandbox.tests import count_passed
from grpo_jax.settings import ConfigError, above, at_least


def _check_sandbox(where: str, options: dict[str, Any]) -> None:
  if not options["sandboxed"]:
    return
  try:
    runner.find()
  except ConfigError as error:
    raise ConfigError(
      f"{where}: {error}. Or let completions do what you may do, with code(sandboxed=False)"
    ) from None


@checked_by(_check_sandbox)
def code(
  completions: list[str],
  test_list: list[list[str]],
  test_setup_code: list[str] | None = None,
  *,
  fraction: bool = False,
  seconds: Annotated[float, above(0)] = 10.0,
  memory: Annotated[float, above(0)] = 0.5,
  at_once: Annotated[int, at_least(1, at_most=256)] = 4,
  sandboxed: bool = True,
  **columns: Any,
) -> list[float | None]:
  """1.0 if the code of the completion passes all tests, else 0.0.

  The code is the last block between ``` lines, or the whole text if there is none. The columns are
  those of MBPP: each test is an `assert`.

  Args:
    completions: The texts.
    test_list: The tests of each completion.
    test_setup_code: What the tests of each completion import, if they need something.
    fraction: Give the fraction of the tests that pass instead.
    seconds: The time limit for a completion with its tests, wall clock and CPU. Tests that have not
      passed by then have failed.
    memory: The memory limit in GiB, for the code and for the tests.
    at_once: How many completions run at once. At most their number times `seconds` / at_once goes
      by, so reward.timeout should be longer.
    sandboxed: False runs the code without a sandbox, with limits of resources alone. It can then
      read and delete all that the user can, and forge its reward.
    columns: Not read.

  Returns:
    The scores. None where there is no test.

  Raises:
    ConfigError: There is no sandbox on this machine.
    RewardError: A sandbox did not start.
  """
  sandbox = runner.find() if sandboxed else runner.NONE
  limits = runner.Limits(seconds=math.ceil(seconds), memory=int(memory * 2**30))
  setups = test_setup_code or [""] * len(completions)

  def score(completion: str, tests: list[str], setup: str | None) -> float | None:
    if not tests:
      return None
    passed = count_passed(program_of(completion), tests, setup or "", limits, sandbox, seconds)
    return passed / len(tests) if fraction else float(passed == len(tests))

  with ThreadPoolExecutor(at_once) as pool:
    return list(pool.map(score, completions, test_list, setups))


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
