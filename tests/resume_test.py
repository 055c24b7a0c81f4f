"""A run that is killed and started again ends as one that was never killed, bit for bit.

Parameters, optimizer, reference, metrics and completions are compared. First with real processes,
which are killed again and again: one run with a warm start, one without. Then, in this process, for
every kind of reference.
"""

import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import jax
from lora_run_test import make_checkpoint
import numpy as np
import pytest

from configs import default
from grpo_jax.config import from_dict
from grpo_jax.console import exit_codes
from grpo_jax.run.run import Run
from grpo_jax.storage.checkpoint import Checkpoints
from grpo_jax.storage.reading import read_metrics
from grpo_jax.timing import is_of_clock
from grpo_jax.training.loop import run_steps
from grpo_jax.training.reporter import Reporter
from grpo_jax.training.state import StateStore

ROOT = Path(__file__).parents[1]
FLAGS = """
  model.embed_dim=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=1 model.head_dim=8
  model.mlp_dim=32 batch.prompts=4 batch.group_size=4 sampling.max_tokens=12 algo.kl_coef=0.5
  optimizer.learning_rate=0.01 warm_start.batch=8 eval.every=2 eval.examples=8 eval.batch=8
  eval.samples=2 checkpoint.every=2 log.completions_every=1 log.tensorboard=False
""".split()
WARM, ALONE = ["warm_start.steps=4", "steps=6"], ["warm_start.steps=0", "steps=8"]
PATIENCE = 600  # seconds, on a machine with other things to do
DIGITS = """
def digits(completions, **_):
  return [sum(c.isdigit() for c in text) / 12 for text in completions]
"""
# A step takes longer than a save, so that a moment between two saves can be met.
SLOW_DIGITS = """
import time

def digits(completions, **_):
  time.sleep(0.2)
  return [sum(c.isdigit() for c in text) / 12 for text in completions]
"""


class Folder:
  """What a run has written so far."""

  def __init__(self, path):
    self.path = path

  def rows(self):
    """Whole rows of metrics, without times."""
    file = self.path / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [without_times(json.loads(line)) for line in lines]

  def saved(self, store="checkpoints"):
    """The steps of complete checkpoints."""
    return sorted(int(name) for name in self._names(store) if name.isdecimal())

  def saving(self, store="checkpoints"):
    """The steps of checkpoints that are half written."""
    return sorted(
      int(name.split(".")[0]) for name in self._names(store) if ".orbax-checkpoint-tmp" in name
    )

  def completions(self):
    return {file.name: file.read_bytes() for file in (self.path / "completions").iterdir()}

  def bits(self, store="checkpoints"):
    """Shape, dtype and digest of every array in the newest checkpoint, by its name."""
    manifest = self.path / store / str(self.saved(store)[-1]) / "manifest" / "metadata"
    return json.loads(manifest.read_text())["leaves"]

  def _names(self, store):
    try:
      return os.listdir(self.path / store)
    except FileNotFoundError:
      return []


def without_times(row):
  return {key: value for key, value in row.items() if not is_of_clock(key)}


class Life:
  """A workdir and the processes that are started on it, always with the same command."""

  def __init__(self, path, keys):
    self.folder = Folder(path / "run")
    (path / "reward.py").write_text(SLOW_DIGITS)
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
    """Runs a process to its end. Returns what it printed."""
    assert self.start().wait(PATIENCE) == 0, self.output()
    return self.output()

  def interrupt(self, moment, number):
    """Starts a process, sends it a signal at the moment and waits. Returns its exit code."""
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
    """Leaves the process stopped at the moment, which has not passed in the meantime."""
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


def in_first_save(folder):
  return folder.saving() == [2] and not folder.saved()


def reference_half_written(folder):
  return folder.saving("reference") and len(folder.rows()) == 4


def in_first_grpo_step(folder):
  return folder.saved("reference") and folder.saved() == [2, 4] and len(folder.rows()) == 4


def in_first_save_of_grpo(folder):
  return folder.saving() == [6]


def before_first_row(folder):
  return (folder.path / "metrics.jsonl").exists() and not folder.rows()


def after_first_save(folder):
  return folder.saved() == [2]


def has_six_rows(folder):
  """Of steps 0 to 5."""
  return len(folder.rows()) == 6


def killed_with_warm_start(path, plain, moments):
  """Steps 1 to 4 are the warm start. Checkpoints are at 2, 4, 6, 8 and 10."""
  life = Life(path, WARM)
  for moment in moments:
    life.kill(moment)
    assert life.folder.rows() == plain.rows()[: len(life.folder.rows())]
  assert "resuming from step 4 of 10" in life.finish()
  return life.folder


