"""Checks that the letters in the names of arrays are their axes, while tests run the code.

`advantages_PGT` must have three axes. P is one size in all arrays of a call, and in an int `P`. A
digit is an axis of that size. The arrays of a struct must agree too. A stack of structs has more
axes in front, the same ones in every array.

chex and jaxtyping do not read names: they check what a call or an annotation says once more. A
profiler made the tests of the learner a third slower even when it looked at nothing. So this adds a
check after each assignment while Python imports a module.
"""

import ast
import builtins
import dataclasses
import functools
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
import re
import sys

PACKAGE = Path(__file__).parents[1] / "grpo_jax"
ROOMS = ("algo", "learner", "sampler", "rollouts", "programs", "evaluation", "serving", "types.py")
CHECK = "__check_letters__"  # a builtin, so that a rewritten module imports nothing


class WrongLetters(AssertionError):
  """An array has other axes than the letters of its name say."""


class Finder(MetaPathFinder):
  """Makes Python import the modules of ROOMS through `Loader`."""

  def find_spec(self, fullname, path, target=None):
    spec = PathFinder.find_spec(fullname, path) if fullname.startswith("grpo_jax.") else None
    if spec and spec.origin and in_rooms(spec.origin):
      spec.loader = Loader(fullname, spec.origin)
    return spec


def in_rooms(file):
  return any(Path(file).is_relative_to(PACKAGE / room) for room in ROOMS)


class Loader(SourceFileLoader):
  """Compiles a module with checks. Nothing is cached, so that no other process finds them."""

  def get_code(self, fullname):
    return checked(self.get_data(self.path), self.path)


def install():
  """From now on, modules of ROOMS check themselves."""
  setattr(builtins, CHECK, check)
  sys.meta_path.insert(0, Finder())


def checked(source, file):
  """The code of a module whose functions check their arguments, variables and results."""
  return compile(ast.fix_missing_locations(AddChecks().visit(ast.parse(source))), file, "exec")


class AddChecks(ast.NodeTransformer):
  """Writes check(locals(), "FUNCTION:LINE") after assignments, and around results in returns."""

  function = ""

  def visit_FunctionDef(self, node):
    outer, self.function = self.function, node.name
    self.generic_visit(node)
    node.body.insert(1 if ast.get_docstring(node) else 0, self.statement(node))
    self.function = outer
    return node

  def visit_Assign(self, node):
    names = [name.id for name in ast.walk(node) if isinstance(name, ast.Name)]
    is_checked = self.function and any(letters(name) or is_size(name) for name in names)
    return [node, self.statement(node)] if is_checked else node

  visit_AugAssign = visit_AnnAssign = visit_Assign

  def visit_For(self, node):
    self.generic_visit(node)
    if self.function:
      node.body.insert(0, self.statement(node))
    return node

  def visit_Return(self, node):
    node.value = self.call(node, node.value or ast.Constant(None))
    return node

  def statement(self, node):
    return ast.copy_location(ast.Expr(self.call(node)), node)

  def call(self, node, *result):
    place = ast.Constant(f"{self.function}:{node.lineno}")
    variables = ast.Call(ast.Name("locals", ast.Load()), [], [])
    call = ast.Call(ast.Name(CHECK, ast.Load()), [variables, place, *result], [])
    return ast.copy_location(call, node)


def check(variables, place, result=None):
  """Raises WrongLetters if variables disagree with their names. Returns the result."""
  function = place.partition(":")[0]
  sizes = {}
  for name, value in {**variables, function: result}.items():
    if is_size(name) and type(value) is int:
      agree(sizes, name, value, name, place)
    elif letters(name) and hasattr(value, "shape"):
      agree_all(sizes, letters(name), value.shape, name, place)
    else:
      for part in value if type(value) is tuple else (value,):
        check_struct(part, name, place)
  return result


def check_struct(struct, name, place):
  """Raises WrongLetters if arrays of the struct disagree, or of a struct in it."""
  sizes, front = {}, None
  for field in field_names(type(struct)):
    value = getattr(struct, field)
    if letters(field) and hasattr(value, "shape"):
      more = max(0, len(value.shape) - len(letters(field)))
      front = value.shape[:more] if front is None else front
      if value.shape[:more] != front:
        raise WrongLetters(f"{place}: {name}.{field} is {value.shape} in a stack of {front}")
      agree_all(sizes, letters(field), value.shape[more:], f"{name}.{field}", place)
    else:
      check_struct(value, f"{name}.{field}", place)


def agree_all(sizes, axes, shape, name, place):
  if len(shape) != len(axes):
    raise WrongLetters(f"{place}: {name} has {len(shape)} axes, {tuple(shape)}")
  for letter, size in zip(axes, shape):
    agree(sizes, letter, size, name, place)


def agree(sizes, letter, size, name, place):
  expected, other = sizes.setdefault(letter, (size, name))
  if letter.isdigit():
    expected, other = int(letter), "its name"
  if size != expected:
    raise WrongLetters(f"{place}: {letter} is {size} in {name} and {expected} in {other}")


@functools.lru_cache(None)
def letters(name):
  """The letters of the axes that a name ends in, such as PGT. "" for the name of no array."""
  found = re.fullmatch(r"_*[a-z]\w*_([0-9]*[A-Z][A-Z0-9]*)", name)
  return found[1] if found else ""


def is_size(name):
  return len(name) == 1 and name.isupper()


@functools.lru_cache(None)
def field_names(kind):
  """The fields of a type of structs. None if the type has no arrays with letters."""
  fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
  return [f.name for f in fields] if any(letters(f.name) for f in fields) else []
