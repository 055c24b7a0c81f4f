"""Runs a program on inputs, each in a process of its own, and sends back what it gave.

It never gets an expected output. Its standard input has a line with the job, and then one for each
case; its standard output gets "started", then "ready", or "broken" if the code is no Python, and
then for each case a line with the size of what the case gave and how it ended: "ended", "failed" or
"late". What it gave follows. The cases of a completion have one /tmp, so a program can find there
what it wrote in an earlier case.
"""

import ast
import builtins
import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import types
from typing import Any

from confine import confine
from values import decode, encode

_RECURSION = 50_000
_ALL_FILES = 3, 4096
# What programs for these data sets use without importing it, as LiveCodeBench gives it to them.
_PRELUDE = """
from typing import *
from collections import *
from itertools import *
from functools import *
from heapq import *
from bisect import *
from math import gcd, inf, sqrt, ceil, floor
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string
import sys, time
"""


def run_cases() -> None:
  """Runs the code once for each case. In the process of a case, it returns when the code ended."""
  requests, answers = os.dup(0), os.dup(1)
  os.dup2(2, 1)
  os.close(0)
  lines = os.fdopen(requests, "rb")
  os.write(answers, b"started\n")  # what follows depends on the code, which may end this process
  job = json.loads(lines.readline())
  names: dict[str, Any] = {}
  exec(_PRELUDE, names)
  try:
    code = compile(job["code"], "solution.py", "exec")
  except Exception:
    os.write(answers, b"broken\n")
    return
  _import_what_it_imports(job["code"])
  gc.freeze()  # a process that never looks at what it shares with this one ends in half the time
  # The end of a case is waited for with a limit of time.
  signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
  os.write(answers, b"ready\n")
  for line in lines:
    case = json.loads(line)
    given, found = _new_file(), _new_file()
    _write(given, case.get("stdin", "").encode("utf-8", "surrogatepass"))
    os.lseek(given, 0, os.SEEK_SET)
    child = os.fork()
    if not child:
      _become_case(given, found, job)
      _play(code, names, case)
      return
    end = _wait(child, job["case_seconds"])
    size = os.fstat(found).st_size
    _write(answers, f"{size} {end}\n".encode())
    for start in range(0, size, 2**20):
      _write(answers, os.pread(found, 2**20, start))
    os.close(given)
    os.close(found)


def _new_file() -> int:
  """The number of an open file that has no name."""
  number, name = tempfile.mkstemp()
  os.unlink(name)
  return number


def _import_what_it_imports(code: str) -> None:
  """Imports modules of Python, and numpy, so that not every process has to."""
  with contextlib.suppress(Exception):  # what cannot be read fails when it is run
    for node in ast.parse(code).body:
      module = node.module if isinstance(node, ast.ImportFrom) else ""
      aliases = [one.name for one in node.names] if isinstance(node, ast.Import) else [module]
      for name in aliases:
        if name and name.split(".")[0] in {*sys.stdlib_module_names, "numpy"} - {"this"}:
          importlib.import_module(name)


def _become_case(given: int, found: int, job: dict[str, Any]) -> None:
  """Gives this process its input and its limits, and takes all other files from it."""
  os.dup2(given, 0)
  os.dup2(found, 1)
  os.closerange(*_ALL_FILES)
  confine(job["limits"], job["threads"], job["in_sandbox"])
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
  sys.setrecursionlimit(_RECURSION)
  sys.set_int_max_str_digits(0)
  sys.argv = ["solution.py"]
  sys.stdin = os.fdopen(0, "r", encoding="utf-8", errors="surrogateescape", closefd=False)
  sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)


def _play(code: Any, names: dict[str, Any], case: dict[str, Any]) -> None:
  """Runs the program, or calls its function and writes the value. Its threads may go on."""
  function = case.get("function")
  module = types.ModuleType("solution" if function else "__main__")
  sys.modules[module.__name__] = module
  module.__dict__.update({**names, **vars(module), "__builtins__": builtins})
  if not function:
    exec(code, module.__dict__)
    return
  sink = os.dup(1)
  os.dup2(2, 1)  # what the code prints is no value
  exec(code, module.__dict__)
  owner = vars(module).get("Solution")
  called = getattr(owner(), function) if hasattr(owner, function) else vars(module)[function]
  value = encode(called(*decode(case["arguments"], id)), id)
  _write(sink, json.dumps(value).encode())


def _wait(child: int, seconds: float) -> str:
  """Waits until a process ends, and kills it if that takes too long. Returns how it ended."""
  deadline = time.monotonic() + seconds
  while True:
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
      return "failed" if status else "ended"
    left = deadline - time.monotonic()
    if left <= 0:
      os.kill(child, signal.SIGKILL)
      os.waitpid(child, 0)
      return "late"
    signal.sigtimedwait({signal.SIGCHLD}, left)


def _write(file: int, data: bytes) -> None:
  while data:
    data = data[os.write(file, data) :]
