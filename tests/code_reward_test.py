"""The reward for programs that pass tests, and what a policy could write to cheat."""

import json
import os
import subprocess
import sys
import time

import pytest
from small_run import small_config, small_run, with_section

from grpo_jax import rewards, train
from grpo_jax.batches.collect import Collector
from grpo_jax.config import Data
from grpo_jax.data.tasks import tasks
from grpo_jax.problems.layouts import layout_of
from grpo_jax.rewards.answer import RewardError
from grpo_jax.rewards.functions import code as code_lib
from grpo_jax.rewards.functions.code import program_of
from grpo_jax.rewards.sandbox import runner
from grpo_jax.scoring.scorers import Scorers
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
  "    inner[:] = [n for n in inner if n not in ('usr', 'lib', 'lib64', 'versions', 'packages')]\n"
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


@pytest.mark.parametrize("name", ["exit", "quit"])
def test_functions_have_exit_and_quit(name):
  program = f"def add(a, b):\n  try:\n    {name}(0)\n  except SystemExit:\n    return a + b"
  assert score(program) == 1


def test_shadowed_builtins_are_not_what_tests_call():
  shadow = "def sorted(*a): return []\ndef all(*a): return True\ndef words(text): return 'zzz'\n"
  assert score(shadow, tests=PROBLEMS[1]["test_list"], parameters="fraction=True") == 0
  # Nor are the modules that the tests import.
  shadow = "import math\nmath.isclose = lambda *a, **k: True\ndef area(radius): return 7"
  problem = PROBLEMS[2]
  assert score(shadow, problem["test_list"], problem["test_setup_code"]) == 0


