"""Programs judged by the tests of the data sets that people bring, each in its published layout."""

import base64
import json
from pathlib import Path
import pickle
import re
import time
import zlib

import pytest

from grpo_jax.config import Data
from grpo_jax.data.tasks import tasks
from grpo_jax.problems import cases, layouts, programs
from grpo_jax.rewards.functions.code import _check_rows, code
from grpo_jax.rewards.sandbox import runner
from grpo_jax.rewards.sandbox.cases import same_output, same_value
from grpo_jax.settings import ConfigError


def compressed(cases):
  """Private cases as LiveCodeBench publishes them."""
  return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


def stdin_cases(*pairs, **more):
  return [{"input": given, "output": right, **more} for given, right in pairs]


_SUMS = {"inputs": ["1 2\n", "5 -5\n", "10 20\n"], "outputs": ["3\n", "0\n", "30\n"]}
ADD = "a, b = map(int, input().split())\nprint(a + b)"
_MAIN = "def main():\n  a, b = map(int, input().split())\n  print(a + b)"
_DEEP = "def largest(x):\n  y = []\n  for _ in range(10**5): y = [y]\n  return y"
_NEAR = "class N:\n  def __eq__(self, x): return True\ndef safe_div(a, b): return N()"
_END = "    return [helper(x) for x in values]"
_ABOVE = "def above(values: List[int]):\n  return [x + 1 for x in values]"
_CALL = {"type": "function_call", "fn_name": "letters"}
TWICE = "class Solution:\n  def twice(self, values: List[int]) -> List[int]:\n    "

ROWS = {
  "TACO": {
    "question": "Add two numbers.",
    "solutions": json.dumps([ADD, "print(1)"]),
    "starter_code": "",
    "input_output": json.dumps(_SUMS),
    "difficulty": "EASY",
    "source": "codeforces",
    "time_limit": "1.0 seconds",
  },
  "APPS": {
    "problem_id": 7,
    "question": "Return the largest values of each list.",
    "solutions": json.dumps(["def largest(lists):\n  return [max(one) for one in lists]"]),
    "input_output": json.dumps(
      {
        "fn_name": "largest",
        "inputs": [[[[1, 5], [2]]], [[]], [[[0.5, -1]]]],
        "outputs": [[[5, 2]], [[]], [[0.5]]],
      }
    ),
    "starter_code": "def largest(lists):\n\t",
    "difficulty": "introductory",
    "url": "https://example.com",
  },
  "PRIME": {
    "data_source": "taco",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add."}],
    "ability": "code",
    "reward_model": {"style": "rule", "ground_truth": json.dumps(_SUMS)},
    "extra_info": {"index": 0, "split": "train"},
  },
  "DeepCoder": {
    "problem": "Count the letters of a text.",
    "solutions": ["```python\ndef letters(text):\n  return dict(Counter(text))\n```"],
    "tests": json.dumps(
      [
        {"input": ["aab"], "output": [{"a": 2, "b": 1}], **_CALL},
        {"input": [""], "output": [{}], **_CALL},
      ]
    ),
  },
  "LiveCodeBench": {
    "question_title": "twice",
    "question_content": "Double all values.",
    "platform": "leetcode",
    "question_id": "1",
    "contest_date": "2026-01-01T00:00:00",
    "starter_code": TWICE.rstrip(),
    "public_test_cases": json.dumps(stdin_cases(("[1, 2]", "[2, 4]"), testtype="functional")),
    "private_test_cases": compressed(
      stdin_cases(("[]", "[]"), ("[-3]", "[-6]"), testtype="functional")
    ),
    "metadata": json.dumps({"func_name": "twice"}),
  },
  "KodCode": {
    "question": "Write safe_div.",
    "solution": "def safe_div(a, b):\n  if b == 0:\n    raise ValueError('zero')\n  return a / b",
    "test": (
      "import pytest\nfrom solution import safe_div as div, safe_div\n\n"
      "HALF = pytest.approx(0.5)\n\n"
      "def test_half():\n    assert div(1, 2) == HALF\n\n"
      "@pytest.mark.parametrize('a, b, c', [(4, 2, 2), (9, 3, 3)])\n"
      "def test_some(a, b, c):\n    assert safe_div(a, b) == c\n\n"
      "def test_zero():\n    with pytest.raises(ValueError, match='zero'):\n"
      "        safe_div(1, 0)\n"
    ),
    "test_info": [{"function_name": "safe_div"}],
  },
  "HumanEval": {
    "task_id": "HumanEval/0",
    "prompt": (
      "from typing import List\n\ndef helper(x):\n    return x + 1\n\n\n"
      'def above(values: List[int]) -> List[int]:\n    """Each value and 1.\n    """\n'
    ),
    "canonical_solution": "    return [helper(x) for x in values]\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == [2, 3]\n"
    "    assert candidate([]) == []\n    assert helper(1) == 2\n",
    "entry_point": "above",
  },
}
_STDIN = "LiveCodeBench, whole programs"
ROWS[_STDIN] = {
  **ROWS["LiveCodeBench"],
  "question_content": "Print each number, divided by 2.",
  "platform": "atcoder",
  "starter_code": "",
  "public_test_cases": json.dumps(stdin_cases(("3\n1\n2\n3\n", "0.5\n1\n1.5\n"), testtype="stdin")),
  "private_test_cases": compressed(stdin_cases(("1\n10\n", "5"), testtype="stdin")),
  "metadata": "{}",
}
_HALVES = "n = int(input())\nfor _ in range(n): print(int(input()) / 2)"

