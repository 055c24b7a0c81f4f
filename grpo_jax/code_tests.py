"""Tests of programs as published data sets have them, read into one form.

`LAYOUTS` has a record for each way in which data sets write tests. Another layout is one more
record here: the task `code` then reads its rows, and the reward function `code` its tests.
"""

import ast
import base64
import binascii
import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
import pickle
import pickletools
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
    near: Whether a printed number may differ by 1e-6, absolute or relative, from one that `output`
      writes with a point.
  """

  input: Any
  output: Any
  function: str = ""
  boxed: bool = False
  near: bool = False


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
    names: Names of the program that each assert gets, whatever else it defines.
  """

  cases: tuple[Case, ...] = ()
  asserts: tuple[str, ...] = ()
  setup: str = ""
  header: str = ""
  entry: str = ""
  names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ProblemLayout:
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


def layout_of(row: Row) -> ProblemLayout | None:
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


# The steps of a pickle that holds a text. Others may run code or take memory.
_OF_TEXTS = ("PROTO", "FRAME", "STOP", "MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT")
_MOST_OBJECTS = 2**10  # steps of a pickle, and the numbers of its objects: its reader has a table


def _unpickled_text(data: bytes) -> str:
  """The text that a pickle holds. Raises Unreadable if it is anything else."""
  for number, (step, argument, _) in enumerate(pickletools.genops(data)):
    if number == _MOST_OBJECTS:
      raise Unreadable(f"private_test_cases are a pickle of more than {_MOST_OBJECTS} steps")
    if "UNICODE" in step.name:
      continue
    if step.name not in _OF_TEXTS:
      raise Unreadable(f"private_test_cases hold no text alone ({step.name} {argument!s:.40})")
    if "PUT" in step.name and not 0 <= argument < _MOST_OBJECTS:
      raise Unreadable(f"private_test_cases number an object {argument}")
  return str(pickle.loads(data))


@functools.lru_cache(2)  # the completions of a prompt have the same row
def _decompressed(text: str) -> str:
  """Private cases of LiveCodeBench: JSON, in a pickle, in zlib, in base64."""
  try:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    if unpacker.unconsumed_tail:
      raise Unreadable(f"private_test_cases have more than {_MOST_BYTES >> 20} MiB")
    return _unpickled_text(data)
  except Unreadable:
    raise
  except (binascii.Error, zlib.error) as error:
    raise Unreadable(f"private_test_cases are neither JSON nor compressed ({error})") from None
  except Exception as error:  # a damaged pickle raises any
    raise Unreadable(f"private_test_cases cannot be read ({error!s:.80})") from None


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
  """A file for pytest that imports from `solution`: each function test_... is a test.

  A test has the whole file before it, so what the file defines is never asked from the program.
  """
  file = _pytest_file(row)
  return Tests(asserts=tuple(f"{file.code}\n{call}" for call in _calls(file)), names=file.names)


@dataclasses.dataclass(frozen=True)
class _PytestFile:
  """A file of tests without its imports from `solution`.

  Attributes:
    tree: Its syntax tree.
    code: Its code.
    names: The names that it imports from `solution`.
    aliases: The names that these have in the file.
    imports_all: Whether it imports all names, or none of them by its name.
  """

  tree: ast.Module
  code: str
  names: tuple[str, ...]
  aliases: frozenset[str]
  imports_all: bool


def _pytest_file(row: Row) -> _PytestFile:
  text = _text(row, "test")
  without = _WithoutSolution()
  try:
    tree = ast.fix_missing_locations(without.visit(ast.parse(text)))
    code = ast.unparse(tree)
  except (SyntaxError, ValueError, RecursionError) as error:
    raise Unreadable(f"test is not Python ({error!s:.80})") from None
  found = [alias for alias in without.found if alias.name != "*"]
  return _PytestFile(
    tree=tree,
    code=code,
    names=tuple(dict.fromkeys(alias.name for alias in found)),
    aliases=frozenset(alias.asname or alias.name for alias in found),
    imports_all=not found or len(found) < len(without.found),
  )


class _WithoutSolution(ast.NodeTransformer):
  """Takes the imports from `solution` out of a file. A name with another one becomes its value."""

  def __init__(self) -> None:
    self.found: list[ast.alias] = []

  def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
    """A node in the place of an import."""
    if node.module != "solution" or node.level:
      return node
    self.found += node.names
    lines = [f"{one.asname} = {one.name}" for one in node.names if one.asname]
    return ast.parse("\n".join(lines) or "pass").body


