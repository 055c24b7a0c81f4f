"""The checker: runs the tests of a problem. The program runs in another process, the player.

A test gets each name of the program (see names.py) from the player, which also makes the calls of
the program's functions. Values come back as plain data, of which the checker makes the objects that
a test compares. Expected values never leave this process.

Standard input has a line with the tests, and then the player's answers. Requests to the player go
to standard output. The verdict goes to standard error: "+" after the player's start, then for each
test "1", "0", or "-" if it reads no name of the program; or "!" if the setup alone fails.
"""

import ast
import builtins
import io
import json
import os
import sys
from typing import Any

from names import foreign, helpers, name_under_test, names_read
from values import decode, encode

_LONGEST_ANSWER = 2**23  # bytes
# Without exceptions that end an iteration: a test would not see them as errors.
_EXCEPTIONS = {
  name: kind
  for name, kind in vars(builtins).items()
  if isinstance(kind, type)
  and issubclass(kind, Exception)
  and name not in ("StopIteration", "StopAsyncIteration", "ExceptionGroup")
}


class Gone(BaseException):
  """The program has ended, or sent an invalid answer. Not an Exception, which a test may catch."""


class Player:
  """The checker's connection to the player, which runs the code of the completion.

  Attributes:
    uses: How many times the setup and the test used an object of the code, such as by a call.
    is_gone: Whether the player has ended. The test then fails, even if it catches `Gone`.
  """

  def __init__(self, answers: Any, requests: Any) -> None:
    self._answers, self._requests = answers, requests
    self._exceptions: dict[int, type] = {}
    self.uses, self.is_gone = 0, False

  def ask(self, **request: Any) -> Any:
    """Sends a request. Returns the value that the code returned, or raises the code's exception."""
    if self.is_gone:
      raise Gone
    self.uses += "object" in request
    line = json.dumps(request).encode() + b"\n"
    try:
      self._requests.write(line)
      self._requests.flush()
      value, error = self.hear()
    except BaseException as problem:
      self.is_gone = True
      raise Gone from problem
    if error is not None:
      raise error
    return value

  def encoded(self, value: Any) -> Any:
    """Encodes a value for the player. Raises Gone, not a TypeError, if it cannot be sent."""
    try:
      return encode(value, _number_of)
    except BaseException as problem:
      self.is_gone = True
      raise Gone from problem

  def hear(self) -> tuple[Any, Exception | None]:
    """Receives an answer: (value, None), or (None, the exception that the code raised)."""
    line = self._answers.readline(_LONGEST_ANSWER)
    if not line.endswith(b"\n"):
      raise EOFError("the code has ended, or its answer is too long")
    answer = json.loads(line)
    if "error" not in answer:
      return self._decode(answer["value"]), None
    kind = self._exception(answer["error"])
    # Not kind(...), whose __init__ may refuse the arguments of the program's class.
    error = kind.__new__(kind, *self._decode(answer["arguments"]))
    attributes = self._decode(answer["attributes"])
    vars(error).update({k: v for k, v in attributes.items() if not k.startswith("_")})
    return None, error

  def _decode(self, data: Any) -> Any:
    return decode(data, lambda number: Remote(self, number), self._own_exception)

  def _own_exception(self, description: Any) -> type:
    """The stand-in for an exception class that the program returns, as `_exception` makes it.

    A builtin is refused: in an `except` of the test, it could catch the test's AssertionError.
    """
    if isinstance(description, str):
      raise TypeError(f"the program gives {description} another name")
    return self._exception(description)

  def _exception(self, description: Any) -> type:
    """The stand-in for an exception class of the program: same name and bases, no methods.

    `description` is what `values.describe_exception` returned in the player.
    """
    if isinstance(description, str):
      return _EXCEPTIONS.get(description, RuntimeError)
    number, name, bases = description
    if number not in self._exceptions:
      kinds = dict.fromkeys(map(self._exception, bases)) or (Exception,)
      self._exceptions[number] = type(name, tuple(kinds), {})
    return self._exceptions[number]


