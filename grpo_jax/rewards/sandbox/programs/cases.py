"""The server in a sandbox: runs a program on inputs, each in a new process, and returns outputs.

It never gets an expected output. It reads a line with the job from standard input, and then a line
for each case. It writes the line "started" to standard output, then "ready", or "broken" if the
code does not compile. For each case it then writes a line with the size of the output in bytes and
how the case ended, "ended", "failed" or "late", and the output after it. All cases of a completion
share /tmp, so a program can find files there that it wrote in an earlier case.
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

_RECURSION = 50_000  # Python's limit for programs
_ALL_FILES = 3, 4096  # the range of file descriptors to close
# Programs for these data sets use such names without importing them, as LiveCodeBench does.
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
  """Serves the job: forks a process for each case. There it returns when the code has ended."""
  requests, answers = os.dup(0), os.dup(1)
  os.dup2(2, 1)  # so that no print mixes with the answers
  os.close(0)
  lines = os.fdopen(requests, "rb")
  os.write(answers, b"started\n")  # if this process ends from here on, the code is at fault
  job = json.loads(lines.readline())
  names: dict[str, Any] = {}
  exec(_PRELUDE, names)
  try:
    code = compile(job["code"], "solution.py", "exec")
  except Exception:
    os.write(answers, b"broken\n")
    return
  _import_what_it_imports(job["code"])
  gc.freeze()  # a child that does not collect the objects of this process ends in half the time
  # `_wait` waits for this signal with a time limit, for which it must be blocked.
  signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
  os.write(answers, b"ready\n")
  for line in lines:
    case = json.loads(line)
    # Files and not pipes: they have a size limit, and nobody needs to read while the program runs.
    input_file, output_file = _new_file(), _new_file()
    _write(input_file, case.get("stdin", "").encode("utf-8", "surrogatepass"))
    os.lseek(input_file, 0, os.SEEK_SET)
    child = os.fork()
    if not child:
      _become_case(input_file, output_file, job)
      _play(code, names, case)
      return
    end = _wait(child, job["case_seconds"])
    size = os.fstat(output_file).st_size
    _write(answers, f"{size} {end}\n".encode())
    for start in range(0, size, 2**20):
      _write(answers, os.pread(output_file, 2**20, start))
    os.close(input_file)
    os.close(output_file)


def _new_file() -> int:
  """The descriptor of an open file that has no name."""
  number, name = tempfile.mkstemp()
  os.unlink(name)
  return number


def _import_what_it_imports(code: str) -> None:
  """Imports standard modules and numpy if the code does, so that not every case has to."""
  with contextlib.suppress(Exception):  # code that cannot be parsed fails when it runs
    for node in ast.parse(code).body:
      module = node.module if isinstance(node, ast.ImportFrom) else ""
      aliases = [one.name for one in node.names] if isinstance(node, ast.Import) else [module]
      for name in aliases:
        if name and name.split(".")[0] in {*sys.stdlib_module_names, "numpy"} - {"this"}:
          importlib.import_module(name)


def _become_case(input_file: int, output_file: int, job: dict[str, Any]) -> None:
  """Prepares this process for a case: input, output and limits. Closes all other files."""
  os.dup2(input_file, 0)
  os.dup2(output_file, 1)
  os.closerange(*_ALL_FILES)
  confine(job["limits"], job["threads"], job["in_sandbox"])
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
  sys.setrecursionlimit(_RECURSION)
  sys.set_int_max_str_digits(0)
  sys.argv = ["solution.py"]
  # Python runs without `site`, which defines these two names.
  vars(builtins).update(exit=sys.exit, quit=sys.exit)
  sys.stdin = os.fdopen(0, "r", encoding="utf-8", errors="surrogateescape", closefd=False)
  sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)


def _play(code: Any, names: dict[str, Any], case: dict[str, Any]) -> None:
  """Runs the program, or calls its function and writes the value.

  Threads of the program may still run when this returns.

  `names` are global names for the program. `case` is {"stdin": text}, or {"function": name,
  "arguments": encoded list}.
  """
  function = case.get("function")
  # As in a script, `if __name__ == "__main__"` is true, but not where only a function is called.
  module = types.ModuleType("solution" if function else "__main__")
  sys.modules[module.__name__] = module
  module.__dict__.update({**names, **vars(module), "__builtins__": builtins})
  if not function:
    exec(code, module.__dict__)
    return
  sink = os.dup(1)
  os.dup2(2, 1)  # so that prints of the code do not mix with the value
  exec(code, module.__dict__)
  owner = vars(module).get("Solution")  # the class with the function, as on LeetCode
  called = getattr(owner(), function) if hasattr(owner, function) else vars(module)[function]
  # An object that is not plain data is sent as its id, which equals no expected value.
  value = encode(called(*decode(case["arguments"], id)), id)
  _write(sink, json.dumps(value).encode())


def _wait(child: int, seconds: float) -> str:
  """Waits for a child, and kills it after `seconds`. Returns "ended", "failed" or "late"."""
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
