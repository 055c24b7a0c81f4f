"""The reward for programs that pass tests, and what a policy could write to cheat."""

import json
import os
import subprocess
import sys
import time

import pytest

from grpo_jax import rewards
from grpo_jax.config import Data
from grpo_jax.data.tasks import tasks
from grpo_jax.rewards.answer import RewardError
from grpo_jax.rewards.functions.code import program_of
from grpo_jax.rewards.sandbox import runner
from grpo_jax.settings import ConfigError

# Problems in the layout of MBPP.
PROBLEMS = [
  {
    "task_id": 1,
    "text": "Write a function that adds two numbers.",
    "code": "def add(a, b):\n  return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(0.5, 1) == 1.5"],
    "test_setup_code": "",
  },
  {
    "task_id": 2,
    "text": "Write a function that returns the different words of a text as a set.",
    "code": "def words(text):\n  return set(text.split())",
    "test_list": [
      "assert words('a b a') == {'a', 'b'}",
      "assert sorted(words('')) == []",
      "assert all(word in words('x y') for word in ('x', 'y'))",
    ],
    "test_setup_code": "",
  },
  {
    "task_id": 3,
    "text": "Write a function that returns the area of a circle.",
    "code": "import math\ndef area(radius):\n  return math.pi * radius**2",
    "test_list": [
      "assert math.isclose(area(1), 3.14159, rel_tol=1e-4)",
      "assert math.isclose(area(2), 12.56637, rel_tol=1e-4)",
    ],
    "test_setup_code": "import math",
  },
  {
    "task_id": 4,
    "text": "Write a class Stack with push and pop.",
    "code": "class Stack:\n  def __init__(self): self.items = []\n"
    "  def push(self, item):\n    self.items.append(item)\n    return self\n"
    "  def pop(self): return self.items.pop()",
    "test_list": [
      "assert Stack().push(1).push(2).pop() == 2",
      "stack = Stack()\nstack.push((3, 4))\nassert stack.pop() == (3, 4)",
      "try:\n  Stack().pop()\n  assert False\nexcept IndexError:\n  pass",
    ],
    "test_setup_code": "",
  },
  {
    "task_id": 5,
    "text": "Write a function that counts letters.",
    "code": "from collections import Counter\ndef letters(text):\n  return Counter(text)",
    "test_list": ["assert letters('aab') == {'a': 2, 'b': 1}", "assert letters(text='') == {}"],
    "test_setup_code": "",
  },
  {
    "task_id": 6,
    "text": "Write a function that yields squares.",
    "code": "def squares(n):\n  return (i * i for i in range(n))",
    "test_list": ["assert list(squares(3)) == [0, 1, 4]", "assert list(squares(0)) == []"],
    "test_setup_code": "",
  },
]
ADD = PROBLEMS[0]["test_list"]


@pytest.fixture(scope="module", autouse=True)
def needs_a_sandbox():
  try:
    runner.find()
  except ConfigError as error:
    pytest.skip(str(error))


def resolve(name):
  return rewards.resolve(name, "reward.functions", lambda name: False)


def score(completion, tests=ADD, setup="", parameters="seconds=5"):
  function = resolve(f"code({parameters})")
  return function(completions=[completion], test_list=[tests], test_setup_code=[setup])[0]


def test_every_solution_passes_and_no_solution_of_another_problem_does():
  texts = [f"Sure:\n```python\n{problem['code']}\n```\nDone." for problem in PROBLEMS]
  columns = {name: [p[name] for p in PROBLEMS] for name in ("test_list", "test_setup_code")}
  function = resolve("code(seconds=20)")
  assert function(completions=texts, **columns) == [1.0] * len(PROBLEMS)
  assert function(completions=texts[1:] + texts[:1], **columns) == [0.0] * len(PROBLEMS)


def test_all_tests_or_the_fraction():
  wrong = "def add(a, b): return 3"
  assert score(wrong) == 0
  assert score(wrong, parameters="fraction=True") == pytest.approx(1 / 3)
  assert score(wrong, tests=[]) is None
  assert score("def add(:") == 0
  assert score("") == 0


