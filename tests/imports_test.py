"""What a program imports of what takes long to import, and what it leaves out."""

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

import grpo_jax
from grpo_jax.config import Config, to_dict

ROOT = Path(__file__).parents[1]
COMMANDS = sorted(
  str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__main__")
  for path in (ROOT / "grpo_jax").rglob("*.py")
  if 'if __name__ == "__main__"' in path.read_text() and "cli.run(" in path.read_text()
)
FAST = "grpo_jax.train", "grpo_jax.report"  # the tests of others are slow: each is a process
COMPUTES = {"jax", "flax", "optax", "orbax", "qwix"}
# What a run on a CPU whose model is not quantised does not use.
UNUSED = {
  "qwix",
  "tqdm.auto",  # it warns in a notebook without ipywidgets
  "flax.nnx",
  "IPython",
  "jax.experimental.pallas.tpu",
  "grpo_jax.model.attention.splash",
  "grpo_jax.model.attention.decode",
}
# Runs a module as a program. The modules that are imported at its end are then in a file.
RUN = """
import atexit, runpy, sys
_, file, module, *arguments = sys.argv
atexit.register(lambda: open(file, "w").write(" ".join(sys.modules)))
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def imported(tmp_path):
  """imported(MODULE, *ARGUMENTS) -> the modules that `python -m MODULE` has imported at its end."""

  def run(module, *arguments):
    file = tmp_path / "imported"
    command = [sys.executable, "-c", RUN, file, module, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {*file.read_text().split()}

  return run


@pytest.fixture
def run(tmp_path):
  """The folder of a run without a checkpoint."""
  folder = tmp_path / "run"
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(to_dict(Config(steps=2))))
  rows = [{"step": 1, "reward": 0.0}, {"step": 2, "reward": 1.0}]
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  return folder


def imported_by(code):
  """The modules that a line of code imports."""
  command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
  done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  return {*done.stdout.split()}


@pytest.mark.parametrize(
  "command",
  [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in COMMANDS],
)
def test_help_needs_no_jax(command, imported):
  assert not imported(command, "--help") & COMPUTES


def test_a_report_needs_neither_jax_nor_pillow(run, imported, tmp_path):
  rows = [{"step": 2, "time/step": 2.0, "time/sample": 1.0}]
  (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  found = imported("grpo_jax.report", str(run), f"--out={tmp_path}/page.html")
  assert not found & {*COMPUTES, "PIL", "numpy.ma"}


def test_runs_without_checkpoints_are_compared_without_jax(run, imported):
  assert not imported("grpo_jax.compare", str(run), str(run)) & COMPUTES


def test_a_launcher_checks_configs_without_jax(imported, tmp_path):
  own, of_train = ["--on=local", "--dry_run", f"--workdir={tmp_path}/run"], ["--config=arithmetic"]
  assert not imported("grpo_jax.launch", *own, "--", *of_train) & COMPUTES


def test_a_table_of_runs_needs_no_jax(run, imported):
  assert not imported("grpo_jax.launch", f"--workdir={run}", "--table") & COMPUTES


@pytest.mark.slow
def test_an_export_imports_neither_other_platforms_kernels_nor_orbax(imported, tmp_path):
  found = imported("grpo_jax.export", "--config=arithmetic", f"--out={tmp_path}/model")
  assert "jax" in found and not found & {*UNUSED, "orbax"}


@pytest.mark.slow
def test_the_training_loop_imports_neither_other_platforms_kernels_nor_orbax():
  found = imported_by("import grpo_jax.training.loop")
  assert "jax" in found and not found & {*UNUSED, "orbax"}


def test_the_api_is_imported_without_jax_but_for_models_and_optimizers():
  names = {*grpo_jax.__all__} - {"Policy", "Completion", "load_policy", "register_optimizer"}
  uses = "; ".join(f"grpo_jax.{name}" for name in sorted(names))
  assert not imported_by(f"import grpo_jax; {uses}") & COMPUTES
