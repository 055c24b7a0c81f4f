"""The habits of the code that a tool can check: format, lint, types, functions and classes."""

import ast
import collections
from pathlib import Path
import re
import subprocess
import sys
import warnings

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "grpo_jax").rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def run(*command):
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr


def test_the_code_is_formatted():
  run(sys.executable, "-m", "ruff", "format", "--check", ".")


def test_the_linter_is_satisfied():
  run(sys.executable, "-m", "ruff", "check", ".")


def test_types_are_annotated_and_agree():
  run(sys.executable, "-m", "mypy")


def test_large_functions_and_classes_are_shown():
  """They are looked at and fail nothing: a subject decides how much belongs together."""
  for path in PACKAGE:
    for excess in excesses(ast.parse(path.read_text())):
      warnings.warn(f"{path.relative_to(ROOT)}: {excess}", stacklevel=1)


def excesses(tree):
  """The functions and classes of a module that are large, in words."""
  for node in ast.walk(tree):
    if isinstance(node, FUNCTIONS):
      # Parameters that are only named do not count: a config sets those of reward functions.
      named = [parameter.arg for parameter in node.args.posonlyargs + node.args.args]
      parameters = [name for name in named if name not in ("self", "cls")]
      lines = node.end_lineno - node.lineno + 1
      if lines > 60:
        yield f"{node.name} has {lines} lines"
      if len(parameters) > 6:
        yield f"{node.name} has {len(parameters)} parameters"
    if isinstance(node, ast.ClassDef):
      names = [child.name for child in node.body if isinstance(child, FUNCTIONS)]
      public = {name for name in names if not name.startswith("_")}
      if len(public) > 12:
        yield f"{node.name} has {len(public)} public methods"


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_is_too_large_is_found(kind):
  def found(text):
    return list(excesses(ast.parse(text)))

  body = "  pass\n" * 59
  assert found(f"{kind} f():\n{body}") == []
  assert found(f"{kind} f():\n{body}  pass\n") == ["f has 61 lines"]
  assert found(f"{kind} f(self, a, b, /, c, d, e, f, *, g, h): pass") == []
  assert found(f"{kind} f(a, b, /, c, d, e, f, g=0): pass") == ["f has 7 parameters"]
  methods = "".join(f"  {kind} f{i}(self): pass\n" for i in range(12))
  assert found(f"class A:\n  def _f(self): pass\n{methods}") == []
  assert found(f"class A:\n{methods}  {kind} g(self): pass") == ["A has 13 public methods"]


# Names that once stood for several functions of the package, and the one that they stand for now.
ONE_MEANING = {
  "pass_at_k": "algo/advantages/answers.py",
  "unbiased_pass_at_k": "evaluation/estimators.py",
  "check_algo": "algo/checks.py",
  "check_messages": "data/tokenizers/chat.py",
}


@pytest.mark.parametrize("name, file", ONE_MEANING.items())
def test_a_name_stands_for_one_function(name, file):
  found = [path for path in PACKAGE if f"\ndef {name}(" in path.read_text()]
  assert found == [ROOT / "grpo_jax" / file]


@pytest.mark.parametrize("file", ["algo/checks.py", "data/tokenizers/chat.py"])
def test_a_check_says_what_it_checks(file):
  assert "\ndef check(" not in (ROOT / "grpo_jax" / file).read_text()


def test_a_public_class_name_is_defined_once():
  modules = {str(path.relative_to(ROOT)): path.read_text() for path in PACKAGE}
  assert defined_twice(modules) == {}


def defined_twice(modules):
  """The files of each public class name that several classes have.

  Args:
    modules: The code of each module by its file.
  """
  files = collections.defaultdict(list)
  for file, code in modules.items():
    for node in ast.walk(ast.parse(code)):
      if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        files[node.name].append(file)
  return {name: found for name, found in files.items() if len(found) > 1}


def test_a_class_name_with_two_meanings_is_found():
  one, two = "class A:\n  class B: pass", "class B: pass\nclass _C: pass"
  assert defined_twice({"one.py": one, "two.py": two}) == {"B": ["one.py", "two.py"]}
  assert defined_twice({"two.py": two, "three.py": "class _C: pass"}) == {}


# These beginnings let the reader guess which thing is meant: "What a layer keeps", "rows: Of [P]".
VAGUE = re.compile(
  r"(?:\A|^\s*(?:Returns|Yields):\n\s*|^\s*\*{0,2}\w+(?:, \w+)*: )"
  r"((?:What|Of|That of|Those of|Theirs|The like)\b.*)",
  re.MULTILINE,
)


@pytest.mark.parametrize(
  "path",
  PACKAGE,
  ids=lambda path: str(path.relative_to(ROOT)),
)
def test_docstrings_name_their_subject(path):
  found = list(vague_lines(ast.parse(path.read_text())))
  assert not found, f"{path.relative_to(ROOT)}: name the thing that is meant in {found}"


def vague_lines(tree):
  """The lines of a module's docstrings that begin with a word of `VAGUE`."""
  for node in ast.walk(tree):
    if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
      yield from VAGUE.findall(ast.get_docstring(node) or "")


def test_a_docstring_without_a_subject_is_found():
  def found(docstring):
    return list(vague_lines(ast.parse(f'def f(rows):\n  """{docstring}"""')))

  assert found("What a row keeps.") == ["What a row keeps."]
  assert found("Keeps.\n\n  Args:\n    rows: Of the batch.\n  ") == ["Of the batch."]
  assert found("Keeps.\n\n  Args:\n    a, b: Those of rows.\n    **c: The like.\n  ") == [
    "Those of rows.",
    "The like.",
  ]
  assert found("Keeps.\n\n  Returns:\n    What is kept.\n  ") == ["What is kept."]
  assert found("Whatever.\n\n  Args:\n    rows: The rows. What follows is padding.\n  ") == []
