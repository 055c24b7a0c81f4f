"""Reads a pytest file as tests of a program, which the file imports as the module `solution`."""

import ast
import collections
from collections.abc import Mapping
import dataclasses
from typing import Any

from grpo_jax.problems.programs import ProgramTests, Row, Unreadable, text_in


def pytest_tests(row: Row) -> ProgramTests:
  """Reads the functions test_... in the column `test`, a file that imports from `solution`.

  Each assert is the whole file and the call of one test, so names that the file defines are never
  taken from the program.
  """
  file = pytest_file(row)
  asserts = tuple(f"{file.code}\n{call}" for call in _calls(file))
  return ProgramTests(asserts=asserts, names=file.names)


@dataclasses.dataclass(frozen=True)
class PytestFile:
  """A file of tests after its imports from `solution` were removed.

  Attributes:
    tree: The syntax tree.
    code: The code.
    names: The names that the file imported from `solution`.
    aliases: The names under which the file uses them.
    imports_all: Whether the file imported `*`, or no single name.
  """

  tree: ast.Module
  code: str
  names: tuple[str, ...]
  aliases: frozenset[str]
  imports_all: bool


def pytest_file(row: Row) -> PytestFile:
  """Parses the file in the column `test` of a row. Raises Unreadable if it is not Python."""
  text = text_in(row, "test")
  without = _WithoutSolution()
  try:
    tree = ast.fix_missing_locations(without.visit(ast.parse(text)))
    code = ast.unparse(tree)
  except (SyntaxError, ValueError, RecursionError) as error:
    raise Unreadable(f"test is not Python ({error!s:.80})") from None
  found = [alias for alias in without.found if alias.name != "*"]
  return PytestFile(
    tree=tree,
    code=code,
    names=tuple(dict.fromkeys(alias.name for alias in found)),
    aliases=frozenset(alias.asname or alias.name for alias in found),
    imports_all=not found or len(found) < len(without.found),
  )


class _WithoutSolution(ast.NodeTransformer):
  """Removes imports from `solution`. `import name as alias` becomes `alias = name`."""

  def __init__(self) -> None:
    self.found: list[ast.alias] = []

  def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
    """Returns the nodes that replace an import."""
    if node.module != "solution" or node.level:
      return node
    self.found += node.names
    lines = [f"{one.asname} = {one.name}" for one in node.names if one.asname]
    return ast.parse("\n".join(lines) or "pass").body


def _calls(file: PytestFile) -> list[str]:
  """Returns the code that calls each test of a file, except tests that do not use the program.

  A test is a function test_... or a method test_... of a class, also an inherited one. A function
  with arguments that other code in the file uses is a helper and no test, unless it is decorated.

  Raises:
    Unreadable: There are no tests.
  """
  read = {node.id for node in ast.walk(file.tree) if isinstance(node, ast.Name)}
  classes: dict[str, dict[str, ast.FunctionDef]] = {}  # each class -> its methods by name
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
  """The code that runs test `name` of class `owner` after the class's setup methods."""
  lines = [f"_of_test = {owner}()"]
  for setup in ("setup_class", "setUpClass", "setup_method", "setUp"):
    if setup in methods:
      wants_method = setup == "setup_method" and len(methods[setup].args.args) > 1
      lines.append(f"_of_test.{setup}({f'_of_test.{name}' if wants_method else ''})")
  return "\n".join([*lines, f"_of_test.{name}()"])


def _reached(node: ast.stmt, tree: ast.Module) -> set[str]:
  """The names that a statement uses, directly or through other definitions in the file."""
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
