"""`python -m grpo_jax.launch`: sweeps, names, what is started and what is not, and the table.

A program of a few lines takes the place of the training here. `launch_run_test.py` and
`slurm_test.py` train.
"""

import json
import math
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

from absl import flags
import pytest

from grpo_jax import cli
from grpo_jax import config as config_lib
from grpo_jax import launch as launch_lib
from grpo_jax import progress as progress_lib
from grpo_jax.around.launchers import local
from grpo_jax.around.launchers.options import Options
from grpo_jax.around.launchers.progress import progress
from grpo_jax.around.launchers.sweep import load_sweep, name_of
from grpo_jax.around.launchers.table import t_interval, table
from grpo_jax.around.launchers.units import Unit, units
from grpo_jax.settings import ConfigError
from grpo_jax.storage import lock

ROOT = Path(__file__).parents[1]
TRAIN = (
  f"--config={ROOT}/configs/arithmetic.py",
  "--config.steps=2",
  "--config.warm_start.steps=1",
)
SWEEP = """
def sweep():
  for learning_rate in (1e-4, 2e-4):
    for seed in (0, 1):
      yield {"seed": seed, "optimizer.learning_rate": learning_rate}
"""
LEGEND = (
  "accuracy: the mean over seeds of each run's newest held-out accuracy; interval: its 95%"
  " t-interval over seeds, within 0% to 100%"
)


def launch(*command_line):
  """What the entry point does with a command line. Returns the exit code."""
  own, train_flags = launch_lib.split(command_line)
  values = flags.FlagValues()
  launch_lib.define_flags(values)
  values(["launch", *own])
  return launch_lib.launch(values, train_flags)


@pytest.fixture
def sweep_file(tmp_path):
  path = tmp_path / "sweep.py"
  path.write_text(SWEEP)
  return path


# Sweeps.


@pytest.mark.parametrize(
  "source, words",
  [
    ("x = 1", ["defines no function sweep()"]),
    ("sweep = 1", ["defines no function sweep()"]),
    ("def sweep(): pass", ["must yield dicts of settings", "returns None"]),
    ("def sweep(): return {'seed': 1}", ["must yield dicts of settings", "returns {'seed': 1}"]),
    ("def sweep(): yield ('seed', 1)", ["must yield dicts of settings", "yields ('seed', 1)"]),
    ("def sweep(): yield {}", ["must yield dicts of settings", "yields {}"]),
    ("def sweep(): return []", ["sweep() yields nothing"]),
    ("def sweep(): yield {1: 2}", ["1: 2 is no setting", "keys are strings"]),
    ("def sweep(): yield {'seed': None}", ["'seed': None is no setting"]),
    ("def sweep(): yield {'algo': {'kl_coef': 1}}", ["'algo': {'kl_coef': 1} is no setting"]),
    ("def sweep():\n  yield {'seed': 1 / 0}", ["ZeroDivisionError", "line 2)"]),
    ("import sys; sys.exit(0)", ["SystemExit: 0", "line 1)"]),
    ("def sweep(:", ["SyntaxError", "line 1"]),
    (
      "def sweep():\n  yield {'seed': 1, 'steps': 2}\n  yield {'steps': 2.0, 'seed': 1}",
      ["yields {'steps': 2.0, 'seed': 1} twice"],
    ),
    (
      "def sweep():\n  yield {'seed': 1}\n  yield {'seed': '1'}",
      ["yields {'seed': '1'} and {'seed': 1}, which are the same run"],
    ),
    (
      "class C:\n  def __getattr__(self, n): 1 / 0\ndef sweep(): yield {'seed': C()}",
      ["no setting"],
    ),
    ("def sweep():\n  i = 0\n  while True: yield {'seed': (i := i + 1)}", ["more than 10000 runs"]),
  ],
)
def test_a_wrong_sweep_file_is_one_line(tmp_path, source, words):
  path = tmp_path / "sweep.py"
  path.write_text(source)
  with pytest.raises(ConfigError) as error:
    load_sweep(str(path))
  message = str(error.value)
  assert message.startswith(f"flag --sweep={path}: ") and "\n" not in message
  assert all(word in message for word in words), message


