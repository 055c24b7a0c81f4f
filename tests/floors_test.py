"""Imports go down only: a room imports itself and lower floors, never what is beside or above."""

import ast
from pathlib import Path
import subprocess
import sys

import pytest

PACKAGE = Path(__file__).parents[1] / "grpo_jax"
FLOORS = [
  {"settings", "files", "patience", "types", "masked"},
  {"registry"},
  {"algo", "cost", "plain_values"},
  {"config"},
  {"model", "sampler", "rewards", "data", "parallel"},
  {"learner"},
  {"run"},
  {"launchers", "reporting"},
  {"train", "evaluate", "sample", "export", "plan", "launch", "report", "__main__"},
]
# Floors of the modules inside run/, from the parts to the loop.
RUN_FLOORS = [
  {"bucket"},
  {
    "clock",
    "compilation_cache",
    "curriculum",
    "estimators",
    "fitting",
    "flag_errors",
    "frozen_model",
    "lengths",
    "notebook",
    "sampling_weights",
    "recipes",
    "shown_completions",
    "skipped_updates",
    "stdout",
    "stop",
    "terminal_text",
  }
  | {"checkpoint_format", "json_files", "orbax_noise", "saved_config"},
  {"checkpoint_reader", "terminal", "json_console", "events", "disk", "weights_and_biases"}
  | {"earlier_rows"},
  {
    "callback",
    "checkpoint",
    "ends",
    "library",
    "workdir",
    "parameters",
    "sampling",
    "checks",
  },
  {"reward_model", "teacher", "rollout", "programs", "lock", "reading", "environment"},
  {"scoring", "dataset"},
  {"scorer"},
  {"rollout_metrics", "build", "bucket_lock"},
  {"bucket_files"},
  {"groups"},
  {"draws"},
  {"collect", "evaluator", "plan_programs"},
  {"state", "reporter", "plan_phases", "policy"},
  {"steps", "plan_table", "load_policy"},
  {"loop", "cli"},
]
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


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p) == "run"], ids=relative)
def test_imports_inside_run_go_down(path):
  here = path.stem
  for name in imported(path):
    parts = name.split(".")
    if parts[:2] == ["grpo_jax", "run"] and len(parts) > 2 and parts[2] != here:
      below = floor_of(parts[2], RUN_FLOORS) < floor_of(here, RUN_FLOORS)
      assert below, f"run/{here} imports run/{parts[2]}, which is not on a lower floor"


def test_the_top_level_shows_entry_points_and_rooms():
  assert {path.name.removesuffix(".py") for path in PACKAGE.iterdir()} - {
    "__init__",
    "__pycache__",
  } == set.union(*FLOORS) - {"__main__"}


def test_rewards_and_data_never_import_jax():
  """Worker processes that call reward functions must start fast."""
  code = (
    "import sys; import grpo_jax.rewards, grpo_jax.data.loader, grpo_jax.data.tasks,"
    " grpo_jax.data.tokenizer;"
    " assert not {'jax', 'flax', 'optax', 'orbax'} & set(sys.modules)"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


def test_launchers_never_import_jax():
  """A login node may have no accelerator, and the jax of a TPU's machine waits for others."""
  code = "import sys, grpo_jax.launchers; assert 'jax' not in sys.modules"
  subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_only_entry_points_know_config_dicts_and_nobody_imports_another_framework(path):
  is_entry_point = path.parent == PACKAGE or path.stem in ("cli", "__main__")
  assert "ml_collections" not in packages(path) or is_entry_point
  assert not packages(path) & {"torch", "tensorflow", "transformers"}


def test_only_the_model_room_sees_modules():
  inside = ("flax.linen", "grpo_jax.model.layers", "grpo_jax.model.transformer")
  for path in FILES:
    if room_of(path) != "model":
      assert not any(name.startswith(inside) for name in imported(path)), path


def _outside_type_checking(tree):
  """The nodes that run, without those under `if TYPE_CHECKING:`."""
  skipped = {
    inner
    for node in ast.walk(tree)
    if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    for inner in ast.walk(node)
  }
  return [node for node in ast.walk(tree) if node not in skipped]
