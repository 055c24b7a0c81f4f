"""Names of huggingface.co: taken from the cache, and one line where they cannot be had."""

import os
import subprocess
import sys

import pytest

from grpo_jax.model import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path):
  """What huggingface_hub keeps of a model that it has downloaded."""
  model = tmp_path / "hub" / "models--someone--tiny-1.5B"
  (model / "snapshots" / COMMIT).mkdir(parents=True)
  (model / "snapshots" / COMMIT / "config.json").write_text("{}")
  (model / "refs").mkdir()
  (model / "refs" / "main").write_text(COMMIT)
  return tmp_path


def ask(cache, name):
  """In a process of its own: huggingface_hub reads its environment once."""
  code = (
    "from grpo_jax import hub\nfrom grpo_jax.config import ConfigError\n"
    f"try:\n  print(hub.folder({name!r}, 'model.path'))\nexcept ConfigError as error:\n  print('error:', error)"
  )
  environment = os.environ | {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
  environment.pop("HF_HUB_CACHE", None)
  return subprocess.run(
    [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
  ).stdout


def test_a_name_is_found_in_the_cache(cache):
  expected = f"{cache}/hub/models--someone--tiny-1.5B/snapshots/{COMMIT}\n"
  assert ask(cache, "someone/tiny-1.5B") == ask(cache, f"someone/tiny-1.5B@{COMMIT}") == expected


def test_a_name_that_cannot_be_had_is_told_in_one_line(cache):
  said = ask(cache, "someone/else")
  assert said.startswith(
    "error: config key model.path is 'someone/else': there is no such folder, and from"
  )
  assert said.count("\n") == 1


def test_a_folder_stays_what_it_is(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "someone" / "folder").mkdir(parents=True)
  for path in (
    "someone/folder",
    str(tmp_path),
    "",
    "./not/there",
    "~/not/there",
    "/not/there",
    "qwen",
    "not/tokenizer.json",
    "not/rewards.py",
  ):
    assert hub.folder(path, "model.path") == path
