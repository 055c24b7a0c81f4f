# ruff: noqa: E501  (a row is a line)
"""Reward functions: the user's code in the middle of a step; and reward models."""

import json
from typing import Any

import numpy as np

from hostile_cases.case import (
  Case,
  tensors,
)  # fmt: skip


def _file(
  name: str, source: str | bytes, code: int | tuple[int, ...], *words: str, **more: Any
) -> Case:
  files = {"reward.py": source, **more.pop("files", {})}
  return Case(
    f"reward/{name}", more.pop("command", "train $REWARD"), code, words, files=files, **more
  )


def _returns(name: str, value: str, code: int | tuple[int, ...], *words: str, **more: Any) -> Case:
  """A function that returns this expression."""
  source = f"import numpy as np\ndef f(completions, **columns):\n  return {value}\n"
  return _file(f"returns {name}", source, code, *words, **more)


def _does(
  name: str, body_lines: str, code: int | tuple[int, ...] = 0, *words: str, **more: Any
) -> Case:
  """A function that does this in its second step, and then scores as it should.

  Each call is a step. `calls` counts from 1.
  """
  body = "".join(f"    {line}\n" for line in body_lines.split("\n"))
  source = (
    "import os, signal, sys, threading, time\ncalls = 0\ndef f(completions, **columns):\n"
    f"  global calls\n  calls += 1\n  if calls == 2:\n{body}  return [float(len(c)) for c in completions]\n"
  )  # fmt: skip
  if code == 0 and not words:
    words = ("finished",)
  return _file(f"step 2 {name}", source, code, *words, **more)


FILES = [
  _file("name is a number", "f = 3\n", 2, "reward.py", "'f'"),
]  # fmt: skip


def _name(name: str, value: str, code: int | tuple[int, ...], *words: str) -> Case:
  source = (
    "import functools\n"
    "def f(completions, **columns): return [float(len(c)) for c in completions]\n"
    "g = f\n"
    "class Score:\n  def __call__(self, completions, **columns): return f(completions)\n"
    "scorer, Klass = Score(), Score\n"
    "unnamed = lambda completions, **columns: f(completions)\n"
    "partial = functools.partial(f, x=1)\n"
  )
  return Case(
    f"reward/name {name}", f'train $RUN --config.reward.functions="{value}"'
    + (' --config.reward.weights="(1.0,1.0)"' if value.count("'") == 4 else ""),
    code, words, files={"reward.py": source},
  )  # fmt: skip


NAMES = [
  _name("missing", "('reward.py:',)", 2, "reward.functions"),
  _name("without a file", "(':f',)", 2, "reward.functions"),
  _name("without a function", "('reward.py',)", 2, "reward.functions"),
  _name("with a dot", "('reward.py:Score.__call__',)", 2, "reward.functions"),
  _name("of a class", "('reward.py:Klass',)", 2, "reward.functions"),
  _name("of an object", "('reward.py:scorer',)", 0, "finished"),
  _name("of a lambda", "('reward.py:unnamed',)", 0, "finished"),
  _name("of a partial", "('reward.py:partial',)", 0, "finished"),
  _name("empty", "('',)", 2, "reward.functions"),
  _name("in capitals", "('STRICT',)", 2, "reward.functions"),
  _name("twice", "('strict','strict')", 2, "same name"),
  _name("twice under two names", "('reward.py:f','reward.py:g')", 2, "same name"),
  _name("of a builtin and a file", "('strict','reward.py:f')", 0, "finished"),
  _name("with an escape", "('\\x1b[2J.py:f',)", 2, "reward.functions"),
  _name("with a null byte", "('a\\x00b.py:f',)", 2, "reward.functions"),
  _name("process reward without steps", "('worked_steps',)", 0, "finished"),
]

