"""Two processes, as on two hosts, give the numbers of one."""

import json
import os
from pathlib import Path
import re
import signal
import socket
import subprocess
import sys
import time

from lora_run_test import REWARD, make_checkpoint, rows_of
import pytest

from grpo_jax.learner.packed import slot_sizes
from grpo_jax.storage.json_files import parse_rows
from grpo_jax.storage.reading import read_completions

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
KEYS = """
  model.embed_dim=16 model.num_layers=1 model.num_heads=2 model.num_kv_heads=2 model.head_dim=8
  model.mlp_dim=32 batch.prompts=8 batch.group_size=4 sampling.max_tokens=8
  optimizer.schedule=constant warm_start.steps=3 warm_start.batch=8 eval.every=2 eval.examples=20
  eval.batch=8 eval.samples=2 checkpoint.every=2 log.tensorboard=False
  mesh.data=2 mesh.fsdp=2 mesh.tensor=2
""".split()


def start(count, workdir, devices=8, **keys):
  """Starts `count` processes that train, all on one workdir."""
  flags = [f"--config.{key}" for key in (*KEYS, *(f"{k}={v}" for k, v in keys.items()))]
  flags = ["--config=configs/arithmetic.py", *flags]
  return start_command(count, "train", *flags, workdir=workdir, devices=devices)