# Programs: what they are, the row that they are for, the code, and the share of tests they pass.
PROGRAMS = [
  ("by input()", "TACO", ADD, 1),
  ("in a text", "TACO", f"First:\n```python\nx\n```\nRather:\n```python\n{ADD}\n```\nDone.", 1),
  ("by sys.stdin", "TACO", "import sys\nprint(sum(map(int, sys.stdin.read().split())))", 1),
  (
    "by files",
    "TACO",
    "import os\nos.write(1, b'%d' % sum(map(int, open(0, 'rb').read().split())))",
    1,
  ),
  (
    "in main",
    "TACO",
    f"import sys\n{_MAIN}\nif __name__ == '__main__':\n  assert len(sys.argv) == 1\n"
    "  main()\n  sys.exit(0)",
    1,
  ),
  (
    "in a thread",
    "TACO",
    f"import threading, sys\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**26)\n{_MAIN}\n"
    "threading.Thread(target=main).start()",
    1,
  ),
  (
    "at the end",
    "TACO",
    "import atexit, io, sys\nsys.stdout = io.StringIO()\n"
    "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\n" + ADD,
    1,
  ),
  (
    "buffered until the end",
    "TACO",
    "import atexit, io, os, sys\nsys.stdout = io.StringIO()\n"
    "atexit.register(lambda: os.write(1, sys.stdout.getvalue().encode()))\n" + ADD,
    1,
  ),
  ("with numpy", "TACO", "import numpy as np\nprint(np.sum([int(x) for x in input().split()]))", 1),
  ("wrong for some", "TACO", "a, b = map(int, input().split())\nprint(abs(a) + abs(b))", 2 / 3),
  ("no program", "TACO", "I give up.", 0),
  ("an error after the output", "TACO", ADD + "\nraise ValueError", 0),
  ("a constant", "TACO", "print(3)", 1 / 3),
  ("slow in one case", "TACO", ADD + "\nif b == -5:\n  while True: pass", 2 / 3),
  ("asleep", "TACO", "import time\ntime.sleep(99)", 0),
  ("endless output", "TACO", "while True: print('1' * 1000)", 0),
  ("much memory", "TACO", "x = [0] * 10**9\n" + ADD, 0),
  ("a process", "TACO", "import os\nos.fork()\n" + ADD, 0),
  ("the end of its server", "TACO", "import os\nos.kill(os.getppid(), 9)\n" + ADD, 0),
  ("the network", "TACO", "import socket\nsocket.create_connection(('1.1.1.1', 53), 1)\n" + ADD, 0),
  ("files of others", "TACO", "print(len(open('/etc/passwd').read()) and 3)", 0),
  (
    "what others may hold",
    "TACO",
    "import os\nfor fd in range(64):\n  try: os.write(fd, b'2 ended\\n3\\n')\n"
    "  except OSError: pass",
    0,
  ),
  ("a function", "APPS", "def largest(lists): return tuple(max(one) for one in lists)", 1),
  ("a class", "APPS", "class Solution:\n  def largest(self, lists): return [*map(max, lists)]", 1),
  ("a function that prints", "APPS", "def largest(x):\n  print(x)\n  return [*map(max, x)]", 1),
  ("the wrong function", "APPS", "def smallest(lists): return [*map(min, lists)]", 0),
  ("a wrong function", "APPS", "def largest(lists): return [*map(min, lists)]", 1 / 3),
  (
    "equal to everything",
    "APPS",
    "class E(list):\n  def __eq__(self, other): return True\ndef largest(lists): return E([99])",
    0,
  ),
  ("an endless value", "APPS", "def largest(x):\n  return __import__('itertools').count()", 0),
  ("a deep value", "APPS", _DEEP, 0),
  ("an early end", "APPS", "import os\ndef largest(x): os._exit(0)", 0),
  ("messages", "PRIME", ADD, 1),
  ("messages, wrong", "PRIME", ADD.replace("+", "-"), 0),
  ("a dict", "DeepCoder", "def letters(text): return {x: text.count(x) for x in text}", 1),
  ("a Counter", "DeepCoder", "def letters(x): return collections.Counter(x)", 1),
  ("a list for a dict", "DeepCoder", "def letters(text): return sorted(text)", 0),
  ("a method", "LiveCodeBench", TWICE + "return [2 * x for x in values]", 1),
  ("a method that is wrong", "LiveCodeBench", TWICE + "return values * 2", 1 / 3),
  ("numbers as they are written", _STDIN, _HALVES, 1),
  ("one line", _STDIN, _HALVES.replace("/ 2)", "/ 2, end=' ')"), 1 / 2),
  ("tests for pytest", "KodCode", ROWS["KodCode"]["solution"], 1),
  ("no exception", "KodCode", "def safe_div(a, b): return a / b if b else 0", 2 / 3),
  ("another exception", "KodCode", "def safe_div(a, b): return a / b", 2 / 3),
  ("another text", "KodCode", ROWS["KodCode"]["solution"].replace("'zero'", "'none'"), 2 / 3),
  ("near everything", "KodCode", _NEAR, 0),
  ("the end of a function", "HumanEval", f"{_END}\n\nprint(above(", 1),
  ("a whole function", "HumanEval", _ABOVE, 1),
  ("a wrong end", "HumanEval", "    return values", 0),
]


