"""XManager: what the launcher hands over, and real experiments with its local executor.

The real ones need the program xmanager on the PATH: `pip install uv && uv tool install xmanager`.
"""

import os
from pathlib import Path
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from grpo_jax.around.launchers import xmanager
from grpo_jax.around.launchers.options import Options
from grpo_jax.around.launchers.units import units
from grpo_jax.settings import ConfigError
from grpo_jax.storage.json_files import parse_rows

ROOT = Path(__file__).parents[1]
RUNS = units("/sweep", ["--config=a b.py"], [{"seed": 0}, {"seed": 1}])
LINES = [
  f"{sys.executable} -m grpo_jax.train '--config=a b.py' --config.seed={seed}"
  f" --workdir=/sweep/seed={seed}"
  for seed in (0, 1)
]


def test_a_dry_run_prints_the_command_of_each_run(capsys, monkeypatch):
  monkeypatch.setenv("PATH", "/nowhere")
  assert xmanager.launch(RUNS, Options(dry_run=True)) == 0
  assert capsys.readouterr().out.splitlines() == LINES


def test_if_xmanager_is_missing_a_line_says_how_to_get_it(monkeypatch):
  monkeypatch.setenv("PATH", "/nowhere")
  with pytest.raises(ConfigError, match="no xmanager on the PATH: .* uv tool install xmanager"):
    xmanager.launch(RUNS, Options())


def test_xmanager_gets_the_script_and_the_runs(tmp_path, monkeypatch):
  program = tmp_path / "xmanager"
  program.touch(mode=0o755)
  monkeypatch.setenv("PATH", str(tmp_path))
  calls = []

  def run(path, command):
    runs = next(flag for flag in command if flag.startswith("--runs="))
    calls.append((path, command, Path(runs.removeprefix("--runs=")).read_text()))

  monkeypatch.setattr(os, "execv", run)
  xmanager.launch(RUNS, Options(at_once=2, xm=("--executor=vertex",)))
  ((path, command, text),) = calls
  assert path == str(program)
  assert command[:4] == [path, "launch", f"{ROOT}/experiments/xm_launch.py", "--"]
  assert command[5:] == ["--at_once=2", "--executor=vertex"]
  assert text.splitlines() == LINES


# Real experiments.

XMANAGER = shutil.which("xmanager")
KEYS = """
  model.embed_dim=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=2 model.head_dim=8
  model.mlp_dim=32 batch.prompts=8 batch.group_size=4 sampling.max_tokens=8
  optimizer.schedule=constant warm_start.steps=3 warm_start.batch=8 eval.every=2 eval.examples=20
  eval.batch=20 checkpoint.every=0 log.tensorboard=False
""".split()
TRAIN = ["--config=configs/arithmetic.py", *(f"--config.{key}" for key in KEYS)]
LAUNCH = [sys.executable, "-m", "grpo_jax.launch"]
CLOUD = """
import sys
sys.path.insert(0, "experiments")
from absl import flags
import xm_launch
from xmanager.cloud import kubernetes, vertex
from xmanager.xm import utils
from xmanager.xm_local import executables

flags.FLAGS(sys.argv)
command = "python -m grpo_jax.train --config=x.py --config.seed=1 --workdir=/gcs/b/x".split()
image = executables.GoogleContainerRegistryImage(name="image", image_path="gcr.io/project/image")
for executor in ("vertex", "kubernetes"):
  spec = xm_launch.packageable(command, executor).executable_spec
  print(spec.entrypoint.module_name, *spec.docker_instructions[1:], sep="; ")
  job = xm_launch.job(command, image, executor)
  print(*job.args.to_list(utils.ARGV_ESCAPER))
  if executor == "vertex":
    print(vertex.get_machine_spec(job)["machine_type"])
  else:
    print(kubernetes.requirements_from_executor(job.executor).limits)
"""


@pytest.fixture
def experiments(tmp_path):
  """A folder with XManager's files, and a sweep file of two seeds."""
  (tmp_path / "sweep.py").write_text("def sweep():\n  for seed in (0, 1): yield {'seed': seed}\n")
  (tmp_path / "home").mkdir()
  return tmp_path


def start(experiments, *command):
  env = os.environ | {"HOME": f"{experiments}/home", "JAX_NUM_CPU_DEVICES": "1"}
  return subprocess.Popen(
    command,
    cwd=ROOT,
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    # A shell ignores SIGINT for what it starts in the background, such as this test.
    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
  )


def end(process, limit=400):
  shown, said = process.communicate(timeout=limit)
  return process.returncode, shown, said


