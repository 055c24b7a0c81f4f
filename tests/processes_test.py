"""Two processes, as on two hosts, do what one does."""

import json
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import time

from lora_run_test import REWARD  # the second is a fixture
import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
KEYS = """
  model.embed_dim=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=2 model.head_dim=8 model.mlp_dim=32
  batch.prompts=8 batch.group_size=4 sampling.max_tokens=8 optimizer.schedule=constant warm_start.steps=3
  warm_start.batch=8 eval.every=2 eval.examples=20 eval.batch=8 eval.samples=2 checkpoint.every=2 log.tensorboard=False
  mesh.data=2 mesh.fsdp=2 mesh.tensor=2
""".split()


def started(count, workdir, **keys):
  """`count` processes of 8 / count devices, all on one workdir."""
  with socket.socket() as s:
    s.bind(("localhost", 0))
    address = f"localhost:{s.getsockname()[1]}"
  flags = [f"--config.{key}" for key in (*KEYS, *(f"{k}={v}" for k, v in keys.items()))]
  processes = []
  for i in range(count):
    env = os.environ | {
      "JAX_NUM_CPU_DEVICES": str(8 // count),
      "JAX_NUM_PROCESSES": str(count),
      "JAX_PROCESS_ID": str(i),
      "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    env |= {"JAX_COORDINATOR_ADDRESS": address} if count > 1 else {}
    command = [
      sys.executable,
      "-m",
      "grpo_jax.train",
      "--config=configs/arithmetic.py",
      f"--workdir={workdir}",
      *flags,
    ]
    processes.append(
      subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
      )
    )
  return processes


def ended(processes):
  outputs = [process.communicate(timeout=500)[0] for process in processes]
  return [process.returncode for process in processes], outputs


def rows(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [
    {k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "perf/"))}
    for line in lines
  ]


def test_two_processes_give_the_numbers_of_one_stop_together_and_go_on(tmp_path):
  assert ended(started(1, tmp_path / "one", steps=4))[0] == [0]
  assert ended(started(2, tmp_path / "two", steps=4))[0] == [0, 0]
  one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
  assert len(one) == len(two) == 7
  for ours, theirs in zip(two, one):
    assert ours == pytest.approx(theirs, abs=1e-5)

  both = started(2, tmp_path / "two", steps=100_000)
  while len(rows(tmp_path / "two")) < 10:  # they go on from step 7
    assert both[0].poll() is None
    time.sleep(0.2)
  both[1].send_signal(signal.SIGTERM)  # asked alone, it takes the other with it
  codes, outputs = ended(both)
  assert codes == [0, 0] and "going on from step 7" in outputs[0]
  step = rows(tmp_path / "two")[-1]["step"]
  assert f"stopped at step {step}" in outputs[0]
  assert (tmp_path / "two" / "checkpoints" / str(step)).is_dir()


def test_an_error_of_the_first_process_ends_both(tmp_path):
  (tmp_path / "thesis.tex").write_text("x")
  codes, outputs = ended(started(2, tmp_path, steps=1))
  assert (
    codes == [2, 2] and "is not empty" in outputs[0] and "first process has ended" in outputs[1]
  )


@pytest.mark.parametrize(
  "algo",
  [{"algo.dynamic_sampling": True, "algo.overlong": 0.5}, {"algo.advantage": "process"}],
  ids=str,
)
def test_what_the_first_process_scores_reaches_the_others_as_it_is(tmp_path, algo):
  """Two functions of unequal weights, their names not in the alphabet's order; one gives steps. And a reward model, which
  both processes compute."""
  (tmp_path / "reward.py").write_text(
    "def steps(completions, **_):\n  return [[(i + 1, float(ch in '123')) for i, ch in enumerate(c)] for c in completions]\n"
    "def even(completions, **_):\n  return [float(sum(map(ord, c)) % 2) for c in completions]\n"
  )
  keys = {
    "warm_start.steps": 0,
    "steps": 2,
    "reward.weights": (2.0, 0.5, 0.3),
    "reward.batch": 8,
    "reward.functions": (
      *(f"{tmp_path}/reward.py:{name}" for name in ("steps", "even")),
      f"{ROOT}/tests/golden/rewards/qwen2",
    ),
    **algo,
  }
  assert ended(started(1, tmp_path / "one", **keys))[0] == [0]
  assert ended(started(2, tmp_path / "two", **keys))[0] == [0, 0]
  one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
  assert (
    len(one) == len(two) == 3
    and one[1]["advantage/std"] > 0.1
    and one[1]["rewards/qwen2/unscored"] == 0
  )
  for ours, theirs in zip(two, one):
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_adapters_on_two_processes_are_those_of_one(tmp_path, checkpoint):
  """On a quantised base that both read from a checkpoint; the reference is the base; then both go on from what is saved."""
  (tmp_path / "reward.py").write_text(REWARD)
  keys = {
    "model.path": checkpoint,
    "lora.rank": 4,
    "lora.base_dtype": "int8",
    "algo.kl_coef": 0.1,
    "warm_start.steps": 0,
    "optimizer.learning_rate": 0.05,
    "optimizer.warmup_steps": 0,
    "reward.functions": (f"{tmp_path}/reward.py:digits",),
  }
  for steps in (2, 4):
    assert ended(started(2, tmp_path / "two", steps=steps, **keys))[0] == [0, 0]
  assert ended(started(1, tmp_path / "one", steps=4, **keys))[0] == [0]
  one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
  assert [row["step"] for row in one] == [0, 1, 2, 3, 4] and one[4]["kl"] > 1e-3
  assert [row["step"] for row in two] == [0, 1, 2, 3, 4]
  for ours, theirs in zip(two, one):
    assert ours == pytest.approx(theirs, abs=1e-5)
