"""The player: runs the code of a completion, and calls the functions of the code for the checker.

It never gets a test. It reads a line with the setup of the tests and the code from standard input,
then requests with the names and arguments of calls. It answers each on standard output. All lines
are JSON.
"""

import builtins
import contextlib
import io
import json
import os
import sys
from typing import Any

from values import decode, describe_exception, encode


def play() -> None:
  """Runs the code, and answers requests until there are no more.

  If the code raises an exception, the process ends, which the checker notices.
  """
  requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
  os.dup2(2, 1)  # so that prints of the code do not mix with the answers
  os.close(0)
  sys.stdin = io.StringIO()
  sys.setrecursionlimit(10_000)
  sys.set_int_max_str_digits(0)  # programs may print long integers
  # Python runs without `site`, which defines these two names.
  vars(builtins).update(exit=sys.exit, quit=sys.exit)
  job = json.loads(requests.readline())
  # Before the code runs: without this answer the sandbox has not started, which is no fault of the
  # code.
  _send(answers, {"value": "ready"})
  names: dict[str, Any] = {"__name__": "completion"}
  # The code may use names of the setup, such as imports. Here the setup may fail because the code
  # has not run yet. The checker runs it, too, and reports that it fails.
  with contextlib.suppress(Exception):
    exec(compile(job["setup"], "<setup>", "exec"), names)
  exec(compile(job["code"], "<completion>", "exec"), names)
  kept = NumberedObjects()
  for line in requests:
    _send(answers, _answer(json.loads(line), names, kept))


class NumberedObjects:
  """Numbers the objects that stay here, so that the checker can refer to them."""

  def __init__(self) -> None:
    self._objects: list[Any] = []
    self._numbers: dict[int, int] = {}  # by id, which `_objects` keeps from being reused

  def number_of(self, value: Any) -> int:
    """The number of an object. An object has the same number in every call."""
    if id(value) not in self._numbers:
      self._numbers[id(value)] = len(self._objects)
      self._objects.append(value)
    return self._numbers[id(value)]

  def __getitem__(self, number: int) -> Any:
    return self._objects[number]


def _answer(
  request: dict[str, Any], names: dict[str, Any], kept: NumberedObjects
) -> dict[str, Any]:
  """Carries out a request. Returns the encoded value or exception, as the checker reads it."""
  try:
    return {"value": encode(_result(request, names, kept), kept.number_of)}
  except Exception as error:
    return _error(error, kept)


def _result(request: dict[str, Any], names: dict[str, Any], kept: NumberedObjects) -> Any:
  if "name" in request:
    return names[request["name"]]
  if "set" in request:
    value = decode(request["set"], kept.__getitem__)
    return setattr(kept[request["object"]], request["attribute"], value)
  if "attribute" in request:
    return getattr(kept[request["object"]], request["attribute"])
  arguments, keywords = decode(request["arguments"], kept.__getitem__)
  return kept[request["object"]](*arguments, **keywords)


def _error(error: Exception, kept: NumberedObjects) -> dict[str, Any]:
  """Encodes an exception: its class, and its arguments and attributes if they can be sent."""
  kind = describe_exception(type(error), kept.number_of)
  try:
    answer = {
      "error": kind,
      "arguments": encode(list(error.args), kept.number_of),
      "attributes": encode(vars(error), kept.number_of),
    }
    json.dumps(answer)
    return answer
  except Exception:
    return {"error": kind, "arguments": ["list", []], "attributes": ["dict", []]}


def _send(answers: Any, answer: dict[str, Any]) -> None:
  answers.write(json.dumps(answer).encode() + b"\n")
  answers.flush()
