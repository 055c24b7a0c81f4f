"""Workers for reward functions, measured: throughput, and a run whose reward hangs and crashes.

python experiments/reward_workers.py --calls=10000    # math-verify: a plain loop and two workers
python experiments/reward_workers.py --run=/tmp/run   # 50 steps, with and without failures
python experiments/reward_workers.py --overlap=/tmp/run  # steps with fewer rows in flight
python experiments/reward_workers.py --programs=200   # programs in the sandbox, with three tests
python experiments/reward_workers.py --parts             # calls that wait, started in parts

The first prints CPU seconds, too: they do not depend on what else the machine computes. The second
trains a tiny model with a reward that hangs on one completion in twenty and kills its process on
another one in twenty, and compares the time with that of the same run without failures. The third
trains with a reward that waits, as a judge does, and prints how long a step samples and waits. The
last starts the same calls in 1, 2, 4 and 8 parts. They sleep, so other work on the machine changes
the times little.
"""

import argparse
from collections.abc import Mapping, Sequence
import dataclasses
from pathlib import Path
import resource
import statistics
import subprocess
import tempfile
import time
from typing import Any

from grpo_jax import load_config, rewards, train
from grpo_jax.config import Config
from grpo_jax.rewards.functions.code import code
from grpo_jax.rewards.functions.symbolic import math
from grpo_jax.rewards.workers.messages import WorkerCall
from grpo_jax.storage.reading import read_metrics

GROUP = 8
FAILURES = '''
import os, zlib

def fails(completions, **_):
  """Of 20 completions, one hangs and one kills its process. Which ones depends on their texts."""
  scores = []
  for text in completions:
    place = zlib.crc32(text.encode()) % 20
    while place == 0:
      pass
    if place == 1:
      os._exit(1)
    scores.append(len(text) / 100)
  return scores

def works(completions, **_):
  return [len(text) / 100 for text in completions]
'''

WAITS = """
import asyncio, time

def waits(completions, seconds=0.1, **_):
  time.sleep(seconds)
  return [len(text) / 100 for text in completions]

async def waits_async(completions, seconds=0.1, **_):
  await asyncio.sleep(seconds)
  return [len(text) / 100 for text in completions]
"""


def problems(count: int) -> tuple[list[str], list[str]]:
  """Completions with a formula, and gold answers. Half of them are equal."""
  texts, golds = [], []
  for i in range(count):
    wrong = i % 2
    texts.append(
      rf"We add the parts. So \boxed{{\frac{{{i + wrong}}}{{{i % 7 + 2}}} + \sqrt{{{i}}}}}."
    )
    golds.append(rf"\sqrt{{{i}}} + {i}/{i % 7 + 2}")
  return texts, golds


def cpu_seconds(who: int) -> float:
  """The CPU time of this process, or of its children that have ended."""
  usage = resource.getrusage(who)
  return usage.ru_utime + usage.ru_stime


def throughput(count: int, workers: int) -> None:
  """Prints the time of `count` calls of math-verify, in a plain loop and by workers."""
  texts, golds = problems(count)
  math(completions=texts[:1], answer=golds[:1])  # imports
  groups = [slice(start, start + GROUP) for start in range(0, count, GROUP)]
  start, cpu = time.monotonic(), cpu_seconds(resource.RUSAGE_SELF)
  plain = [one for rows in groups for one in math(completions=texts[rows], answer=golds[rows])]
  plain_seconds, plain_cpu = time.monotonic() - start, cpu_seconds(resource.RUSAGE_SELF) - cpu
  pool = rewards.Pool(workers, timeout=30.0, memory=4.0)
  pool.add("math", math, is_named=True)
  calls = [
    WorkerCall("math", "math", {"completions": texts[rows], "answer": golds[rows]})
    for rows in groups
  ]
  cpu = cpu_seconds(resource.RUSAGE_CHILDREN)
  pool.start(calls[:workers]).result()  # starts them
  start, own_cpu = time.monotonic(), cpu_seconds(resource.RUSAGE_SELF)
  answers = pool.start(calls).result()
  seconds, own_cpu = time.monotonic() - start, cpu_seconds(resource.RUSAGE_SELF) - own_cpu
  pool.close()
  cpu = cpu_seconds(resource.RUSAGE_CHILDREN) - cpu
  found = [steps[0][1] for answer in answers for steps in answer.steps]
  assert found == plain and sum(plain) == count / 2
  ratio = plain_seconds / seconds
  print(f"{count} calls of math-verify")
  print(f"plain loop: {plain_seconds:.1f} s, {plain_cpu:.1f} CPU s")
  print(f"{workers} workers: {seconds:.1f} s, {cpu:.1f} CPU s with their start", end="")
  print(f", and {own_cpu:.1f} CPU s of the process of the run")
  print(f"{ratio:.2f} times as fast, which is {ratio / workers:.0%} of {workers} cores")


def config_of(steps: int, changes: Mapping[str, Any]) -> Config:
  """A run of random weights that evaluates nothing, with two workers."""
  common = {"steps": steps, "warm_start.steps": 0, "eval.every": 0, "reward.workers": 2}
  return load_config("arithmetic", {**common, **changes})