class Remote:
  """The stand-in for an object in the player, such as a function. It can be called."""

  def __init__(self, player: Player, number: int) -> None:
    self.__dict__.update(_player=player, _number=number)

  def __call__(self, *arguments: Any, **keywords: Any) -> Any:
    sent = self._player.encoded((list(arguments), keywords))
    return self._player.ask(object=self._number, arguments=sent)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    return self._player.ask(object=self._number, attribute=name)

  def __setattr__(self, name: str, value: Any) -> None:
    if name.startswith("__"):
      raise AttributeError(name)
    sent = self._player.encoded(value)
    self._player.ask(object=self._number, attribute=name, set=sent)

  def __bool__(self) -> bool:
    raise Gone("the code returned an object that is not plain data")


def run_tests() -> None:
  """Runs the tests, and writes the verdict as the module describes it."""
  verdict, answers, requests = (os.fdopen(os.dup(2), "w"), sys.stdin.buffer, sys.stdout.buffer)
  sys.set_int_max_str_digits(0)  # answers may hold long integers
  # Prints of a test are dropped, and its input is empty.
  sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()
  job = json.loads(answers.readline())
  player = Player(answers, requests)
  player.hear()  # that the player has started

  def say(text: str) -> None:
    print(text, end="", file=verdict, flush=True)

  say("+")
  tests = [_parsed(test) for test in job["tests"]]
  solution = _parsed(job["solution"]) if job["solution"].strip() else None
  names: dict[str, Any] = {}
  setup = _parsed(job["setup"])
  foreign_in_setup = foreign(setup, {}) if setup else []
  names |= helpers([setup] if setup else [], {}, solution)
  # The names that the setup reads, and that neither the setup nor Python defines.
  setup_reads = [name for name in foreign_in_setup if name not in names]
  try:
    names |= {name: player.ask(name=name) for name in setup_reads}
    exec(compile(job["setup"], "<setup>", "exec"), names)
  except BaseException:  # the setup may raise anything
    if not setup_reads:  # else the program may be at fault, and all tests fail
      say("!")
      raise
    for _ in tests:
      say("0")
    return
  trees = [test for test in tests if test]
  names |= helpers(trees, names, solution)
  required = job["names"]  # each test takes these from the program, even if it redefines them
  # By test: the names that it takes from the program.
  reads = [[*dict.fromkeys(foreign(test, names) + required)] if test else [] for test in tests]
  if not (any(reads) or setup_reads):  # the program may redefine a builtin that the tests read
    name = name_under_test(trees, names, solution)
    reads = [[name] if test and name in names_read(test) else [] for test in tests]
  uses_by_setup = player.uses  # they count for each test, which may check what the setup computed
  for test, read in zip(tests, reads):
    player.uses = uses_by_setup
    if test is None:  # it is not Python
      say("0")
    elif read or setup_reads:
      say("1" if _passes(test, read, names, player) else "0")
    else:
      say("-")


def _passes(test: ast.Module, read: list[str], names: dict[str, Any], player: Player) -> bool:
  """Whether a test passes. A test that uses no object of the program does not.

  Args:
    test: The test.
    read: The names of the program that the test reads.
    names: The values of the other names that the test may read.
    player: The connection to the program.
  """
  try:
    scope = names | {name: player.ask(name=name) for name in read}
    exec(compile(test, "<test>", "exec"), scope)
    return player.uses > 0 and not player.is_gone
  except BaseException:  # a test may raise anything
    return False


def _parsed(code: str) -> ast.Module | None:
  """The syntax tree of some code. None if it is not Python."""
  try:
    return ast.parse(code)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None


def _number_of(value: Any) -> int:
  if isinstance(value, Remote):
    return value._number
  raise TypeError("only plain data can be passed to the code")
