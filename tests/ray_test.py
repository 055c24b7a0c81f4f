"""Ray: flags, and runs on a real cluster of several nodes on this machine (`ray_cluster.py`)."""

import contextlib
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from grpo_jax.around.launchers import ray_cluster as launcher
from grpo_jax.around.launchers.options import Options
from grpo_jax.around.launchers.units import units
from grpo_jax.settings import ConfigError
from grpo_jax.storage import lock
from grpo_jax.storage.json_files import parse_rows

try:
  import ray_cluster
except ImportError:
  ray_cluster = None

ROOT = Path(__file__).parents[1]


# Flags.


@pytest.mark.parametrize("text", ["8", "[]", "{", '{"GPU": 0}', '{"GPU": "8"}', '{"GPU": true}'])
def test_wrong_resources_are_one_line(text):
  with pytest.raises(ConfigError, match=r"flag --ray_resources=.* such as \{.GPU.: 8\}"):
    launcher.parse_resources(text)


def test_a_host_has_one_cpu_unless_it_is_told_otherwise():
  assert launcher.parse_resources("") == {"CPU": 1}
  assert launcher.parse_resources('{"TPU": 4}') == {"CPU": 1, "TPU": 4}
  assert launcher.parse_resources('{"CPU": 8, "my-slice": 0.5}') == {"CPU": 8, "my-slice": 0.5}


def test_a_dry_run_needs_no_ray(tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, "ray", None)
  runs = units(str(tmp_path), ["--config=a b.py"], [{"seed": 0}, {"seed": 1}])
  assert launcher.launch(runs, Options(hosts=2, dry_run=True, ray_resources='{"GPU": 8}')) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[2:] == [
    '# 2 x {"CPU": 1, "GPU": 8}: seed=1',
    f"python -m grpo_jax.train '--config=a b.py' --config.seed=1 --workdir={tmp_path}/seed=1",
  ]


def test_if_ray_is_missing_a_line_says_how_to_get_it(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "ray", None)
  with pytest.raises(ConfigError, match=r"needs the package ray: pip install -e '\.\[ray\]'"):
    launcher.launch(units(str(tmp_path), ["--config=x.py"]), Options())


def test_if_there_is_no_cluster_a_line_says_what_to_do(tmp_path, monkeypatch):
  message = (
    "Could not find any running Ray instance. Please specify ... by setting `--address` flag"
  )
  fake = mock.Mock(**{"init.side_effect": ConnectionError(message)})
  monkeypatch.setitem(sys.modules, "ray", fake)
  monkeypatch.setitem(sys.modules, "grpo_jax.around.launchers.ray_run", mock.Mock())
  monkeypatch.delenv("RAY_ADDRESS", raising=False)
  with pytest.raises(
    ConfigError, match="no Ray cluster runs .*ray start --head.* RAY_ADDRESS=HOST"
  ):
    launcher.launch(units(str(tmp_path), ["--config=x.py"]), Options())
  assert not list(tmp_path.iterdir())


# Parts, without a cluster.

needs_ray = pytest.mark.skipif(not ray_cluster, reason="needs ray: pip install -e '.[ray]'")