def failing_run(folder: Path, steps: int, timeout: float) -> None:
  """Prints the time of a run with a reward that fails and of one with a reward that works."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "failing.py").write_text(FAILURES)
  sizes = {"batch.prompts": 8, "batch.group_size": GROUP}
  config = config_of(steps, {**sizes, "reward.timeout": timeout})
  seconds = {}
  for name in ("works", "fails"):
    functions = (f"{folder}/failing.py:{name}",)
    reward = dataclasses.replace(config.reward, functions=functions)
    start = time.monotonic()
    train(dataclasses.replace(config, reward=reward), folder / name)
    seconds[name] = time.monotonic() - start
  rows = read_metrics(folder / "fails")
  counts = {
    kind: int(sum(row[f"rewards/fails/{kind}"] for row in rows))
    for kind in ("timeouts", "crashes", "errors")
  }
  # A completion that hangs takes the limit twice: in its group, and alone. Two workers wait.
  limits = 2 * timeout * counts["timeouts"] / 2
  allowed = 1.3 * seconds["works"] + limits
  print(
    f"without failures {seconds['works']:.1f} s, with failures {seconds['fails']:.1f} s: {counts}"
  )
  print(f"at most 1.3 times the first and the time limits: {allowed:.1f} s")
  left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
  print(f"{left.count('grpo_jax.rewards.workers.forker')} processes of workers are left")


def programs(count: int, workers: int) -> None:
  """Prints how long programs take to be scored in the sandbox. Half of them are right."""
  texts = [f"def double(x):\n  return x * {2 + i % 2}" for i in range(count)]
  tests = [["assert double(1) == 2", "assert double('a') == 'aa'", "assert double(0) == 0"]] * count
  pool = rewards.Pool(workers, timeout=120.0, memory=4.0)
  pool.add("code", code, is_named=True)
  calls = [
    WorkerCall(
      "code", "code", {"completions": texts[i : i + GROUP], "test_list": tests[i : i + GROUP]}
    )
    for i in range(0, count, GROUP)
  ]
  pool.start(calls[:workers]).result()  # starts them
  start = time.monotonic()
  answers = pool.start(calls).result()
  seconds = time.monotonic() - start
  pool.close()
  right = sum(steps[0][1] for answer in answers for steps in answer.steps)
  assert right == count / 2
  print(f"{count} programs in the sandbox: {seconds:.1f} s, {1000 * seconds / count:.0f} ms each")


def overlap(folder: Path, steps: int, wait: float) -> None:
  """Prints the times of steps by rows in flight. The reward of a group takes `wait` seconds."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "waiting.py").write_text(WAITS)
  sizes = {"model.embed_dim": 256, "model.mlp_dim": 1024, "batch.group_size": 16}
  functions = (f"{folder}/waiting.py:waits(seconds={wait})",)
  config = config_of(steps, {**sizes, "reward.functions": functions})
  print(f"{config.batch.prompts} groups, {wait} s each in two workers; medians of {steps} steps")
  for part in (1, 2, 4, 8):
    in_flight = config.batch.prompts * config.batch.group_size // part
    train(config.replace({"sampling.rows": in_flight}), folder / str(part))
    rows = read_metrics(folder / str(part))[1:]  # the first step compiles
    seconds = {
      name: statistics.median(row[f"time/{name}"] for row in rows)
      for name in ("step", "sample", "reward")
    }
    print(
      f"{in_flight} rows in flight: "
      + ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
    )


def in_parts(folder: Path) -> None:
  """Prints the time of calls that sleep, started in parts: an async function, and a plain one."""
  (folder / "waiting.py").write_text(WAITS)
  for name, count, seconds, workers in (("waits_async", 64, 0.2, 8), ("waits", 8, 0.8, 8)):
    key = f"{folder}/waiting.py:{name}(seconds={seconds})"
    pool = rewards.Pool(workers, timeout=30.0, memory=4.0)
    pool.add(key, None, is_named=True)
    calls = [
      WorkerCall(key, name, {"completions": ["a"] * GROUP}, is_async="async" in name)
    ] * count
    pool.start(calls).result()  # starts the workers
    for parts in (1, 2, 4, 8):
      size, times = count // parts, []
      for _ in range(5):
        start = time.monotonic()
        begun = [pool.start(calls[first : first + size]) for first in range(0, count, size)]
        answers = [answer for one in begun for answer in one.result()]
        times.append(time.monotonic() - start)
        assert len(answers) == count
      took = f"median {statistics.median(times):.2f} s, most {max(times):.2f} s"
      print(f"{name}: {count} calls of {seconds} s, {workers} workers, {parts} parts: {took}")
    pool.close()


def main(arguments: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--calls", type=int, default=0, help="calls of math-verify")
  parser.add_argument("--workers", type=int, default=2)
  parser.add_argument("--run", type=Path, help="a folder for the two runs")
  parser.add_argument("--steps", type=int, default=50)
  parser.add_argument("--timeout", type=float, default=1.0, help="reward.timeout of the runs")
  parser.add_argument("--programs", type=int, default=0, help="programs of the reward code")
  parser.add_argument("--overlap", type=Path, help="a folder for runs with fewer rows in flight")
  parser.add_argument("--wait", type=float, default=0.05, help="seconds of the reward of a group")
  parser.add_argument("--parts", action="store_true", help="time calls that start in parts")
  options = parser.parse_args(arguments)
  if options.calls:
    throughput(options.calls, options.workers)
  if options.run:
    failing_run(options.run, options.steps, options.timeout)
  if options.programs:
    programs(options.programs, options.workers)
  if options.parts:
    with tempfile.TemporaryDirectory() as folder:
      in_parts(Path(folder))
  if options.overlap:
    overlap(options.overlap, options.steps, options.wait)


if __name__ == "__main__":
  main()