@pytest.fixture(scope="module", autouse=True)
def needs_a_sandbox():
  try:
    runner.find()
  except ConfigError as error:
    pytest.skip(str(error))


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
  """The example of each row, as `data.task=code` reads it."""
  folder = tmp_path_factory.mktemp("code")
  for split in ("train", "test"):
    (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in ROWS.values()))
  train = tasks.make_task(Data(task="code", path=str(folder))).train
  return dict(zip(ROWS, train, strict=True))


def scores_of(programs, rows, **options):
  columns = {name: [row.get(name) for row in rows] for row in rows for name in row}
  return code(completions=programs, **columns, **options)


def children():
  """The processes that this one has started."""
  found = "".join(file.read_text() for file in Path("/proc/self/task").glob("*/children"))
  return {*found.split()}


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_programs_are_judged_as_they_should_be(every, examples):
  assert len(PROGRAMS) >= 40
  names, rows, programs, expected = zip(*PROGRAMS[::every])
  before = children()
  limits = dict(partial=True, seconds=20, case_seconds=2, at_once=4)
  found = scores_of(programs, [examples[row] for row in rows], **limits)
  assert dict(zip(names, found)) == dict(zip(names, map(pytest.approx, expected)))
  assert children() <= before


def test_a_program_that_stops_its_server_has_failed_in_time(examples):
  program, started = "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)", time.monotonic()
  assert scores_of([program], [examples["TACO"]], seconds=1) == [0]
  assert time.monotonic() - started < 9


