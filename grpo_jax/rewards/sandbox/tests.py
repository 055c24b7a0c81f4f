"""Runs the tests of a problem on a program.

The program runs in a sandbox (see `runner.py`), in a process called the player. The tests run in a
second sandbox, in a process called the checker. The checker sends calls with arguments to the
player, gets plain data back, and compares.
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
    passed: The number of tests that passed.
    counted: The number of tests, without those that read no name of the program.
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
    program: The source of the program.
    tests: The tests of the program. Only the asserts are run.
    limits: The limits of each of the two processes.
    sandbox: One of `runner.KINDS`, or `runner.NONE`.
    seconds: The time limit. Tests that have not passed by then have failed.
    place: The name of the problem in error messages.
    solution: A program that passes, or "". It decides which names the program defines (`names.py`).

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
      # Each pipe has two writers, but the job is the first line: the player writes only after it
      # has read its job, and the checker only after the player.
      job = {"tests": tests.asserts, "setup": tests.setup, "names": tests.names}
      _send(to_checker[1], job | {"solution": solution}, deadline)
      _send(to_player[1], {"code": program, "setup": tests.setup}, deadline)
    finally:  # a process sees that the other has ended only if no third one holds the pipe open
      for end in (*to_checker, *to_player):
        os.close(end)
    # The verdict: "+", and a character for each test.
    found = _read(started[0].stderr.fileno(), 1 + len(tests.asserts), deadline)
  finally:
    for process in started:
      runner.stop(process)
      if process.stderr:
        process.stderr.close()
  return _verdict(found, tests, place, seconds)


def _verdict(found: bytes, tests: ProgramTests, place: str, seconds: float) -> Verdict:
  """Parses the verdict that the checker wrote. Raises RewardError as `run_tests` does."""
  # Text after the verdict is ignored, such as a traceback of the checker.
  match = re.match(rb"\+([01-]*)(!?)", found)
  if match is None:
    said = " ".join(found.decode(errors="replace").split())[-200:]
    failed = f"a sandbox did not start in {seconds:g} s"
    raise RewardError(f"{place}: {failed}{': ' if said else ''}{said}")
  if match[2]:
    raise RewardError(f"{place}: test_setup_code fails: {tests.setup!r:.200}")
  return Verdict(match[1].count(b"1"), len(tests.asserts) - match[1].count(b"-"))


def _send(pipe: int, job: dict[str, Any], deadline: float) -> None:
  """Writes a job as a line. Gives up at the deadline."""
  os.set_blocking(pipe, False)  # because the line may be longer than the buffer of the pipe
  left = memoryview(json.dumps(job).encode() + b"\n")
  while left and _wait(pipe, select.POLLOUT, deadline):
    left = left[os.write(pipe, left) :]
  os.set_blocking(pipe, True)  # the programs share this setting


def _read(pipe: int, count: int, deadline: float) -> bytes:
  """Reads `count` bytes, or fewer if the pipe ends or the deadline comes first."""
  found = b""
  while len(found) < count and _wait(pipe, select.POLLIN, deadline):
    part = os.read(pipe, 4096)
    if not part:
      break
    found += part
  return found


def _wait(pipe: int, event: int, deadline: float) -> bool:
  """Waits until a pipe is ready for `event`, such as select.POLLIN. False after the deadline."""
  poll = select.poll()
  poll.register(pipe, event)
  left = deadline - time.monotonic()
  return left > 0 and bool(poll.poll(left * 1000))