def test_a_sweep_file_that_is_not_there_is_named(tmp_path):
  with pytest.raises(ConfigError, match="there is no file .*/none.py"):
    load_sweep(str(tmp_path / "none.py"))


def test_scalars_of_numpy_and_lists_become_values_of_flags(tmp_path):
  (tmp_path / "sweep.py").write_text(
    "import numpy as np\n"
    "def sweep():\n"
    "  for rate in np.logspace(-4, -3, 2):\n"
    "    yield {'optimizer.learning_rate': rate, 'reward.functions': ['strict', 'flexible']}\n"
  )
  found = load_sweep(str(tmp_path / "sweep.py"))
  assert [type(one["optimizer.learning_rate"]) for one in found] == [float, float]
  unit = units("/sweep", TRAIN, found)[1]
  assert unit.flags[len(TRAIN) :] == (
    "--config.optimizer.learning_rate=0.001",
    "--config.reward.functions=('strict', 'flexible')",
  )
  config = cli.config_of(unit.flags)
  assert config.optimizer.learning_rate == 1e-3
  assert config.reward.functions == ("strict", "flexible")


def test_names_are_the_settings_with_the_seed_last():
  rate = {"seed": 1, "optimizer.learning_rate": 1e-3}
  assert name_of(rate) == "optimizer.learning_rate=0.001,seed=1"
  assert name_of({"seed": 1, "warm_start.steps": 8, "algo.kl": "k3"}) == (
    "algo.kl=k3,warm_start.steps=8,seed=1"
  )


def test_names_are_names_of_folders_and_differ_where_the_settings_do():
  names = [name_of({"data.prompt": text}) for text in ("a/b", "a b", "a\nb", "x" * 300, "x" * 301)]
  assert len(set(names)) == 5
  assert all("/" not in name and " " not in name and len(name) < 200 for name in names)
  assert names[0].startswith("data.prompt=a_b-")


def test_a_unit_has_its_folder_and_the_flags_of_its_settings(tmp_path):
  first, second = units(str(tmp_path), TRAIN, [{"seed": 3}, {"algo.dynamic_sampling": True}])
  assert first.command("python") == [
    *("python", "-m", "grpo_jax.train", *TRAIN),
    *("--config.seed=3", f"--workdir={tmp_path}/seed=3"),
  ]
  assert second.flags[-1] == "--config.algo.dynamic_sampling=True"
  (only,) = units("relative", TRAIN)
  assert only == Unit("", f"{Path.cwd()}/relative", {}, TRAIN)


# Flags.


@pytest.mark.parametrize(
  "command_line, words",
  [
    (["--on=local", "--", *TRAIN], "flag --workdir is missing"),
    (
      ["--workdir=DIR", "--", *TRAIN],
      "flag --on is missing: choose one of local, ray, slurm, xmanager",
    ),
    (
      ["--on=pbs", "--workdir=DIR", "--", *TRAIN],
      "--on=pbs is unknown: choose one of local, ray, slurm, xmanager",
    ),
    (["--on=local", "--workdir=DIR"], "write flags of grpo_jax.train after --"),
    (["--on=local", "--workdir=DIR", "--", "--confg=1"], "Unknown command line flag 'confg'"),
    (["--on=local", "--workdir=DIR", "--", *TRAIN, "--workdir=/x"], "--workdir stands after --"),
    (
      ["--on=local", "--workdir=DIR", "--time_limit=5", "--", *TRAIN],
      "does nothing with --on=local",
    ),
    (["--on=local", "--workdir=DIR", "--", *TRAIN, "--config.sed=1"], "did you mean seed"),
    (["--on=slurm", "--workdir=DIR", "--time_limit=5", "--", *TRAIN], "must be 60 seconds longer"),
    (["--on=slurm", "--workdir=DIR", "--time_limit=2h", "--", *TRAIN], "hours:minutes:seconds"),
    (["--on=slurm", "--workdir=DIR", "--", *TRAIN], "there is no sbatch"),
    (["--workdir=DIR", "--table"], "there is no such folder"),
    (["--on=local", "--workdir=gs://DIR", "--", *TRAIN], "gs://"),
  ],
)
def test_wrong_flags_are_one_line_and_nothing_is_written(
  tmp_path, monkeypatch, command_line, words
):
  monkeypatch.setenv("PATH", "/nowhere")
  command_line = [flag.replace("--workdir=DIR", f"--workdir={tmp_path}/x") for flag in command_line]
  with pytest.raises(ConfigError) as error:
    launch(*command_line)
  assert words in str(error.value) and "\n" not in str(error.value)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "settings, words",
  [
    ("{'optimizer.lr': 1}", "run optimizer.lr=1: config key optimizer.lr is unknown"),
    ("{'seed': 0.5}", "run seed=0.5: config key seed must be a whole number"),
    (
      "{'batch.group_size': 1}",
      "run batch.group_size=1: config key batch.group_size is 1: it must",
    ),
    ("{'steps': 3}", "config key steps is set by the sweep and by --config.steps: remove one"),
  ],
)
def test_a_setting_that_cannot_be_used_starts_nothing(tmp_path, settings, words):
  (tmp_path / "sweep.py").write_text(f"def sweep():\n  yield {{'seed': 1}}\n  yield {settings}")
  with pytest.raises(ConfigError) as error:
    launch("--on=local", f"--workdir={tmp_path}/x", f"--sweep={tmp_path}/sweep.py", "--", *TRAIN)
  assert words in str(error.value)
  assert not (tmp_path / "x").exists()