def test_cases_are_judged_without_a_sandbox_too():
  programs = [ADD, "while True: pass", "print(3)"]
  options = dict(sandboxed=False, case_seconds=0.5, seconds=8, partial=True)
  assert scores_of(programs, [ROWS["TACO"]] * 3, **options) == [1, 0, pytest.approx(1 / 3)]


def test_all_tests_must_pass_where_no_share_is_asked_for():
  programs = [ADD, "a, b = map(int, input().split())\nprint(abs(a) + abs(b))"]
  assert scores_of(programs, [ROWS["TACO"]] * 2) == [1, 0]


def test_the_columns_of_a_data_set_are_read_as_they_are(examples):
  for name, row in ROWS.items():
    layout = layouts.layout_of(row)
    assert layout.tests(row) == layouts.layout_of(examples[name]).tests(examples[name])
    assert layout.name in name or name in layout.name
  by_column = {"tests": ROWS["PRIME"]["reward_model"]["ground_truth"]}
  assert scores_of([ADD], [by_column]) == [1]


def test_a_question_says_what_is_asked_for(examples):
  asked = {name: example["question"] for name, example in examples.items()}
  assert "reads standard input" in asked["TACO"] and "standard input" in asked[_STDIN]
  assert "completes this:\n\n```python\ndef largest(lists):" in asked["APPS"]
  assert "class Solution" in asked["LiveCodeBench"]
  assert "defines letters." in asked["DeepCoder"] and "defines safe_div" in asked["KodCode"]
  assert asked["PRIME"] == ROWS["PRIME"]["prompt"]
  assert "def above(values" in asked["HumanEval"]
  for name in ("TACO", "APPS", "DeepCoder", "KodCode", "HumanEval"):
    assert "```python\n" in examples[name]["solution"] and examples[name]["code"]


def test_the_solutions_of_the_rows_pass(examples):
  rows = [*zip(examples, examples.values())]
  assert _check_rows("x", code, rows) == ""


def test_rows_without_tests_are_said_at_the_start():
  with pytest.raises(ConfigError, match="x: the examples have no tests, which are in one of the c"):
    _check_rows("x", code, [("row 0", {"question": "1+1"})])
  of_sums = {"reward_model": {"ground_truth": "72"}}
  said = "x: none of the rows that were looked at has tests"
  assert _check_rows("x", code, [("row 0", of_sums)]) == said


class Names:
  def __reduce__(self):
    return print, ("run",)


@pytest.mark.parametrize(
  "row, error",
  [
    ({"input_output": "{"}, "input_output is not JSON"),
    ({"input_output": ""}, "input_output is empty: leave such rows out"),
    ({"input_output": {"inputs": ["1"], "outputs": []}}, "has 1 inputs and 0 outputs"),
    ({"input_output": {"inputs": [], "outputs": []}}, "input_output has no cases"),
    ({"tests": [{"input": "1"}]}, "tests has a case without input and output"),
    ({"tests": 5}, "tests has no cases"),
    (
      {"tests": stdin_cases(("1", "2"), testtype="functional")},
      "calls a function, and nothing names it",
    ),
    (
      {"tests": stdin_cases(("1", "2"), type="function_call")},
      "calls a function, and nothing names it",
    ),
    ({"test": "def f(: pass"}, "test is not Python"),
    ({"test": "from solution import f"}, "test has no function test_"),
    (
      {"test": "from solution import f\ndef test_a(): pass"},
      "test has no function test_... that uses solution",
    ),
  ],
)
def test_what_cannot_be_read_is_said(row, error, tmp_path):
  row = {"question": "x", "problem": "x"} | row
  found = scores_of(["x"], [row])[0]
  assert error in found.reason
  for split in ("train", "test"):
    (tmp_path / f"{split}.jsonl").write_text(json.dumps(row))
  if "no function test_" not in error:
    with pytest.raises(ConfigError, match="train.jsonl line 1: .*in the layout of"):
      tasks.make_task(Data(task="code", path=str(tmp_path)))


