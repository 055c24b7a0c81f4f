"""Names on huggingface.co: read from the cache, or one line of error where that is impossible."""

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


def folder_in_new_process(cache, *names):
  """What hub.folder returns for each name, or its error, one line each.

  A new process, because huggingface_hub reads its environment only once.
  """
  code = f"""
from grpo_jax.model import hub
from grpo_jax.settings import ConfigError
for name in {names!r}:
  try:
    print(hub.folder(name, "model.path"))
  except ConfigError as error:
    print("error:", error)
"""
  environment = os.environ | {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
  environment.pop("HF_HUB_CACHE", None)
  return subprocess.run(
    [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
  ).stdout


def test_a_name_is_found_in_the_cache(cache):
  output = folder_in_new_process(cache, "someone/tiny-1.5B", f"someone/tiny-1.5B@{COMMIT}")
  snapshot = f"{cache}/hub/models--someone--tiny-1.5B/snapshots/{COMMIT}"
  assert output.splitlines() == [snapshot, snapshot]


def test_the_error_for_a_name_that_cannot_be_downloaded_is_one_line(cache):
  output = folder_in_new_process(cache, "someone/else")
  assert output.startswith(
    "error: config key model.path is 'someone/else': there is no such folder"
  )
  assert "huggingface.co" in output and output.count("\n") == 1


def test_what_is_not_a_name_is_returned_unchanged(tmp_path, monkeypatch):
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
