"""Runs the code of a completion, and calls its functions for the checker.

It never gets a test, only the names and arguments of calls. Its standard input has a line with the
code and then requests; its standard output gets an answer for each, both as JSON.
"""

import io
import json
import os
import sys
from typing import Any

from values import decode, encode


def play() -> None:
  """Answers requests until there are no more."""
  requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
  os.dup2(2, 1)  # what the code prints goes where errors go
  os.close(0)
  sys.stdin = io.StringIO()
  sys.setrecursionlimit(10_000)
  job = json.loads(requests.readline())
  _send(answers, {"value": "ready"})
  names: dict[str, Any] = {"__name__": "completion"}
  exec(compile(job["setup"], "<setup>", "exec"), names)
  exec(compile(job["code"], "<completion>", "exec"), names)
  kept: list[Any] = []
  for line in requests:
    _send(answers, _answer(json.loads(line), names, kept))


def _answer(request: dict[str, Any], names: dict[str, Any], kept: list[Any]) -> dict[str, Any]:
  """The value that a request is for, or the error that it ends with."""

  def keep(value: Any) -> int:
    kept.append(value)
    return len(kept) - 1

  try:
    if "name" in request:
      found = names[request["name"]]
    elif "attribute" in request:
      found = getattr(kept[request["object"]], request["attribute"])
    else:
      arguments, keywords = decode(request["arguments"], kept.__getitem__)
      found = kept[request["object"]](*arguments, **keywords)
    answer = {"value": encode(found, keep)}
    json.dumps(answer)  # an int may have too many digits
    return answer
  except Exception as error:
    return {"error": type(error).__name__}


def _send(answers: Any, answer: dict[str, Any]) -> None:
  answers.write(json.dumps(answer).encode() + b"\n")
  answers.flush()
