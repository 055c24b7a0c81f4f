"""The habits of the code that a tool can check: format, lint, types and the sizes of rooms."""

import ast
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "grpo_jax").rglob("*.py"))
# Longer than 400 lines. Each says why at its top.
LONG_FILES = {"grpo_jax/config.py"}


def run(*command):
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr


def test_the_code_is_formatted():
  run(sys.executable, "-m", "ruff", "format", "--check", ".")


def test_the_linter_is_satisfied():
  run(sys.executable, "-m", "ruff", "check", ".")


def test_types_are_annotated_and_agree():
  run(sys.executable, "-m", "mypy")


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_functions_and_classes_are_small(path):
  text = path.read_text()
  name = str(path.relative_to(ROOT))
  assert text.count("\n") <= 400 or name in LONG_FILES, f"{name} has over 400 lines"
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.FunctionDef):
      length = node.end_lineno - node.lineno + 1
      assert length <= 60, f"{name}:{node.lineno} {node.name} has {length} lines"
    if isinstance(node, ast.ClassDef):
      methods = [
        child.name
        for child in node.body
        if isinstance(child, ast.FunctionDef) and not child.name.startswith("_")
      ]
      assert len(methods) <= 12, f"{name}:{node.lineno} {node.name}: {methods}"


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
