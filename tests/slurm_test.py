"""Slurm: the script and the queue with programs of a few lines, and runs on a real cluster.

The real cluster is slurmctld and slurmd on this machine: see `slurm_cluster.py`.
"""

import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import threading
import time

from launch_run_test import processes_of
from launch_test import launch
import pytest
import slurm_cluster

from grpo_jax.around.launchers import slurm
from grpo_jax.around.launchers.options import Options
from grpo_jax.around.launchers.slurm import names_in, script, seconds
from grpo_jax.around.launchers.units import units
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.storage.json_files import parse_rows

ROOT = Path(__file__).parents[1]
FLAGS = ("--config=configs/arithmetic.py", "--config.data.prompt=it's {question}")
SETTINGS = [{"seed": 0}, {"data.system": "a b"}]


# The script, which a shell runs with other programs in the place of those of Slurm.


def test_the_script_names_its_runs_and_options(tmp_path):
  options = Options(
    hosts=2, tasks_per_host=8, at_once=3, time_limit="1-0", partition="gpu", sbatch=("--mem=9G",)
  )
  text = script(units("/sweeps/a b", FLAGS, SETTINGS), options, tmp_path / "slurm-1.sh")
  for line in (
    "#   0: seed=0",
    f"#   1: {units('/sweeps/a b', FLAGS, SETTINGS)[1].name}",
    "#SBATCH --job-name=a_b",
    f"#SBATCH --comment={tmp_path}/slurm-1.sh",
    "#SBATCH --array=0-1%3",
    "#SBATCH --nodes=2",
    "#SBATCH --ntasks-per-node=8",
    "#SBATCH --time=1-0",
    "#SBATCH --partition=gpu",
    "#SBATCH --mem=9G",
    f"#SBATCH --output={tmp_path}/slurm-%A_%a.log",
    "#SBATCH --requeue",
    "#SBATCH --signal=TERM@300",
  ):
    assert line in text.splitlines()
  assert " --label \\\n" in text
  assert names_in(text) == {"0": "seed=0", "1": units("/x", FLAGS, SETTINGS)[1].name}
  one = script(units("/run%1", FLAGS), Options(), Path("/run%1/launch/slurm-1.sh"))
  assert "#SBATCH --output=/run%%1/launch/slurm-%j.log" in one.splitlines()
  assert "--array" not in one and "--label" not in one and "--time" not in one