def test_the_command_ends_with_one_line_and_its_exit_code(tmp_path):
  """Through the entry point. A flag of grpo_jax.train before -- is noticed."""
  command = [sys.executable, "-m", "grpo_jax.launch", "--on=local", f"--workdir={tmp_path}/x"]
  done = subprocess.run(
    [*command, *TRAIN, "--table"], cwd=ROOT, capture_output=True, text=True, check=False
  )
  assert done.returncode == 2
  assert done.stderr == f"error: flag {TRAIN[0]} is one of grpo_jax.train: write it after --\n"


# Progress and the table, from folders written by hand.


def write_run(folder, steps=2, rows=(), checkpoint=None, every=1):
  """The folder of a run of `steps` GRPO steps after one step of warm start."""
  folder.mkdir(parents=True)
  config = {"steps": steps, "warm_start": {"steps": 1}, "eval": {"every": every}}
  (folder / "config.json").write_text(json.dumps(config))
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  if checkpoint is not None:
    (folder / "checkpoints" / str(checkpoint)).mkdir(parents=True)


def evaluated(step, accuracy):
  return {"step": step, "eval/accuracy": accuracy}


def test_progress_is_read_from_the_folder(tmp_path):
  assert str(progress(tmp_path / "none")) == "not started"
  assert not (tmp_path / "none").exists()
  write_run(
    tmp_path / "begun", rows=[{"step": 1}, evaluated(2, 0.25), {"step": 3, "eval/accuracy": None}]
  )
  with open(tmp_path / "begun" / "metrics.jsonl", "a") as file:
    file.write('{"step": 4, "eval/accuracy"')  # half a line
  found = progress(tmp_path / "begun")
  assert (found.step, found.last_step, found.accuracy, found.is_finished) == (3, 3, 0.25, False)
  assert str(found) == "at 3 of 3"  # not finished: there is no checkpoint
  write_run(tmp_path / "done", rows=[evaluated(3, 0.5)], checkpoint=3)
  assert str(progress(tmp_path / "done")) == "finished"
  assert str(progress(tmp_path / "done", last_step=9)) == "at 3 of 9"  # it is to have more steps
  with lock.held(tmp_path / "begun", print):
    found = progress(tmp_path / "begun")
    assert found.holder.startswith(f"process {os.getpid()} on ") and not found.is_finished
    assert str(found) == "running, at 3 of 3"
  assert not progress(tmp_path / "begun").holder
  with lock.held(tmp_path / "done", print):
    assert not progress(tmp_path / "done").is_finished  # it writes what is still missing


def test_a_run_whose_last_evaluation_failed_is_not_finished(tmp_path):
  write_run(tmp_path / "lacks", rows=[evaluated(2, 0.5), {"step": 3}], checkpoint=3)
  write_run(tmp_path / "never", rows=[{"step": 3}], checkpoint=3, every=0)
  assert not progress(tmp_path / "lacks").is_finished
  exams = [{"step": 3, "eval/math500/accuracy": 0.5}]
  write_run(tmp_path / "exams", rows=exams, checkpoint=3)
  assert progress(tmp_path / "exams").is_finished
  assert progress(tmp_path / "never").is_finished


