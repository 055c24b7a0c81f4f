# ruff: noqa: E501  (a row is a line)
"""Reward functions: the user's code in the middle of a step; and reward models."""

from typing import Any

import numpy as np

from hostile_cases.case import (
  Case,
  cut,
  edit_json,
  fifo,
  make_folder,
  remove,
  replace_text,
  tensors,
  write,
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
  _file("empty file", "", 2, "reward.py", "'f'"),
  _file("binary file", bytes(range(256)), 2, "reward.py"),
  _file("null bytes", b"\x00" * 10, 2, "reward.py"),
  _file("not utf-8", b"# \xff\xfe\n", 2, "reward.py"),
  _file("name is a number", "f = 3\n", 2, "reward.py", "'f'"),
  _file("error at import", "raise OSError('no model here')\n", 2, "reward.py", "no model here"),
  _file("interrupt at import", "raise KeyboardInterrupt\n", (2, 130), "reward"),
  _file("error of many lines at import", "raise ValueError('a\\nb\\n' * 99)\n", 2, "reward.py"),
  _file("prints at import", "print('x' * 100)\ndef f(completions, **c): return [0.0] * len(completions)\n", 0, "finished"),
  _file("changes the folder at import", "import os; os.chdir('/')\ndef f(completions, **c): return [0.0] * len(completions)\n", 0, "finished"),
  _file("reads the command line", "import argparse; argparse.ArgumentParser().parse_args()\n", 2, "reward.py"),
  _file("defines flags", "from absl import flags; flags.DEFINE_string('workdir', 'x', 'x')\n", 2, "reward.py", "workdir"),
  _file("parses flags again", "from absl import flags; flags.FLAGS(['x', '--nosuch'])\n", 2, "reward.py"),
  _file("forks at import", "import subprocess; subprocess.run(['true'])\ndef f(completions, **c): return [0.0] * len(completions)\n", 0, "finished"),
  _file("imports its neighbour", "import helper\nf = helper.f\n", (0, 2), files={"helper.py": "def f(completions, **c): return [0.0] * len(completions)\n"}),
  _file("has the name of a module", "def f(completions, **c): return [0.0] * len(completions)\n", 0, "finished", files={"r/jax.py": "def f(completions, **c): return [0.0] * len(completions)\n"}, command="train $RUN --config.reward.functions=\"('r/jax.py:f',)\""),
  Case("reward/a folder", "train $REWARD", 2, ("reward.py",), setup=(make_folder("reward.py"),)),
  Case("reward/a fifo", "train $REWARD", 2, ("reward.py",), setup=(fifo("reward.py"),), limit=40),
  Case("reward/no file", "train $REWARD", 2, ("no file reward.py",)),
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
  _returns("none for all", "[None] * 8", 0, "finished"),
  _returns("none for some", "[None, 1.0] * 4", 0, "finished"),
  _returns("nan", "[float('nan')] * 8", 0, "finished"),
  _returns("one infinity", "[float('inf')] + [0.0] * 7", (1, 2), "f returned a score that is not finite"),
  _returns("minus infinity", "[-float('inf')] * 8", (1, 2), "f returned a score that is not finite"),
  _returns("a sum beyond float64", "[1e308] * 8", (1, 2), "f"),
  _returns("an integer beyond floats", "[10**400] * 8", (1, 2), "f"),
  _returns("the largest float32", "[3.4e38, -3.4e38] * 4", (0, 1, 2), absent=("nan",)),
  _returns("tiny numbers", "[1e-320] * 8", 0, "finished"),
  _returns("complex numbers", "[1j] * 8", (1, 2), "f must return"),
  _returns("a generator", "(0.5 for c in completions)", 0, "finished"),
  _returns("a generator that raises", "(1 / 0 for c in completions)", (1, 2), "f"),
  _returns("an endless generator", "iter(float, 1)", (1, 2), "f", limit=60, command="ulimit -v 30000000; train $REWARD"),
  _returns("a map", "map(len, completions)", 0, "finished"),
  _returns("numpy", "np.arange(8)", 0, "finished"),
  _returns("numpy float16", "np.ones(8, np.float16)", 0, "finished"),
  _returns("numpy of two axes", "np.ones((8, 1))", (1, 2), "f must return"),
  _returns("numpy objects", "np.array(['a'] * 8, object)", (1, 2), "f must return"),
  _returns("a masked array", "np.ma.masked_all(8)", (0, 1, 2)),
  _returns("a jax array", "__import__('jax').numpy.ones(8)", 0, "finished"),
  _returns("jax on one", "[__import__('jax').numpy.ones(())] * 8", 0, "finished"),
  _returns("decimals and fractions", "[__import__('decimal').Decimal(1), __import__('fractions').Fraction(1, 3)] * 4", 0, "finished"),
  _returns("a decimal nan", "[__import__('decimal').Decimal('sNaN')] * 8", (1, 2), "f must return"),
  _returns("steps beyond the text", "[[(99, 1.0)]] * 8", (1, 2), "outside its completion"),
  _returns("steps at zero", "[[(0, 1.0)]] * 8", (1, 2), "outside its completion"),
  _returns("empty steps", "[[]] * 8", 0, "finished"),
  _returns("steps of three", "[[(1, 1.0, 1.0)]] * 8", (1, 2), "f must return"),
  _returns("steps with nan", "[[(1, float('nan'))]] * 8", (1, 2), "f"),
  _returns("steps out of order", "[[(5, 1.0), (1, 0.5)]] * 8", (0, 1, 2)),
  _returns("a hundred thousand steps", "[[(1, 1.0)] * 100000] * 8", 0, "finished"),
  _returns("its arguments", "completions", (1, 2), "f must return"),
  _returns("itself", "f", (1, 2), "f must return"),
  _returns("an exception", "ValueError('x')", (1, 2), "f must return"),
  _file("returns a list of lies", "class L(list):\n  def __len__(self): return 8\ndef f(completions, **c): return L([0.0])\n", (1, 2), "f"),
  _file("returns text that cannot be shown", "class L:\n  def __repr__(self): raise KeyError\ndef f(completions, **c): return L()\n", (1, 2), "f must return"),
  _file("returns megabytes to show", "def f(completions, **c): return 'x' * 10**8\n", (1, 2), "f must return"),
]  # fmt: skip