def killed_without_warm_start(path, plain):
  """Then SIGTERM stops it, and then its newest checkpoint is damaged."""
  life = Life(path, ALONE)
  for moment in (before_first_row, after_first_save):
    life.kill(moment)
    assert life.folder.rows() == plain.rows()[: len(life.folder.rows())]
  assert life.interrupt(has_six_rows, signal.SIGTERM) == exit_codes.STOPPED
  stopped_at = life.folder.rows()[-1]["step"]
  assert 5 <= stopped_at < 8 and life.folder.saved()[-1] == stopped_at and not life.folder.saving()
  assert f"stopped at step {stopped_at}; run the same command again to resume" in life.output()

  newest = life.folder.path / "checkpoints" / str(stopped_at)
  for file in (newest / "params").rglob("d/*"):
    os.truncate(file, file.stat().st_size // 2)
  output = life.finish()
  assert f"warning: checkpoint {newest} is damaged" in output
  assert "resuming from step 4 of 8" in output
  return life.folder


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
  return never_killed(tmp_path_factory.mktemp("warm"), WARM)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  return never_killed(tmp_path_factory.mktemp("alone"), ALONE)


def assert_same(folder, plain):
  assert folder.rows() == plain.rows()
  assert folder.saved()[-1] == plain.saved()[-1]
  assert folder.bits() == plain.bits()
  assert folder.completions() == plain.completions()
  assert not folder.saving()


def assert_could_show_a_difference(rows):
  """The policy learns, so that parameters and samples change, and leaves its reference behind."""
  assert len({row["loss"] for row in rows}) == len(rows)
  assert rows[-1]["kl"] > 1e-4
  # The counter of tokens is in the checkpoint.
  tokens = np.cumsum([row["completions/tokens"] + row["prompts/tokens"] for row in rows])
  assert [row["num_tokens"] for row in rows] == tokens.tolist()


@pytest.mark.parametrize(
  "moments",
  [
    (reference_half_written, in_first_save_of_grpo),
    (in_first_save, in_first_grpo_step, in_first_save_of_grpo),
  ],
  ids=["in two saves", "in three"],
)
@pytest.mark.slow
def test_killed_with_a_warm_start(moments, warm, tmp_path):
  assert [row["step"] for row in warm.rows()] == [*range(1, 11)]
  assert [row["step"] for row in warm.rows() if "eval/accuracy" in row] == [4, 6, 8, 10]
  assert_could_show_a_difference(warm.rows()[4:])
  groups = {name.partition(".")[0] for name in warm.bits()}
  assert groups == {"step", "params", "opt_state", "coefs", "host"}
  folder = killed_with_warm_start(tmp_path, warm, moments)
  assert_same(folder, warm)
  assert folder.bits("reference") == warm.bits("reference")


@pytest.mark.slow
def test_killed_and_stopped_and_damaged_without_a_warm_start(alone, tmp_path):
  assert [row["step"] for row in alone.rows()] == [*range(9)]
  assert_could_show_a_difference(alone.rows()[1:])
  assert_same(killed_without_warm_start(tmp_path, alone), alone)


# Every kind of reference, in this process.

REFERENCES = {
  "fixed": dict(kl_coef=0.5),
  "moving": dict(kl_coef=0.5, ref_sync_steps=2),
  "unused": dict(kl_coef=0.0),
}
ADAPTERS = dict(rank=2, base_dtype="float32", targets=("q_proj", "down_proj"))
LAST_STEP = 5


def config(folder, algo, warm_steps, lora=None):
  c = default.get_config()
  c.model.update(embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
  c.batch.update(prompts=8, group_size=4)
  c.data.max_prompt_tokens, c.sampling.max_tokens = 12, 10
  c.reward.functions = (f"{folder}/reward.py:digits",)
  c.optimizer.learning_rate = 0.05
  c.warm_start.update(steps=warm_steps, batch=8)
  c.steps = LAST_STEP - warm_steps
  c.checkpoint.every = 1
  c.log.update(completions_every=0, tensorboard=False)
  c.algo.update(algo)
  if lora is not None:
    c.model.path = lora
    c.lora.update(ADAPTERS)
    c.algo.ref_mixup = 1.0
  return from_dict(c.to_dict())


def assert_equal(ours, theirs):
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def assert_close(ours, theirs):
  np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


class Restarts:
  """A run without updates, which only a `StateStore` keeps: each step adds 1 to what is trained."""

  def __init__(self, config, workdir):
    self.config = config
    self.workdir = workdir
    self.run = Run(config)
    self.store, self.checkpoints = self.open_store()

  def open_store(self):
    checkpoints = Checkpoints(self.workdir / "checkpoints", keep=1)
    return StateStore(self.run, self.workdir, checkpoints, {"count": np.int64(7)}), checkpoints

  def restored(self, step):
    """The state that another process would find after this step."""
    self.checkpoints.wait()
    store, checkpoints = self.open_store()
    state, found, is_restored = store.restore_or_init()
    assert (found, is_restored) == (step, step > 0)
    checkpoints.close()
    return state

  def after_step(self, state, step):
    train = state.train
    train = train.replace(step=train.step + 1, params=jax.tree.map(lambda x: x + 1, train.params))
    state = state.replace(train=train, host={"count": state.host["count"] + 1})
    index, period = step - self.config.warm_start.steps, self.config.algo.ref_sync_steps
    if index >= 0 and period and (index + 1) % period == 0:
      state = self.store.sync_reference(state)
    return state


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  return make_checkpoint(tmp_path_factory.mktemp("base") / "hf")


@pytest.mark.parametrize(
  "kind, warm_steps, has_adapters",
  [
    pytest.param("fixed", 2, False, marks=pytest.mark.slow),
    pytest.param("moving", 2, False, marks=pytest.mark.slow),
    pytest.param("unused", 2, False, marks=pytest.mark.slow),
    pytest.param("fixed", 0, False, marks=pytest.mark.slow),
    pytest.param("moving", 0, False, marks=pytest.mark.slow),
    pytest.param("fixed", 0, True, marks=pytest.mark.slow),
    ("moving", 0, True),
    pytest.param("unused", 0, True, marks=pytest.mark.slow),
  ],
)
def test_a_state_is_restored_as_it_was_after_every_step(
  kind, warm_steps, has_adapters, tmp_path, checkpoint
):
  """Where the reference stays is known by hand: see `expected`."""
  (tmp_path / "reward.py").write_text(DIGITS)
  lora = checkpoint if has_adapters else None
  c = config(tmp_path, REFERENCES[kind], warm_steps, lora)
  restarts = Restarts(c, tmp_path / "run")
  store = restarts.store
  state, _, _ = store.restore_or_init()
  initial = jax.device_get(state.train.params)

  def expected(step):
    """The reference, as trained parameters, of the GRPO step that follows `step`."""
    if kind == "unused" or (kind == "fixed" and has_adapters):
      return None
    if kind == "fixed":
      return moved(warm_steps)
    syncs = (step - warm_steps) // 2
    mixup = c.algo.ref_mixup
    reference = moved(warm_steps)
    for sync in range(1, syncs + 1):
      policy = moved(warm_steps + 2 * sync)
      reference = jax.tree.map(lambda r, p: (1 - mixup) * r + mixup * p, reference, policy)
    return reference

  def moved(steps):
    return jax.tree.map(lambda x: x + steps, initial)

  for step in range(LAST_STEP):
    restored = restarts.restored(step) if step else state
    assert_equal(restored.train, state.train)
    assert_equal(restored.host, state.host)
    if step == warm_steps:
      restored, state = store.begin_grpo(restored), store.begin_grpo(state)
    if step >= warm_steps:
      assert_equal(restored.train, state.train)
      assert_equal(restored.reference, state.reference)
      wanted = expected(step)
      assert (state.reference is None) == (wanted is None)
      jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.reference, wanted
      )
      assert_equal(store.reference_params(restored), store.reference_params(state))
      assert (store.reference_params(state) is None) == (kind == "unused")
    state = restarts.after_step(restored, step)
    store.save(step + 1, state)
  restarts.checkpoints.close()
  has_folder = (tmp_path / "run" / "reference").exists()
  assert has_folder == (kind == "fixed" and warm_steps > 0)


class Killed(Exception):
  pass


def killed_after(last, config, workdir, monkeypatch):
  """Starts the run. It dies after step `last`, before that is saved."""
  original = Reporter.step

  def report(self, step, params, metrics, rows):
    row = original(self, step, params, metrics, rows)
    if step == last:
      raise Killed
    return row

  with monkeypatch.context() as patched:
    patched.setattr(Reporter, "step", report)
    with pytest.raises(Killed):
      run_steps(config, workdir)


@pytest.mark.slow
def test_a_run_with_a_moving_reference_is_the_same_after_kills(tmp_path, monkeypatch):
  """Its newest checkpoint is of the end of the warm start, then of the step that moved it."""
  (tmp_path / "reward.py").write_text(DIGITS)
  c = config(tmp_path, REFERENCES["moving"], warm_steps=2)
  whole = run_steps(c, tmp_path / "whole").state
  for last in (3, 5):
    killed_after(last, c, tmp_path / "killed", monkeypatch)
  killed = run_steps(c, tmp_path / "killed").state
  assert_equal(killed, whole)
  ours, theirs = (
    [without_times(row) for row in read_metrics(tmp_path / name)] for name in ("killed", "whole")
  )
  assert ours == theirs and [row["step"] for row in ours] == [*range(1, LAST_STEP + 1)]
  assert abs(ours[2]["kl"]) < 1e-6 < 1e-4 < ours[3]["kl"]
