"""Runs the code of a completion, and calls its functions for the checker.

It never gets a test, only the names and arguments of calls. Its standard input has a line with the
code and then requests; its standard output gets an answer for each, both as JSON.
"""

import contextlib
import io
import json
import os
import sys
from typing import Any

from values import decode, describe_exception, encode


def play() -> None:
  """Answers requests until there are no more."""
  requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
  os.dup2(2, 1)  # what the code prints goes where errors go
  os.close(0)
  sys.stdin = io.StringIO()
  sys.setrecursionlimit(10_000)
  sys.set_int_max_str_digits(0)
  job = json.loads(requests.readline())
  _send(answers, {"value": "ready"})
  names: dict[str, Any] = {"__name__": "completion"}
  # The checker says whether the setup fails. Here it may need what only the code defines.
  with contextlib.suppress(Exception):
    exec(compile(job["setup"], "<setup>", "exec"), names)
  exec(compile(job["code"], "<completion>", "exec"), names)
  kept = NumberedObjects()
  for line in requests:
    _send(answers, _answer(json.loads(line), names, kept))


class NumberedObjects:
  """The objects that the checker knows by numbers."""

  def __init__(self) -> None:
    self._objects: list[Any] = []
    self._numbers: dict[int, int] = {}  # by id. What is kept keeps its id.

  def number_of(self, value: Any) -> int:
    """The number of an object, always the same one."""
    if id(value) not in self._numbers:
      self._numbers[id(value)] = len(self._objects)
      self._objects.append(value)
    return self._numbers[id(value)]

  def __getitem__(self, number: int) -> Any:
    return self._objects[number]


def _answer(
  request: dict[str, Any], names: dict[str, Any], kept: NumberedObjects
) -> dict[str, Any]:
  """The value that a request is for, or the error that it ends with."""
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
  """An exception: its class, and what it holds where that can be sent."""
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