UNSCORED = ("the last 3 GRPO steps had nothing to learn from",)
CUT_OFF = [
  Case(
    "reward/all cut off and masked",
    "train $RUN --config.algo.mask_truncated=True --config.sampling.min_tokens=5"
    " --config.reward.max_unscored_steps=2",
    1,
    ("the last 2 GRPO steps had nothing to learn from", "algo.mask_truncated"),
  ),
]  # fmt: skip
RETURNS = [
  _returns("too few", "[0.0]", (1, 2), "f returned 1 scores for 8"),
  _returns("too many", "[0.0] * 9", (1, 2), "f returned 9 scores for 8"),
  _returns("nothing", "None", (1, 2), "f must return a list"),
  _returns("an empty list", "[]", (1, 2), "f returned 0 scores"),
  _returns("one number", "1.0", (1, 2), "f must return a list"),
  _returns("a text", "'1' * len(completions)", (1, 2), "f must return a list"),
  _returns("a dict", "{c: 1.0 for c in completions}", (1, 2), "f"),
  _returns("a dict by number", "dict.fromkeys(range(8), 5.0)", (1, 2), "f must return"),
  _returns("texts", "['1.0'] * 8", (1, 2), "f must return"),
  _returns("bytes", "b'12345678'", (1, 2), "f must return"),
  _returns("bools", "[True] * 8", 0, "finished"),
  _returns("none for all", "[None] * len(completions)", 1, *UNSCORED, "returned no score for any completion", saved=3),
  _returns("none for some", "[None, 1.0] * 4", 0, "finished"),
  _returns("nan", "[float('nan')] * len(completions)", 1, *UNSCORED, saved=3),
  _returns("one infinity", "[float('inf')] + [0.0] * 7", (1, 2), "f returned a score that is not finite"),
  _returns("minus infinity", "[-float('inf')] * 8", (1, 2), "f returned a score that is not finite"),
  _returns("a sum beyond float64", "[1e308] * 8", (1, 2), "f"),
  _returns("an integer beyond floats", "[10**400] * 8", (1, 2), "f"),
  _returns("the largest float32", "[3.4e38] * len(completions)", 1, "beyond 1e+15", absent=("RuntimeWarning",)),
  _returns("almost the largest float32", "[3e38] * len(completions)", 1, "beyond 1e+15", absent=("RuntimeWarning",)),
  _returns("tiny numbers", "[1e-320] * 8", 0, "finished"),
  _returns("complex numbers", "[1j] * 8", (1, 2), "f must return"),
  _returns("a generator", "(0.5 for c in completions)", 0, "finished"),
  _returns("a generator that raises", "(1 / 0 for c in completions)", (1, 2), "f"),
  _returns("a map", "map(len, completions)", 0, "finished"),
  _returns("numpy", "np.arange(8)", 0, "finished"),
  _returns("numpy float16", "np.ones(8, np.float16)", 0, "finished"),
  _returns("numpy of two axes", "np.ones((8, 1))", (1, 2), "f must return"),
  _returns("numpy objects", "np.array(['a'] * 8, object)", (1, 2), "f must return"),
  _returns("a jax array", "__import__('jax').numpy.ones(8)", 0, "finished"),
  _returns("jax on one", "[__import__('jax').numpy.ones(())] * 8", 0, "finished"),
  _returns("decimals and fractions", "[__import__('decimal').Decimal(1), __import__('fractions').Fraction(1, 3)] * 4", 0, "finished"),
  _returns("a decimal nan", "[__import__('decimal').Decimal('sNaN')] * 8", (1, 2), "f must return"),
  _returns("steps beyond the text", "[[(99, 1.0)]] * 8", (1, 2), "outside its completion"),
  _returns("steps at zero", "[[(0, 1.0)]] * 8", (1, 2), "outside its completion"),
  _returns("empty steps", "[[]] * len(completions)", 1, *UNSCORED, saved=3),
  _returns("steps of three", "[[(1, 1.0, 1.0)]] * 8", (1, 2), "f must return"),
  _returns("a hundred thousand steps", "[[(1, 1.0)] * 100000] * 8", 0, "finished"),
  _returns("its arguments", "completions", (1, 2), "f must return"),
  _returns("itself", "f", (1, 2), "f must return"),
  _returns("an exception", "ValueError('x')", (1, 2), "f must return"),
  _file("returns a list of lies", "class L(list):\n  def __len__(self): return 8\ndef f(completions, **c): return L([0.0])\n", (1, 2), "f"),
  _file("returns text that cannot be shown", "class L:\n  def __repr__(self): raise KeyError\ndef f(completions, **c): return L()\n", (1, 2), "f must return"),
  _file("returns megabytes to show", "def f(completions, **c): return 'x' * 10**8\n", (1, 2), "f must return"),
]  # fmt: skip