@pytest.mark.parametrize(
  "state, code, is_queued_again",
  [("RUNNING", 75, True), ("COMPLETING", 75, False), ("", 75, False), ("RUNNING", 1, False)],
)
def test_the_script_trains_one_run_and_queues_only_a_saved_one_again(
  tmp_path, state, code, is_queued_again
):
  runs = units(str(tmp_path / "a b"), FLAGS, SETTINGS)
  programs(
    tmp_path,
    srun=f'printf "%s\\n" "$@" > {tmp_path}/srun; exit {code}',
    squeue=f'echo "$@" > {tmp_path}/squeue; echo {state}',
    scontrol=f'echo "$@" > {tmp_path}/scontrol',
  )
  env = {"PATH": f"{tmp_path}/bin", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "12"}
  text = script(runs, Options(), tmp_path / "slurm-1.sh")
  done = subprocess.run(["/bin/bash", "-c", text], env=env, capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (code, "")
  assert (tmp_path / "srun").read_text().splitlines() == [
    "--wait=30",
    "--kill-on-bad-exit=0",
    *runs[1].command(),
  ]
  assert (tmp_path / "squeue").read_text() == "--noheader --jobs=12_1 --format=%T\n"
  assert (tmp_path / "scontrol").exists() == is_queued_again
  if is_queued_again:
    assert (tmp_path / "scontrol").read_text() == "requeue 12_1\n"
    assert done.stdout == "job 12_1: stopped and saved, queued again\n"


def test_nodes_of_a_job_serve_the_engine_of_its_run(tmp_path):
  options = Options(engine_hosts=2, engine=("--program=/a b/vllm",))
  (run,) = units(str(tmp_path / "run"), FLAGS)
  programs(
    tmp_path,
    srun=f'printf "%s\\n" "$@" > "{tmp_path}/srun$3"',
    squeue="",
    scontrol='[ "$*" = "show hostnames n[1-3]" ] && printf "n1\\nn2\\nn3\\n"',
  )
  text = script([run], options, tmp_path / "slurm-1.sh")
  assert "#SBATCH --nodes=3" in text.splitlines()
  env = {"PATH": f"{tmp_path}/bin", "SLURM_JOB_ID": "70123", "SLURM_JOB_NODELIST": "n[1-3]"}
  text = text.replace('exit "$code"', 'wait; exit "$code"')
  done = subprocess.run(["/bin/bash", "-c", text], env=env, capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (0, "")
  urls = "--config.rollout.engine_urls=('http://n2:20123','http://n3:20123',)"
  of_run = (tmp_path / "srun--nodes=1").read_text().splitlines()
  assert of_run[2:] == ["--nodes=1", "--ntasks=1", "--relative=0", *run.command(), urls]
  for node in (1, 2):
    served = (tmp_path / f"srun--relative={node}").read_text().splitlines()
    url = f"--url=http://n{node + 1}:20123"
    command = [sys.executable, "-m", "grpo_jax.engine", *FLAGS, urls, url, "--program=/a b/vllm"]
    assert served == ["--nodes=1", "--ntasks=1", f"--relative={node}", *command]
  with pytest.raises(ConfigError, match="--engine_hosts: a run of several processes samples it"):
    script([run], Options(hosts=2, engine_hosts=1), tmp_path / "slurm-1.sh")
  with pytest.raises(ConfigError, match="flag --engine: it needs --engine_hosts"):
    script([run], Options(engine=("--cpu",)), tmp_path / "slurm-1.sh")


@pytest.mark.parametrize("option", ["--job-name=x", "-Jx", "--comment=mine"])
def test_options_by_which_jobs_are_found_cannot_be_given(option, tmp_path):
  with pytest.raises(ConfigError, match=f"flag --sbatch={option}: leave it out"):
    script(units(str(tmp_path), FLAGS), Options(sbatch=(option,)), tmp_path / "slurm-1.sh")


def test_a_dry_run_with_servers_needs_an_engine(fake_slurm, capsys):
  workdir = f"--workdir={fake_slurm / 'run'}"
  words = ["--on=slurm", "--engine_hosts=1", "--dry_run", workdir, "--", *FLAGS[:1]]
  with pytest.raises(ConfigError, match="--engine_hosts needs --config.rollout.engine=vllm"):
    launch(*words)
  engine = ("--config.rollout.engine=vllm", "--config.model.path=FOLDER")
  assert launch(*words, *engine) == 0
  assert "-m grpo_jax.engine " in capsys.readouterr().out
  assert not (fake_slurm / "run").exists()


@pytest.mark.parametrize(
  "text, wanted",
  [
    ("90", 5400),
    ("2:30", 150),
    ("1:00:00", 3600),
    ("2-12", 216000),
    ("1-00:30", 88200),
    ("0-0:0:5", 5),
    ("1-2:3:4:5", None),
    ("2h", None),
    ("", None),
  ],
)
def test_time_limits_as_slurm_writes_them(text, wanted):
  assert seconds(text) == wanted


def programs(folder, **sources):
  """Shell scripts of these names in folder/bin."""
  (folder / "bin").mkdir(exist_ok=True)
  for name, source in sources.items():
    path = folder / "bin" / name
    path.write_text(f"#!/bin/bash\n{source}\n")
    path.chmod(0o755)


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
  """An sbatch that queues nothing, and a squeue that shows the file `queue`."""
  (tmp_path / "queue").touch()
  programs(
    tmp_path,
    sbatch=f'echo "$@" >> {tmp_path}/submitted; echo "7;cluster"',
    squeue=f'echo "$@" >> {tmp_path}/asked; /bin/cat {tmp_path}/queue',
  )
  monkeypatch.setenv("PATH", f"{tmp_path}/bin")
  return tmp_path


def test_units_in_the_queue_are_found_by_their_folder(fake_slurm):
  settings = [{"seed": seed} for seed in range(5)]
  runs = units(str(fake_slurm / "sweep"), FLAGS, settings)
  assert slurm.launch([runs[4], *runs[:3]], Options()) == 0
  folder = fake_slurm / "sweep" / "launch"
  assert (fake_slurm / "submitted").read_text() == f"--parsable {folder}/slurm-1.sh\n"
  (fake_slurm / "queue").write_text(
    f"7_0|RUNNING|None|{folder}/slurm-1.sh\n"
    f"7_1|PENDING|Priority|{folder}/slurm-1.sh\n"
    f"7_2|COMPLETED|None|{folder}/slurm-1.sh\n"  # not queued any more
    f"8_3|PENDING|Priority|{fake_slurm}/other/sweep/launch/slurm-1.sh\n"
    "9|RUNNING|None|(null)\n"
  )
  assert slurm.queued(runs) == {"seed=4": "job 7_0 running", "seed=0": "job 7_1 pending: Priority"}
  assert "--name=sweep " in (fake_slurm / "asked").read_text()
  assert slurm.launch([runs[3]], Options()) == 0
  assert names_in((folder / "slurm-2.sh").read_text()) == {"0": "seed=3"}

  (folder / "slurm-1.sh").unlink()
  with pytest.raises(RunFailed, match="job 7_0 is of this folder.* scancel 7_0"):
    slurm.queued(runs)


def test_a_run_without_a_sweep_is_found_too(fake_slurm):
  (run,) = units(str(fake_slurm / "run"), FLAGS)
  (fake_slurm / "queue").write_text(f"7|PENDING|JobHeldUser|{fake_slurm}/run/launch/slurm-1.sh\n")
  slurm.launch([run], Options())
  assert slurm.queued([run]) == {run.workdir: "job 7 pending: JobHeldUser"}


@pytest.mark.parametrize(
  ("then", "code", "words"),
  [
    ("", 0, "1 run: 0 finished, 1 to start\nsubmitted job 7: "),
    ("7|PENDING|BeginTime|{}\n", 0, ": job 7 pending: BeginTime\n1 run: 0 finished, 0 to start\n"),
    (
      "7|COMPLETING|None|{}\n",
      75,
      "has not ended job 7 in 0.3 seconds: see squeue, and",
    ),
  ],
)
def test_a_job_that_slurm_is_ending_is_waited_for(
  fake_slurm, monkeypatch, capsys, then, code, words
):
  """Whether it is then gone or queued again, one launch is enough."""
  monkeypatch.setattr(slurm, "_SECONDS_BETWEEN_LOOKS", 0.01)
  monkeypatch.setattr(slurm, "_SECONDS_TO_COMPLETE", 0.3)
  flags = (f"--workdir={fake_slurm}/run", "--on=slurm")
  train = ("--", f"--config={ROOT}/configs/arithmetic.py")
  assert launch(*flags, *train) == 0
  path = f"{fake_slurm}/run/launch/slurm-1.sh"
  (fake_slurm / "queue").write_text(f"7|COMPLETING|None|{path}\n")
  (fake_slurm / "later").write_text(then.format(path))
  programs(  # at the third look, the job has changed
    fake_slurm,
    squeue=f"cd {fake_slurm}; echo x >> looks; /bin/cat queue\n"
    "[ $(/usr/bin/wc -l < looks) != 2 ] || /bin/cp later queue",
  )
  capsys.readouterr()
  assert launch(*flags, *train) == code
  said = capsys.readouterr().err
  assert said.startswith("waiting until Slurm has ended job 7\n") and words in said


def test_what_slurm_refuses_is_one_line(fake_slurm, monkeypatch):
  (run,) = units(str(fake_slurm / "run"), FLAGS)
  refuse = 'echo "error: Batch job submission failed:" >&2; echo "Invalid partition" >&2; exit 1'
  programs(fake_slurm, sbatch=refuse, squeue="echo squeue: down >&2; exit 1")
  with pytest.raises(RunFailed, match="^sbatch: error: Batch job submission failed: Invalid part"):
    slurm.launch([run], Options(partition="x"))
  assert not list((fake_slurm / "run" / "launch").iterdir())
  with pytest.raises(RunFailed, match="^squeue: down"):
    slurm.queued([run])
  monkeypatch.setenv("PATH", "/nowhere")
  with pytest.raises(ConfigError, match="there is no sbatch"):
    slurm.launch([run], Options())
  assert slurm.queued([run]) == {}  # so that a dry run works where no Slurm is


# A real cluster.

KEYS = """
  model.embed_dim=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=2 model.head_dim=8
  model.mlp_dim=32 batch.prompts=8 batch.group_size=4 sampling.max_tokens=8
  optimizer.schedule=constant warm_start.steps=3 warm_start.batch=8 eval.every=2 eval.examples=20
  eval.batch=20 checkpoint.every=0 log.tensorboard=False
""".split()
TRAIN = ["--config=configs/arithmetic.py", *(f"--config.{key}" for key in KEYS)]
LONG = [*TRAIN, "--config.steps=100000"]
slow = [
  pytest.mark.slow,
  pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing()),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
  with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm") / "cluster") as env:
    yield env | {"JAX_NUM_CPU_DEVICES": "1"}


class Slurm:
  """Commands on the cluster, for one folder of runs."""

  def __init__(self, env, workdir):
    self.env, self.workdir = env, workdir

  def launch(self, *flags):
    """The launcher's stdout and stderr."""
    command = [sys.executable, "-m", "grpo_jax.launch", "--on=slurm", f"--workdir={self.workdir}"]
    done = subprocess.run(
      [*command, *flags], cwd=ROOT, env=self.env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr

  def run(self, *command):
    return subprocess.run(command, env=self.env, capture_output=True, text=True).stdout.strip()

  def state(self, job):
    return re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", job))[1]

  def log(self):
    return "".join(path.read_text() for path in sorted(self.workdir.glob("launch/*.log")))

  def step(self):
    path = self.workdir / "metrics.jsonl"
    rows = parse_rows(path) if path.exists() else []
    return rows[-1][0]["step"] if rows else 0

  def wait_until(self, is_true, limit=300):
    end = time.monotonic() + limit
    while not is_true():
      assert time.monotonic() < end, self.run("squeue") + self.log()[-2000:]
      time.sleep(0.5)


def submitted(shown):
  return re.search(r"submitted job (\d+):", shown)[1]


def resumed_from(log):
  """The steps from which the run of a log went on."""
  return [int(step) for step in re.findall(r"resuming from step (\d+)", log)]


class TestOnACluster:
  pytestmark = slow

  def test_a_sweep_is_an_array_and_nothing_is_submitted_twice(self, cluster, tmp_path):
    (tmp_path / "sweep.py").write_text("def sweep():\n  for seed in (0, 1): yield {'seed': seed}\n")
    here = Slurm(cluster, tmp_path / "my sweep")
    flags = (f"--sweep={tmp_path}/sweep.py", "--", *TRAIN, "--config.steps=2")
    shown, said = here.launch(*flags)
    job = submitted(said)
    assert f"job {job}_0" in shown and f"job {job}_1" in shown
    shown, said = here.launch(*flags)
    assert said.count("left alone seed=") == 2 and "submitted" not in said
    here.wait_until(lambda: not here.run("squeue", "--noheader"))
    shown, said = here.launch(*flags)
    assert "2 runs: 2 finished, 0 to start" in said and "submitted" not in said
    assert shown.splitlines()[1].startswith("as configured  ")
    assert shown.splitlines()[1].endswith("  2      finished")
    assert here.log().count("finished: metrics") == 2

  def test_a_run_of_two_hosts_is_one_run(self, cluster, tmp_path):
    here = Slurm(cluster, tmp_path / "run")
    job = submitted(here.launch("--hosts=2", "--", *TRAIN, "--config.steps=2")[1])
    here.wait_until(lambda: here.state(job) in ("COMPLETED", "FAILED"))
    log = here.log()
    assert here.state(job) == "COMPLETED", log
    assert "0: 2 x cpu (cpu), mesh data 2" in log and "0: finished: metrics" in log
    nodes = here.run(
      "scontrol", "show", "hostnames", here.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%N")
    )
    assert set(nodes.split()) == set(slurm_cluster.NODES)

  def test_if_one_of_two_hosts_dies_the_job_ends(self, cluster, tmp_path):
    here = Slurm(cluster, tmp_path / "run")
    job = submitted(here.launch("--hosts=2", "--", *LONG)[1])
    here.wait_until(lambda: here.step() > 5)
    pids = [
      line.split()[0] for line in here.run("scontrol", "listpids", f"{job}.0").splitlines()[1:]
    ]
    os.kill(int(pids[-1]), 9)
    here.wait_until(lambda: here.state(job) == "FAILED", limit=60)
    assert "Killed" in here.log()

  def test_a_job_goes_on_after_requeue_and_saves_when_it_is_cancelled(self, cluster, tmp_path):
    here = Slurm(cluster, tmp_path / "run")
    job = submitted(here.launch("--", *LONG)[1])
    here.wait_until(lambda: here.step() > 5)
    here.run("scontrol", "requeue", job)  # as a preemption does
    here.wait_until(lambda: resumed_from(here.log()))
    (step,) = resumed_from(here.log())
    assert step > 5 and (here.workdir / "checkpoints" / str(step)).is_dir()
    here.wait_until(lambda: here.step() > step)
    here.run("scancel", job)
    here.wait_until(lambda: here.state(job) == "CANCELLED")
    assert f"stopped at step {here.step()}" in here.log()
    assert (here.workdir / "checkpoints" / str(here.step())).is_dir()
    time.sleep(10)
    assert not here.run("squeue", "--noheader")  # nobody queued it again
    shown, said = here.launch("--dry_run", "--", *LONG)
    assert "0 finished, 1 to start" in said and shown.startswith("#!/bin/bash")

  def test_one_launch_is_enough_while_slurm_ends_a_job(self, cluster, tmp_path):
    here = Slurm(cluster, tmp_path / "run")
    first = submitted(here.launch("--", *LONG)[1])
    here.wait_until(lambda: here.step() > 5)
    pids = processes_of(here.workdir)
    here.run("scancel", first)
    time.sleep(0.1)  # Slurm wakes it before it asks it to stop
    for pid in pids:  # it saves later
      os.kill(pid, signal.SIGSTOP)
    threading.Timer(25, lambda: [os.kill(pid, signal.SIGCONT) for pid in pids]).start()
    here.wait_until(lambda: here.state(first) == "COMPLETING", limit=10)
    _, said = here.launch("--", *LONG)
    assert f"waiting until Slurm has ended job {first}\n" in said
    assert "left alone" not in said and submitted(said) != first
    here.wait_until(lambda: resumed_from(here.log()))
    here.run("scancel", submitted(said))
    here.wait_until(lambda: not here.run("squeue", "--noheader"))

  def test_a_preempted_job_saves_and_goes_on_by_itself(self, cluster, tmp_path):
    here = Slurm(cluster, tmp_path / "run")
    job = submitted(here.launch("--", *LONG)[1])
    here.wait_until(lambda: here.step() > 5)
    nodes = f"--nodes={len(slurm_cluster.NODES)}"
    here.run(
      "sbatch", "--partition=urgent", nodes, "--exclusive", "--output=/dev/null", "--wrap=ls"
    )
    here.wait_until(lambda: resumed_from(here.log()))
    (step,) = resumed_from(here.log())
    assert f"stopped at step {step}" in here.log() and "DUE TO PREEMPTION" in here.log()
    here.run("scancel", job)
    here.wait_until(lambda: not here.run("squeue", "--noheader"))

  def test_a_job_saves_before_its_time_limit_and_queues_itself_again(self, cluster, tmp_path):
    here = Slurm(cluster, tmp_path / "run")
    flags = ("--time_limit=2", "--stop_ahead=60", "--", *LONG)
    job = submitted(here.launch(*flags)[1])
    here.wait_until(lambda: resumed_from(here.log()), limit=400)
    assert f"job {job}: stopped and saved, queued again" in here.log()
    assert resumed_from(here.log())[0] > 0
    assert "DUE TO TIME LIMIT" not in here.log()
    _, said = here.launch(*flags)
    assert f"left alone {here.workdir}: job {job}" in said
    here.run("scancel", job)
    here.wait_until(lambda: not here.run("squeue", "--noheader"))