# Programs that are right, with their tests and what these need: (program, tests, setup, solution).
_UNCALLED = "def test_f():\n  assert f(1) == 1"
_POW = "def pow(a, b): return a**b"
_NODE = "class Node:\n  def __init__(self, value): self.left = None\n"
RIGHT = {
  "sum": ("def sum(a, b): return a + b", ["assert sum(1, 2) == 3"], "", "def sum(x, y): return x"),
  "sum without a solution": ("def sum(a, b): return a + b", ["assert sum(1, 2) == 3"]),
  "a name that the setup imports": (
    "def gcd(a, b): return gcd(b, a % b) if b else a",
    ["assert gcd(4, 6) == 2"],
    "from math import *",
    "from math import *\ndef gcd(a, b): return 1",
  ),
  "a setup that calls the program": ("def f(x): return x", ["assert y == 3"], "y = f(3)"),
  "a test that is called": ("def f(x): return x", [_UNCALLED + "\ntest_f()"]),
  "a builtin in a helper": (_POW, ["assert all(pow(2, i) == 2**i for i in range(4))"], "", _POW),
  "what the solution imports": (
    "def area(r): return 3.14159 * r**2",
    ["assert isclose(area(1), pi, rel_tol=1e-4)"],
    "",
    "from math import *\ndef area(r): return pi * r**2",
  ),
  "a module without an import": ("def f(x): return x", ["assert math.isclose(f(1), 1.0)"]),
  "a setup that uses the program": (
    _NODE + "def depth(node): return 0 if node is None else 1 + depth(node.left)",
    ["assert depth(root) == 2"],
    "root = Node(1)\nroot.left = Node(2)",
  ),
  "a thread": (
    "import threading\ndef f(x):\n  found = []\n"
    "  thread = threading.Thread(target=lambda: found.append(2 * x))\n"
    "  thread.start()\n  thread.join()\n  return found[0]",
    ["assert f(2) == 4"],
  ),
  "a large stack": (
    "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
    "def depth(n): return n and 1 + depth(n - 1)\ndef f(n):\n  found = []\n"
    "  thread = threading.Thread(target=lambda: found.append(depth(n)))\n"
    "  thread.start()\n  thread.join()\n  return found[0]",
    ["assert f(50000) == 50000"],
  ),
  "Decimal": (
    "from decimal import Decimal\ndef f(x): return Decimal(x) / 3",
    ["from decimal import Decimal\nassert f('1.5') == f(Decimal('1.5')) == Decimal('0.5')"],
  ),
  "Fraction": (
    "from fractions import Fraction\ndef f(x): return Fraction(x, 3)",
    ["from fractions import Fraction\nassert f(2) == Fraction(2, 3)"],
  ),
  "namedtuple": (
    "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(x): return P(x, 2)",
    ["assert f(1).y == 2", "assert f(1) == P(1, 2)", "assert f(1)._asdict() == {'x': 1, 'y': 2}"],
  ),
  "Counter": (
    "from collections import Counter\ndef f(text): return Counter(text)",
    ["assert f('aab').most_common(1) == [('a', 2)]", "assert f('a')['z'] == 0"],
  ),
  "OrderedDict": (
    "from collections import OrderedDict\ndef f(text): return OrderedDict.fromkeys(text)",
    ["from collections import OrderedDict\nassert f('ab') != OrderedDict.fromkeys('ba')"],
  ),
  "deque": (
    "from collections import deque\ndef f(x): return deque([x, 2])",
    ["from collections import deque\nassert f(1) == deque([1, 2])"],
  ),
  "views of a dict": (
    "def f(x): return x.keys(), x.values(), x.items()",
    ["a, b, c = f({'k': 1})\nassert a == {'k'} and list(b) == [1] and ('k', 1) in c"],
  ),
  "texts and numbers of an Enum": (
    "from enum import Enum\nclass T(str, Enum): A = 'a'\nclass N(int, Enum): B = 2\n"
    "def f(x): return [T.A, N.B] * x",
    ["assert f(1) == ['a', 2]"],
  ),
  "a large number": ("def f(x): return 3**x", ["assert f(20000) == 3**20000"]),
  "a type": ("def f(x, t): return t(x), t", ["assert f('3', int) == (3, int)"]),
  "an exception of its own": (
    "class Base(ValueError): pass\nclass Empty(Base):\n"
    "  def __init__(self, code):\n    super().__init__(f'bad {code}')\n    self.code = code\n"
    "def f(x): raise Empty(x)",
    [
      "try:\n  f(3)\n  assert False\nexcept Empty as e:\n  assert (str(e), e.code) == ('bad 3', 3)",
      "try:\n  f(3)\n  assert False\nexcept (KeyError, Base):\n  pass",
      "try:\n  f(3)\n  assert False\nexcept ValueError:\n  pass",
    ],
  ),
  "numpy": (
    "import numpy\ndef f(x): return numpy.array(x) * 2",
    [
      "assert (f([1, 2]) == numpy.array([2, 4])).all()",
      "assert numpy.allclose(f(numpy.ones((2, 3))), 2) and f([[1.5]]).shape == (1, 1)",
    ],
    "import numpy",
  ),
  "a number of numpy": (
    "import numpy as np\ndef f(x): return np.mean(x), np.sum(x), np.any(x)",
    ["assert f([1, 2]) == (1.5, 3, True) and np.isclose(f([0])[0], 0)"],
  ),
}


def scores_of(programs, parameters="seconds=20"):
  """The scores of rows (program, tests, setup, solution), of which the last two may be missing."""
  rows = [(*row, "", "")[:4] for row in programs]
  completions, tests, setups, solutions = map(list, zip(*rows))
  columns = {"test_list": tests, "test_setup_code": setups, "code": solutions}
  return resolve(f"code({parameters})")(completions=completions, **columns)


def test_right_programs_of_many_kinds_pass_and_their_tests_are_no_gift():
  assert dict(zip(RIGHT, scores_of(RIGHT.values()))) == dict.fromkeys(RIGHT, 1.0)
  nothing = [("I give up.", *row[1:]) for row in RIGHT.values()]
  assert dict(zip(RIGHT, scores_of(nothing))) == dict.fromkeys(RIGHT, 0.0)


