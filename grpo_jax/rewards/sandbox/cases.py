"""Runs a program on the cases of a problem, and compares the outputs with the expected outputs.

The program runs in a sandbox, in a new process for each case (`programs/cases.py`). The sandbox
gets inputs only. This module compares the outputs, as plain texts and values.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from decimal import Decimal
import json
import math
import os
import select
import subprocess
import time
from typing import Any

from grpo_jax.problems.programs import Case
from grpo_jax.rewards.answer import RewardError
from grpo_jax.rewards.sandbox import runner
from grpo_jax.rewards.sandbox.programs.values import encode
from grpo_jax.rewards.sandbox.tests import Verdict

_MOST_OUTPUT = 2**24  # bytes of a case's output, which the program writes to a file of that limit
_MOST_VALUE = 2**23  # bytes of a value in JSON
_LONGEST_LINE = 64  # bytes of a line from the sandbox
_NEAR = 1e-6  # the relative and absolute tolerance of numbers for which `Case.near` is true
_SERVER = 3  # processes besides the threads of a program: those of the sandbox, and one that ends
_LISTS = ("list", "tuple", "deque", "namedtuple")
_DICTS = ("dict", "Counter", "OrderedDict")


class _Gone(Exception):
  """The sandbox has ended, sent something invalid, or missed the deadline."""


class _NotStarted(Exception):
  """The sandbox did not start."""


@dataclasses.dataclass(frozen=True)
class TimeLimits:
  """Time limits, in seconds.

  Attributes:
    whole: The limit for all cases together. Cases that have not passed by then have failed.
    case: The limit for each case.
  """

  whole: float
  case: float


def run_cases(
  program: str,
  cases: Sequence[Case],
  limits: runner.SandboxLimits,
  sandbox: str,
  clock: TimeLimits,
  place: str,
  *,
  stops: bool = True,
) -> Verdict:
  """Runs a program on cases, and counts those that it passes.

  Args:
    program: The source of the program.
    cases: The inputs of the program, with the expected outputs.
    limits: The limits of the process of each case, except that `seconds` limits the server, the
      process that starts these processes. `clock.case` limits a case.
    sandbox: One of `runner.KINDS`, or `runner.NONE`.
    clock: The time limits.
    place: The name of the problem in error messages.
    stops: Whether to stop after the first case that fails.

  Raises:
    RewardError: The sandbox did not start.
  """
  deadline = time.monotonic() + clock.whole
  # The server starts a process for each case, so its limit of processes must be more than 1, which
  # allows only threads. It writes inputs to files that may be larger than those of a program.
  server_limits = dataclasses.replace(
    limits, processes=limits.threads + _SERVER, file_size=limits.memory
  )
  case_limits = dataclasses.replace(limits, seconds=math.ceil(clock.case))
  job = {
    "code": program,
    "limits": runner.values_of(case_limits, sandbox),
    "threads": limits.threads,
    "in_sandbox": sandbox != runner.NONE,
    "case_seconds": clock.case,
  }
  pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
  # Without a buffer, because `_Talk` reads and writes the file descriptors itself.
  process = runner.start(
    "from cases import run_cases; run_cases()", server_limits, sandbox, bufsize=0, **pipes
  )
  talk, passed = _Talk(process, deadline), 0
  try:
    compiles = talk.begin(job)
    for case in cases if compiles else ():  # code that does not compile passes no case
      is_right = _is_right(case, talk)
      passed += is_right
      if stops and not is_right:
        break
  except _NotStarted:
    message = f"{place}: a sandbox did not start in {clock.whole:g} s"
    raise RewardError(message) from None
  except _Gone:
    pass  # the cases that are left have failed
  finally:
    talk.close()
    runner.stop(process)
  return Verdict(passed, len(cases))


class _Talk:
  """Exchanges messages with the server in a sandbox. Its methods raise _Gone at the deadline."""

  def __init__(self, process: "subprocess.Popen[bytes]", deadline: float) -> None:
    self._process, self._deadline = process, deadline
    self._rest = b""
    os.set_blocking(process.stdin.fileno(), False)

  def begin(self, job: Mapping[str, Any]) -> bool:
    """Sends the job after the sandbox has started. Returns whether job["code"] compiles.

    Raises:
      _NotStarted: The sandbox has not started.
    """
    try:
      has_started = self.line() == "started"
    except _Gone:
      has_started = False
    if not has_started:
      raise _NotStarted
    self.say(job)
    return self.line() == "ready"

  def say(self, message: Mapping[str, Any]) -> None:
    """Sends a message as a line of JSON."""
    pipe, left = self._process.stdin.fileno(), memoryview(json.dumps(message).encode() + b"\n")
    while left:
      self._wait(pipe, select.POLLOUT)
      try:
        left = left[os.write(pipe, left) :]
      except OSError:
        raise _Gone from None

  def line(self) -> str:
    """Receives the next line."""
    while b"\n" not in self._rest:
      if len(self._rest) > _LONGEST_LINE:
        raise _Gone
      self._rest += self._read()
    line, _, self._rest = self._rest.partition(b"\n")
    return line.decode(errors="replace")

  def output(self, size: int) -> bytes:
    """Receives the next `size` bytes."""
    parts, found = [self._rest], len(self._rest)
    while found < size:
      parts.append(self._read())
      found += len(parts[-1])
    whole = b"".join(parts)
    self._rest = whole[size:]
    return whole[:size]

  def close(self) -> None:
    """Closes both pipes."""
    for pipe in (self._process.stdin, self._process.stdout):
      pipe.close()

  def _read(self) -> bytes:
    pipe = self._process.stdout.fileno()
    self._wait(pipe, select.POLLIN)
    part = os.read(pipe, 2**20)
    if not part:
      raise _Gone
    return part

  def _wait(self, pipe: int, event: int) -> None:
    poll = select.poll()
    poll.register(pipe, event)
    left = self._deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
      raise _Gone


def _is_right(case: Case, talk: _Talk) -> bool:
  """Sends a case to the sandbox. Returns whether the program passes it."""
  if case.function:
    try:
      arguments = encode(case.input, id)  # `id` is not called, because the input is plain data
    except RecursionError:  # too deeply nested to send
      raise _Gone from None
    talk.say({"function": case.function, "arguments": arguments})
  else:
    talk.say({"stdin": case.input})
  size, _, end = talk.line().partition(" ")
  if not size.isdecimal() or int(size) > _MOST_OUTPUT:
    raise _Gone
  found = talk.output(int(size))  # also after a failure, because the next line comes after it
  if end != "ended":
    return False
  return same_value(case, found) if case.function else same_output(case.output, found, case.near)


def same_output(expected: str, found: bytes, near: bool = False) -> bool:
  """Whether two outputs have equal lines, as LiveCodeBench compares them.

  Spaces around lines, and empty lines around the text, do not count. Two lines are also equal if
  they hold the same numbers, such as `1.0 2` and `1 2`. With `near`, numbers with a decimal point
  in `expected` may differ by 1e-6.
  """
  given, wanted = (
    [line.strip() for line in text.strip().split("\n")]
    for text in (found.decode(errors="replace"), expected)
  )
  if len(given) != len(wanted):
    return False
  return all(_same_line(one, other, near) for one, other in zip(given, wanted))


def _same_line(given: str, wanted: str, near: bool) -> bool:
  if given == wanted:
    return True
  words, wanted_words = given.split(), wanted.split()
  if len(words) != len(wanted_words):
    return False
  try:
    return all(_same_number(*pair, near) for pair in zip(words, wanted_words))
  except (ArithmeticError, ValueError):
    return False


def _same_number(given: str, wanted: str, near: bool) -> bool:
  if near and "." in wanted:
    return math.isclose(float(given), float(wanted), rel_tol=_NEAR, abs_tol=_NEAR)
  return Decimal(given) == Decimal(wanted)


def same_value(case: Case, found: bytes) -> bool:
  """Whether a call returned the expected output of the case.

  The expected value comes from JSON. So a tuple equals a list with the same items, and a number as
  a key of a dict equals its text. `found` is the JSON of `values.encode` for the returned value.
  """
  if len(found) > _MOST_VALUE:
    return False
  try:
    value, expected = _plain(json.loads(found)), _with_texts_as_keys(case.output)
    is_boxed = case.boxed and isinstance(expected, list) and len(expected) == 1
    return bool(value == expected or (is_boxed and value == expected[0]))
  except (ValueError, TypeError, LookupError, RecursionError):  # `found` is not an encoded value
    return False


def _plain(data: Any) -> Any:
  """Converts an encoded value to lists, dicts and scalars. Any other type equals nothing."""
  if not isinstance(data, list):
    return data
  kind, *rest = data
  if kind in _LISTS:
    return [_plain(item) for item in rest[0 if kind != "namedtuple" else 2]]
  if kind in _DICTS:
    return {_key(_plain(key)): _plain(item) for key, item in rest[0]}
  return object()


def _with_texts_as_keys(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {_key(key): _with_texts_as_keys(item) for key, item in value.items()}
  return [_with_texts_as_keys(item) for item in value] if isinstance(value, list) else value


def _key(key: Any) -> str:
  """Converts the key of a dict to text, as JSON does."""
  return key if isinstance(key, str) else json.dumps(key)
