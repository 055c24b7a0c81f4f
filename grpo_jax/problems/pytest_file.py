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
  remover = _WithoutSolution()
  try:
    tree = ast.fix_missing_locations(remover.visit(ast.parse(text)))
    code = ast.unparse(tree)
  except (SyntaxError, ValueError, RecursionError) as error:
    raise Unreadable(f"test is not Python ({error!s:.80})") from None
  found = [alias for alias in remover.found if alias.name != "*"]
  return PytestFile(
    tree=tree,
    code=code,
    names=tuple(dict.fromkeys(alias.name for alias in found)),
    aliases=frozenset(alias.asname or alias.name for alias in found),
    imports_all=not found or len(found) < len(remover.found),
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
  with arguments that other code in the file uses is a helper and no test, unless it is decorated,
  because parametrize passes the arguments by itself.

  Raises:
    Unreadable: There are no tests.
  """
  used_names = {node.id for node in ast.walk(file.tree) if isinstance(node, ast.Name)}
  classes: dict[str, dict[str, ast.FunctionDef]] = {}  # each class -> its methods by name
  calls, has_no_tests = [], True
  for node in file.tree.body:
    found: list[tuple[str, str]] = []  # (name of a function or method, code that calls it)
    if isinstance(node, ast.FunctionDef):
      has_arguments = len(node.args.args) > len(node.args.defaults)
      is_helper = has_arguments and not node.decorator_list and node.name in used_names
      found = [] if is_helper else [(node.name, f"{node.name}()")]
    elif isinstance(node, ast.ClassDef):
      bases = [classes.get(base.id, {}) for base in node.bases if isinstance(base, ast.Name)]
      methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
      for base in bases:  # the first base that has a method wins
        methods = base | methods
      classes[node.name] = methods
      found = [(name, _call_of_method(node.name, name, methods)) for name in methods]
    tests = [call for name, call in found if name.startswith("test")]
    has_no_tests = has_no_tests and not tests
    # If no single names were imported, any name may be the program's, so all tests count.
    if file.imports_all or _reached(node, file.tree) & file.aliases:
      calls += tests
  if not calls:
    raise Unreadable(
      f"test has no function test_...{'' if has_no_tests else ' that uses solution'}"
    )
  return calls


def _call_of_method(class_name: str, name: str, methods: Mapping[str, ast.FunctionDef]) -> str:
  """The code that runs test `name` of class `class_name` after the class's setup methods."""
  lines = [f"_of_test = {class_name}()"]
  for setup in ("setup_class", "setUpClass", "setup_method", "setUp"):
    if setup in methods:
      # pytest passes the test method to a setup_method that takes one.
      wants_method = setup == "setup_method" and len(methods[setup].args.args) > 1
      lines.append(f"_of_test.{setup}({f'_of_test.{name}' if wants_method else ''})")
  return "\n".join([*lines, f"_of_test.{name}()"])


def _reached(node: ast.stmt, tree: ast.Module) -> set[str]:
  """The names that a statement uses, directly or through other definitions in the file."""
  definitions = collections.defaultdict[str, list[ast.stmt]](list)  # name -> what defines it
  for top in tree.body:
    if isinstance(top, (ast.FunctionDef, ast.ClassDef)):
      definitions[top.name].append(top)
      continue
    for sub in ast.walk(top):
      if isinstance(sub, ast.Name) and isinstance(sub.ctx, ast.Store):
        definitions[sub.id].append(top)
  found, pending = set[str](), [node]
  while pending:
    for sub in ast.walk(pending.pop()):
      # The name of an argument may be that of a fixture.
      name = sub.id if isinstance(sub, ast.Name) else sub.arg if isinstance(sub, ast.arg) else ""
      if name and name not in found:
        found.add(name)
        pending += definitions[name]
  return found