def test_the_interval_is_students():
  # t(0.975, 1 degree) = 12.7062, s = 0.1 * sqrt(2), n = 2: 12.7062 * 0.1
  assert t_interval([0.4, 0.6]) == pytest.approx((0.5 - 1.27062, 0.5 + 1.27062), abs=1e-5)
  # t(0.975, 2 degrees) = 4.30265, s = 0.1, n = 3: 4.30265 * 0.1 / 1.73205
  assert t_interval([0.5, 0.6, 0.7]) == pytest.approx((0.6 - 0.248414, 0.6 + 0.248414), abs=1e-5)
  assert t_interval([0.5]) is t_interval([]) is None
  assert not math.isnan(t_interval([0.5, 0.5])[0])


def test_the_table_has_the_best_setting_first_with_intervals_over_seeds(tmp_path):
  settings = [{"algo.kl_coef": kl, "seed": seed} for kl in (0, 0.1) for seed in (0, 1, 2)]
  settings += [{"algo.kl_coef": 0.2, "seed": 0}, {"algo.kl_coef": 0.3, "seed": 0}]
  runs = units(str(tmp_path), TRAIN, settings)
  for run, accuracy in zip(runs, (0.5, 0.25, 0.3, 0.5, 0.6, 0.7)):
    write_run(Path(run.workdir), rows=[evaluated(3, accuracy)], checkpoint=3)
  (Path(runs[1].workdir) / "checkpoints" / "3").rmdir()
  write_run(Path(runs[6].workdir), rows=[evaluated(1, 0.9), {"step": 2}])
  queued = {runs[7].title: "job 7_3 pending", runs[1].title: "job 7_1 running"}
  assert table(runs, queued) == [
    # The mean of 0.5, 0.25 and 0.3 is 0.35, s = 0.13229, and 4.30265 * s / sqrt(3) = 0.32862.
    "setting           accuracy  interval        seeds  progress",
    "algo.kl_coef=0.2  90.0%     -               1      at 2 of 3",
    "algo.kl_coef=0.1  60.0%     35.2% to 84.8%  3      finished",
    "algo.kl_coef=0    35.0%     2.1% to 67.9%   3      seed 0, 2 finished; seed 1 job 7_1 running,"
    " at 3 of 3",
    "algo.kl_coef=0.3  -         -               0      job 7_3 pending",
    LEGEND,
  ]


def test_the_table_of_seeds_alone_and_of_one_run(tmp_path):
  runs = units(str(tmp_path), TRAIN, [{"seed": 0}, {"seed": 1}])
  assert table(runs, {})[1] == "as configured  -         -         0      not started"
  for run, accuracy in zip(runs, (0.3, 0.7)):  # 0.5 plus or minus 12.7062 * 0.2, and no more than 1
    write_run(Path(run.workdir), rows=[evaluated(3, accuracy)], checkpoint=3)
  assert table(runs, {})[1] == "as configured  50.0%     0.0% to 100.0%  2      finished"
  (only,) = units(str(tmp_path / "run"), TRAIN)
  write_run(tmp_path / "run", rows=[evaluated(3, 0.5)], checkpoint=3)
  assert table([only], {})[1].split() == [f"{tmp_path}/run", "50.0%", "-", "1", "finished"]


def test_folders_of_runs_and_of_sweeps_are_told_apart(tmp_path, sweep_file, capsys):
  for run in units(str(tmp_path / "x"), TRAIN, load_sweep(str(sweep_file))):
    write_run(Path(run.workdir), rows=[evaluated(3, 0.5)], checkpoint=3)
  with pytest.raises(ConfigError, match="is the folder of a sweep: add --sweep=FILE"):
    launch("--table", f"--workdir={tmp_path}/x")
  inner = next((tmp_path / "x").iterdir())
  with pytest.raises(ConfigError, match="is the folder of a run: name another for a sweep"):
    launch("--on=local", f"--workdir={inner}", f"--sweep={sweep_file}", "--", *TRAIN)
  assert launch("--table", f"--workdir={tmp_path}/x", f"--sweep={sweep_file}") == 0
  shown = capsys.readouterr().out
  assert "optimizer.learning_rate=0.0001  50.0%     50.0% to 50.0%  2      finished" in shown


