"""Mutation testing of the algorithm: are its tests strong enough to notice a wrong line?

  pip install cosmic-ray
  python experiments/mutate.py --count 300 --seed 0

cosmic-ray changes one operator, number, condition or decorator in grpo_jax/algo, masked.py or
evaluation/estimators.py, and the fast tests of these files run on the change. A change that no test
notices has survived. Survivors are printed with their diffs: each is a missing test, or it does not
change what the program computes. --only 17,203 repeats mutants of the same draw by their numbers.

The draw first takes places in the code, all equally likely, then one change of each place. Changes
of these places could not be noticed, or would always be, and are not drawn:
  * type annotations and aliases, and code under `if TYPE_CHECKING`;
  * worked examples (`Example`) and constants that only they use, which are tests themselves;
  * changes that Python cannot compile.
Docstrings and the meanings of settings are strings, which cosmic-ray does not change.

The tests run in copies of the working tree, never in the tree itself, --jobs of them at a time. On
two CPU cores a mutant takes about half a minute.
"""

import argparse
import ast
from collections.abc import Iterator
import concurrent.futures
import dataclasses
import difflib
import functools
import itertools
import multiprocessing
import os
from pathlib import Path
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from needs import needs

with needs("pip install -e '.[test,mutation]'"):
  from cosmic_ray.ast import ast_nodes, get_ast
  from cosmic_ray.mutating import mutate_code
  from cosmic_ray.plugins import get_operator, operator_names
  import pytest


ROOT = Path(__file__).parents[1]
ESTIMATORS = "grpo_jax/evaluation/estimators.py"
FILES = (
  *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "grpo_jax/algo").rglob("*.py")),
  "grpo_jax/masked.py",
  ESTIMATORS,
)
# The tests of a mutant, those of its file first, because the first failure ends a run.
CHECKS, PARTS = "tests/algo_checks_test.py", "tests/algo_parts_test.py"
VARIANTS = "tests/variants_test.py"
LONG = ("tests/golden_test.py", "tests/algo_test.py")
FIRST = {"checks.py": CHECKS, "settings.py": CHECKS, "presets.py": CHECKS} | {
  name: PARTS for name in ("masked.py", "metrics.py", "kl.py", "controllers.py", "balance.py")
}


def tests_of(file: str) -> list[str]:
  """The tests that run on a mutant of this file, in their order."""
  if file == ESTIMATORS:
    return ["tests/estimators_test.py"]
  first = FIRST.get(Path(file).name, VARIANTS)
  return list(dict.fromkeys((first, VARIANTS, PARTS, CHECKS, *LONG)))


TIMEOUT = 1800  # seconds, after which a mutant counts as caught
ENVIRONMENT = {
  "JAX_PLATFORMS": "cpu",
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  "PYTHONDONTWRITEBYTECODE": "1",  # mutants may have the size and the second of the last one
  "OMP_NUM_THREADS": "1",
  "XLA_FLAGS": "--xla_backend_optimization_level=0",
}

# What every mutant needs and no mutant changes. It is imported once.
PRELOADED = ["jax.numpy", "flax.struct", "optax", "hypothesis", "_pytest.assertion.rewrite"]