# Values whose class says that they equal everything, as (what it needs, its base, its argument).
_LIAR = (
  "class L({}):\n  def __eq__(self, other): return True\n  def __ne__(self, other): return False\n"
  "  def __lt__(self, other): return True\n  __le__ = __gt__ = __ge__ = __lt__\n"
  "  def __hash__(self): return 0\n  def __bool__(self): return True\n"
  "  def __contains__(self, item): return True\ndef f(x): return {}"
)
_LIARS = {
  "Decimal": ("from decimal import Decimal", "Decimal", "L(9)"),
  "Fraction": ("from fractions import Fraction", "Fraction", "L(9)"),
  "Counter": ("from collections import Counter", "Counter", "L('z')"),
  "OrderedDict": ("from collections import OrderedDict", "OrderedDict", "L(z=1)"),
  "namedtuple": ("from collections import namedtuple", "namedtuple('P', 'x')", "L(9)"),
  "deque": ("from collections import deque", "deque", "L([9])"),
  "numpy": ("import numpy", "numpy.ndarray", "numpy.arange(2).view(L)"),
}
_CATCHES = ["try:\n  assert f(1) == 5\nexcept E:\n  pass"]
_TRUE_FOR_ALL = ["assert all(f(i) == i + 1 for i in range(3))"]
FORGERIES_OF_NAMES = {
  "a builtin alone": ("I give up.", ["assert sum([1, 2, 3]) == 6"]),
  "a builtin alone, and an error": ("raise RuntimeError", ["assert pow(2, 3) == 8"]),
  "a helper of a test": ("all = any = lambda x: True\ndef f(x): return 99", _TRUE_FOR_ALL),
  "a helper that the solution has": (
    "all = lambda x: True\ndef f(x): return 99",
    _TRUE_FOR_ALL,
    "",
    "def f(x): return x + 1\ndef all(x): return True",
  ),
  "a helper of a builtin": (
    f"all = lambda x: True\n{_POW}".replace("a**b", "99"),
    ["assert all(pow(2, i) == 2**i for i in range(4))"],
    "",
    _POW,
  ),
  "a module of a test": (
    "class math:\n  isclose = lambda *a: True\ndef f(x): return 99",
    ["assert math.isclose(f(1), 1.0)"],
  ),
  "numpy of a test": (
    "import numpy as np\nnp.allclose = lambda *a: True\ndef f(x): return 99",
    ["assert np.allclose(f(1), 1.0)"],
  ),
  "what the solution imports": (
    "isclose = lambda *a: True\ndef f(x): return 99",
    ["assert isclose(f(1), 1.0)"],
    "",
    "from math import isclose\ndef f(x): return x",
  ),
  "an end that looks like an iteration's": (
    "class E(ValueError, StopIteration): pass\ndef f(x): raise E",
    ["assert all(map(f, [1, 2]))"],
  ),
  "an end in a test that catches all": (
    "import os\ndef f(x): os._exit(0)",
    ["try:\n  assert f(1) == 2\nexcept:\n  pass"],
  ),
  "an error of its own that is Python's": ("E = AssertionError\ndef f(x): return 99", _CATCHES),
  "an error of its own above Python's": ("E = Exception\ndef f(x): return 99", _CATCHES),
  "an error below Python's": ("class E(AssertionError): pass\ndef f(x): return 99", _CATCHES),
  "an error from a patched player": (
    "import sys\nsys.modules['player'].encode = lambda *a: ['exception', 'AssertionError']\n"
    "class E(Exception): pass\ndef f(x): return 99",
    _CATCHES,
  ),
  "an error with attributes that lie": (
    "class L:\n  def __eq__(self, other): return True\nclass E(Exception):\n"
    "  def __str__(self): return 'right'\ndef f(x):\n"
    "  e = E(L())\n  e.code, e.__dict__['args'] = L(), ('right',)\n  raise e",
    [
      "try:\n  f(1)\nexcept E as e:\n  assert e.code == 5",
      "try:\n  f(1)\nexcept E as e:\n  assert str(e) == 'right'",
    ],
  ),
  "objects in an array": (
    "import numpy\nclass L:\n  def __eq__(self, other): return True\n"
    "def f(x): return numpy.array([L()], object)",
    ["assert f(1) == 5"],
  ),
  "a tuple whose fields are code": (
    "P = type('P', (tuple,), {'_fields': ('x=__import__(\"os\")._exit(0)',)})\n"
    "def f(x): return P([1])",
    ["assert f(1) == (2,)"],
  ),
  "a builtin of the checker": ("def f(x): return eval", ["assert f(1) == eval"]),
  "a setup that it lies to": (
    "class Node:\n  def __init__(self, value): pass\n  def __setattr__(self, name, value): pass\n"
    "  def __eq__(self, other): return True\ndef f(x): return Node(1)",
    ["assert f(root) == 2", "assert f(root) == root"],
    "root = Node(1)\nroot.left = Node(2)",
  ),
  "a test that calls nothing": ("def f(x): return 99", [_UNCALLED]),
  "a test that calls nothing of a number": ("f = 99", [_UNCALLED, "assert f > 0"]),
  "a process": ("import os\ndef f(x): return os.fork() and x", ["assert f(1) == 1"]),
}
for name, (needs, base, made) in _LIARS.items():
  tests = ["assert f(1) == 5", "assert f(1) in [4, 5]"]
  FORGERIES_OF_NAMES[f"a liar of {name}"] = (f"{needs}\n{_LIAR.format(base, made)}", tests)


