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

from grpo_jax.problems.programs import ProgramTests
from grpo_jax.rewards.answer import RewardError
from grpo_jax.rewards.sandbox import runner


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
  program: str,
  tests: ProgramTests,
  limits: runner.SandboxLimits,
  sandbox: str,
  seconds: float,
  place: str,
  *,
  solution: str = "",
) -> Verdict:
  """Runs a program, and the asserts of its tests on it.

  Args:
    program: The program.
    tests: Its tests.
    limits: The limits of the program and of its tests, each.
    sandbox: One of `runner.KINDS`, or `runner.NONE`.
    seconds: Tests that have not passed by then have failed.
    place: The name of the problem in error messages.
    solution: A program that passes, or "". It says which names are the program's (`names.py`).

  Raises:
    RewardError: A sandbox did not start, or the setup fails.
  """
  if not tests.asserts:
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
      job = {"tests": tests.asserts, "setup": tests.setup, "names": tests.names}
      _send(to_checker[1], job | {"solution": solution}, deadline)
      _send(to_player[1], {"code": program, "setup": tests.setup}, deadline)
    finally:
      for end in (*to_checker, *to_player):
        os.close(end)
    found = _read(started[0].stderr.fileno(), 1 + len(tests.asserts), deadline)
  finally:
    for process in started:
      runner.stop(process)
      if process.stderr:
        process.stderr.close()
  return _verdict(found, tests, place, seconds)


def _verdict(found: bytes, tests: ProgramTests, place: str, seconds: float) -> Verdict:
  """The verdict in the bytes that the checker wrote. Raises RewardError as `run_tests` does."""
  # Nothing but the verdict counts, such as what the checker's Python says when it fails.
  match = re.match(rb"\+([01-]*)(!?)", found)
  if match is None:
    said = " ".join(found.decode(errors="replace").split())[-200:]
    failed = f"a sandbox did not start in {seconds:g} s"
    raise RewardError(f"{place}: {failed}{': ' if said else ''}{said}")
  if match[2]:
    raise RewardError(f"{place}: test_setup_code fails: {tests.setup!r:.200}")
  return Verdict(match[1].count(b"1"), len(tests.asserts) - match[1].count(b"-"))


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
