"""`python -m grpo_jax.compare`: two runs that are the same, and the first difference of others."""

import json
import shutil
import subprocess
import sys

import pytest
from small_run import small_config

from grpo_jax.around.reporting.differences import compare, compare_rows
from grpo_jax.storage.reading import read_config
from grpo_jax.train import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Two runs of a config with two seeds."""
  folder = tmp_path_factory.mktemp("runs")
  config = small_config().replace({"steps": 2, "checkpoint.every": 1, "checkpoint.keep": 2})
  for name, seed in (("one", 0), ("other", 1)):
    train(config.replace({"seed": seed}), folder / name)
  shutil.copytree(folder / "one", folder / "same")
  return folder


def differences(one, other):
  return {found.what: found.difference for found in compare(str(one), str(other))}


@pytest.mark.slow
def test_the_same_command_makes_the_same_run(runs, tmp_path):
  train(read_config(runs / "one"), tmp_path / "again")
  found = list(compare(str(runs / "one"), str(tmp_path / "again")))
  assert [(one.what, one.steps, one.difference) for one in found] == [
    ("metrics", 2, ""),
    ("completions", 2, ""),
    ("checkpoints", 2, ""),
  ]


@pytest.mark.slow
def test_another_seed_differs_in_all(runs):
  found = differences(runs / "one", runs / "other")
  assert all(line.startswith("step 1: ") for line in found.values()) and len(found) == 3
  assert "completion 0: " in found["completions"] and " differs" in found["checkpoints"]


def edited(runs, tmp_path, change):
  """The differences of a run and its copy in which something is changed."""
  shutil.copytree(runs / "one", tmp_path / "copy")
  change(tmp_path / "copy")
  return differences(runs / "one", tmp_path / "copy")


def edit_line(path, number, **fields):
  lines = path.read_text().splitlines()
  lines[number] = json.dumps(json.loads(lines[number]) | fields)
  path.write_text("".join(line + "\n" for line in lines))


@pytest.mark.slow
def test_the_first_number_that_differs_is_named(runs, tmp_path):
  found = edited(runs, tmp_path, lambda copy: edit_line(copy / "metrics.jsonl", 1, kl=7.5))
  assert found["metrics"].startswith("step 2: kl is ") and found["metrics"].endswith(" and 7.5")
  assert not found["completions"] and not found["checkpoints"]


@pytest.mark.slow
def test_times_are_not_compared(runs, tmp_path):
  times = {"time/step": 1e3, "perf/tokens_per_second": 1.0, "rollout/queue": 4}
  assert not any(
    edited(runs, tmp_path, lambda copy: edit_line(copy / "metrics.jsonl", 1, **times)).values()
  )


def test_a_number_that_the_clock_does_not_decide_is_compared():
  ours, theirs = ({1: {"step": 1, "perf/padding": x, "staleness/mean": 0.0}} for x in (0.1, 0.2))
  assert compare_rows("metrics", ours, theirs).difference == "step 1: perf/padding is 0.1 and 0.2"


@pytest.mark.slow
def test_a_step_that_one_run_lacks_is_named(runs, tmp_path):
  def shorten(copy):
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text(lines[0])
    next((copy / "completions").glob("*2.jsonl")).unlink()
    shutil.rmtree(copy / "checkpoints" / "2")

  found = edited(runs, tmp_path, shorten)
  assert found["metrics"] == found["completions"] == "step 2: the second run has none"
  assert found["checkpoints"] == ""  # a run keeps the newest ones


@pytest.mark.slow
def test_a_completion_that_differs_is_named(runs, tmp_path):
  def change(copy):
    edit_line(next((copy / "completions").glob("*1.jsonl")), 3, completion="?")

  assert "step 1: completion 3: completion is " in edited(runs, tmp_path, change)["completions"]


@pytest.mark.slow
def test_runs_without_a_common_checkpoint_are_not_called_the_same(runs, tmp_path):
  def change(copy):
    shutil.rmtree(copy / "checkpoints")

  assert edited(runs, tmp_path, change)["checkpoints"].startswith("no step is saved in both: ")


@pytest.mark.slow
def test_an_asynchronous_run_is_compared_too(tmp_path):
  """Its shares of time differ, also in checkpoints, and its staleness does not."""
  config = small_config().replace({"steps": 3, "rollout.max_staleness": 1})
  config = config.replace({"checkpoint.every": 1, "checkpoint.keep": 3})
  for name in ("one", "same"):
    train(config, tmp_path / name)
  assert not any(differences(tmp_path / "one", tmp_path / "same").values())


@pytest.mark.slow
@pytest.mark.parametrize(
  "folders, code, words",
  [
    (("one", "same"), 0, "metrics: 2 steps are the same"),
    (("one", "other"), 1, "the runs differ in their metrics and completions and checkpoints"),
    (("one",), 2, "name the folders of two runs"),
    (("one", "."), 2, "has no config.json"),
    (("one", "nowhere"), 2, "has no config.json"),
  ],
)
def test_the_command_ends_with_a_code(folders, code, words, runs):
  command = [sys.executable, "-m", "grpo_jax.compare", *folders]
  done = subprocess.run(command, cwd=runs, capture_output=True, text=True)
  assert done.returncode == code and words in done.stdout + done.stderr
  assert "Traceback" not in done.stderr