@needs_ray
def test_processes_find_the_first_one_and_inherit_what_jax_reads(monkeypatch):
  from grpo_jax.around.launchers.ray_host import Place
  from grpo_jax.around.launchers.ray_run import environments

  passed_on = {"XLA_FLAGS": "--x", "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "http://h:1"}
  monkeypatch.setattr(os, "environ", {**passed_on, "PATH": "/bin"})
  places = [Place(host=f"h{i}", node="n", address=f"10.0.0.{i}:8{i}", tpu_worker=i) for i in (0, 1)]
  assert environments(places[1:]) == [passed_on]
  first, second = environments(places)
  assert second == first | {"JAX_PROCESS_ID": "1"}
  assert first == {
    **passed_on,
    "JAX_COORDINATOR_ADDRESS": "10.0.0.0:80",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "0",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
  }


@needs_ray
def test_a_restart_waits_until_nobody_holds_the_folder(tmp_path, monkeypatch):
  """A process on a node that Ray has given up may still hold it."""
  from grpo_jax.around.launchers import ray_run

  asked = []
  monkeypatch.setattr(ray_run, "placement_group", lambda *asks: asked.append(asks) or mock.Mock())
  monkeypatch.setattr(ray_run, "_are_there", lambda results: False)
  (unit,) = units(str(tmp_path), ["--config=x.py"])
  run = ray_run.RayRun(unit, hosts=2, resources={"CPU": 1}, restarts=1)
  assert asked == [([{"CPU": 1}, {"CPU": 1}], "STRICT_SPREAD")]
  run._forget()  # as after the loss of a host
  with lock.held(tmp_path, print):
    assert run.poll() is None and len(asked) == 1
  assert run.poll() is None and len(asked) == 2
  assert run.waits


@needs_ray
def test_a_host_without_the_folder_of_the_launcher_says_so(tmp_path):
  from grpo_jax.around.launchers.ray_host import HostActor

  (unit,) = units(str(tmp_path), ["--config=x.py"])
  with pytest.raises(FileNotFoundError, match=f"{tmp_path}/none"):
    HostActor().run(unit, {}, f"{tmp_path}/none", f"{tmp_path}/log")
  with pytest.raises(FileNotFoundError, match=f"{tmp_path}/none/log"):
    HostActor().run(unit, {}, os.getcwd(), f"{tmp_path}/none/log")


# A real cluster.

KEYS = """
  model.embed_dim=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=2 model.head_dim=8
  model.mlp_dim=32 batch.prompts=8 batch.group_size=4 sampling.max_tokens=8
  optimizer.schedule=constant warm_start.steps=3 warm_start.batch=8 eval.every=2 eval.examples=20
  eval.batch=20 checkpoint.every=2 log.tensorboard=False reward.workers=0
""".split()
TRAIN = ["--config=configs/arithmetic.py", *(f"--config.{key}" for key in KEYS)]
REWARDS = """
import os, signal

def kill(completions, **columns):
  os.kill(os.getpid(), signal.SIGKILL)

def fail(completions, **columns):
  raise ValueError("no reward today")
"""


@pytest.fixture(scope="module")
def cluster():
  with ray_cluster.cluster(nodes=2) as (made, nodes, env):
    yield made, nodes, env | {"JAX_NUM_CPU_DEVICES": "1"}


@pytest.fixture
def launch(tmp_path):
  """Starts a launcher for a folder, and ends it after the test."""
  started = []

  def start(env, name, *flags, steps):
    started.append(Launcher(env, tmp_path / name, *flags, steps=steps))
    return started[-1]

  yield start
  for one in started:
    one.process.kill()  # Ray ends its actors, and they their processes
    one.process.wait()


class Launcher:
  """The launcher as a process of its own, for one folder of runs."""

  def __init__(self, env, workdir, *flags, steps):
    command = [sys.executable, "-m", "grpo_jax.launch", "--on=ray", f"--workdir={workdir}", *flags]
    self.workdir, self.said_file = workdir, workdir.with_suffix(".said")
    with open(self.said_file, "w") as said:
      self.process = subprocess.Popen(
        [*command, "--", *TRAIN, f"--config.steps={steps}"],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=said,
        text=True,
      )

  def said(self):
    return self.said_file.read_text()

  def step(self):
    path = self.workdir / "metrics.jsonl"
    rows = parse_rows(path) if path.exists() else []
    return rows[-1][0]["step"] if rows else 0

  def resumed_from(self):
    logs = "".join(path.read_text() for path in self.workdir.glob("launch/*.log"))
    return [int(step) for step in re.findall(r"resuming from step (\d+)", logs)]

  def processes(self):
    """The training processes of the folder: their ids by JAX_PROCESS_ID."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
      with contextlib.suppress(OSError):  # it has ended
        words = (path / "cmdline").read_bytes().decode().split("\0")
        if "grpo_jax.train" in words and any(str(self.workdir) in word for word in words):
          env = dict(
            pair.split("=", 1) for pair in (path / "environ").read_text().split("\0") if pair
          )
          found[env.get("JAX_PROCESS_ID", "0")] = int(path.name)
    return found

  def wait_until(self, is_true, limit=300):
    end = time.monotonic() + limit
    while not is_true():
      assert time.monotonic() < end and self.process.poll() is None, self.said()
      time.sleep(0.2)

  def wait_for_steps(self, count=5):
    wanted = self.step() + count
    self.wait_until(lambda: self.step() >= wanted)

  def end(self, limit=400):
    """Waits for its end. Returns the exit code and what it printed."""
    shown, _ = self.process.communicate(timeout=limit)
    return self.process.returncode, shown


class TestOnACluster:
  pytestmark = [pytest.mark.slow, needs_ray]

  def test_a_run_of_two_hosts_goes_on_after_one_is_killed_and_stops(self, cluster, launch):
    made, nodes, env = cluster
    run = launch(env, "run", "--hosts=2", steps=100_000)
    run.wait_for_steps()
    # The label of a TPU slice says which host is the first one.
    ids = [node.node_id[:8] for node in nodes]
    places = ", ".join(rf"\S+ \(node {one}\)" for one in ids)
    assert re.search(rf"^started {run.workdir} on {places}$", run.said(), re.MULTILINE)
    assert "2 x cpu (cpu), mesh data 2" in (run.workdir / "launch" / "run.0.log").read_text()

    os.kill(run.processes()["1"], signal.SIGKILL)
    lost = rf"process 1 of 2 on \S+ \(node {ids[1]}\) was killed by SIGKILL"
    run.wait_until(run.resumed_from)
    assert re.search(rf"^restart 1 of 3 of {run.workdir}: {lost}: ", run.said(), re.MULTILINE)
    assert run.resumed_from()[0] >= 4
    run.wait_for_steps()
    run.process.send_signal(signal.SIGTERM)
    code, shown = run.end()
    assert code == 75 and f"stopped {run.workdir}: at {run.step()} of 100003" in run.said()
    assert (run.workdir / "checkpoints" / str(run.step())).is_dir() and not run.processes()

  def test_a_run_goes_on_after_its_actor_or_its_node_has_died(self, cluster, launch):
    made, nodes, env = cluster
    run = launch(env, "run", steps=100_000)
    run.wait_for_steps()
    trainer = run.processes()["0"]
    actor = int(Path(f"/proc/{trainer}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(actor, signal.SIGKILL)
    run.wait_until(lambda: run.processes().get("0") not in (None, trainer))
    assert "was lost: its worker process has died" in run.said()
    run.wait_for_steps()

    _, second = re.findall(r"^started .* \(node (\w+)\)$", run.said(), re.MULTILINE)
    (lost,) = [node for node in nodes if node.node_id.startswith(second)]
    made.remove_node(lost, allow_graceful=False)
    run.wait_until(lambda: run.said().count("\nstarted ") == 3)
    assert re.search(rf"restart 2 of 3 of .* \(node {second}\) was lost: ", run.said())
    run.wait_for_steps()
    assert len(run.resumed_from()) == 2
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 75
    index = nodes.index(lost)
    nodes[index] = ray_cluster.add_node(made, index)

  def test_a_sweep_takes_the_room_that_there_is(self, cluster, launch, tmp_path):
    *_, env = cluster
    source = "def sweep():\n  for seed in range(3): yield {'seed': seed}\n"
    (tmp_path / "sweep.py").write_text(source)
    flags = [f"--sweep={tmp_path}/sweep.py", '--ray_resources={"CPU": 2}']  # that of a node
    sweep = launch(env, "sweep", *flags, steps=2)
    code, shown = sweep.end()
    assert code == 0, sweep.said()
    events = re.findall(r"^(started|finished) seed=\d", sweep.said(), re.MULTILINE)
    assert events[:3] == ["started", "started", "finished"] and events.count("finished") == 3
    assert shown.splitlines()[1].endswith("  3      finished")

  def test_what_fails_again_ends(self, cluster, launch, tmp_path):
    """A process that is killed is started again as often as --restarts says, an error never."""
    *_, env = cluster
    (tmp_path / "rewards.py").write_text(REWARDS)
    names = [f"{tmp_path}/rewards.py:{name}" for name in ("kill", "fail")]
    source = f"def sweep():\n  for name in {names}: yield {{'reward.functions': (name,)}}\n"
    (tmp_path / "sweep.py").write_text(source)
    flags = [f"--sweep={tmp_path}/sweep.py", "--restarts=1"]
    sweep = launch(env, "sweep", *flags, steps=2)
    assert sweep.end()[0] == 1
    lines = sweep.said().splitlines()
    (restart,) = [line for line in lines if line.startswith("restart 1 of 1 of reward.functions=")]
    failed = sorted(line for line in lines if line.startswith("failed "))
    assert "_kill" in restart and "was killed by SIGKILL" in restart
    assert len(failed) == 2
    assert "_fail" in failed[0] and "exited with 1: error: " in failed[0]
    assert "no reward today" in failed[0] and failed[0].endswith(".log)")
    assert "_kill" in failed[1] and "was killed by SIGKILL" in failed[1]

  def test_a_cluster_that_cannot_be_reached_is_one_line(self, launch):
    run = launch(os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}, "run", steps=2)
    assert run.end()[0] == 2
    assert "error: flag --on=ray: " in run.said() and "set RAY_ADDRESS" in run.said()