FORGERIES = {
  "exit": "import sys\nsys.exit(0)",
  "exit at once": "import os\nos._exit(0)",
  "exit in the call": "import os\ndef add(a, b): os._exit(0)",
  "print a verdict": "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'+111')\n"
  "  except OSError: pass\nprint('+111')\n",
  "equal to everything": "class E:\n  def __eq__(self, other): return True\n"
  "  def __ne__(self, other): return False\n  __hash__ = None\ndef add(a, b): return E()",
  "an int that is equal to everything": "class E(int):\n  def __eq__(self, other): return True\n"
  "  def __hash__(self): return 0\ndef add(a, b): return E(99)",
  "builtins": "import builtins\nbuiltins.AssertionError = None\nbuiltins.__debug__ = False\n"
  "builtins.eval = builtins.exec = lambda *a: None\ndef add(a, b): return 99",
  "frames": "import sys\ndef add(a, b):\n  frame = sys._getframe()\n  while frame:\n"
  "    for value in frame.f_locals.values():\n"
  "      if isinstance(value, str) and 'assert' in value: return eval(value.split('==')[1])\n"
  "    frame = frame.f_back\n  return 99",
  "garbage": "import gc\ndef add(a, b):\n  for found in gc.get_objects():\n"
  "    if isinstance(found, list) and any('assert add' in str(x) for x in found):\n"
  "      return eval(found[0].split('==')[1])\n  return 99",
  "the patched checker": "import sys, values\nvalues.encode = lambda value, keep: True\n"
  "values.decode = None\nimport json\njson.loads = json.dumps\ndef add(a, b): return 99",
  "an import of the checker": "import checker\nchecker._passes = lambda *a: True\n"
  "def add(a, b): return 99",
  "files": "import os, glob\ndef add(a, b):\n  for folder, inner, files in os.walk('/'):\n"
  "    inner[:] = [name for name in inner if name not in ('usr', 'lib', 'lib64', 'versions')]\n"
  "    for name in files:\n      text = open(os.path.join(folder, name), errors='replace').read()\n"
  "      if 'add(-1, 1) ==' in text: return eval(text.split('==')[1][:2])\n  return 99",
  "an attribute that is always true": "class Any:\n  def __getattr__(self, name): return self\n"
  "  def __call__(self, *a): return self\n  def __bool__(self): return True\nadd = Any()",
  "a huge answer": "def add(a, b): return 'x' * 10**7",
  "a deep answer": "def add(a, b):\n  x = []\n  for _ in range(10**5): x = [x]\n  return x",
  "an endless answer": "import itertools\ndef add(a, b): return itertools.count()",
  "an exception": "def add(a, b): raise SystemExit(0)",
  "not a number": "def add(a, b): return float('nan')",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_does_not_pass(name):
  assert score(FORGERIES[name]) == 0


def test_shadowed_builtins_are_not_what_tests_call():
  shadow = "def sorted(*a): return []\ndef all(*a): return True\ndef words(text): return 'zzz'\n"
  assert score(shadow, tests=PROBLEMS[1]["test_list"], parameters="fraction=True") == 0
  # Nor are the modules that the tests import.
  shadow = "import math\nmath.isclose = lambda *a, **k: True\ndef area(radius): return 7"
  problem = PROBLEMS[2]
  assert score(shadow, problem["test_list"], problem["test_setup_code"]) == 0


def test_an_object_that_is_not_plain_data_is_not_true():
  truthy = "class T: pass\ndef f(x): return T()"
  for test in ("assert f(1)", "assert not f(1)", "assert f(1) == f(1)", "assert len(f(1)) == 0"):
    assert score(truthy, tests=[test]) == 0


def test_time_is_limited():
  start = time.monotonic()
  assert score("while True: pass", parameters="seconds=0.7") == 0
  assert score("import time\ndef add(a, b): time.sleep(99)", parameters="seconds=0.7") == 0
  assert time.monotonic() - start < 8
  # What has passed by then has passed.
  slow = "import time\ndef add(a, b):\n  if a < 0: time.sleep(99)\n  return a + b"
  assert score(slow, parameters="seconds=1.5, fraction=True") == pytest.approx(1 / 3)


def test_memory_is_limited():
  assert score("def add(a, b): return len(bytearray(10**9)) and a + b") == 0
  assert score("x = []\nwhile True: x.append(bytearray(10**7))") == 0


def test_completions_run_at_once():
  slow = "import time\ntime.sleep(0.6)\ndef add(a, b): return a + b"
  start = time.monotonic()
  found = resolve("code(at_once=4)")(completions=[slow] * 4, test_list=[ADD] * 4)
  assert found == [1.0] * 4
  assert time.monotonic() - start < 2.2


def test_a_setup_that_fails_is_an_error_and_not_a_reward():
  with pytest.raises(RewardError, match="test_setup_code fails: 'import nothing_of_this_name'"):
    score(PROBLEMS[0]["code"], setup="import nothing_of_this_name")


def test_a_sandbox_that_does_not_start_is_an_error_and_not_a_reward(monkeypatch):
  function = resolve("code")
  monkeypatch.setitem(runner._WRAP, runner.find(), lambda command, limits: ["/bin/false"])
  with pytest.raises(RewardError, match="a sandbox did not start in 10 s"):
    function(completions=["x"], test_list=[ADD])


def test_it_runs_without_a_sandbox_only_if_the_config_says_so(monkeypatch):
  def none():
    raise ConfigError("programs cannot be sandboxed on this machine")

  monkeypatch.setattr(runner, "find", none)
  with pytest.raises(ConfigError, match=r"^reward.functions: code: programs .*sandboxed=False"):
    resolve("code")
  assert score(PROBLEMS[0]["code"], parameters="sandboxed=False") == 1
  assert score("def add(a, b): return 3", parameters="sandboxed=False, seconds=5") == 0


@pytest.mark.slow
def test_nothing_is_left_when_the_caller_is_killed():
  marker = "sleeper_of_the_code_reward"
  call = (
    "from grpo_jax.rewards.functions.code import code;"
    f" code(completions=['import time\\n#{marker}\\ntime.sleep(1000)'], test_list=[['assert 1']],"
    " seconds=500)"
  )
  caller = subprocess.Popen([sys.executable, "-c", call])
  children = f"/proc/{caller.pid}/task/{caller.pid}/children"
  started = time.monotonic()
  found: set[str] = set()
  while len(found) < 4 and time.monotonic() - started < 100:
    found = family(str(caller.pid)) - {str(caller.pid)}
    time.sleep(0.05)
  assert len(found) >= 4, children
  caller.kill()
  caller.wait()
  deadline = time.monotonic() + 10
  while any(alive(pid) for pid in found) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not any(alive(pid) for pid in found)


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_no_program():
  name = f"code(seconds=500, memory={0.25 + os.getpid() / 2**30})"  # marks the command lines
  limit = f"'AS': {int((0.25 + os.getpid() / 2**30) * 2**30)},"
  pool = rewards.Pool(count=1, timeout=2.0)
  caller = rewards.Caller(pool)
  try:
    function = resolve(name)
    assert caller.add({name: function}) == ()
    columns = {
      "completions": [PROBLEMS[0]["code"], "import time\ntime.sleep(1000)"],
      "test_list": [ADD, ADD],
    }
    answer = caller.start([function], columns, 0, 2)(function)
    assert [len(steps) for steps in answer.steps] == [1, 0]
    assert [(one.row, one.kind) for one in answer.failures] == [(1, "timeout")]
  finally:
    caller.close()
  deadline = time.monotonic() + 10
  while programs_with(limit) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not programs_with(limit)


def programs_with(text):
  done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
  return [line for line in done.splitlines() if text in line]


def family(pid):
  """A process and all that it started."""
  done = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True).stdout
  pairs = [line.split() for line in done.splitlines()[1:]]
  found, grew = {pid}, True
  while grew:
    more = {child for child, parent in pairs if parent in found} - found
    found, grew = found | more, bool(more)
  return found


