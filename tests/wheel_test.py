"""The wheel, installed: a run by the name of a recipe, in a folder with a `configs` of its own."""

import os
from pathlib import Path
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = Path(__file__).parents[1]
SMALL = [
  "--config.steps=1",
  "--config.warm_start.steps=0",
  "--config.batch.prompts=4",
  "--config.batch.group_size=2",
  "--config.model.num_layers=1",
  "--config.model.embed_dim=16",
  "--config.model.mlp_dim=32",
  "--config.sampling.max_tokens=4",
  "--config.eval.every=0",
]


def run(*command, **options):
  done = subprocess.run(command, capture_output=True, text=True, **options)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.mark.slow
def test_recipes_are_in_the_wheel(tmp_path):
  """It needs PyPI, from where pip gets what builds a wheel."""
  source = tmp_path / "source"  # a build writes into its folder
  shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "experiments", "build"))
  pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
  run(*pip, "wheel", "-q", "--no-deps", f"--wheel-dir={tmp_path}", str(source))
  (wheel,) = tmp_path.glob("*.whl")
  files = zipfile.ZipFile(wheel).namelist()
  assert {name.split("/")[0] for name in files if "dist-info" not in name} == {"grpo_jax"}
  recipes = {path.name for path in (ROOT / "configs").glob("*.py")}
  assert recipes == {Path(name).name for name in files if name.startswith("grpo_jax/configs/")}

  run(*pip, "install", "-q", "--no-deps", f"--target={tmp_path / 'installed'}", str(wheel))
  empty = tmp_path / "empty"
  (empty / "configs").mkdir(parents=True)  # of the user
  (empty / "configs" / "__init__.py").write_text("")
  environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
  environment |= {"PYTHONPATH": str(tmp_path / "installed"), "JAX_NUM_CPU_DEVICES": "1"}
  train = [sys.executable, "-m", "grpo_jax.train", "--config=arithmetic", "--workdir=run", *SMALL]
  said = run(
    train[0], "-c", "import grpo_jax; print(grpo_jax.__file__)", cwd=empty, env=environment
  )
  assert said.strip() == str(tmp_path / "installed/grpo_jax/__init__.py")
  assert "finished" in run(*train, cwd=empty, env=environment)
