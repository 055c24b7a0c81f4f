"""Runs of an earlier version are resumed, evaluated and exported: see tests/golden/old_runs."""

import dataclasses
import json
from pathlib import Path
import tarfile

from gsm8k_test import finish, start
import numpy as np
import pytest
from safetensors.numpy import load_file

from grpo_jax.storage.checkpoint import Checkpoints
from grpo_jax.storage.reading import read_config, read_metrics
from grpo_jax.training.loop import run_steps

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "old_runs"
MORE = 3  # GRPO steps by which the earlier version continued each run
# Other metrics of a step are sums of floats. Their order depends on the version and on the mesh.
SAME = ("step", "reward", "rewards/", "frac_", "completions/", "eval/", "batch/", "skipped_")


@pytest.fixture
def unpack(tmp_path, monkeypatch):
  """unpack(name) -> the folder of that run. Its reward functions are found from the root."""
  monkeypatch.chdir(ROOT)

  def unpack(name):
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
      archive.extractall(tmp_path, filter="data")
    return tmp_path / name

  return unpack


def expected(name):
  """What the old version wrote, without the votes: its function reads no answers to count."""
  found = json.loads((GOLDEN / f"{name}.json").read_text())
  found["rows"] = [
    {key: value for key, value in row.items() if not key.startswith("eval/maj@2")}
    for row in found["rows"]
  ]
  if "evaluation" in found:
    found["evaluation"] = [line for line in found["evaluation"] if "eval/maj@2" not in line]
  return found


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    "fixed_reference",
    pytest.param("warm_start_done", marks=pytest.mark.slow),
    pytest.param("moving_reference", marks=pytest.mark.slow),
  ],
)
def test_an_old_run_continues_as_the_old_version_continued_it(name, unpack):
  """On eight devices, where the old version had one."""
  workdir, rows = unpack(name), expected(name)["rows"]
  (saved_at,) = Checkpoints(workdir / "checkpoints", keep=1).steps()
  before = read_metrics(workdir)
  old_keys = json.loads((workdir / "config.json").read_text())
  assert "name" not in old_keys["optimizer"]
  assert "host" not in {path.name for path in (workdir / "checkpoints" / str(saved_at)).iterdir()}

  config = read_config(workdir)
  state = run_steps(dataclasses.replace(config, steps=config.steps + MORE), workdir).state

  updates = (config.steps + MORE) * config.algo.updates_per_step
  assert int(state.train.step) == config.warm_start.steps + updates
  found = read_metrics(workdir)
  assert [row["step"] for row in found] == [row["step"] for row in rows]
  assert found[: len(before)] == before
  new = [(ours, old) for ours, old in zip(found, rows) if old["step"] > saved_at]
  assert len(new) == MORE
  for ours, old in new:
    assert old.keys() <= ours.keys()
    for key, value in old.items():
      if key.startswith(SAME):
        assert ours[key] == pytest.approx(value, rel=1e-6), (old["step"], key)
      else:
        assert ours[key] == pytest.approx(value, abs=1e-4, rel=1e-4), (old["step"], key)
  assert [ours["num_tokens"] for ours, _ in new] == np.cumsum(
    [old["completions/tokens"] + ours["prompts/tokens"] for ours, old in new]
  ).tolist()


def test_the_rows_of_old_runs_can_tell_a_wrong_state():
  """The steps to come depend on the reference, on the optimizer and on the coefficient."""
  for name in ("fixed_reference", "moving_reference"):
    rows = expected(name)["rows"][-MORE:]
    assert min(row["kl"] for row in rows) > 0.01
    assert len({row["reward"] for row in rows}) == MORE
  assert len({row["kl_coef"] for row in rows}) == MORE
  first = expected("warm_start_done")["rows"][-MORE]
  assert abs(first["kl"]) < 1e-6  # the reference is the policy that the warm start ends with


@pytest.mark.slow
def test_an_old_run_is_evaluated_and_exported_as_by_the_old_version(unpack, tmp_path):
  """The printed accuracies are the same text, and the exported weights the same bits."""
  workdir, out = unpack("fixed_reference"), tmp_path / "exported"
  evaluate = start("evaluate", f"--workdir={workdir}")
  export = start("export", f"--workdir={workdir}", f"--out={out}")
  first, *lines = finish(evaluate).splitlines()
  finish(export)
  assert first == f"{workdir}, step 6: 20 test problems of arithmetic"
  assert lines == expected("fixed_reference")["evaluation"]
  ours, old = (
    load_file(out / "model.safetensors"),
    load_file(GOLDEN / "fixed_reference.safetensors"),
  )
  assert ours.keys() == old.keys() and len(ours) > 10
  for name, weight in ours.items():
    np.testing.assert_array_equal(weight, old[name], strict=True)