def alive(pid):
  done = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout
  return bool(done.strip()) and "Z" not in done


@pytest.mark.parametrize(
  "text, code",
  [
    ("x = 1", "x = 1"),
    ("a\n```python\nx = 1\n```\nb", "x = 1"),
    ("```\nx = 1\n```\nthen\n```py\ny = 2\n```", "y = 2"),
    ("```python\nx = 1", "x = 1"),
    ("```python\nx = 1\n```\n```", ""),
    ("", ""),
    ("```", ""),
  ],
)
def test_the_code_of_a_completion(text, code):
  assert program_of(text) == code


def test_the_task_reads_the_layout_of_mbpp(tmp_path):
  for split in ("train", "test"):
    lines = [json.dumps(problem) for problem in PROBLEMS]
    (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
  task = tasks.make_task(Data(task="code", path=str(tmp_path)))
  assert len(task.train) == len(task.test) == len(PROBLEMS)
  first = task.train[0]
  assert first["question"].startswith("Write a function that adds two numbers.")
  assert ADD[0] in first["question"] and ADD[1] not in first["question"]
  columns = {name: [first[name]] for name in ("test_list", "test_setup_code")}
  assert resolve("code")(completions=[first["solution"]], **columns) == [1.0]


def test_the_task_reads_the_layout_of_sanitized_mbpp(tmp_path):
  row = {"prompt": "x", "test_list": ["assert f(1)"], "test_imports": ["import math", "import re"]}
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_text(json.dumps(row))
  first = tasks.make_task(Data(task="code", path=str(tmp_path))).train[0]
  assert first["test_setup_code"] == "import math\nimport re"
  assert first["solution"] == first["answer"] == ""


@pytest.mark.parametrize(
  "row, error",
  [
    ({"text": "x"}, "line 1 has no list field 'test_list'"),
    ({"test_list": ["assert 1"]}, "line 1 has no text field 'text' or 'prompt'"),
    ({"text": "x", "test_list": []}, "test_list must be a list of tests"),
    ({"text": "x", "test_list": [1]}, "test_list must be a list of tests"),
    ({"text": "x", "test_list": ["assert 1"], "code": 1}, "must be texts"),
    ([], "line 1 is not an object"),
  ],
)
def test_a_bad_row_is_named(tmp_path, row, error):
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_text(json.dumps(row))
  with pytest.raises(ConfigError, match=error):
    tasks.make_task(Data(task="code", path=str(tmp_path)))
