"""Imports go down only: a room may import lower floors and itself, never its neighbours or what is above it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "grpo_jax"
FLOORS = {
  "config": 0,
  "types": 0,
  "masked": 0,
  "hub": 0.5,
  "algo": 1,
  "model": 1,
  "sampler": 1,
  "rewards": 1,
  "data": 1,
  "parallel": 1,
  "optim": 1,
  "estimators": 1,
  "learner": 2,
  "reward_model": 2,
  "rollout": 2,
  "run_checks": 2,
  "parameters": 2,
  "run": 3,
  "checkpoint": 3,
  "metrics": 3,
  "terminal": 3,
  "cli": 4,
  "collect": 4,
  "evaluate": 5,
  "export": 5,
  "sample": 5,
  "train": 6,
}
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def room(path):
  return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path):
  """Every module that a file imports, `from package import module` resolved to both."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative import"
      yield node.module
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
  here = room(path)
  for name in imported(path):
    if name.startswith("grpo_jax."):
      there = name.split(".")[1]
      if there != here:
        assert there in FLOORS, f"{name} has no floor"
        assert FLOORS[there] < FLOORS[here], (
          f"{here} (floor {FLOORS[here]}) imports {there} (floor {FLOORS[there]})"
        )


def packages(path):
  return {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize(
  "path", [p for p in FILES if room(p) in ("rewards", "data")], ids=lambda p: p.name
)
def test_rewards_and_data_know_no_jax(path):
  assert not packages(path) & {"jax", "flax", "optax", "orbax"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_config_dicts_stop_at_the_door_and_no_other_framework_comes_in(path):
  entry_points = {"cli", "train", "evaluate", "export", "sample"}
  assert "ml_collections" not in packages(path) or room(path) in entry_points
  assert not packages(path) & {"torch", "tensorflow", "transformers"}


def test_only_the_model_room_sees_modules():
  for path in FILES:
    if room(path) != "model":
      assert not any(
        name.startswith(("flax.linen", "grpo_jax.model.layers", "grpo_jax.model.transformer"))
        for name in imported(path)
      ), path