def test_names_and_types_of_the_program_forge_no_verdict():
  found = scores_of(FORGERIES_OF_NAMES.values(), "seconds=20, fraction=True")
  assert dict(zip(FORGERIES_OF_NAMES, found)) == dict.fromkeys(FORGERIES_OF_NAMES, 0.0)


def test_a_test_that_reads_nothing_of_the_program_does_not_count():
  both = "all = lambda x: True\ndef pow(a, b): return 99"
  assert scores_of(
    [
      ("I give up.", ["assert 1 + 1 == 2"]),
      ("I give up.", ["assert sum([pow(2, 3)]) == 8"]),  # whose is not known
      (both, ["assert all(pow(2, i) == 2**i for i in range(4))"], "", both),
      ("def f(x): return x", ["assert 1 + 1 == 2", "assert f(1) == 1"]),
      ("def f(x): return x", ["assert 1 + 1 == 2", "assert f(1) == 2"]),
    ]
  ) == [None, None, None, 1.0, 0.0]


def test_tests_and_setups_as_texts():
  assert score("def f(x): return x", "assert f(1) == 1\nassert f(2) == 2") == 1
  assert score("def f(x): return x", "assert f(1) == 1\nassert f(2) == 3") == 0
  assert score("def f(x): return x", ["assert f(math.pi) > 3"], ["import math", "import re"]) == 1
  for wrong in (5, [5], {"a": 1}, [["assert f(1) == 1"]]):
    for name, found in (
      ("test_list", score("def f(x): return x", wrong)),
      ("test_setup_code", score("def f(x): return x", setup=wrong)),
    ):
      assert found.reason.startswith(f"row 0: {name} must be a text or a list of texts")
  with pytest.raises(RewardError, match="test_list must have an entry for each of 2 completions"):
    resolve("code")(completions=["x", "y"], test_list="assert f(1)")


@pytest.mark.parametrize(
  "parameters", ["memory=0.001", "memory=1e999", "seconds=1e999", "seconds=0.001"]
)
def test_limits_with_which_nothing_could_run_are_refused(parameters):
  name = parameters.split("=")[0]
  with pytest.raises(ConfigError, match=f"reward.functions: code.*{name} is out of its range"):
    resolve(f"code({parameters})")


def test_an_object_that_is_not_plain_data_is_not_true():
  truthy = "class T: pass\ndef f(x): return T()"
  for test in ("assert f(1)", "assert not f(1)", "assert f(1) == f(1)", "assert len(f(1)) == 0"):
    assert score(truthy, tests=[test]) == 0


def test_time_is_limited():
  start = time.monotonic()
  assert score(PROBLEMS[0]["code"], parameters="seconds=60") == 1
  enough = 1 + 4 * (time.monotonic() - start)  # also for a machine that is busy
  start = time.monotonic()
  assert score("while True: pass", parameters="seconds=0.7") == 0
  assert score("import time\ndef add(a, b): time.sleep(99)", parameters="seconds=0.7") == 0
  assert time.monotonic() - start < 60
  # What has passed by then has passed.
  slow = "import time\ndef add(a, b):\n  if a < 0: time.sleep(99)\n  return a + b"
  assert score(slow, parameters=f"seconds={enough}, fraction=True") == pytest.approx(1 / 3)


def test_memory_is_limited():
  assert score("def add(a, b): return len(bytearray(10**9)) and a + b") == 0
  assert score("x = []\nwhile True: x.append(bytearray(10**7))") == 0


def test_completions_run_at_once():
  slow = "import time\ntime.sleep(1.5)\ndef add(a, b): return a + b"
  start = time.monotonic()
  found = resolve("code(at_once=4)")(completions=[slow] * 4, test_list=[ADD] * 4)
  assert found == [1.0] * 4
  assert time.monotonic() - start < 4 * 1.5  # what they sleep one after the other


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
    f" code(completions=['import time\\n#{marker}\\ntime.sleep(1000)'],"
    " test_list=[['assert f(1)']], seconds=500)"
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
    answer = caller.start([function], columns, 0, 2)[0].result()
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


