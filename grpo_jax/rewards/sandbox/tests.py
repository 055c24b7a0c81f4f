"""Runs the tests of a problem on a program.

The program runs in a sandbox (see `runner.py`), as one process, the player. The tests run in
another one, the checker. The checker sends calls with their arguments to the player, gets plain
data back, and compares.
"""

import dataclasses
import json
import os
import re
import select
import subprocess
import time
from typing import Any

from grpo_jax.rewards.answer import RewardError
from grpo_jax.rewards.sandbox import runner


@dataclasses.dataclass(frozen=True)
class Problem:
  """The tests of a program, with the code that they need.

  Attributes:
    place: The name of the problem in error messages.
    tests: The tests. Each is a program that raises an exception if it fails.
    setup: Code that runs before the tests, such as imports. It may use the program.
    solution: A program that passes, or "". It says which names are the program's (`names.py`).
    names: Names of the program that each test gets, whatever else it defines.
  """

  place: str
  tests: tuple[str, ...]
  setup: str = ""
  solution: str = ""
  names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The result of the tests.

  Attributes:
    passed: How many passed.
    counted: How many there are, without those that read nothing of the program.
  """

  passed: int
  counted: int


def run_tests(
  program: str, problem: Problem, limits: runner.SandboxLimits, sandbox: str, seconds: float
) -> Verdict:
  """Runs a program, and the tests on it.

  Args:
    program: The program.
    problem: Its tests.
    limits: The limits of the program and of its tests, each.
    sandbox: One of `runner.KINDS`, or `runner.NONE`.
    seconds: Tests that have not passed by then have failed.

  Raises:
    RewardError: A sandbox did not start, or the setup fails.
  """
  if not problem.tests:
    return Verdict(0, 0)
  deadline = time.monotonic() + seconds
  to_checker, to_player = os.pipe(), os.pipe()
  started: list[subprocess.Popen[bytes]] = []

  def start(source: str, stdin: int, stdout: int, stderr: int) -> None:
    streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    started.append(runner.start(source, limits, sandbox, **streams))

  try:
    try:
      start(
        "from checker import run_tests; run_tests()", to_checker[0], to_player[1], subprocess.PIPE
      )
      start("from player import play; play()", to_player[0], to_checker[1], subprocess.DEVNULL)
      # The player says nothing before it has its job, and the checker nothing before the player.
      # So the first line of each pipe is the job, though the pipes have two writers.
      _send(to_checker[1], dataclasses.asdict(problem), deadline)
      _send(to_player[1], {"code": program, "setup": problem.setup}, deadline)
    finally:
      for end in (*to_checker, *to_player):
        os.close(end)
    verdict = _read(started[0].stderr.fileno(), 1 + len(problem.tests), deadline)
  finally:
    for process in started:
      runner.stop(process)
      if process.stderr:
        process.stderr.close()
  # Nothing but the verdict counts, such as what the checker's Python says when it fails.
  match = re.match(rb"\+([01-]*)(!?)", verdict)
  if match is None:
    said = " ".join(verdict.decode(errors="replace").split())[-200:]
    failed = f"a sandbox did not start in {seconds:g} s"
    raise RewardError(f"{problem.place}: {failed}{': ' if said else ''}{said}")
  if match[2]:
    raise RewardError(f"{problem.place}: test_setup_code fails: {problem.setup!r:.200}")
  return Verdict(match[1].count(b"1"), len(problem.tests) - match[1].count(b"-"))


def _send(pipe: int, job: dict[str, Any], deadline: float) -> None:
  """Writes a line, of which a pipe may hold only a part. Gives up at the deadline."""
  os.set_blocking(pipe, False)
  left = memoryview(json.dumps(job).encode() + b"\n")
  while left and _wait(pipe, select.POLLOUT, deadline):
    left = left[os.write(pipe, left) :]
  os.set_blocking(pipe, True)  # the programs share this


def _read(pipe: int, count: int, deadline: float) -> bytes:
  """The first `count` bytes, or those that there are when the pipe ends or at the deadline."""
  found = b""
  while len(found) < count and _wait(pipe, select.POLLIN, deadline):
    part = os.read(pipe, 4096)
    if not part:
      break
    found += part
  return found


def _wait(pipe: int, event: int, deadline: float) -> bool:
  """Waits for an event of a pipe. Returns whether it came before the deadline."""
  poll = select.poll()
  poll.register(pipe, event)
  left = deadline - time.monotonic()
  return left > 0 and bool(poll.poll(left * 1000))
