"""Decides which names in the tests belong to the program, and which to Python.

The tests and the solution in the data decide that. The program under test does not, so it gains
nothing by defining a name that the tests use as a helper.
"""

import ast
import builtins
from collections.abc import Sequence
import contextlib
import sys
from typing import Any

_BUILTINS = frozenset(dir(builtins))
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SHORT = {"np": "numpy"}  # modules by their usual short names


def names_read(tree: ast.AST) -> list[str]:
  """The names that some code reads and does not define, in the order of `ast.walk`.

  A name that the code defines anywhere, in any scope and even after it is read, counts as defined.
  """
  nodes = list(ast.walk(tree))
  names = [node for node in nodes if isinstance(node, ast.Name)]
  defined = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
  defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
  defined |= {  # `import a.b` defines a
    (node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)
  }
  defined |= {
    node.name
    for node in nodes
    if isinstance(node, (*_DEFINITIONS, ast.ExceptHandler)) and node.name
  }
  return list(dict.fromkeys(node.id for node in names if node.id not in defined))


def foreign(tree: ast.AST, own: dict[str, Any]) -> list[str]:
  """The names that some code reads, except for builtins and names that it or `own` defines."""
  return [name for name in names_read(tree) if name not in _BUILTINS and name not in own]


def name_under_test(
  trees: Sequence[ast.AST], own: dict[str, Any], solution: ast.Module | None
) -> str:
  """The builtin that the program redefines, for tests that read no foreign name.

  It is the only name in the tests (`trees`) that the solution defines, or, without a solution, the
  only builtin in the tests that `own`, the names defined so far, lacks. "" if there is not exactly
  one: then the tests use Python's builtins.
  """
  read = {name for tree in trees for name in names_read(tree)}
  candidates = read & (defined_by(solution) if solution else _BUILTINS - set(own))
  return candidates.pop() if len(candidates) == 1 else ""


def helpers(
  trees: Sequence[ast.AST], own: dict[str, Any], solution: ast.Module | None
) -> dict[str, Any]:
  """Imports what the tests read without importing it: the solution's imports and Python's modules.

  A name counts as a module of Python if the tests only read attributes of it, as in `math.sqrt`.
  `trees` are the tests, and `own` are names that are already defined. Names that the solution
  defines are left to the program. Returns the values of the names.
  """
  defined = defined_by(solution) if solution else set()
  wanted = {name for tree in trees for name in foreign(tree, own)} - defined
  found: dict[str, Any] = {}
  imports = [f"import {_SHORT.get(name, name)} as {name}" for name in _modules(trees, wanted)]
  for node in solution.body if solution and wanted else ():
    if isinstance(node, (ast.Import, ast.ImportFrom)):
      imports.append(ast.unparse(node))
  for line in imports:
    with contextlib.suppress(Exception):  # if the import fails, the name belongs to the program
      exec(line, found)
  return {name: found[name] for name in wanted if name in found}


def defined_by(solution: ast.Module) -> set[str]:
  """The names of the functions, classes and variables that a program defines at the top level."""
  names = {node.name for node in solution.body if isinstance(node, _DEFINITIONS)}
  for node in solution.body:
    if not isinstance(node, _DEFINITIONS):
      names |= {
        one.id
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
      }
  return names


def _modules(trees: Sequence[ast.AST], names: set[str]) -> list[str]:
  """Which of `names` are modules of Python. The tests only read attributes of such names."""
  nodes = [node for tree in trees for node in ast.walk(tree)]
  read = [node.id for node in nodes if isinstance(node, ast.Name)]
  as_modules = [
    node.value.id
    for node in nodes
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
  ]
  known = {name for name in names if _SHORT.get(name, name) in {*sys.stdlib_module_names, "numpy"}}
  return sorted(name for name in known if read.count(name) == as_modules.count(name))