Position = tuple[int, int]  # line from 1, column from 0


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One change of one file."""

  file: str
  operator: str
  occurrence: int
  position: Position

  def code(self) -> str:
    """The changed source of the file."""
    return mutate_code(source_of(self.file), get_operator(self.operator)(), self.occurrence)

  def diff(self) -> str:
    """The change, without context."""
    before, after = source_of(self.file).splitlines(), self.code().splitlines()
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[3:]
    return "\n".join(f"    {line}" for line in lines)

  def compiles(self) -> bool:
    """Whether the changed source is Python."""
    try:
      compile(self.code(), self.file, "exec")
    except SyntaxError:
      return False
    return True


@functools.cache
def source_of(file: str) -> str:
  """The source of a file. It is read once, so that the tree may change during a run."""
  return (ROOT / file).read_text()


def mutants_of(file: str) -> Iterator[Mutant]:
  """All changes of a file, but for those that the head of this module leaves out."""
  source = source_of(file)
  excluded = excluded_spans(ast.parse(source))
  nodes = list(ast_nodes(get_ast(source)))
  for name in operator_names():
    operator_class = get_operator(name)
    if operator_class.arguments():
      continue  # it replaces variables by others, whose names it has to be given
    operator = operator_class()
    positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
    for occurrence, start in enumerate(positions):
      if not any(first <= start < last for first, last in excluded):
        yield Mutant(file, name, occurrence, start)


def excluded_spans(tree: ast.Module) -> list[tuple[Position, Position]]:
  """Where a change could not be noticed, or always would be."""
  excluded: list[ast.expr | ast.stmt] = []
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef):
      excluded += [node.returns] if node.returns else []
    elif isinstance(node, (ast.arg, ast.AnnAssign)):
      excluded += [node.annotation] if node.annotation else []
    elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
      excluded += [node.test, *node.body]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Example":
      excluded.append(node)
  assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
  spans = [_span(node) for node in (*excluded, *filter(_is_type_alias, assignments))]
  for node in assignments:
    if _is_used_only_in(spans, tree, ast.unparse(node.targets[0])):
      spans.append(_span(node))
  return spans


def _is_type_alias(node: ast.Assign) -> bool:
  """Whether a line such as `Mean = tuple[Array, Array]` names a type: CamelCase, and no call."""
  name = ast.unparse(node.targets[0])
  is_camel_case = name[:1].isupper() and not name.isupper()
  return is_camel_case and isinstance(node.value, (ast.Subscript, ast.BinOp, ast.Name))


def _is_used_only_in(spans: list[tuple[Position, Position]], tree: ast.Module, name: str) -> bool:
  """Whether a private constant of the module is read, and only inside the spans."""
  uses = [
    (node.lineno, node.col_offset)
    for node in ast.walk(tree)
    if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
  ]
  inside = (any(first <= use < last for first, last in spans) for use in uses)
  return name.startswith("_") and bool(uses) and all(inside)


def _span(node: ast.expr | ast.stmt) -> tuple[Position, Position]:
  """Where the node begins, its decorators included, and where it ends."""
  starts = [(node.lineno, node.col_offset)]
  for decorator in getattr(node, "decorator_list", []):
    starts.append((decorator.lineno, decorator.col_offset - 1))  # the @
  return min(starts), (node.end_lineno, node.end_col_offset)


def draw(count: int, seed: int) -> list[Mutant]:
  """`count` mutants of different places."""
  places: dict[tuple[str, Position], list[Mutant]] = {}
  for mutant in itertools.chain.from_iterable(map(mutants_of, FILES)):
    places.setdefault((mutant.file, mutant.position), []).append(mutant)
  rng = random.Random(seed)
  order = rng.sample(sorted(places), len(places))
  drawn: list[Mutant] = []
  for place in order:
    candidates = rng.sample(places[place], len(places[place]))
    compiled = next((mutant for mutant in candidates if mutant.compiles()), None)
    if compiled is not None:
      drawn.append(compiled)
    if len(drawn) == count:
      break
  print(f"{len(places)} places, {len(drawn)} mutants drawn with seed {seed}", flush=True)
  return drawn


def copy_tree(folder: Path) -> Path:
  """A copy of what git tracks or would track."""
  command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
  names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
  for name in names.splitlines():
    if (ROOT / name).is_file():
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(ROOT / name, folder / name)
  return folder


def failing_test(tree: Path, file: str) -> str | None:
  """The first test that fails, "timeout", or None if all pass."""
  output = tree / "mutate_output.txt"
  context = multiprocessing.get_context("forkserver")
  process = context.Process(target=_run_tests, args=(str(tree), file, str(output)))
  process.start()
  process.join(TIMEOUT)
  if process.is_alive():
    process.kill()
    return "timeout"
  if process.exitcode == 0:
    return None
  lines = output.read_text(errors="replace").splitlines() if output.exists() else []
  failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
  return failed[0].split(" - ")[0] if failed else f"exit code {process.exitcode}"


def _run_tests(tree: str, file: str, output: str) -> None:
  """Runs pytest in a process that has imported JAX and the test tools, and nothing of the tree."""
  descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  os.dup2(descriptor, 1)
  os.dup2(descriptor, 2)
  os.chdir(tree)
  sys.path.insert(0, tree)
  # The shared cache of compiled programs is set already, so the one of conftest.py is not wanted.
  options = ["-n", "0", "-x", "-q", "--noconftest", "-p", "no:cacheprovider", "--durations=0"]
  code = pytest.main([*options, *tests_of(file)], plugins=[_OwnAxisFirst(file)])
  os._exit(int(code))


class _OwnAxisFirst:
  """Runs the tests of the records in the changed file before those of other records."""

  AXES = {
    "surrogates": "[surrogate-",
    "advantages": "[advantage-",
    "ratios": "[ratio-",
    "aggregation": "[aggregation-",
    "corrections": "[correction",
    "token_selection": "[token_weight-",
    "kl": "[kl-",
  }

  def __init__(self, file: str) -> None:
    path = Path(file)
    self._marker = self.AXES.get(path.parent.name, self.AXES.get(path.stem, "["))

  def pytest_collection_modifyitems(self, items: list[Any]) -> None:
    items.sort(key=lambda item: self._marker not in item.nodeid)


def run(mutants: dict[int, Mutant], jobs: int) -> dict[int, Mutant]:
  """Tests the mutants, reports on each, and returns the survivors."""
  survivors: dict[int, Mutant] = {}
  with tempfile.TemporaryDirectory(prefix="mutate_") as folder:
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(folder, "compiled")))
    os.environ.pop("GOLDEN_DIR", None)
    multiprocessing.set_forkserver_preload(["__main__", *PRELOADED])
    trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for job in range(jobs):
      trees.put(copy_tree(Path(folder, str(job))))

    def test(mutant: Mutant) -> str | None:
      tree = trees.get()
      path = tree / mutant.file
      try:
        path.write_text(mutant.code())
        return failing_test(tree, mutant.file)
      finally:
        path.write_text(source_of(mutant.file))
        trees.put(tree)

    tree = trees.get()
    for file in (ESTIMATORS, "grpo_jax/masked.py"):
      failed = failing_test(tree, file)
      if failed is not None:
        sys.exit(f"the tests fail without a mutant: {failed}")
    trees.put(tree)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
      futures = {pool.submit(test, mutant): number for number, mutant in mutants.items()}
      for future in concurrent.futures.as_completed(futures):
        number, caught = futures[future], future.result()
        mutant = mutants[number]
        place = f"{mutant.file}:{mutant.position[0]} {mutant.operator.removeprefix('core/')}"
        print(f"{number:4} {'SURVIVED' if caught is None else 'caught'} {place} {caught or ''}")
        if caught is None:
          survivors[number] = mutant
          print(mutant.diff())
        sys.stdout.flush()
  return survivors


def main() -> None:
  """Draws mutants, tests them, and lists the survivors."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--count", type=int, default=300, help="how many mutants to draw")
  parser.add_argument("--seed", type=int, default=0, help="of the draw")
  parser.add_argument("--jobs", type=int, default=2, help="how many mutants to test at a time")
  parser.add_argument("--only", default="", help="numbers of the draw, as in 17,203; all if empty")
  parser.add_argument("--list", action="store_true", help="show the draw without testing it")
  flags = parser.parse_args()
  mutants = dict(enumerate(draw(flags.count, flags.seed)))
  if flags.only:
    mutants = {number: mutants[number] for number in map(int, flags.only.split(","))}
  if flags.list:
    for number, mutant in mutants.items():
      print(f"{number:4} {mutant.file}:{mutant.position[0]} {mutant.operator}\n{mutant.diff()}")
    return
  survivors = run(mutants, flags.jobs)
  caught = len(mutants) - len(survivors)
  print(f"\n{caught} of {len(mutants)} mutants caught, {len(survivors)} survived")
  for number, mutant in sorted(survivors.items()):
    print(f"{number:4} {mutant.file}:{mutant.position[0]} {mutant.operator}\n{mutant.diff()}")


if __name__ == "__main__":
  main()
