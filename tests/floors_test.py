"""Imports go down only: a room imports itself and lower floors, never what is beside or above."""

import ast
import functools
import graphlib
from pathlib import Path
import subprocess
import sys
import warnings

import pytest

PACKAGE = Path(__file__).parents[1] / "grpo_jax"
FLOORS = [
  {"lazy"},
  {"settings", "files", "foreign", "timing", "types", "masked", "pending"},
  {"registry", "calls", "gguf_file", "progress"},
  {"algo", "plain_values", "problems", "compiling"},
  {"config"},
  {"model", "rewards", "data"},
  {"parallel"},
  {"sampler", "environments", "learner", "recipes", "configs"},
  {"run", "storage"},
  {"serving"},
  {"rollouts", "console"},
  {"scoring"},
  {"evaluation", "batches"},
  {"asynchronous"},
  {"engine"},
  {"training"},
  {"around"},
  {"cli"},
  {"train", "evaluate", "sample", "sample_for", "export"}
  | {"plan", "launch", "report", "compare", "serve", "__main__"},
]
MANY_MODULES = 15  # of a folder, without the folders in it
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def relative(path):
  return str(path.relative_to(PACKAGE))


def room_of(path):
  if path.stem == "__main__":  # the entry point `python -m grpo_jax.ROOM`
    return path.stem
  return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor_of(name, floors):
  found = [number for number, names in enumerate(floors) if name in names]
  assert found, f"{name} has no floor: add it to tests/floors_test.py"
  return found[0]


def imported(path, nodes=ast.walk):
  """Every module that a file imports. `from package import module` counts as both."""
  for node in nodes(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import"
      yield node.module
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages(path):
  return {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_go_down(path):
  here = room_of(path)
  for name in imported(path, _outside_type_checking):
    parts = name.split(".")
    if parts[0] == "grpo_jax" and len(parts) > 1 and parts[1] != here:
      above = floor_of(parts[1], FLOORS) >= floor_of(here, FLOORS)
      assert not above, f"{here} imports {parts[1]}, which is not on a lower floor"


def file_of(name):
  """The file of a module of the package, or None."""
  inside = PACKAGE.joinpath(*name.split(".")[1:])
  files = (inside.with_suffix(".py"), inside / "__init__.py")
  return next((file for file in files if name.startswith("grpo_jax.") and file.is_file()), None)


@functools.cache
def modules_imported(path):
  """The files of the package that a file imports, under TYPE_CHECKING too."""
  return tuple(_modules_imported(path))


def _modules_imported(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (file_of(alias.name) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
      for alias in node.names:
        yield file_of(f"{node.module}.{alias.name}") or file_of(node.module)


def circle(graph):
  """The files of a circle of imports, or nothing."""
  try:
    list(graphlib.TopologicalSorter(graph).static_order())
  except graphlib.CycleError as error:
    return [relative(path) for path in error.args[1]]
  return []


def test_no_files_import_each_other_in_a_circle():
  assert not circle({path: {*modules_imported(path)} - {None, path} for path in FILES})


def test_a_circle_is_found():
  first, second, third = FILES[:3]
  assert not circle({first: {second, third}, second: {third}})
  assert len(circle({first: {second}, second: {third}, third: {first}})) == 4


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=relative)
def test_a_folder_says_what_it_is_for(folder):
  modules = [path for path in folder.glob("*.py") if not path.stem.startswith("__")]
  if folder != PACKAGE and len(modules) > MANY_MODULES:
    warnings.warn(f"{relative(folder)} has {len(modules)} modules", stacklevel=1)
  text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
  assert text and len(text.split()) > 8, f"{relative(folder)}/__init__.py does not say what it is"


def test_the_top_level_shows_entry_points_and_rooms():
  assert {path.name.removesuffix(".py") for path in PACKAGE.iterdir()} - {
    "__init__",
    "__pycache__",
  } == set.union(*FLOORS) - {"__main__"}


def test_rewards_and_data_never_import_jax():
  """Worker processes that call reward functions must start fast."""
  code = (
    "import sys; import grpo_jax.rewards, grpo_jax.data.loader, grpo_jax.data.tasks.tasks,"
    " grpo_jax.data.tokenizers.tokenizer;"
    " assert not {'jax', 'flax', 'optax', 'orbax'} & set(sys.modules)"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


def test_launchers_never_import_jax():
  """A login node may have no accelerator, and the jax of a TPU's machine waits for others."""
  code = "import sys, grpo_jax.around.launchers; assert 'jax' not in sys.modules"
  subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_only_entry_points_know_config_dicts_and_nobody_imports_another_framework(path):
  is_entry_point = path.parent == PACKAGE or path.stem == "__main__"
  assert "ml_collections" not in packages(path) or is_entry_point
  assert not packages(path) & {"torch", "tensorflow", "transformers"}


def test_only_the_model_room_sees_modules():
  inside = ("flax.linen", "grpo_jax.model.layers", "grpo_jax.model.transformer")
  for path in FILES:
    if room_of(path) != "model":
      assert not any(name.startswith(inside) for name in imported(path)), path


def test_the_decoder_does_not_know_hugging_face():
  """The list of what the rest of the program uses does, and so does the folder itself."""
  room, formats = PACKAGE / "model", PACKAGE / "model/huggingface"
  for path in {*FILES} & {*room.rglob("*.py")} - {*formats.rglob("*.py"), room / "__init__.py"}:
    assert not any(name.startswith("grpo_jax.model.huggingface") for name in imported(path)), path


def _outside_type_checking(tree):
  """The nodes that run, without those under `if TYPE_CHECKING:`."""
  skipped = {
    inner
    for node in ast.walk(tree)
    if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    for inner in ast.walk(node)
  }
  return [node for node in ast.walk(tree) if node not in skipped]
