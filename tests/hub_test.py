"""Names on huggingface.co: found in the cache, or one line if the download fails."""

import os
import subprocess
import sys

import pytest

from grpo_jax.model.huggingface import hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path):
  """The files that huggingface_hub keeps of a model that it has downloaded."""
  model = tmp_path / "hub" / "models--someone--tiny-1.5B"
  (model / "snapshots" / COMMIT).mkdir(parents=True)
  (model / "snapshots" / COMMIT / "config.json").write_text("{}")
  (model / "refs").mkdir()
  (model / "refs" / "main").write_text(COMMIT)
  return tmp_path


CODE = """
import sys
from grpo_jax.model.huggingface import hub
from grpo_jax.settings import ConfigError
try:
  print(hub.folder(sys.argv[1], "model.path"))
except ConfigError as error:
  print("error:", error)
"""


def printed_folder(cache, name):
  """What CODE prints. It runs in its own process: huggingface_hub reads its environment once."""
  environment = os.environ | {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
  environment.pop("HF_HUB_CACHE", None)
  return subprocess.run(
    [sys.executable, "-c", CODE, name], env=environment, capture_output=True, text=True, check=True
  ).stdout


@pytest.mark.slow
def test_a_name_is_found_in_the_cache(cache):
  expected = f"{cache}/hub/models--someone--tiny-1.5B/snapshots/{COMMIT}\n"
  assert printed_folder(cache, "someone/tiny-1.5B") == expected
  assert printed_folder(cache, f"someone/tiny-1.5B@{COMMIT}") == expected


@pytest.mark.slow
def test_a_failed_download_is_an_error_of_one_line(cache):
  line = printed_folder(cache, "someone/else")
  assert line.startswith(
    "error: config key model.path is 'someone/else': there is no such folder, and the download from"
    " huggingface.co failed ("
  )
  assert line.count("\n") == 1


def test_a_path_is_returned_as_it_is(tmp_path, monkeypatch):
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