SAVED: dict[str, Any] = {"saved": 1}
DOES = [
  _does("raises", "raise ValueError('bad\\nnews')", 1, "f", "ValueError: bad news", **SAVED),
  _does("raises without words", "raise RuntimeError", 1, "f", "RuntimeError", **SAVED),
  _does("raises stop iteration", "raise StopIteration", 1, "f", "StopIteration", **SAVED),
  _does("raises generator exit", "raise GeneratorExit", 1, "f", "GeneratorExit", **SAVED),
  _does("raises an interrupt", "raise KeyboardInterrupt", (1, 75, 130), **SAVED),
  _does("raises a base exception", "class E(BaseException): pass\nraise E('x')", 1, "f", **SAVED),
  _does("raises an assertion", "assert completions == []", 1, "f", "AssertionError", **SAVED),
  _does("raises of memory", "raise MemoryError", 1, "f", "MemoryError", **SAVED),
  _does("raises a config error", "from grpo_jax.settings import ConfigError\nraise ConfigError('x')", 1, "f", **SAVED),
  _does("raises megabytes", "raise ValueError('x' * 10**7)", 1, "f", **SAVED),
  _does("raises an escape", "raise ValueError('\\x1b[2J')", 1, "f", absent=("\x1b",), **SAVED),
  _does("raises a group", "raise ExceptionGroup('many', [ValueError(1), TypeError(2)])", 1, "f", **SAVED),
  _does("recurses", "return f(completions) if sys.setrecursionlimit(200) else (lambda g: g(g))(lambda g: g(g))", 1, "f", "RecursionError", **SAVED),
  _does("exits with a text", "sys.exit('enough')", 1, "f", **SAVED),
  _does("sends itself a SIGTERM", "os.kill(os.getpid(), signal.SIGTERM)", 75, "resume", **SAVED),
  _does("sends itself a SIGINT", "os.kill(os.getpid(), signal.SIGINT)", 75, **SAVED),
  _does("prints megabytes", "print('x\\n' * 1000000)", lines=1_000_010),
  _does("prints escapes", "print('fine')", 0, "finished"),
  _does("closes descriptor 2", "os.close(2)"),
  _does("leaves a daemon thread", "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"),
  _does("leaves a process", "import subprocess; subprocess.Popen(['sleep', '30'])"),
  _does("raises in a thread", "threading.Thread(target=lambda: sys.exit('x')).start()"),
  _does("forks", "if not os.fork(): os._exit(0)\nos.wait()", 0, "finished", lines=20),
]  # fmt: skip


def _logs(name: str, metric: str, code: int, *words: str, **more: Any) -> Case:
  """A function that logs a metric of this name in each call."""
  source = (
    f"def f(completions, log_metric, **columns):\n  log_metric({metric}, 99)\n"
    "  return [float(len(c)) for c in completions]\n"
  )
  return _file(f"logs {name}", source, code, *words, **more)


JSON = "train $REWARD --config.log.console=json"
LOGS = [
  _logs("a step", "'step'", 1, "log_metric('step', ...)", "choose another"),
  _logs("an event as JSON", "'event'", 1, "log_metric('event', ...)", "choose another", command=JSON),
  _logs("self as JSON", "'self'", 0, "finished", command=JSON),
  _logs("a reward", "'reward'", 1, "log_metric('reward', ...)", "the run has a metric of this name"),
  _logs("no name", "''", 1, "log_metric('', ...)", "not empty"),
  _logs("an escape", "'\\x1b[2J'", 1, "log_metric(", "printable", absent=("\x1b",)),
  _file("raises in __getattr__", "class C:\n  def __getattr__(self, name): return {}[name]\n  def __call__(self, completions, **c): return [0.0] * len(completions)\nf = C()\n", 2, "__getattr__ of C raises KeyError", "AttributeError"),
]  # fmt: skip

_PROGRAM = {
  "text": "Double it.",
  "test_list": ["assert f(1) == 2"],
  "code": "def f(x): return 2 * x",
}


def _code(
  name: str, row: dict[str, Any], code: int, *words: str, task: str = "code", options: str = ""
) -> Case:
  """Two problems for the reward `code`: one that is right, and one with these changes of it."""
  lines = json.dumps(_PROGRAM) + "\n" + json.dumps(_PROGRAM | row) + "\n"
  command = (
    f"train $RUN --config.data.task={task} --config.data.path=problems --config.eval.every=0"
    f" --config.data.max_prompt_tokens=200 --config.reward.functions=\"('code{options}',)\""
  )
  if task == "columns":
    command += " --config.data.columns=\"('question=text',)\""
  files = {"problems/train.jsonl": lines, "problems/test.jsonl": lines}
  return Case(f"reward/code {name}", command, code, words, files=files)