# This machine, with a program of a few lines for the training.

# It notes its start, waits where the file `wait` is, fails where the file `fail/NAME` is, and else
# writes what a finished run leaves.
FAKE = """
import os, pathlib, signal, sys, time
folder, common = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
index = os.environ.get("JAX_PROCESS_ID", "")
print("this is", folder.name, index, flush=True)
asked = []
for number in (signal.SIGTERM, signal.SIGINT):
  signal.signal(number, lambda number, frame: asked.append(number))
with open(common / "starts", "a") as file:
  file.write(f"{folder.name} {os.getpid()}\\n")
while (common / "wait").exists() and not (common / "fail" / (folder.name + index)).exists():
  time.sleep(0.01)
  if asked:
    print("saving", flush=True)
    time.sleep(0.3)
    sys.exit(130 if asked == [signal.SIGTERM, signal.SIGINT] else 75)
if (common / "fail" / (folder.name + index)).exists():
  print((common / "fail" / (folder.name + index)).read_text() or f"error: no luck {index}")
  print("bye")
  sys.exit(1)
folder.mkdir(exist_ok=True)
(folder / "config.json").write_text((common / "configs" / folder.name).read_text())
(folder / "metrics.jsonl").write_text('{"step": 3, "eval/accuracy": 0.5}\\n')
(folder / "checkpoints" / "3").mkdir(parents=True)
"""


class Fakes:
  """Runs of a sweep whose program is FAKE."""

  def __init__(self, folder, sweep_file):
    self.folder, self.workdir = folder, folder / "x"
    (folder / "fake.py").write_text(FAKE)
    (folder / "fail").mkdir()
    (folder / "configs").mkdir()
    self.flags = ["--on=local", f"--workdir={self.workdir}", f"--sweep={sweep_file}"]
    self.units = units(str(self.workdir), TRAIN, load_sweep(str(sweep_file)))
    for unit in self.units:
      config = config_lib.to_dict(cli.config_of(unit.flags))
      (folder / "configs" / unit.name).write_text(json.dumps(config))

  @property
  def command(self):
    start = [sys.executable, "-S", "-E", f"{self.folder}/fake.py"]
    return lambda unit: [*start, unit.workdir, str(self.folder)]

  def launch(self, *more):
    return launch(*self.flags, *more, "--", *TRAIN)

  def starts(self):
    """The names of the runs that were started, in this order, and the ids of their processes."""
    path = self.folder / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split() for line in lines]

  def names_started(self):
    return [name for name, _ in self.starts()]


@pytest.fixture
def fakes(tmp_path, sweep_file, monkeypatch):
  fakes = Fakes(tmp_path, sweep_file)
  monkeypatch.setattr(Unit, "command", fakes.command)
  return fakes


def test_a_sweep_runs_and_nothing_runs_twice(fakes, capsys):
  (fakes.folder / "fail" / fakes.units[1].name).touch()
  assert fakes.launch("--at_once=2") == 1
  shown = capsys.readouterr()
  log = f"{fakes.workdir}/launch/{fakes.units[1].name}.log"
  assert f"failed {fakes.units[1].name}: exited with 1: error: no luck ({log})" in shown.err
  assert "seed 0 finished; seed 1 not started" in shown.out
  assert sorted(fakes.names_started()) == sorted(unit.name for unit in fakes.units)

  (fakes.folder / "fail" / fakes.units[1].name).write_text("something else")
  assert fakes.launch() == 1  # the error in the log is of the start before
  assert f"failed {fakes.units[1].name}: exited with 1: bye ({log})" in capsys.readouterr().err

  (fakes.folder / "fail" / fakes.units[1].name).unlink()
  assert fakes.launch() == 0
  assert fakes.names_started()[4:] == [fakes.units[1].name] * 2
  assert Path(log).read_text().count("this is") == 3  # no start is lost
  shown = capsys.readouterr()
  assert "4 runs: 3 finished, 1 to start" in shown.err
  assert shown.out.splitlines()[1].endswith("50.0%     50.0% to 50.0%  2      finished")

  assert fakes.launch() == 0
  assert len(fakes.starts()) == 6
  assert "4 runs: 4 finished, 0 to start" in capsys.readouterr().err


