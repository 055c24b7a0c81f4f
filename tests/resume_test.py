"""A run killed at any moment and started again ends as one never killed: the same parameters and rows, bit for bit.

Two lives of real processes, killed again and again, beside runs that nothing happened to: one with a warm start, one
without.
"""

import concurrent.futures
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import pytest

ROOT = Path(__file__).parents[1]
FLAGS = """
  model.embed_dim=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=1 model.head_dim=8 model.mlp_dim=32
  batch.prompts=4 batch.group_size=4 sampling.max_tokens=12 algo.kl_coef=0.5 optimizer.learning_rate=0.01
  warm_start.batch=8 eval.every=2 eval.examples=8 eval.batch=8 eval.samples=2 checkpoint.every=2
  log.completions_every=1 log.tensorboard=False
""".split()
WARM, ALONE = ["warm_start.steps=4", "steps=6"], ["warm_start.steps=0", "steps=8"]
PATIENCE = 600  # seconds, on a machine with other things to do
REWARD = """
import time

def digits(completions, **_):
  time.sleep(0.2)  # longer than a save takes, so that a moment can be met
  return [sum(c.isdigit() for c in text) / 12 for text in completions]
"""


class Folder:
  """What a run has written so far."""

  def __init__(self, path):
    self.path = path

  def rows(self):
    """Whole rows, without what a clock says."""
    file = self.path / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [
      {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "perf/"))}
      for line in lines
    ]

  def saved(self, store="checkpoints"):
    """The steps of complete checkpoints."""
    return sorted(int(name) for name in self._names(store) if name.isdecimal())

  def saving(self, store="checkpoints"):
    """The steps of those half written."""
    return sorted(
      int(name.split(".")[0]) for name in self._names(store) if ".orbax-checkpoint-tmp" in name
    )

  def completions(self):
    return {file.name: file.read_bytes() for file in (self.path / "completions").iterdir()}

  def bits(self, store="checkpoints"):
    """Name -> digest of every array in the newest checkpoint: parameters, optimizer, step."""
    manifest = self.path / store / str(self.saved(store)[-1]) / "manifest" / "metadata"
    return {
      name: leaf["digest"] for name, leaf in json.loads(manifest.read_text())["leaves"].items()
    }

  def _names(self, store):
    try:
      return os.listdir(self.path / store)
    except FileNotFoundError:
      return []