def _code_config(tmp_path, rows):
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
  config = with_section(
    small_config(), "data", task="code", path=str(tmp_path), max_prompt_tokens=200
  )
  return with_section(config, "reward", functions=("code",), weights=(1.0,))


_WRONG = [
  {"text": "x", "test_list": ["assert max([1, 2]) == 2"], "code": "def f(x): return x"},
  {"text": "x", "test_list": ["assert f(1) == 2"], "code": "def f(x): return x"},
]


def test_a_run_begins_with_rows_that_can_pay_no_program(tmp_path, capsys):
  scorers = Scorers(small_run(_code_config(tmp_path, [*PROBLEMS, *_WRONG])))
  Collector(scorers._run, scorers)
  scorers.close()
  said = capsys.readouterr().err
  assert (
    "warning: reward.functions: code: 2 of 8 rows that were tried cannot reward any program" in said
  )
  assert f"{tmp_path}/train.jsonl line 7: its tests read nothing of a program" in said
  assert f"{tmp_path}/train.jsonl line 8: its own solution fails its tests" in said


@pytest.mark.parametrize(
  "rows, error",
  [
    (_WRONG, "no program can earn a reward in any of 2 rows: .*line [12]: its"),
    ([PROBLEMS[0] | {"test_setup_code": "import nil"}], "line 1: test_setup_code fails"),
  ],
)
def test_a_run_where_no_row_can_pay_does_not_start(tmp_path, rows, error):
  with pytest.raises(ConfigError, match=f"reward.functions: code: .*{error}"):
    train(_code_config(tmp_path, rows), tmp_path / "run")
  assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_rows_that_are_tried_are_few(monkeypatch):
  rows = [(f"prompt {i}", {"test_list": ["assert f(1)"], "code": "x"}) for i in range(99)]
  tried = []

  def score(completions, **columns):
    tried.extend(columns["place"])
    return [0.0] * len(completions)

  others = [("prompt 100", {"test_list": None})] * 50  # of another task of a mixture
  with pytest.raises(ConfigError, match="in any of 32 rows: prompt 0: .*; and 29 more"):
    code_lib._check_rows("x", score, [*others, *rows])
  assert len(tried) == 32
  monkeypatch.setattr(code_lib, "_SECONDS", 0.0)
  assert code_lib._check_rows("x", score, rows) == ""


def test_the_task_reads_the_layout_of_sanitized_mbpp(tmp_path):
  row = {"prompt": "x", "test_list": ["assert f(1)"]}
  lines = [
    json.dumps(row | {"test_imports": imports})
    for imports in (["import math", "import re"], "import x")
  ]
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
  first, second = tasks.make_task(Data(task="code", path=str(tmp_path))).train
  setups = [layout_of(row).tests(row).setup for row in (first, second)]
  assert setups == ["import math\nimport re", "import x"]
  assert first["solution"] == first["answer"] == first["code"] == ""


@pytest.mark.parametrize(
  "row, error",
  [
    ({"text": "x"}, "line 1 has no tests: it needs one of the columns test_list, test"),
    ({"test_list": ["assert 1"]}, "line 1: it has no text text or prompt .in the layout of MBPP"),
    ({"text": "x", "test_list": []}, "test_list must be a list of tests"),
    ({"text": "x", "test_list": [1]}, "test_list must be a text or a list of texts"),
    ({"text": "x", "test_list": "assert 1"}, "line 1: test_list is a text"),
    ({"text": "x", "test_list": ["assert 1"], "test_imports": 5}, "test_imports must be a list"),
    ({"text": "x", "test_list": ["assert 1"], "test_imports": [5]}, "test_imports must be a list"),
    ({"text": "x", "test_list": ["assert 1"], "code": 1}, "code must be a text"),
    ([], "line 1 is not an object"),
  ],
)
def test_a_bad_row_is_named(tmp_path, row, error):
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_text(json.dumps(row))
  with pytest.raises(ConfigError, match=error):
    tasks.make_task(Data(task="code", path=str(tmp_path)))