SIGNATURES = [
  _file("no arguments", "def f(): return [0.0] * 8\n", (1, 2), "f"),
  _file("positional only", "def f(completions, /, **columns): return [0.0] * 8\n", (1, 2), "f"),
  _file("unknown argument", "def f(completions, gold, **columns): return [0.0] * 8\n", (1, 2), "f", "gold"),
  _file("misspelt completions", "def f(completion, **columns): return [0.0] * 8\n", (1, 2), "f", "completion"),
  _file("only columns", "def f(**columns): return [0.0] * len(columns['completions'])\n", 0, "finished"),
  _file("async", "async def f(completions, **columns): return [0.0] * 8\n", (1, 2), "f", absent=("never awaited",)),
  _file("yields", "def f(completions, **columns):\n  for c in completions: yield 0.0\n", 0, "finished"),
]  # fmt: skip

SAVED: dict[str, Any] = {"saved": 1}
DOES = [
  _does("raises", "raise ValueError('bad\\nnews')", 1, "f", "ValueError: bad news", **SAVED),
  _does("raises without words", "raise RuntimeError", 1, "f", "RuntimeError", **SAVED),
  _does("raises what has no text", "class E(Exception):\n  __str__ = None\nraise E", 1, "f", **SAVED),
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
  _does("exits with code 2", "raise SystemExit(2)", 1, "f", **SAVED),
  _does("calls quit", "quit()", 1, "f", **SAVED),
  _does("returns too few", "return [0.0]", (1, 2), "f returned 1 scores", **SAVED),
  _does("imports what is missing", "import nosuchpackage", 1, "f", "nosuchpackage", **SAVED),
  _does("opens what is missing", "open('/nosuch/file')", 1, "f", "/nosuch/file", **SAVED),
  _does("decodes rubbish", "b'\\xff'.decode()", 1, "f", "UnicodeDecodeError", **SAVED),
  _does("sends itself a SIGTERM", "os.kill(os.getpid(), signal.SIGTERM)", 75, "resume", **SAVED),
  _does("sends itself a SIGINT", "os.kill(os.getpid(), signal.SIGINT)", 75, **SAVED),
  _does("kills itself", "time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)", 137, then="train $REWARD --config.steps=2", **SAVED),
  _does("ignores signals", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
  _does("takes the signals", "signal.signal(signal.SIGTERM, lambda *a: None); os.kill(os.getpid(), signal.SIGTERM)"),
  _does("prints megabytes", "print('x\\n' * 1000000)"),
  _does("prints escapes", "print('fine')", 0, "finished"),
  _does("writes a thousand warnings", "import warnings\nfor i in range(1000): warnings.warn(str(i))", 0, "finished", lines=5000),
  _does("logs an error", "import logging; logging.error('hm')"),
  _does("closes stdout", "sys.stdout.close()", (0, 1, 75), saved=1),
  _does("has no stdout", "sys.stdout = None", (0, 1, 75), saved=1),
  _does("closes descriptor 1", "os.close(1)", (0, 1, 75), saved=1),
  _does("closes descriptor 2", "os.close(2)"),
  _does("redirects stdout", "sys.stdout = open(os.devnull, 'w')", (0, 75), saved=1),
  _does("closes all descriptors", "os.closerange(3, 4096)", (0, 1, 134, 139), saved=1),
  _does("changes the folder", "os.chdir('/')"),
  _does("removes the folder it is in", "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"),
  _does("empties the environment", "os.environ.clear()"),
  _does("changes the locale", "import locale; locale.setlocale(locale.LC_ALL, 'C')"),
  _does("sets a small recursion limit", "sys.setrecursionlimit(60)", (0, 1)),
  _does("makes warnings errors", "import warnings; warnings.simplefilter('error')"),
  _does("makes numpy raise", "import numpy; numpy.seterr(all='raise')"),
  _does("turns on 64 bits", "import jax; jax.config.update('jax_enable_x64', True)", (0, 1), saved=1),
  _does("looks for nans", "import jax; jax.config.update('jax_debug_nans', True)"),
  _does("clears the caches", "import jax; jax.clear_caches()"),
  _does("deletes live arrays", "import jax; [a.delete() for a in jax.live_arrays()]", (0, 1), saved=1),
  _does("seeds the random numbers", "import random, numpy; random.seed(0); numpy.random.seed(0)"),
  _does("leaves a thread", "threading.Thread(target=time.sleep, args=(600,)).start()", 0, "finished", limit=60),
  _does("leaves a daemon thread", "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"),
  _does("leaves a process", "import subprocess; subprocess.Popen(['sleep', '30'])"),
  _does("raises in a thread", "threading.Thread(target=lambda: sys.exit('x')).start()"),
  _does("raises at exit", "import atexit; atexit.register(lambda: sys.exit(7))", (0, 1), saved=3),
  _does("forks", "if not os.fork(): os._exit(0)\nos.wait()", 0, "finished", lines=20),
  _does("sets an alarm", "signal.alarm(1); time.sleep(2)", (1, 75, 142), saved=1),
  _does("collects garbage of 1e6 objects", "import gc; x = [[] for _ in range(10**6)]; gc.collect()"),
  _does("changes its lists", "completions.clear()\nfor c in columns.values(): c.clear()\nreturn [0.0] * 8"),
  _does("changes its messages", "columns['answer'][:] = [None] * 8"),
  _does("writes into the workdir", "open('run/notes.txt', 'w').write('x')"),
  _does("writes into checkpoints", "open('run/checkpoints/notes.txt', 'w').write('x')"),
  _does("makes a folder of a later step", "os.mkdir('run/checkpoints/3')", (0, 1), saved=1),
  _does("removes the workdir", "import shutil; shutil.rmtree('run')", 1, "run"),
  _does("removes the checkpoints", "import shutil; shutil.rmtree('run/checkpoints')", (0, 1)),
  _does("removes completions", "import shutil; shutil.rmtree('run/completions')", (0, 1), saved=1),
  _does("replaces completions by a file", "import shutil; shutil.rmtree('run/completions'); open('run/completions', 'w')", (0, 1), saved=1),
  _does("renames the workdir", "os.rename('run', 'run2')", (0, 1), "run"),
  _does("removes metrics", "os.remove('run/metrics.jsonl')", 1, "metrics.jsonl", saved=1),
  _does("removes config", "os.remove('run/config.json')", (0, 1), saved=1),
  _does("fills the descriptors", "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", (0, 1), saved=1),
]  # fmt: skip

EVAL_RUN = "train $RUN --config.eval.every=1 --config.eval.function=reward.py:f"
EVAL = [
  _file("eval raises at step 0", "def f(completions, **c): raise ValueError('no')\n", 1, "f", "no", command=EVAL_RUN),
  _file("eval returns too few", "def f(completions, **c): return [1.0]\n", (1, 2), "f returned 1", command=EVAL_RUN),
  _file("eval returns halves", "def f(completions, **c): return [0.5] * len(completions)\n", 0, "finished", command=EVAL_RUN),
  _file("eval exits", "import sys\ndef f(completions, **c): sys.exit(0)\n", 1, "f", command=EVAL_RUN),
  _file("evaluate exits", "import sys\ndef f(completions, **c): sys.exit(0)\n", (1, 2), "f",
        command="evaluate --config=tiny.py --config.eval.function=reward.py:f"),
  _file("evaluate raises", "def f(completions, **c): raise ValueError('no')\n", (1, 2), "f", "no",
        command="evaluate --config=tiny.py --config.eval.function=reward.py:f"),
  Case("reward/eval by a model", "train $RUN --config.eval.every=1 --config.eval.function=scorer", 2, ("eval.function",), needs="scorer"),
  Case("reward/eval unknown but off", "train $RUN --config.eval.function=nosuch", (0, 2)),
]  # fmt: skip

TWICE = "train $REWARD --config.steps=1 && {} && train $REWARD --config.steps=3"
AGAIN = [
  _file("gone when it resumes", "def f(completions, **c): return [0.0] * 8\n", 2, "no file",
        command=TWICE.format("mv reward.py r.py"), saved=1),
  _file("broken when it resumes", "def f(completions, **c): return [0.0] * 8\n", 2, "reward.py",
        command=TWICE.format("echo '(' >> reward.py"), saved=1),
  _file("raises once and then not", "import os\ndef f(completions, **c):\n  if not os.path.exists('ok'):\n    open('ok', 'w'); raise OSError('busy')\n  return [0.0] * 8\n",
        1, "busy", then="train $REWARD"),
]  # fmt: skip

MODEL = "train $RUN --config.reward.functions=\"('scorer',)\""
NANS = tensors("scorer/model.safetensors", lambda arrays: arrays.update({"score.weight": arrays["score.weight"] * np.float32(np.nan)}))  # fmt: skip


def _scorer(name: str, code: int | tuple[int, ...], *words: str, **more: Any) -> Case:
  more.setdefault("command", MODEL)
  return Case(
    f"reward/model {name}", code=code, words=words, needs="scorer steps_scorer model", **more
  )


MODELS = [
  _scorer("unchanged", 0, "finished"),
  _scorer("without a tokenizer", 2, "reward.functions", setup=(remove("scorer/tokenizer.json"),)),
  _scorer("of three labels", 2, "labels", setup=(edit_json("scorer/config.json", id2label={"0": "a", "1": "b", "2": "c"}),)),
  _scorer("of labels in a list", 2, "scorer/config.json", setup=(edit_json("scorer/config.json", id2label=["a"]),)),
  _scorer("cut off", 2, "model.safetensors", setup=(cut("scorer/model.safetensors"),)),
  _scorer("with nans", 2, "score.weight", setup=(NANS,)),
  _scorer("twice", 2, "same name", command="train $RUN --config.reward.functions=\"('scorer','./scorer')\" --config.reward.weights=\"(1.0,1.0)\""),
  _scorer("is a language model", 2, "architectures", command="train $RUN --config.reward.functions=\"('model',)\""),
  _scorer("without a head", 2, "score", setup=(tensors("scorer/model.safetensors", lambda arrays: arrays.pop("score.weight")),)),
  _scorer("of other characters", 2, "reward", setup=(replace_text("scorer/tokenizer.json", '"="', '"~"'),), limit=60),
  _scorer("of few positions", 0, "finished", setup=(edit_json("scorer/config.json", max_position_embeddings=4),)),
  _scorer("of steps without a separator", (0, 2), command="train $RUN --config.reward.functions=\"('steps_scorer',)\""),
  _scorer("with a chat", 2, "chat template", command="train $CHAT --config.reward.functions=\"('scorer',)\"", files={},
          setup=(write("model/chat_template.jinja", "{{ messages[0].content }}"),)),
  _scorer("batch of zero", 2, "reward.batch", command=MODEL + " --config.reward.batch=0"),
]  # fmt: skip

CASES = [*FILES, *NAMES, *RETURNS, *SIGNATURES, *DOES, *EVAL, *AGAIN, *MODELS]