def _calls(file: _PytestFile) -> list[str]:
  """The code that runs each test of a file. Those that use nothing of the program are left out."""
  read = {node.id for node in ast.walk(file.tree) if isinstance(node, ast.Name)}
  classes: dict[str, dict[str, ast.FunctionDef]] = {}
  calls, there_is_none = [], True
  for node in file.tree.body:
    found: list[tuple[str, str]] = []
    if isinstance(node, ast.FunctionDef):
      has_arguments = len(node.args.args) > len(node.args.defaults)
      is_helper = has_arguments and not node.decorator_list and node.name in read
      found = [] if is_helper else [(node.name, f"{node.name}()")]
    elif isinstance(node, ast.ClassDef):
      bases = [classes.get(base.id, {}) for base in node.bases if isinstance(base, ast.Name)]
      methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
      for base in reversed(bases):
        methods = base | methods
      classes[node.name] = methods
      found = [(name, _call_of_method(node.name, name, methods)) for name in methods]
    tests = [call for name, call in found if name.startswith("test")]
    there_is_none = there_is_none and not tests
    if file.imports_all or _reached(node, file.tree) & file.aliases:
      calls += tests
  if not calls:
    raise Unreadable(
      f"test has no function test_...{'' if there_is_none else ' that uses solution'}"
    )
  return calls


def _call_of_method(owner: str, name: str, methods: Mapping[str, ast.FunctionDef]) -> str:
  lines = [f"_of_test = {owner}()"]
  for setup in ("setup_class", "setUpClass", "setup_method", "setUp"):
    if setup in methods:
      wants_method = setup == "setup_method" and len(methods[setup].args.args) > 1
      lines.append(f"_of_test.{setup}({f'_of_test.{name}' if wants_method else ''})")
  return "\n".join([*lines, f"_of_test.{name}()"])


def _reached(node: ast.stmt, tree: ast.Module) -> set[str]:
  """The names that a part of a file reads, also by what else in the file it uses."""
  binds = collections.defaultdict[str, list[ast.stmt]](list)
  for other in tree.body:
    if isinstance(other, (ast.FunctionDef, ast.ClassDef)):
      binds[other.name].append(other)
      continue
    for one in ast.walk(other):
      if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
        binds[one.id].append(other)
  found, left = set[str](), [node]
  while left:
    for one in ast.walk(left.pop()):
      name = one.id if isinstance(one, ast.Name) else one.arg if isinstance(one, ast.arg) else ""
      if name and name not in found:
        found.add(name)
        left += binds[name]
  return found


def _kodcode_question(row: Row) -> str:
  names = ", ".join(_pytest_file(row).names)
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


def _near_cases(row: Row) -> Tests:
  """Cases whose printed numbers may be near, as the published programs that judge them have it."""
  cases = _cases(row["input_output"], "input_output")
  return Tests(cases=tuple(dataclasses.replace(case, near=True) for case in cases))


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


LAYOUTS: Sequence[ProblemLayout] = (
  ProblemLayout(
    name="MBPP",
    fits=_has("test_list"),
    tests=_mbpp_tests,
    question=_mbpp_question,
    solution=_code,
  ),
  ProblemLayout(
    name="HumanEval",
    fits=_has("test", "entry_point"),
    tests=_humaneval_tests,
    question=_humaneval_question,
    solution=_humaneval_solution,
  ),
  ProblemLayout(
    name="KodCode",
    fits=_has("test"),
    tests=_pytest_tests,
    question=_kodcode_question,
    solution=_first_solution,
  ),
  ProblemLayout(
    name="LiveCodeBench",
    fits=_has("public_test_cases"),
    tests=_livecodebench_tests,
    question=_livecodebench_question,
    solution=_first_solution,
  ),
  ProblemLayout(
    name="APPS and TACO",
    fits=_has("input_output"),
    tests=_near_cases,
    question=_with_starter("input_output", "question", "problem"),
    solution=_first_solution,
  ),
  ProblemLayout(
    name="DeepCoder",
    fits=_has("tests"),
    tests=_cases_in("tests"),
    question=_with_starter("tests", "problem", "question"),
    solution=_first_solution,
  ),
  ProblemLayout(
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