def step_of(workdir):
  path = workdir / "metrics.jsonl"
  rows = parse_rows(path) if path.exists() else []
  return rows[-1][0]["step"] if rows else 0


@pytest.mark.slow
@pytest.mark.skipif(
  not XMANAGER, reason="needs xmanager: pip install uv && uv tool install xmanager"
)
class TestWithXManager:
  def launch(self, experiments, *flags):
    """As users of XManager do."""
    python = f"--python={sys.executable}"
    return start(
      experiments, XMANAGER, "launch", "experiments/xm_launch.py", "--", python, *TRAIN, *flags
    )

  def test_a_sweep_is_an_experiment_with_work_units(self, experiments):
    workdir = experiments / "sweep"
    flags = (f"--workdir={workdir}", f"--sweep={experiments}/sweep.py")
    code, shown, said = end(self.launch(experiments, *flags, "--config.steps=2", "--at_once=2"))
    assert code == 0, said
    assert shown.count("] finished: metrics, completions and checkpoints are in ") == 2
    assert all(f"[seed={seed}] exited with 0" in shown for seed in (0, 1))
    database = sqlite3.connect(experiments / "home" / ".xmanager" / "experiments.sqlite3")
    assert database.execute("SELECT experiment_title FROM experiment").fetchall() == [("grpo_jax",)]
    assert database.execute("SELECT work_unit_id FROM work_unit").fetchall() == [(1,), (2,)]
    _, table, _ = end(start(experiments, *LAUNCH, *flags, "--table"))
    assert table.splitlines()[1].endswith("  2      finished")
    code, shown, said = end(self.launch(experiments, *flags, "--config.steps=2"))
    assert code == 0 and "2 runs: 2 finished, 0 to start" in said and not shown

  def test_ctrl_c_saves_and_the_launcher_goes_on(self, experiments):
    workdir = experiments / "run"
    process = self.launch(experiments, f"--workdir={workdir}", "--config.steps=100000")
    while step_of(workdir) < 6:
      assert process.poll() is None, process.communicate()
      time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    code, shown, said = end(process, 30)
    assert code == 75 and "the same command goes on" in shown, said
    while not (workdir / "checkpoints" / str(step_of(workdir))).is_dir():  # XManager does not wait
      time.sleep(0.2)
    last = step_of(workdir) + 2
    on = start(
      experiments,
      *LAUNCH,
      "--on=xmanager",
      f"--workdir={workdir}",
      "--",
      *TRAIN,
      f"--config.steps={last - 3}",
    )
    code, shown, said = end(on)
    assert code == 0, said
    assert f"[run] resuming from step {last - 2} of {last}" in shown and step_of(workdir) == last

  def test_a_run_that_fails_ends_no_other_one(self, experiments):
    (experiments / "rewards.py").write_text(
      "def fail(completions, **columns):\n  raise ValueError('no reward today')\n"
    )
    names = [f"{experiments}/rewards.py:fail", "strict"]
    (experiments / "sweep.py").write_text(
      f"def sweep():\n  for name in {names}: yield {{'reward.functions': (name,)}}\n"
    )
    flags = (f"--workdir={experiments}/sweep", f"--sweep={experiments}/sweep.py")
    code, shown, said = end(self.launch(experiments, *flags, "--config.steps=2"))
    assert code == 1, said
    assert "no reward today" in shown and shown.count("] finished: metrics") == 1
    assert re.search(r"_fail\S* exited with 1$", shown, re.MULTILINE)

  def test_bad_input_starts_nothing(self, experiments):
    code, shown, said = end(self.launch(experiments, f"--workdir={experiments}/x", "--config.x=1"))
    assert code == 2 and "error: config key x is unknown" in said
    assert not (experiments / "home" / ".xmanager").exists()

  def test_jobs_for_the_cloud_are_complete(self, experiments):
    """As far as this can be seen without Docker and a project on Google Cloud."""
    first_line = Path(XMANAGER).read_text().splitlines()[0]
    python = first_line.removeprefix("#!").strip()
    code, shown, said = end(
      start(experiments, python, "-c", CLOUD, '--requirements={"A100": 8}', "--config.seed=1")
    )
    assert code == 0, said
    image = "grpo_jax.train; WORKDIR /grpo_jax; RUN pip install -e '.[cuda]'"
    args = "--config=x.py --config.seed=1 --workdir=/gcs/b/x"
    assert shown.splitlines() == [
      *(image, args, "a2-highgpu-8g"),
      *(image, args, "{'nvidia.com/gpu': '8'}"),
    ]