@pytest.mark.parametrize(
  "made, error",
  [
    (base64.b64encode(zlib.compress(pickle.dumps(Names()))), "no text alone .STACK_GLOBAL"),
    (base64.b64encode(zlib.compress(b"\x80\x04\x8c\x01[r\0\0\0\4.")), "number an object 67108864"),
    (base64.b64encode(zlib.compress(b"\x80\x04\x8c\x01[" + b"\x94" * 2000 + b".")), "1024 steps"),
    (base64.b64encode(zlib.compress(pickle.dumps(5))), "hold no text"),
    (base64.b64encode(zlib.compress(b"no pickle")), "cannot be read"),
    (b"no base64!", "neither JSON nor compressed"),
  ],
)
def test_compressed_cases_hold_a_text_and_run_nothing(made, error, capsys):
  row = ROWS["LiveCodeBench"] | {"private_test_cases": made.decode()}
  assert re.search(error, scores_of(["x"], [row])[0].reason)
  assert "run" not in capsys.readouterr().out


def test_compressed_cases_have_a_limit(monkeypatch):
  monkeypatch.setattr(cases, "_MOST_BYTES", 2**20)
  made = base64.b64encode(zlib.compress(pickle.dumps("[" + " " * 2**21))).decode()
  row = ROWS["LiveCodeBench"] | {"private_test_cases": made}
  with pytest.raises(programs.Unreadable, match="more than 1 MiB"):
    layouts.layout_of(row).tests(row)


@pytest.mark.parametrize("text", ["-" * 10**6 + "1", "(" * 10**4, "x = [" + "1," * 10**7 + "]"])
def test_a_text_that_takes_too_much_to_compile_is_a_wrong_program(text):
  assert scores_of([text], [ROWS["TACO"]], seconds=1, memory=0.125) == [0]


@pytest.mark.parametrize(
  "expected, found, same",
  [
    ("1\n2\n", b"1\n2", True),
    ("1 2\n", b" 1 2 \n\n", True),
    ("1\n2", b"1 2", False),
    ("1.0 2", b"1 2.00", True),
    ("1 a", b"1.0 a", False),
    ("0.1", b"0.10000000001", False),
    ("1e3", b"1000", True),
    ("nan", b"NaN", False),
    ("sNaN 1", b"snan 1.0", False),
    ("é", "é".encode(), True),
    ("1", b"\xff", False),
    ("1\n\n2", b"1\n2", False),
    ("1", b"1e999999999999999999999", False),
    ("", b"\n", True),
  ],
)
def test_outputs_are_compared_by_lines_and_numbers(expected, found, same):
  assert same_output(expected, found) is same


@pytest.mark.parametrize(
  "expected, found, boxed, same",
  [
    ([1, 2], '["tuple", [1, 2]]', False, True),
    ([[1]], '["list", [["tuple", [1]]]]', False, True),
    ([5], "5", True, True),
    ([5], "5", False, False),
    ([5, 6], "5", True, False),
    ({"1": [2]}, '["dict", [[1, ["list", [2]]]]]', False, True),
    ({"true": 1}, '["dict", [[true, 1]]]', False, True),
    ([1], '["set", [1]]', False, False),
    (None, "null", False, True),
    (1, "true", False, True),
    ("a", '["object", 5]', False, False),
    ([1], '["list"]', False, False),
    ([1], '["list", 5]', False, False),
    ([1], "[" * 10**5, False, False),
    ([1], "no JSON", False, False),
    ([1], "", False, False),
  ],
)
def test_values_are_compared_as_plain_data(expected, found, boxed, same):
  case = programs.Case([], expected, "f", boxed)
  assert same_value(case, found.encode()) is same


@pytest.mark.parametrize(
  "expected, found, same",
  [
    ("0.1", b"0.1000001", True),
    ("1000000.5", b"1000001", True),
    ("0.1", b"0.1001", False),
    ("3 0.5", b"3 0.50000001", True),
    ("3", b"3.0000000001", False),
    ("1.5", b"nan", False),
    ("a.b", b"a.c", False),
  ],
)
def test_printed_numbers_may_be_near_where_the_data_set_has_it_so(expected, found, same):
  assert same_output(expected, found, near=True) is same
  assert not same_output(expected, found)