def test_a_finished_run_with_other_settings_is_refused(fakes):
  assert fakes.launch() == 0
  with pytest.raises(ConfigError, match="config.json has algo.kl_coef = 0.04, this run 0.5"):
    launch(*fakes.flags, "--", *TRAIN, "--config.algo.kl_coef=0.5")
  assert len(fakes.starts()) == 4


def test_runs_of_an_earlier_version_are_known_by_the_same_command(fakes):
  assert fakes.launch() == 0
  for unit in fakes.units:
    file = Path(unit.workdir) / "config.json"
    values = json.loads(file.read_text())
    del values["data"]["count_at_start"]
    file.write_text(json.dumps(values | {"optimizer": values["optimizer"] | {"b2": 0.999}}))
  assert fakes.launch() == 0 and len(fakes.starts()) == 4


def test_a_run_that_somebody_else_trains_is_left_alone(fakes, capsys):
  with lock.held(Path(fakes.units[2].workdir), print):
    assert fakes.launch() == 75
    title = fakes.units[2].name
    assert f"left alone {title}: process {os.getpid()} on " in capsys.readouterr().err
    # Somebody else starts it while it waits for its turn.
    assert local.launch([fakes.units[2]], Options()) == 75
  assert title not in fakes.names_started() and len(fakes.starts()) == 3


# Another launcher has the lock, or has finished the run, before this process asks for it.
REFUSED = """
import fcntl, os, pathlib, shutil, sys, time
folder, common, what = (pathlib.Path(path) for path in sys.argv[1:])
folder.mkdir()
if str(what) == "held" and not os.fork():
  os.setsid()
  lock = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT)
  fcntl.flock(lock, fcntl.LOCK_EX)
  os.write(lock, f"process {os.getpid()} of another launcher".encode())
  (common / "holds").write_text(str(os.getpid()))
  time.sleep(60)
  sys.exit()
while str(what) == "held" and os.path.isdir(common):
  if (common / "holds").exists() and (common / "holds").read_text():
    break
  time.sleep(0.01)
if str(what) == "finished":
  shutil.copy(common / "configs" / folder.name, folder / "config.json")
  (folder / "metrics.jsonl").write_text('{"step": 3, "eval/accuracy": 0.5}\\n')
  (folder / "checkpoints" / "3").mkdir(parents=True)
print("error: --workdir=x is in use by another process: wait for its end")
sys.exit(2)
"""


@pytest.mark.parametrize(
  ("what", "code", "line"),
  [
    ("held", 75, "left alone {}: process {} of another launcher trains it"),
    ("finished", 75, "left alone {}: another launcher has finished it"),
    ("wrong", 1, "failed {}: exited with 2: error: --workdir=x is in use"),
  ],
)
def test_a_run_that_another_launcher_starts_first_has_not_failed(
  fakes, monkeypatch, capsys, what, code, line
):
  (fakes.folder / "fake.py").write_text(REFUSED)
  command = fakes.command
  monkeypatch.setattr(Unit, "command", lambda unit: [*command(unit), what])
  assert local.launch([fakes.units[0]], Options()) == code
  holds = fakes.folder / "holds"
  pid = holds.read_text() if holds.exists() else ""
  if pid:
    os.kill(int(pid), signal.SIGKILL)
  assert line.format(fakes.units[0].name, pid) in capsys.readouterr().err