def start_command(count, name, *flags, workdir, own_flags=((), ()), devices=8):
  """Starts `count` processes of a command. `own_flags[i]` are those of process i alone."""
  with socket.socket() as s:
    s.bind(("localhost", 0))
    address = f"localhost:{s.getsockname()[1]}"
  processes = []
  for i in range(count):
    env = os.environ | {
      "JAX_NUM_CPU_DEVICES": str(devices // count),
      "JAX_NUM_PROCESSES": str(count),
      "JAX_PROCESS_ID": str(i),
      "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    env |= {"JAX_COORDINATOR_ADDRESS": address} if count > 1 else {}
    command = [
      sys.executable,
      "-m",
      f"grpo_jax.{name}",
      f"--workdir={workdir}",
      *flags,
      *own_flags[i],
    ]
    processes.append(
      subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
      )
    )
  return processes


def finish(processes):
  """Waits for the processes. Returns their exit codes and what they printed."""
  outputs = [process.communicate(timeout=500)[0] for process in processes]
  return [process.returncode for process in processes], outputs


def train(count, workdir, **keys):
  """Trains with `count` processes. Returns the rows of metrics, without times."""
  codes, outputs = finish(start(count, workdir, **keys))
  assert codes == [0] * count, outputs
  return rows_of(workdir)


def assert_same(ours, theirs):
  assert len(ours) == len(theirs)
  for row, wanted in zip(ours, theirs):
    assert row == pytest.approx(wanted, abs=1e-5)


def test_two_processes_give_the_numbers_of_one_and_stop_together_and_resume(tmp_path):
  one, two = train(1, tmp_path / "one", steps=4), train(2, tmp_path / "two", steps=4)
  assert len(one) == 7
  assert_same(two, one)

  both = start(2, tmp_path / "two", steps=100_000)
  # They resume from step 7. The last line of the file may be half written.
  while len(parse_rows(tmp_path / "two" / "metrics.jsonl")) < 10:
    assert both[0].poll() is None
    time.sleep(0.2)
  both[1].send_signal(signal.SIGTERM)  # to one of them, and both stop
  codes, outputs = finish(both)
  assert codes == [75, 75] and "resuming from step 7" in outputs[0]
  step = rows_of(tmp_path / "two")[-1]["step"]
  assert f"stopped at step {step}" in outputs[0]
  assert (tmp_path / "two" / "checkpoints" / str(step)).is_dir()


@pytest.mark.parametrize(
  "keys",
  [
    {"mesh.data": 1, "mesh.context": 4, "mesh.tensor": 1, "sampling.context": 4},
    {"mesh.data": 4, "mesh.fsdp": 1, "batch.micro_batch": 4},  # sums of gradients meet at the end
  ],
  ids=str,
)
def test_texts_caches_and_gradients_of_two_processes_are_those_of_one(tmp_path, keys):
  one, two = (train(count, tmp_path / str(count), steps=2, **keys) for count in (1, 2))
  assert len(one) == 5
  assert_same(two, one)


def test_a_run_goes_on_with_fewer_and_more_devices(tmp_path):
  """The batches are the same, and the numbers to rounding.

  The rewards of a group differ. Where all gradients are zero, AdamW would make steps of rounding.
  """
  (tmp_path / "reward.py").write_text(REWARD)
  keys = {
    "mesh.data": -1,
    "mesh.fsdp": 1,
    "mesh.tensor": 1,
    "algo.kl_coef": 0.1,
    "log.completions_every": 1,
    "reward.functions": (f"{tmp_path}/reward.py:digits",),
  }
  whole = train(1, tmp_path / "whole", steps=10, **keys)
  steps, before = 0, None
  for count, devices in ((1, 8), (1, 4), (1, 2), (1, 1), (2, 8)):
    steps += 2
    processes = start(count, tmp_path / "moved", devices, steps=steps, **keys)
    codes, outputs = finish(processes)
    assert codes == [0] * count, outputs
    line = f"on {devices} devices instead of {before}"
    assert (line in " ".join(outputs[0].split())) == (before is not None)
    before = devices
  moved = rows_of(tmp_path / "moved")
  assert [row["step"] for row in moved] == [row["step"] for row in whole]
  for row, wanted in zip(moved, whole):
    for name in row.keys() & wanted.keys():
      assert row[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-5), name
  prompts = [
    [json.loads(line)["prompt_ids"] for line in (tmp_path / name / file).read_text().splitlines()]
    for name in ("whole", "moved")
    for file in ("completions/000012.jsonl",)
  ]
  assert prompts[0] == prompts[1]


def test_an_error_of_the_first_process_ends_both(tmp_path):
  (tmp_path / "thesis.tex").write_text("x")
  codes, outputs = finish(start(2, tmp_path, steps=1))
  assert codes == [2, 2]
  assert "is not empty" in outputs[0] and "first process has ended" in outputs[1]


ENDED = (
  "error: process {} of 2 (counted from 0) has ended: see what it says; then run the same command"
  " on all hosts to go on from the newest checkpoint"
)


def wait_for_rows(workdir, count, process):
  """Waits until metrics.jsonl has `count` rows."""
  metrics = workdir / "metrics.jsonl"
  while not metrics.exists() or len(parse_rows(metrics)) < count:
    assert process.poll() is None
    time.sleep(0.2)


@pytest.mark.parametrize("killed", [0, 1])
def test_the_others_end_with_one_line_when_one_is_killed_and_the_command_goes_on(tmp_path, killed):
  both = start(2, tmp_path, steps=100_000)
  wait_for_rows(tmp_path, 8, both[0])
  both[killed].kill()
  killed_at = time.monotonic()
  codes, outputs = finish(both)
  assert time.monotonic() - killed_at < 30
  assert codes[killed] == -signal.SIGKILL and codes[1 - killed] == 1
  lines = outputs[1 - killed].splitlines()
  assert lines[-1] == ENDED.format(killed)
  assert not any("Traceback" in line for line in lines)
  both = start(2, tmp_path, steps=100_000)
  wait_for_rows(tmp_path, 14, both[0])
  both[0].send_signal(signal.SIGTERM)
  codes, outputs = finish(both)
  assert codes == [75, 75] and "resuming from step" in outputs[0]


def test_an_error_of_one_process_ends_the_other_at_once(tmp_path):
  """The flags of the second process are wrong, so the first one waits for it in vain."""
  flags = ("--config=configs/arithmetic.py", *(f"--config.{key}" for key in (*KEYS, "steps=2")))
  started = time.monotonic()
  both = start_command(
    2,
    "train",
    *flags,
    workdir=tmp_path,
    own_flags=((), ("--config.reward.functions=('nowhere.py:f',)",)),
  )
  codes, outputs = finish(both)
  assert time.monotonic() - started < 90
  assert codes == [1, 2] and outputs[0].splitlines()[-1] == ENDED.format(1)
  assert "nowhere.py" in outputs[1].splitlines()[-1]


def test_a_second_run_on_the_same_folder_is_refused_and_named(tmp_path):
  first = start(2, tmp_path, steps=100_000)
  wait_for_rows(tmp_path, 3, first[0])
  codes, outputs = finish(start(2, tmp_path, steps=100_000))
  assert codes == [2, 2]
  assert f"is in use by process {first[0].pid} on {socket.gethostname()} since" in outputs[0]
  first[0].send_signal(signal.SIGTERM)
  assert finish(first)[0] == [75, 75]


def test_two_processes_choose_the_same_slots(tmp_path):
  """Micro-batches need one of two numbers of slots, and each process reads which."""
  keys = {
    "steps": 3,
    "warm_start.steps": 0,
    "batch.prompts": 16,
    "batch.group_size": 8,
    "batch.micro_batch": 4,
    "sampling.max_tokens": 32,
    "eval.every": 0,
  }
  one, two = train(1, tmp_path / "one", **keys), train(2, tmp_path / "two", **keys)
  assert_same(two, one)
  assert len(slot_sizes(8, 32, "cpu")) == 2 and len(one) == 3


def test_evaluate_sample_and_export_on_two_processes_do_what_they_do_on_one(tmp_path):
  train(1, tmp_path / "run", steps=2)

  def printed(count, *command):
    codes, outputs = finish(start_command(count, *command, workdir=tmp_path / "run"))
    assert codes == [0] * count, outputs
    # What takes long is said where it takes long.
    noise = re.compile("peer ranks|^(laying out|reading|tokenising|compiling|sampling|evaluat|$)")
    return [[x for x in text.splitlines() if not noise.search(x)] for text in outputs]

  for command in (("evaluate", "--samples=4"), ("sample", "--prompt=7+15-6+9=", "--n=2")):
    (one,) = printed(1, *command)
    assert printed(2, *command) == [one, []] and len(one) > 3
  for count in (1, 2):
    printed(count, "export", f"--out={tmp_path}/{count}")
  files = sorted(path.name for path in (tmp_path / "1").iterdir())
  assert files == sorted(path.name for path in (tmp_path / "2").iterdir()) and len(files) > 3
  for name in files:
    assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_two_processes_score_in_little_more_than_half_the_time(tmp_path):
  """64 completions, of which each takes 0.1 s: 6.4 s on one process."""
  (tmp_path / "reward.py").write_text(SLOW_REWARD)
  keys = {
    "steps": 2,
    "warm_start.steps": 0,
    "batch.prompts": 16,
    "eval.every": 0,
    "reward.functions": (f"{tmp_path}/reward.py:slow",),
    "reward.workers": 1,
  }
  one, two = train(1, tmp_path / "one", **keys), train(2, tmp_path / "two", **keys)
  assert_same(two, one)
  seconds = [
    [row["time/reward"] for row, _ in parse_rows(tmp_path / name / "metrics.jsonl")]
    for name in ("one", "two")
  ]
  print("seconds of rewards on one process and on two:", *seconds)
  assert min(seconds[0]) > 6.4 and max(seconds[1]) < 0.6 * min(seconds[0])


SLOW_REWARD = """
import time
def slow(completions, **_):
  time.sleep(0.1 * len(completions))
  return [float(len(text)) for text in completions]
"""
FAILS_AND_LOGS = """
import os, zlib
def fails(completions, step, log_metric, log_extra, **_):
  for text in completions:
    place = zlib.crc32(text.encode()) % 8
    if place == 0:
      os._exit(1)
    if place == 1:
      raise ValueError(text)
    log_metric("my/place", place)
  log_extra("upper", [text.upper() for text in completions])
  return [float(len(text)) for text in completions]
"""
STEPS_AND_PARITY = """
def steps(completions, **_):
  return [[(i + 1, float(ch in '123')) for i, ch in enumerate(c)] for c in completions]

def even(completions, **_):
  return [float(sum(map(ord, c)) % 2) for c in completions]
"""


@pytest.mark.parametrize(
  "algo",
  [{"algo.dynamic_sampling": True, "algo.overlong": 0.5}, {"algo.advantage": "process"}],
  ids=str,
)
def test_rewards_of_each_process_reach_the_others(tmp_path, algo):
  """Two functions of different weights, of which one gives steps, and a reward model.

  The names of the functions are not in alphabetical order. Both processes compute the model.
  """
  (tmp_path / "reward.py").write_text(STEPS_AND_PARITY)
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
  one, two = train(1, tmp_path / "one", **keys), train(2, tmp_path / "two", **keys)
  assert len(one) == 3 and one[1]["advantage/std"] > 0.1
  assert one[1]["rewards/qwen2/unscored"] == 0
  assert_same(two, one)


def test_what_fails_and_what_is_logged_on_each_process_reaches_the_others(tmp_path):
  (tmp_path / "reward.py").write_text(FAILS_AND_LOGS)
  keys = {
    "warm_start.steps": 0,
    "steps": 2,
    "log.completions_every": 1,
    "reward.on_error": "none",
    "reward.workers": 1,
    "reward.functions": (f"{tmp_path}/reward.py:fails",),
  }
  rows = {}
  for count in (1, 2):
    rows[count] = train(count, tmp_path / str(count), **keys)
    for step in (1, 2):
      for one in read_completions(tmp_path / str(count), step):
        failed = one["rewards/fails"] is None
        assert failed or one["extra/upper"] == one["completion"].upper()
  assert rows[1][1]["rewards/fails/crashes"] > 0 and rows[1][1]["rewards/fails/errors"] > 0
  assert 2 <= rows[1][1]["my/place"] <= 7
  assert_same(rows[2], rows[1])


ENVIRONMENT = """
class Counting:
  def reset(self, example):
    self.turns = 0
    return [{"role": "user", "content": example["question"][:2]}]

  def step(self, message):
    self.turns += 1
    return [{"role": "user", "content": f"{self.turns}="}], float(self.turns), self.turns == 3
"""


def test_turns_of_each_process_reach_the_others(tmp_path):
  """Each process asks the environments of its own rows."""
  (tmp_path / "env.py").write_text(ENVIRONMENT)
  keys = {
    "environment.name": f"{tmp_path}/env.py:Counting",
    "environment.turn_tokens": 4,
    "sampling.max_tokens": 24,
    "reward.functions": "('environment',)",
    "eval.every": 0,
    "steps": 2,
    "log.completions_every": 1,
  }
  rows = [train(count, tmp_path / f"run{count}", **keys) for count in (1, 2)]
  assert_same(rows[1], rows[0])
  one, two = (read_completions(tmp_path / f"run{count}", 5) for count in (1, 2))
  assert [row["turns"] for row in one] == [row["turns"] for row in two]
  assert any(len(row["turns"]) > 2 for row in one)


def test_adapters_on_two_processes_are_those_of_one(tmp_path):
  """On a quantised base that both processes read. The reference is the base. Both resume."""
  (tmp_path / "reward.py").write_text(REWARD)
  keys = {
    "model.path": make_checkpoint(tmp_path / "hf"),
    "lora.rank": 4,
    "lora.base_dtype": "int8",
    "algo.kl_coef": 0.1,
    "warm_start.steps": 0,
    "optimizer.learning_rate": 0.05,
    "optimizer.warmup_steps": 0,
    "reward.functions": (f"{tmp_path}/reward.py:digits",),
  }
  train(2, tmp_path / "two", steps=2, **keys)
  two = train(2, tmp_path / "two", steps=4, **keys)
  one = train(1, tmp_path / "one", steps=4, **keys)
  assert [row["step"] for row in one] == [0, 1, 2, 3, 4] and one[4]["kl"] > 1e-3
  assert_same(two, one)


@pytest.mark.parametrize("apart", [False, True])
def test_two_processes_draw_ahead_what_one_draws(apart, tmp_path):
  """Workers score, and checkpoints hold batches of both processes.

  With `apart`, half of the devices of each process only sample.
  """
  (tmp_path / "reward.py").write_text(REWARD)
  keys = {
    "rollout.max_staleness": 2,
    "algo.kl_coef": 0.1,
    "checkpoint.every": 1,
    "reward.workers": 1,
    "reward.functions": (f"{tmp_path}/reward.py:digits",),
    "mesh.tensor": 1 if apart else 2,
  }
  of_one = keys | {"mesh.sampler": 4 if apart else 0}
  keys["mesh.sampler"] = 2 if apart else 0
  one = train(1, tmp_path / "one", steps=6, **of_one)
  both = start(2, tmp_path / "two", steps=6, **keys)
  rows = tmp_path / "two" / "metrics.jsonl"
  while not rows.exists() or len(parse_rows(rows)) < 6:  # three of them of the warm start
    assert both[0].poll() is None
    time.sleep(0.05)
  both[1].kill()
  both[0].kill()
  finish(both)
  two = train(2, tmp_path / "two", steps=6, **keys)
  assert_same(two, one)
  assert [row["staleness/max"] for row in two[-6:]] == [0, 1, 2, 2, 2, 2]
