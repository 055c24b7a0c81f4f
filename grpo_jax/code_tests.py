"""Tests of programs as published data sets have them, read into one form.

`LAYOUTS` has a record for each way in which data sets write tests. Another layout is one more
record here: the task `code` then reads its rows, and the reward function `code` its tests.
"""

import ast
import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import io
import json
import pickle
from typing import Any
import zlib

Row = Mapping[str, Any]

_MOST_BYTES = 2**28  # of the cases of a row, after they were decompressed


class Unreadable(ValueError):
  """The tests of a row cannot be read. The text says why."""


@dataclasses.dataclass(frozen=True)
class Case:
  """An input of a program, and what the program should make of it.

  Attributes:
    input: The text on standard input, or the arguments of a call.
    output: The text on standard output, or the value that the call returns.
    function: The function of the program to call, or a method of its class Solution. "" runs the
      whole program.
    boxed: Whether `output` may be a list with the value in it, as APPS writes values.
  """

  input: Any
  output: Any
  function: str = ""
  boxed: bool = False


@dataclasses.dataclass(frozen=True)
class Tests:
  """The tests of a program: `cases`, or `asserts` where there are none.

  Attributes:
    cases: Inputs with their outputs.
    asserts: Programs that call the one under test, and raise an exception if it is wrong.
    setup: Code that the asserts need before them.
    header: Code before the program, such as imports and the head of a function.
    entry: The function that the header begins. A program that does not define it goes on where the
      header ends.
  """

  cases: tuple[Case, ...] = ()
  asserts: tuple[str, ...] = ()
  setup: str = ""
  header: str = ""
  entry: str = ""


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a data set writes programming problems.

  Attributes:
    name: The data set.
    fits: Whether a row is written so.
    tests: The tests of such a row. Raises Unreadable.
    question: The question for the policy: a text or messages. Raises Unreadable.
    solution: A program that is right, or "".
  """

  name: str
  fits: Callable[[Row], bool]
  tests: Callable[[Row], Tests]
  question: Callable[[Row], Any]
  solution: Callable[[Row], str]


def layout_of(row: Row) -> Layout | None:
  """The first layout that a row fits. None if it has no tests."""
  return next((layout for layout in LAYOUTS if layout.fits(row)), None)


def _has(*columns: str) -> Callable[[Row], bool]:
  return lambda row: all(row.get(name) is not None for name in columns)


def _text(row: Row, *names: str) -> str:
  """The first of some columns that is a text."""
  for name in names:
    if isinstance(row.get(name), str):
      return row[name]
  raise Unreadable(f"it has no text {' or '.join(names)}")


def _json(value: Any, name: str) -> Any:
  """A value, or what its text holds in JSON."""
  if not isinstance(value, str):
    return value
  if not value.strip():
    raise Unreadable(f"{name} is empty: leave such rows out")
  try:
    return json.loads(value)
  except (ValueError, RecursionError) as error:
    raise Unreadable(f"{name} is not JSON ({error!s:.80})") from None


# Cases: texts for standard input and output, or arguments and values.


def _cases(given: Any, name: str, function: str = "") -> tuple[Case, ...]:
  """The cases in a value or in its text in JSON.

  It is an object with the lists `inputs` and `outputs`, and perhaps `fn_name` (APPS, TACO, PRIME),
  or a list of objects with `input` and `output` (LiveCodeBench, DeepCoder).

  Args:
    given: The value.
    name: Its column, for messages.
    function: The name that a case calls whose type is functional.
  """
  given = _json(given, name)
  if isinstance(given, Mapping):
    function = given.get("fn_name") or ""
    inputs, outputs = (given.get(key, given.get(key[:-1])) for key in ("inputs", "outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list):
      raise Unreadable(f"{name} has no lists inputs and outputs")
    if len(inputs) != len(outputs):
      raise Unreadable(f"{name} has {len(inputs)} inputs and {len(outputs)} outputs")
    cases = [_case(one, other, function) for one, other in zip(inputs, outputs)]
  elif isinstance(given, list):
    cases = [_typed_case(one, name, function) for one in given]
  else:
    raise Unreadable(f"{name} has no cases")
  if not cases:
    raise Unreadable(f"{name} has no cases")
  return tuple(cases)


def _typed_case(case: Any, name: str, function: str) -> Case:
  """A case that says itself what it is: stdin, functional or function_call."""
  if not isinstance(case, Mapping) or not {"input", "output"} <= case.keys():
    raise Unreadable(f"{name} has a case without input and output")
  kind = case.get("testtype") or case.get("type")
  metadata = case.get("metadata")
  named = metadata.get("func_name") if isinstance(metadata, Mapping) else None
  function = case.get("fn_name") or named or function
  if kind == "functional":
    if not function:
      raise Unreadable(f"{name} has a case that calls a function, and nothing names it")
    arguments = [_json(line, name) for line in str(case["input"]).split("\n") if line.strip()]
    return Case(arguments, _json(case["output"], name), function)
  is_call = kind == "function_call" or (kind is None and function)
  return _case(case["input"], case["output"], function if is_call else "")


def _case(given: Any, expected: Any, function: str) -> Case:
  if not function:
    return Case(_lines(given), _lines(expected))
  arguments = given if isinstance(given, list) else [given]
  return Case([_with_numbers(one) for one in arguments], expected, function, boxed=True)


def _lines(value: Any) -> str:
  """A text, which some rows write as a list of lines."""
  return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _with_numbers(value: Any) -> Any:
  """An argument as APPS means it: JSON made texts of the keys of a dict that are numbers."""
  if isinstance(value, Mapping) and value:
    try:
      return {int(key): item for key, item in value.items()}
    except ValueError:
      return value
  return value


class _TextsOnly(pickle.Unpickler):
  """Reads texts and plain values. A pickle that names a class or a function is refused."""

  def find_class(self, module: str, name: str) -> Any:
    raise pickle.UnpicklingError(f"it names {module}.{name}")

  def persistent_load(self, pid: Any) -> Any:
    raise pickle.UnpicklingError("it names another object")


@functools.lru_cache(2)  # the completions of a prompt have the same row
def _decompressed(text: str) -> str:
  """Private cases of LiveCodeBench: JSON, in a pickle, in zlib, in base64."""
  try:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    if unpacker.unconsumed_tail:
      raise Unreadable(f"private_test_cases have more than {_MOST_BYTES >> 20} MiB")
    found = _TextsOnly(io.BytesIO(data)).load()
  except Unreadable:
    raise
  except (binascii.Error, zlib.error) as error:
    raise Unreadable(f"private_test_cases are neither JSON nor compressed ({error})") from None
  except Exception as error:  # a damaged pickle raises any
    raise Unreadable(f"private_test_cases cannot be read ({error!s:.80})") from None
  if not isinstance(found, str):
    raise Unreadable("private_test_cases hold no text")
  return found


# Questions and solutions.

_WHOLE = "Write a Python program that reads standard input and writes to standard output."
_IN_A_BLOCK = " Give it in one block of code, after ```python."


def _asked(text: str, function: str, starter: Any) -> str:
  """A problem, and what kind of program solves it."""
  if isinstance(starter, str) and starter.strip():
    begin = f"Write Python code that completes this:\n\n```python\n{starter.rstrip()}\n```\n\n"
    return f"{text.strip()}\n\n{begin}{_IN_A_BLOCK.strip()}\n"
  what = f"Write Python code that defines {function}." if function else _WHOLE
  return f"{text.strip()}\n\n{what}{_IN_A_BLOCK}\n"


def _first_solution(row: Row) -> str:
  """The first of `solutions`, which may be a text in JSON, or `solution`."""
  found = row.get("solutions") or row.get("solution")
  if isinstance(found, str) and found.lstrip().startswith("["):
    try:
      found = json.loads(found)
    except (ValueError, RecursionError):
      return found
  if isinstance(found, list):
    found = found[0] if found else ""
  return found if isinstance(found, str) else ""


def _with_starter(column: str, *names: str) -> Callable[[Row], str]:
  """The question of rows whose cases are in `column`, and whose problem is in one of `names`."""

  def question(row: Row) -> str:
    cases = _cases(row[column], column)
    return _asked(_text(row, *names), cases[0].function, row.get("starter_code"))

  return question


# MBPP.


def _mbpp_tests(row: Row) -> Tests:
  tests, setup = row["test_list"], row.get("test_setup_code") or ""
  tests = [tests] if isinstance(tests, str) else tests
  setup = [setup] if isinstance(setup, str) else setup
  for name, value in (("test_list", tests), ("test_setup_code", setup)):
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
      raise Unreadable(f"{name} must be a text or a list of texts")
  return Tests(asserts=tuple(tests), setup="\n".join([*_imports(row), *setup]).strip())


def _imports(row: Row) -> list[str]:
  """The lines by which tests import modules in the sanitized MBPP."""
  imports = row.get("test_imports") or []
  imports = [imports] if isinstance(imports, str) else imports
  if not isinstance(imports, list) or not all(isinstance(line, str) for line in imports):
    raise Unreadable("test_imports must be a list of lines, each a text")
  return imports


def _mbpp_question(row: Row) -> str:
  """The text and the first test, because the tests say how the function is called."""
  text = _text(row, "text", "prompt")
  if isinstance(row["test_list"], str):
    raise Unreadable("test_list is a text; it must be a list of tests")
  tests = _mbpp_tests(row).asserts
  if not tests:
    raise Unreadable("test_list must be a list of tests, each a text")
  return f"{text}\n\nYour code should pass this test, and others like it:\n\n{tests[0]}\n"


def _code(row: Row) -> str:
  code = row.get("code") or ""
  if not isinstance(code, str):
    raise Unreadable("code must be a text")
  return code


# HumanEval.


def _humaneval_tests(row: Row) -> Tests:
  entry, test = _text(row, "entry_point"), _text(row, "test")
  header = row.get("prompt")
  return Tests(
    asserts=(f"{test}\ncheck({entry})",),
    header=header if isinstance(header, str) else "",
    entry=entry,
  )


def _humaneval_question(row: Row) -> str:
  head = _text(row, "prompt").rstrip()
  return (
    f"Complete this Python function:\n\n```python\n{head}\n```\n\n"
    "Give the whole function in one block of code, after ```python.\n"
  )


def _humaneval_solution(row: Row) -> str:
  end = row.get("canonical_solution")
  return f"{row.get('prompt')}{end}" if isinstance(end, str) else ""


# KodCode.


def _pytest_tests(row: Row) -> Tests:
  """A file for pytest that imports from `solution`: each function test_... is a test."""
  tree, setup, _ = _pytest_parts(row)
  tests = []
  for node in tree.body:
    names = [node] if isinstance(node, ast.FunctionDef) else []
    if isinstance(node, ast.ClassDef):
      names = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    prefix = f"{node.name}()." if isinstance(node, ast.ClassDef) else ""
    for one in names:
      if one.name.startswith("test"):
        tests.append(f"{ast.unparse(node)}\n{prefix}{one.name}()")
  if not tests:
    raise Unreadable("test has no function test_...")
  return Tests(asserts=tuple(f"{setup}\n{test}" for test in tests))


def _pytest_parts(row: Row) -> tuple[ast.Module, str, list[str]]:
  """The file of a row, what it has beside its tests, and the names that it wants of `solution`.

  An import from `solution` makes no name: the checker asks the program for those that are left.
  """
  try:
    tree = ast.parse(_text(row, "test"))
  except (SyntaxError, ValueError, RecursionError) as error:
    raise Unreadable(f"test is not Python ({error!s:.80})") from None
  wanted, lines = list[str](), list[str]()
  for node in tree.body:
    if isinstance(node, ast.ImportFrom) and node.module == "solution":
      wanted += [alias.name for alias in node.names if alias.name != "*"]
      lines += [f"{alias.asname} = {alias.name}" for alias in node.names if alias.asname]
    elif not _is_test(node):
      lines.append(ast.unparse(node))
  return tree, "\n".join(lines), wanted


def _is_test(node: ast.stmt) -> bool:
  if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
    return False
  return node.name.lower().startswith("test")


def _kodcode_question(row: Row) -> str:
  names = ", ".join(_pytest_parts(row)[2])
  return _asked(_text(row, "question", "problem"), names, None)


# LiveCodeBench.


def _livecodebench_tests(row: Row) -> Tests:
  function = _livecodebench_function(row)
  cases = _cases(row["public_test_cases"], "public_test_cases", function)
  private = row.get("private_test_cases")
  if isinstance(private, str) and not private.lstrip().startswith("["):
    private = _decompressed(private) if private.strip() else "[]"
  private = _json(private, "private_test_cases")
  if private:
    cases += _cases(private, "private_test_cases", function)
  return Tests(cases=cases)


def _livecodebench_function(row: Row) -> str:
  metadata = _json(row.get("metadata") or "{}", "metadata")
  return (metadata.get("func_name") or "") if isinstance(metadata, Mapping) else ""


def _livecodebench_question(row: Row) -> str:
  function = _livecodebench_function(row)
  _cases(row["public_test_cases"], "public_test_cases", function)
  return _asked(_text(row, "question_content"), function, row.get("starter_code"))


# APPS, TACO, DeepCoder, PRIME.


def _cases_in(column: str) -> Callable[[Row], Tests]:
  return lambda row: Tests(cases=_cases(row[column], column))


_GROUND_TRUTH = "reward_model.ground_truth"


def _ground_truth(row: Row) -> Any:
  model = row.get("reward_model")
  return model.get("ground_truth") if isinstance(model, Mapping) else None


def _has_ground_truth(row: Row) -> bool:
  """Whether it looks like cases. In other rows of the same files, it is the answer of a sum."""
  found = _ground_truth(row)
  text = found.lstrip()[:1] if isinstance(found, str) else ""
  return text in ("{", "[") if text else isinstance(found, (Mapping, list))


def _prime_question(row: Row) -> Any:
  prompt = row.get("prompt")
  _cases(_ground_truth(row), _GROUND_TRUTH)
  if not isinstance(prompt, (str, list)):
    raise Unreadable("it has no text or messages prompt")
  return prompt


LAYOUTS: Sequence[Layout] = (
  Layout(
    name="MBPP",
    fits=_has("test_list"),
    tests=_mbpp_tests,
    question=_mbpp_question,
    solution=_code,
  ),
  Layout(
    name="HumanEval",
    fits=_has("test", "entry_point"),
    tests=_humaneval_tests,
    question=_humaneval_question,
    solution=_humaneval_solution,
  ),
  Layout(
    name="KodCode",
    fits=_has("test"),
    tests=_pytest_tests,
    question=_kodcode_question,
    solution=_first_solution,
  ),
  Layout(
    name="LiveCodeBench",
    fits=_has("public_test_cases"),
    tests=_livecodebench_tests,
    question=_livecodebench_question,
    solution=_first_solution,
  ),
  Layout(
    name="APPS and TACO",
    fits=_has("input_output"),
    tests=_cases_in("input_output"),
    question=_with_starter("input_output", "question", "problem"),
    solution=_first_solution,
  ),
  Layout(
    name="DeepCoder",
    fits=_has("tests"),
    tests=_cases_in("tests"),
    question=_with_starter("tests", "problem", "question"),
    solution=_first_solution,
  ),
  Layout(
    name="PRIME",
    fits=_has_ground_truth,
    tests=lambda row: Tests(cases=_cases(_ground_truth(row), _GROUND_TRUTH)),
    question=_prime_question,
    solution=_first_solution,
  ),
)

# The columns that have tests, of which each layout has one, and all that tests are read of.
MAIN_COLUMNS = (
  "test_list",
  "test",
  "public_test_cases",
  "input_output",
  "tests",
  "reward_model",
)
TEST_COLUMNS = (
  *MAIN_COLUMNS,
  *("test_setup_code", "test_imports", "entry_point", "prompt", "private_test_cases", "metadata"),
)
