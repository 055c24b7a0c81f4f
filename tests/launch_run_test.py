"""The launcher on this machine, with real training: a sweep that is interrupted, and two hosts."""

import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import time

import pytest

from grpo_jax.storage.json_files import parse_rows

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
KEYS = """
  model.embed_dim=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=2 model.head_dim=8
  model.mlp_dim=32 batch.prompts=8 batch.group_size=4 sampling.max_tokens=8
  optimizer.schedule=constant warm_start.steps=3 warm_start.batch=8 eval.every=2 eval.examples=20
  eval.batch=20 log.tensorboard=False
""".split()
TRAIN = ["--config=configs/arithmetic.py", *(f"--config.{key}" for key in KEYS)]


def start(workdir, *flags, steps):
  command = [sys.executable, "-m", "grpo_jax.launch", "--on=local", f"--workdir={workdir}", *flags]
  return subprocess.Popen(
    [*command, "--", *TRAIN, f"--config.steps={steps}"],
    cwd=ROOT,
    env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def step_of(workdir):
  path = workdir / "metrics.jsonl"
  rows = parse_rows(path) if path.exists() else []
  return rows[-1][0]["step"] if rows else 0


def wait_for_steps(launcher, *workdirs, step=6):
  while any(step_of(workdir) < step for workdir in workdirs):
    assert launcher.poll() is None, launcher.communicate()
    time.sleep(0.2)


def processes_of(workdir):
  """The ids of the training processes whose command line names the folder."""
  found = []
  for path in Path("/proc").glob("[0-9]*/cmdline"):
    try:
      words = path.read_bytes().decode().split("\0")
    except OSError:  # it has ended
      continue
    if "grpo_jax.train" in words and any(str(workdir) in word for word in words):
      found.append(int(path.parent.name))
  return sorted(found)


def test_a_sweep_that_is_interrupted_goes_on_and_leaves_no_process(tmp_path):
  (tmp_path / "sweep.py").write_text("def sweep():\n  for seed in (0, 1): yield {'seed': seed}\n")
  flags, workdirs = [f"--sweep={tmp_path}/sweep.py"], [tmp_path / "x" / f"seed={i}" for i in (0, 1)]
  launcher = start(tmp_path / "x", *flags, "--at_once=2", steps=100_000)
  wait_for_steps(launcher, *workdirs)
  assert len(processes_of(tmp_path)) == 2
  launcher.send_signal(signal.SIGTERM)
  shown, said = launcher.communicate(timeout=200)
  assert launcher.returncode == 75 and said.count("stopped seed=") == 2
  assert not processes_of(tmp_path)
  assert re.search(r"seed 0 at \d+ of 100003; seed 1 at \d+ of 100003$", shown, re.MULTILINE)

  last = max(map(step_of, workdirs)) + 2
  saved = [step_of(workdir) for workdir in workdirs]
  launcher = start(tmp_path / "x", *flags, steps=last - 3)
  shown, said = launcher.communicate(timeout=400)
  assert launcher.returncode == 0 and "2 runs: 0 finished, 2 to start" in said
  assert [step_of(workdir) for workdir in workdirs] == [last] * 2
  for workdir, step in zip(workdirs, saved):
    log = (tmp_path / "x" / "launch" / f"{workdir.name}.log").read_text()
    assert f"resuming from step {step} of {last}" in log
  assert shown.splitlines()[1].endswith("  2      finished")


def test_of_two_launchers_at_once_one_trains_and_no_run_has_failed(tmp_path):
  launchers = [start(tmp_path / "x", steps=100_000) for _ in range(2)]
  while all(launcher.poll() is None for launcher in launchers):
    time.sleep(0.2)
  loser, winner = sorted(launchers, key=lambda launcher: launcher.poll() is None)
  shown, said = loser.communicate()
  assert loser.returncode == 75 and f"left alone {tmp_path}/x: process " in said
  assert "failed" not in said and (" running, at " in shown or " starting" in shown)
  wait_for_steps(winner, tmp_path / "x")
  winner.send_signal(signal.SIGTERM)
  assert "stopped " in winner.communicate(timeout=100)[1] and winner.returncode == 75
  assert not processes_of(tmp_path)


def test_two_processes_of_a_run_end_together_and_go_on(tmp_path):
  launcher = start(tmp_path / "x", "--hosts=2", steps=100_000)
  wait_for_steps(launcher, tmp_path / "x")
  first, second = processes_of(tmp_path)
  os.kill(second, signal.SIGKILL)
  killed_at = time.monotonic()
  _, said = launcher.communicate(timeout=60)
  assert launcher.returncode == 1 and time.monotonic() - killed_at < 60
  assert f"failed {tmp_path}/x: process 1 of 2 was killed by SIGKILL: " in said
  assert not processes_of(tmp_path)

  last = step_of(tmp_path / "x") + 2
  launcher = start(tmp_path / "x", "--hosts=2", steps=last - 3)
  shown, said = launcher.communicate(timeout=400)
  assert launcher.returncode == 0, said
  assert step_of(tmp_path / "x") == last and shown.splitlines()[1].endswith("  1      finished")
  assert "2 x cpu (cpu), mesh data 2" in (tmp_path / "x" / "launch" / "run.0.log").read_text()
