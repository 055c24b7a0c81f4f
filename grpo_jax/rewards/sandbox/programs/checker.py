"""Runs the tests of a problem on code that runs elsewhere, in the player.

A name in a test that is neither the test's own nor Python's is asked from the player, and so are
calls of its functions. Values come back as plain data, so that everything that a test compares is
made here, and a test's expected values never leave this process.

Its standard input has a line with the tests and then the player's answers; its standard output gets
requests; its standard error gets the verdict: "+" for the player's start, and then "1" or "0" for
each test, or "!" if what the tests need cannot be set up.
"""

import ast
import builtins
import io
import json
import os
import sys
from typing import Any

from values import decode, encode

_LONGEST_ANSWER = 2**23  # bytes


class Player:
  """The code of the completion, as the tests see it."""

  def __init__(self, answers: Any, requests: Any) -> None:
    self._answers, self._requests = answers, requests

  def ask(self, **request: Any) -> Any:
    """Sends a request and returns what the code gave. Raises what the code raised."""
    self._requests.write(json.dumps(request).encode() + b"\n")
    self._requests.flush()
    return self.hear()

  def hear(self) -> Any:
    """The next value."""
    line = self._answers.readline(_LONGEST_ANSWER)
    if not line.endswith(b"\n"):
      raise EOFError("the code has ended, or its answer is too long")
    answer = json.loads(line)
    if "error" in answer:
      kind = getattr(builtins, str(answer["error"]), None)
      raise kind() if kind in _EXCEPTIONS else RuntimeError(answer["error"])
    return decode(answer["value"], self._object)

  def _object(self, number: int) -> "Remote":
    return Remote(self, number)


class Remote:
  """An object that stays in the player, such as a function. It can be called, and equals itself."""

  def __init__(self, player: Player, number: int) -> None:
    self.__dict__.update(_player=player, _number=number)

  def __call__(self, *arguments: Any, **keywords: Any) -> Any:
    sent = encode((list(arguments), keywords), _number_of)
    return self._player.ask(object=self._number, arguments=sent)

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    return self._player.ask(object=self._number, attribute=name)

  def __bool__(self) -> bool:
    raise TypeError("the code returned an object that is not plain data")


# Those that a test may expect of a call.
_EXCEPTIONS = (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError, AttributeError)


def run_tests() -> None:
  """Writes the verdict of each test."""
  verdict, answers, requests = (os.fdopen(os.dup(2), "w"), sys.stdin.buffer, sys.stdout.buffer)
  # What a test prints goes nowhere, and what it reads is empty.
  sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()
  job = json.loads(answers.readline())
  player = Player(answers, requests)
  player.hear()
  print("+", end="", file=verdict, flush=True)
  names: dict[str, Any] = {}
  try:
    exec(compile(job["setup"], "<setup>", "exec"), names)
  except BaseException:  # it is a program, so it can raise any exception
    print("!", end="", file=verdict, flush=True)
    raise
  for test in job["tests"]:
    print("1" if _passes(test, names, player) else "0", end="", file=verdict, flush=True)


def _passes(test: str, names: dict[str, Any], player: Player) -> bool:
  try:
    tree = ast.parse(test)
    own = dict(names)
    for name in _foreign(tree, own):
      own[name] = player.ask(name=name)
    exec(compile(tree, "<test>", "exec"), own)
    return True
  except BaseException:  # a test is a program too, so it can raise any exception
    return False


def _foreign(tree: ast.AST, own: dict[str, Any]) -> list[str]:
  """The names that a test reads and does not define."""
  nodes = list(ast.walk(tree))
  names = [node for node in nodes if isinstance(node, ast.Name)]
  defined = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
  defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
  defined |= {
    (node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)
  }
  defined |= {
    node.name
    for node in nodes
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)) and node.name
  }
  known = {*defined, *own, *dir(builtins)}
  return list(dict.fromkeys(node.id for node in names if node.id not in known))


def _number_of(value: Any) -> int:
  if isinstance(value, Remote):
    return value._number
  raise TypeError("only plain data can be passed to the code")