class Life:
  """One workdir and the processes that are started on it, always with the same command."""

  def __init__(self, path, keys):
    self.folder = Folder(path / "run")
    (path / "reward.py").write_text(REWARD)
    keys = [*FLAGS, *keys, f"reward.functions=('{path / 'reward.py'}:digits',)"]
    self._command = [
      sys.executable,
      "-m",
      "grpo_jax.train",
      "--config=configs/arithmetic.py",
      f"--workdir={self.folder.path}",
      *(f"--config.{key}" for key in keys),
    ]

  def start(self):
    with open(self.folder.path.with_suffix(".out"), "w") as out:
      return subprocess.Popen(
        self._command,
        cwd=ROOT,
        stdout=out,
        stderr=subprocess.STDOUT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
      )

  def finish(self):
    """-> what the process printed."""
    assert self.start().wait(PATIENCE) == 0, self.output()
    return self.output()

  def interrupt(self, moment, number):
    """Starts a process, sends it a signal at the moment, waits. -> its exit code."""
    process = self.start()
    try:
      self._wait_for(moment, process)
      process.send_signal(number)
      process.send_signal(signal.SIGCONT)
      return process.wait(PATIENCE)
    finally:
      process.kill()
      process.wait()

  def kill(self, moment):
    assert self.interrupt(moment, signal.SIGKILL) == -signal.SIGKILL
    assert moment(self.folder)

  def output(self):
    return self.folder.path.with_suffix(".out").read_text()

  def _wait_for(self, moment, process):
    """Leaves the process stopped, at a moment that has not passed in the meantime."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
      assert process.poll() is None, f"it ended before the moment came: {self.output()}"
      if moment(self.folder):
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        if moment(self.folder):
          return
        process.send_signal(signal.SIGCONT)
      time.sleep(0.001)
    raise TimeoutError(self.output())


def never_killed(path, keys):
  life = Life(path, keys)
  life.finish()
  return life.folder


def killed_with_warm_start(path, plain):
  """Steps 1 to 4 are the warm start; checkpoints at 2, 4, 6, 8, 10."""
  life = Life(path, WARM)
  for moment in (
    lambda f: f.saving() == [2] and not f.saved(),  # in the first save
    lambda f: f.saved() == [2] and len(f.rows()) == 3,  # in the warm start
    lambda f: (
      f.saving("reference") and len(f.rows()) == 4
    ),  # at the border, the reference half written
    lambda f: (
      f.saved("reference") and f.saved() == [2, 4] and len(f.rows()) == 4
    ),  # in the first GRPO step
    lambda f: f.saving() == [6],  # in the first save after it
    lambda f: f.saved()[-1:] == [6] and len(f.rows()) == 7,  # in the middle of GRPO
  ):
    life.kill(moment)
    assert life.folder.rows() == plain.rows()[: len(life.folder.rows())]
  assert "going on from step 6 of 10" in life.finish()
  return life.folder


def killed_without_warm_start(path, plain):
  """Then asked to stop by SIGTERM, then left with a damaged checkpoint."""
  life = Life(path, ALONE)
  for moment in (
    lambda f: (f.path / "metrics.jsonl").exists() and not f.rows(),  # before the first row
    lambda f: f.saved() == [2],  # right after a save
  ):
    life.kill(moment)
    assert life.folder.rows() == plain.rows()[: len(life.folder.rows())]
  assert life.interrupt(lambda f: len(f.rows()) == 6, signal.SIGTERM) == 0  # rows of steps 0 to 5
  stopped_at = life.folder.rows()[-1]["step"]
  assert 5 <= stopped_at < 8 and life.folder.saved()[-1] == stopped_at and not life.folder.saving()
  assert f"stopped at step {stopped_at}" in life.output()

  newest = life.folder.path / "checkpoints" / str(stopped_at)
  for file in (newest / "params").rglob("d/*"):
    os.truncate(file, file.stat().st_size // 2)
  output = life.finish()
  assert (
    f"warning: checkpoint {newest} is damaged" in output and "going on from step 4 of 8" in output
  )
  return life.folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  new = tmp_path_factory.mktemp
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    warm, alone = pool.map(never_killed, (new("warm"), new("alone")), (WARM, ALONE))
    return {
      "warm": warm,
      "alone": alone,
      "warm killed": pool.submit(killed_with_warm_start, new("warm_killed"), warm),
      "alone killed": pool.submit(killed_without_warm_start, new("alone_killed"), alone),
    }


def assert_same(folder, plain):
  assert folder.rows() == plain.rows()
  assert folder.saved()[-1] == plain.saved()[-1]
  assert folder.bits() == plain.bits()
  assert folder.completions() == plain.completions()
  assert not folder.saving()


def test_the_run_never_killed_is_one_that_could_go_wrong(runs):
  warm, alone = runs["warm"], runs["alone"]
  assert [row["step"] for row in warm.rows()] == [*range(1, 11)]
  assert [row["step"] for row in alone.rows()] == [*range(9)]
  for rows in (warm.rows()[4:], alone.rows()[1:]):
    assert len({row["loss"] for row in rows}) == len(
      rows
    )  # it learns, so parameters and samples change
    assert rows[-1]["kl"] > 1e-3  # and leaves its reference behind
  assert [row["step"] for row in warm.rows() if "eval/accuracy" in row] == [4, 6, 8, 10]


def test_killed_with_a_warm_start(runs):
  folder = runs["warm killed"].result()
  assert_same(folder, runs["warm"])
  assert folder.bits("reference") == runs["warm"].bits("reference")


def test_killed_and_stopped_and_damaged_without_a_warm_start(runs):
  assert_same(runs["alone killed"].result(), runs["alone"])