def test_the_numbers_of_taco_may_be_near():
  row = {"input_output": {"inputs": ["x"], "outputs": ["0.3333333333"]}}
  assert scores_of(["print(1 / 3)"], [row]) == [1]
  assert scores_of(["print(1 / 3)"], [{"tests": row["input_output"]}]) == [0]


def test_keys_that_are_numbers_reach_the_program():
  cases = {"fn_name": "f", "inputs": [[{"1": 2, "3": 4}], [[{"a": [1]}]]], "outputs": [6, 1]}
  program = "def f(x): return x[1] + x[3] if isinstance(x, dict) else x[0]['a'][0]"
  assert scores_of([program], [{"input_output": cases}]) == [1]


@pytest.mark.parametrize("end", ["exit()", "quit(0)", "sys.exit()"])
def test_a_program_may_end_with_exit_or_quit(end):
  cases = {"inputs": ["1\n"], "outputs": ["1"]}
  assert scores_of([f"print(input())\n{end}\nprint(2)"], [{"input_output": cases}]) == [1]


def test_a_large_input_reaches_the_program():
  cases = {"inputs": ["1" * (2**24 + 5)], "outputs": [str(2**24 + 5)]}
  assert scores_of(["print(len(input()))"], [{"input_output": cases}]) == [1]


PYTEST = """
import unittest
import pytest
from solution import f

def test_helper(x): return 2 * x

def test_cases(): return [(0, 0), (2, 4)]

class TestBase:
    def setup_method(self, method):
        self.right = test_helper(1)
    def test_inherited(self):
        assert f(1) == self.right

class TestMore(TestBase):
    @pytest.mark.timeout(5)
    def test_own(self):
        assert f(5) == 10

class First:
    def setup_method(self):
        self.right = 4

class TestBoth(First, TestBase):
    def test_both(self):
        assert f(2) == self.right
    def test_inherited(self):
        assert f(2) == self.right

class Unit(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.right = 6
    def setUp(self):
        self.given = 3
    def test_unit(self):
        self.assertEqual(f(self.given), self.right)

@pytest.mark.slow
def test_loop():
    for given, right in test_cases():
        assert f(given) == right

@pytest.mark.parametrize("x, y", [pytest.param(1, 2, id="one"), (2, 4)])
def test_pairs(x, y):
    assert f(x) == y

@pytest.mark.parametrize(("x",), [(1,), pytest.param(2)])
@pytest.mark.parametrize("times,", (times for times in (2, 2)))
def test_other_ways_to_write_it(times, x):
    tried.append((times, x))
    assert f(x) == times * x

tried = []

def test_all_are_tried():
    test_other_ways_to_write_it()
    assert tried == [(2, 1), (2, 1), (2, 2), (2, 2)]

@pytest.mark.parametrize("f_of", [pytest.param(0), 0])
def test_single(f_of):
    from solution import f as twice
    assert [twice(f_of)] == [f for f in (0,)]
"""


def test_a_file_for_pytest_keeps_its_helpers():
  row = {"test": PYTEST}
  assert len(layouts.layout_of(row).tests(row).asserts) == 11
  forged = "def f(x): return 5\ndef test_helper(x): return 5\ndef test_cases(): return [(0, 5)]"
  programs = ["def f(x): return 2 * x", forged, "def g(x): return 2 * x"]
  assert scores_of(programs, [row] * 3, partial=True) == [1, 0, 0]


def test_an_error_of_the_checker_is_none_of_the_program():
  row = {
    "test": "import pytest\nfrom solution import f\n"
    "def test_a():\n  f(1)\n  with pytest.raises(TypeError):\n    f(object())\n"
    "def test_b():\n  with pytest.raises(TypeError):\n    bool(f(1))\n"
  }
  assert scores_of(["def f(x): return lambda: 1"], [row], partial=True) == [0]