def test_a_sweep_that_takes_long_says_so(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(progress_lib, "_SECONDS_BETWEEN_LOOKS", 0.01)
  monkeypatch.setattr(progress_lib, "_SECONDS_BETWEEN_LINES", 0.05)
  path = tmp_path / "sweep.py"
  path.write_text("import time\ndef sweep():\n  time.sleep(0.3)\n  yield {'seed': 1}\n")
  assert load_sweep(str(path)) == [{"seed": 1}]
  assert capsys.readouterr().err.startswith(f"executing {path}\n")


def test_a_dry_run_prints_the_commands_and_starts_nothing(fakes, capsys):
  assert fakes.launch("--dry_run") == 0
  wanted = [f"{' '.join(fakes.command(unit))}\n" for unit in fakes.units]
  assert capsys.readouterr().out == "".join(wanted)
  assert fakes.launch("--dry_run", "--hosts=2") == 0
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 8 and not fakes.starts() and not fakes.workdir.exists()
  for index, line in enumerate(lines[:2]):
    assert line.startswith("JAX_COORDINATOR_ADDRESS=localhost:")
    assert " JAX_NUM_PROCESSES=2 " in line and f" JAX_PROCESS_ID={index} {sys.executable}" in line


# Signals and dead processes, in a process of its own.

DRIVER = """
import signal, sys
from grpo_jax.around.launchers import local, process_group
from grpo_jax.around.launchers.options import Options
from grpo_jax.around.launchers.units import Unit

common, hosts, at_once, *names = sys.argv[1:]
for number in (signal.SIGINT, signal.SIGHUP):  # a shell's background job ignores them
  signal.signal(number, signal.SIG_DFL)
process_group.GRACE_SECONDS = 1.0
process_group._TOGETHER_SECONDS = 0.2
Unit.command = lambda u: [sys.executable, "-S", "-E", f"{common}/fake.py", u.workdir, common]
units = [Unit(name, f"{common}/x/{name}", {}, ()) for name in names]
sys.exit(local.launch(units, Options(hosts=int(hosts), at_once=int(at_once))))
"""


def start_driver(fakes, hosts, at_once, count):
  """Starts `count` runs, and waits until as many as possible have begun. They wait then."""
  (fakes.folder / "wait").touch()
  names = [unit.name for unit in fakes.units[:count]]
  driver = subprocess.Popen(
    [sys.executable, "-c", DRIVER, str(fakes.folder), str(hosts), str(at_once), *names],
    cwd=ROOT,
    stderr=subprocess.PIPE,
    text=True,
  )
  while len(fakes.starts()) < hosts * at_once:
    assert driver.poll() is None
    time.sleep(0.02)
  return driver


def is_alive(pid):
  try:
    os.kill(int(pid), 0)
  except ProcessLookupError:
    return False
  return True


@pytest.mark.parametrize(
  "number", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_a_signal_stops_all_runs_and_leaves_no_process(fakes, number):
  driver = start_driver(fakes, hosts=1, at_once=2, count=3)
  time.sleep(0.1)
  assert len(fakes.starts()) == 2  # the third one waits
  driver.send_signal(number)
  _, shown = driver.communicate(timeout=30)
  assert driver.returncode == 75
  assert f"{number.name}: waiting until what runs has saved" in shown
  assert shown.count("stopped ") == 2 and "failed" not in shown
  assert len(fakes.starts()) == 2 and not any(is_alive(pid) for _, pid in fakes.starts())


def test_a_second_signal_reaches_the_runs_too(fakes):
  driver = start_driver(fakes, hosts=1, at_once=1, count=1)
  driver.send_signal(signal.SIGTERM)
  log = fakes.workdir / "launch" / f"{fakes.units[0].name}.log"
  while "saving" not in log.read_text():
    time.sleep(0.02)
  driver.send_signal(signal.SIGTERM)
  driver.communicate(timeout=30)
  assert driver.returncode == 75 and not is_alive(fakes.starts()[0][1])


def test_if_one_process_of_a_run_dies_the_others_end(fakes):
  name = fakes.units[0].name
  driver = start_driver(fakes, hosts=2, at_once=1, count=2)
  (fakes.folder / "fail" / f"{name}1").touch()
  (fakes.folder / "fail" / f"{fakes.units[1].name}0").touch()  # of the next run
  _, shown = driver.communicate(timeout=30)
  assert driver.returncode == 1
  assert f"{name}: process 1 of 2 exited with 1, so the others end within 1.0 seconds" in shown
  log = f"{fakes.workdir}/launch/{name}.1.log"
  assert f"failed {name}: process 1 of 2 exited with 1: error: no luck 1 ({log})" in shown
  assert f"failed {fakes.units[1].name}: process 0 of 2 exited with 1" in shown
  assert len(fakes.starts()) == 4 and not any(is_alive(pid) for _, pid in fakes.starts())
