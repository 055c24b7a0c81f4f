"""Which names of the tests are the program's, and which are Python's.

The tests and the row's own solution decide that, and never the program, so a program gains nothing
by defining a name that the tests use as a helper.
"""

import ast
import builtins
from collections.abc import Sequence
import contextlib
import sys
from typing import Any

_BUILTINS = frozenset(dir(builtins))
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SHORT = {"np": "numpy"}


def names_read(tree: ast.AST) -> list[str]:
  """The names that some code reads and does not define."""
  nodes = list(ast.walk(tree))
  names = [node for node in nodes if isinstance(node, ast.Name)]
  defined = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
  defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
  defined |= {
    (node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)
  }
  defined |= {
    node.name
    for node in nodes
    if isinstance(node, (*_DEFINITIONS, ast.ExceptHandler)) and node.name
  }
  return list(dict.fromkeys(node.id for node in names if node.id not in defined))


def foreign(tree: ast.AST, own: dict[str, Any]) -> list[str]:
  """The names that some code reads and that neither it, nor `own`, nor Python defines."""
  return [name for name in names_read(tree) if name not in _BUILTINS and name not in own]


def name_under_test(
  trees: Sequence[ast.AST], own: dict[str, Any], solution: ast.Module | None
) -> str:
  """The name of Python's that the program defines anew, for tests that read no foreign name.

  It is the only one that the solution defines, or, where there is no solution, the only builtin
  that the tests read. "" if that leaves a choice: then the tests mean what Python has.
  """
  read = {name for tree in trees for name in names_read(tree)}
  candidates = read & (defined_by(solution) if solution else _BUILTINS - set(own))
  return candidates.pop() if len(candidates) == 1 else ""


def helpers(
  trees: Sequence[ast.AST], own: dict[str, Any], solution: ast.Module | None
) -> dict[str, Any]:
  """The names that tests read without importing them: the solution's imports, and Python's modules.

  A name counts as a module of Python if the tests only read its attributes, as in `math.sqrt`.
  """
  defined = defined_by(solution) if solution else set()
  wanted = {name for tree in trees for name in foreign(tree, own)} - defined
  found: dict[str, Any] = {}
  imports = [f"import {_SHORT.get(name, name)} as {name}" for name in _modules(trees, wanted)]
  for node in solution.body if solution and wanted else ():
    if isinstance(node, (ast.Import, ast.ImportFrom)):
      imports.append(ast.unparse(node))
  for line in imports:
    with contextlib.suppress(Exception):  # then the name is the program's
      exec(line, found)
  return {name: found[name] for name in wanted if name in found}


def defined_by(solution: ast.Module) -> set[str]:
  """The names that a program gives to functions, classes and values of its own."""
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
  """The names that stand for modules of Python."""
  nodes = [node for tree in trees for node in ast.walk(tree)]
  read = [node.id for node in nodes if isinstance(node, ast.Name)]
  as_modules = [
    node.value.id
    for node in nodes
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
  ]
  known = {name for name in names if _SHORT.get(name, name) in {*sys.stdlib_module_names, "numpy"}}
  return sorted(name for name in known if read.count(name) == as_modules.count(name))