# What a random model writes is no program, so these runs end with rewards of 0.
CODE = [
  _code("of right rows", {}, 0, "finished"),
  _code("whose tests call builtins", {"test_list": ["assert sum([1, 2]) == 3"]}, 0, "finished", "1 of 2 rows", "problems/train.jsonl line 2: its tests read nothing of a program"),
  _code("whose tests call a builtin of the solution", {"test_list": ["assert sum(1, 2) == 3"], "code": "def sum(a, b): return a + b"}, 0, "finished"),
  _code("whose solution is wrong", {"code": "def f(x): return x"}, 0, "finished", "1 of 2 rows", "problems/train.jsonl line 2: its own solution fails its tests"),
  _code("whose solution hangs", {"code": "while True: pass"}, 0, "finished", "its own solution fails its tests", options="(seconds=2)"),
  _code("whose setup fails", {"test_setup_code": "import nothing"}, 2, "problems/train.jsonl line 2: test_setup_code fails"),
  _code("whose setup calls the program", {"test_setup_code": "y = f(1)", "test_list": ["assert y == 2"]}, 0, "finished"),
  _code("with tests as a text", {"test_list": "assert f(1) == 2"}, 2, "problems/train.jsonl line 2: test_list is a text"),
  _code("with imports as a text", {"test_imports": "import math"}, 0, "finished"),
  _code("with imports as a number", {"test_imports": 5}, 2, "problems/train.jsonl line 2: test_imports must be a list"),
  _code("with columns of texts", {"test_list": "assert f(1) == 2"}, 0, "finished", task="columns"),
  _code("with columns of numbers", {"test_list": 5}, 2, "test_list must be a text or a list of texts", task="columns"),
  _code("without memory", {}, 2, "memory is out of its range", options="(memory=0.001)"),
  _code("with endless memory", {}, 2, "memory is out of its range", options="(memory=1e999)"),
  _code("with endless time", {}, 2, "seconds is out of its range", options="(seconds=1e999)"),
]  # fmt: skip

UNLEARNED = [
  _file("exits in a worker", "import sys\ndef f(completions, **c): sys.exit(0)\n", 1, *UNSCORED, "f raised SystemExit: 0", command="train $REWARD --config.reward.workers=1", saved=3, lines=9),
  _file("raises in a worker always", "def f(completions, **c): 1 / 0\n", 1, "last 2 GRPO steps", "ZeroDivisionError", "step 2 is saved", command="train $REWARD --config.reward.workers=1 --config.reward.on_error=none --config.reward.max_unscored_steps=2", saved=2),
  Case("reward/judge that nobody answers", """train $RUN --config.reward.workers=1 --config.reward.functions='("judge(url=\\'http://127.0.0.1:9/v1\\', model=\\'m\\', attempts=1)",)'""".replace("\\'", "'\\''"), 1, (*UNSCORED, "reward function judge: the judge at http://127.0.0.1:9/v1 gave no score"), saved=3, lines=9),
  _file("import never ends", "import time\nwhile True: time.sleep(1)\n", 2, "importing ", "is not imported after 120 s", lines=30, limit=240),
  _file("a column named self", "class Score:\n  def __call__(self, completions, **columns): return [float(len(c)) for c in completions]\nf = Score()\n", 0, "finished", command="train $REWARD --config.data.path=own", files={f"own/{split}.jsonl": "".join(f'{{"question": "{i}+1=", "answer": "#### {i + 1}", "self": "x"}}\n' for i in range(12)) for split in ("train", "test")}),
]  # fmt: skip

EVAL_RUN = "train $RUN --config.eval.every=1 --config.eval.function=reward.py:f"

TWICE = "train $REWARD --config.steps=1 && {} && train $REWARD --config.steps=3"

MODEL = "train $RUN --config.reward.functions=\"('scorer',)\""
NANS = tensors("scorer/model.safetensors", lambda arrays: arrays.update({"score.weight": arrays["score.weight"] * np.float32(np.nan)}))  # fmt: skip


CASES = [*FILES, *NAMES, *CUT_OFF, *RETURNS, *DOES, *LOGS, *CODE, *UNLEARNED]
