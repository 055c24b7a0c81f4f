"""Finds where each method breaks: runs of every preset under conditions from harmless to hard.

  pip install -e '.[plot]'
  python experiments/stress.py --out=/tmp/stress --hours=2
  python experiments/stress_page.py

The first command makes warm starts and then runs cells, one for each CPU core at a time, the most
telling first. It writes one line of JSON for each cell to experiments/stress.jsonl, and stops after
so many hours. The same command again goes on with the cells that have no line. The second one
writes experiments/stress.md with its pictures, from these lines.

  python experiments/stress.py --out=/tmp/stress --repeat=5

runs five cells again that have a line, and compares all their metrics, bit for bit.

`stress_cells.py` says what the cells are. A cell takes 24 steps of 16 x 8 completions.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import os
from pathlib import Path
import shutil
import statistics
import sys
import time
from typing import Any, NamedTuple
from unittest import mock
import zlib

from jax.sharding import Mesh
import stress_cells
from stress_cells import OPERANDS, TARGETS, Cell

import grpo_jax
from grpo_jax.config import Config, Data, Reward
from grpo_jax.data.tasks.arithmetic import Arithmetic
from grpo_jax.model.huggingface.folders import new_folder
from grpo_jax.rewards.functions.worked_steps import equations
from grpo_jax.run import run as run_module
from grpo_jax.run.compiled import Programs
from grpo_jax.run.parameters import Parameters
from grpo_jax.storage.json_files import json_line, replace_file

LINES = Path(__file__).with_name("stress.jsonl")
TRAIN, TEST = 8000, 512  # sums of each folder
DRAWS, NEAR = 8, 1.33  # of each sum, to measure a warm start, and how far it may be from its target


class Call(NamedTuple):
  """A function and its arguments.

  Attributes:
    function: In a module, so that a process can find it.
    arguments: By place.
    family: Equal for calls that can share a process.
  """

  function: Callable[..., Any]
  arguments: tuple[Any, ...]
  family: Any = None


def read_lines(path: Path = LINES) -> list[dict[str, Any]]:
  """The lines of the cells that have run."""
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sums(out: Path, operands: int, worked: float = 1.0) -> Path:
  """Writes sums as files, and returns their folder.

  Args:
    out: Where the folder lies.
    operands: Of each sum.
    worked: The share of the training sums whose solution is worked. That of the others is the
      answer 0, so that hardly any of them is right.
  """
  folder = out / f"sums_{operands}_{worked:g}"
  if folder.exists():
    return folder
  with new_folder(folder) as files:
    for split, count in (("train", TRAIN), ("test", TEST)):
      lines = []
      for i, example in enumerate(Arithmetic(split, operands)[:count]):
        answer = f"#### {example['answer']}"
        steps = [*equations(example["question"]), answer]
        solution = ";".join(steps) if i < worked * count else "#### 0"
        lines.append(json.dumps(example | {"solution": solution}) + "\n")
      (files / f"{split}.jsonl").write_text("".join(lines))
  return folder


def warm_starts(out: Path, seed: int) -> None:
  """Writes the warm starts of a seed, one for each of TARGETS.

  The model first learns to work sums out. Then it learns how often not to try. It learns that again
  with other solutions until the share of right draws is near the target.
  """
  folder = out / f"seed_{seed}"
  folder.mkdir(parents=True, exist_ok=True)
  able = folder / "able"
  if not able.exists():
    share = _supervised(folder, seed, sums(out, OPERANDS), "able", {"warm_start.steps": 800})
    print(f"seed {seed}, all worked: {share:.1%} of draws are right", flush=True)
  for target, worked in TARGETS.items():
    least, most = worked / 4, worked * 4  # shares that teach too few and too many right draws
    while not (folder / f"start_{target:g}").exists():
      name = f"tried_{target:g}_{worked:g}"
      hesitant = {"warm_start.steps": 100, "model.path": str(able)}
      share = _supervised(folder, seed, sums(folder, OPERANDS, worked), name, hesitant)
      print(f"seed {seed}, {worked:.3g} worked: {share:.1%} of draws are right", flush=True)
      if 1 / NEAR < share / target < NEAR:
        (folder / name).rename(folder / f"start_{target:g}")
      least, most = (worked, most) if share < target else (least, worked)
      worked = round(math.sqrt(least * most), 4)


def _supervised(
  folder: Path, seed: int, data: Path, name: str, changes: Mapping[str, Any]
) -> float:
  """Writes folder/name, a model that has imitated solutions. Returns its share of right draws."""
  settings = stress_cells.COMMON | {
    "seed": seed,
    "steps": 0,
    "data.path": str(data),
    "warm_start.learning_rate": 2e-3,
    "eval.batch": 256,
    "eval.temperature": 1.0,
  }
  workdir = folder / "runs" / name
  with _output_to(folder / "log"):
    grpo_jax.train(grpo_jax.load_config("arithmetic", {**settings, **changes}), workdir)
    policy = grpo_jax.load_policy(workdir)
    share = policy.evaluate(samples=DRAWS, examples=256)[f"eval/mean@{DRAWS}"]
    shutil.rmtree(folder / name, ignore_errors=True)  # of a try that was killed
    policy.export(folder / name)
  return share


class SharedPrograms(Programs):
  """Programs of which each sampler is traced once."""

  sampler = functools.cache(Programs.sampler)


_kept: dict[str, Programs] = {}  # of this process, by what they read of a config


def shared_programs(config: Config, mesh: Mesh, parameters: Parameters, *rest: Any) -> Programs:
  """The programs of a config: those of an earlier run here that differs in nothing they read.

  To trace them takes longer than most cells take to run. They hold no parameters and no state.
  """
  read = dataclasses.replace(
    config,
    algo=dataclasses.replace(config.algo, updates_per_batch=1),  # a loop around them
    model=dataclasses.replace(config.model, path=""),  # all warm starts have one shape
    data=Data(),
    reward=Reward(),
    steps=1,  # the learning rate does not depend on it
    seed=0,
  )
  key = repr(read)
  if key not in _kept:
    _kept[key] = SharedPrograms(config, mesh, parameters, *rest)
  return _kept[key]


def run_cell(cell: Cell, out: Path) -> dict[str, Any]:
  """Runs a cell in this process. Returns its line."""
  start = time.monotonic()
  workdir = out / "runs" / str(os.getpid())
  shutil.rmtree(workdir, ignore_errors=True)
  failure = ""
  sharing = mock.patch.object(run_module, "Programs", shared_programs)
  with _output_to(out / f"log_{os.getpid()}"), sharing:
    try:
      grpo_jax.train(cell.config(out), workdir)
    except grpo_jax.RunFailed as error:  # such as a loss that is not finite
      failure = str(error)
  line = {"level": cell.level, "method": cell.method, "seed": cell.seed}
  line |= summary(grpo_jax.read_metrics(workdir))
  if failure:
    line["failure"] = failure[:200]
  return line | {"seconds": round(time.monotonic() - start, 1)}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """What a line holds of a run's metrics.

  `digest` is a checksum of all of them but the times. Means are over the last eight steps.
  """
  timeless = [
    {name: value for name, value in row.items() if not name.startswith(("time/", "perf/"))}
    for row in rows
  ]
  evaluated = [row for row in rows if "eval/accuracy" in row]
  steps = [row for row in rows if "loss" in row]
  line = {
    "digest": zlib.crc32(json.dumps(timeless, sort_keys=True).encode()),
    "steps": len(steps),
    "accuracy": [round(row["eval/accuracy"], 4) for row in evaluated],
    "length": round(evaluated[-1]["eval/mean_length"], 2),
  }
  for key, name in (
    ("entropy", "entropy"),
    ("kl", "kl"),
    ("clipped", "clip_ratio/region_mean"),
    ("wasted", "wasted"),
  ):
    values = [row[name] for row in steps[-8:] if row.get(name) is not None]
    if values:
      line[key] = float(f"{statistics.fmean(values):.4g}")
  ratios = [row["ratio/max"] for row in steps if row.get("ratio/max") is not None]
  return line | {"ratio": float(f"{max(ratios, default=1.0):.4g}")}


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[None]:
  with open(log, "a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
    yield


def in_processes(queues: Sequence[Iterable[Call]], deadline: float = float("inf")) -> Iterator[Any]:
  """The results of calls as they come. Each queue has a process with a CPU core of its own.

  With one core, sums are always made in the same order, so that numbers can be repeated. A call of
  another family than the one before gets a new process, because programs stay in memory.

  Args:
    queues: The calls of each process, no more of them than there are cores.
    deadline: The time (time.monotonic) after which no call is begun.
  """
  cores = sorted(os.sched_getaffinity(0))[: len(queues)]
  workers = [_Worker(core, iter(queue)) for core, queue in zip(cores, queues, strict=True)]
  running = dict[Future[Any], _Worker]()
  try:
    while True:
      for worker in workers:
        if worker not in running.values() and time.monotonic() < deadline:
          future = worker.begin()
          if future is not None:
            running[future] = worker
      if not running:
        break
      for future in wait(running, return_when=FIRST_COMPLETED).done:
        del running[future]
        yield future.result()
  finally:
    for worker in workers:
      worker.close()


class _Worker:
  """A process on one core, which takes the calls of a queue in turn."""

  def __init__(self, core: int, calls: Iterator[Call]):
    self._core, self._calls = core, calls
    self._pool: ProcessPoolExecutor | None = None
    self._family: Any = None

  def begin(self) -> Future[Any] | None:
    """Begins the next call. None if there is none."""
    call = next(self._calls, None)
    if call is None:
      return None
    if self._pool is None or call.family != self._family:
      self.close()
      context = multiprocessing.get_context("spawn")
      pin = os.sched_setaffinity  # before JAX counts the cores
      self._pool = ProcessPoolExecutor(1, context, initializer=pin, initargs=(0, [self._core]))
      self._family = call.family
    return self._pool.submit(call.function, *call.arguments)

  def close(self) -> None:
    """Ends the process."""
    if self._pool is not None:
      self._pool.shutdown(cancel_futures=True)


def queues_of(cells: Sequence[Cell], out: Path, jobs: int) -> list[list[Call]]:
  """One queue for each job. All cells of a method are in one, where they share programs."""
  of_method: dict[str, list[Cell]] = {}
  for cell in cells:
    of_method.setdefault(cell.method, []).append(cell)
  taken: list[list[Cell]] = [[] for _ in range(jobs)]
  for own in sorted(of_method.values(), key=len, reverse=True):
    min(taken, key=len).extend(own)
  return [
    [Call(run_cell, (cell, out), stress_cells.family(cell.level)) for cell in cells if cell in own]
    for own in map(set, taken)
  ]


def cell_of(line: Mapping[str, Any]) -> Cell:
  """The cell of a line."""
  return Cell(line["level"], line["method"], line["seed"])


def same_start(line: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> bool:
  """Whether a line begins with the accuracy of those whose runs begin in the same way.

  It does not where lines come from another machine: other processors round otherwise, so the same
  seeds make other warm starts.
  """

  def beginning(one: Mapping[str, Any]) -> tuple[Any, ...]:
    level = one["level"]
    return stress_cells.family(level), stress_cells.LEVELS[level].start, one["seed"]

  before = (one for one in lines if beginning(one) == beginning(line))
  return all(one["accuracy"][0] == line["accuracy"][0] for one in before)


def repeat(lines: Sequence[Mapping[str, Any]], out: Path, jobs: int) -> None:
  """Runs the cells of these lines again. Exits with 1 if a metric differs."""
  differ = 0
  found = in_processes(queues_of([cell_of(line) for line in lines], out, jobs))
  before = {cell_of(line): line for line in lines}
  for line in found:
    same = line["digest"] == before[cell_of(line)]["digest"]
    differ += not same
    print(f"{cell_of(line)}: {'the same' if same else 'DIFFERS'}", flush=True)
  sys.exit(differ > 0)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("--out", type=Path, required=True, help="a folder for the warm starts")
  parser.add_argument("--hours", type=float, default=24.0, help="no cell begins after these")
  parser.add_argument("--seeds", type=int, default=3)
  cores = len(os.sched_getaffinity(0))
  parser.add_argument("--jobs", type=int, default=cores, help="cells at a time, one a core")
  parser.add_argument("--repeat", type=int, default=0, help="so many cells of those that have run")
  options = parser.parse_args()
  if not 1 <= options.jobs <= cores:
    parser.error(f"--jobs must be from 1 to {cores}, the cores of this process")
  deadline = time.monotonic() + 3600 * options.hours
  options.out.mkdir(parents=True, exist_ok=True)
  lines = read_lines()
  if options.repeat:
    # Spread over all that have run.
    repeat(
      lines[:: max(1, len(lines) // options.repeat)][: options.repeat], options.out, options.jobs
    )
  has_run = {cell_of(line) for line in lines}
  seeds = range(options.seeds)
  starts = [
    [Call(warm_starts, (options.out, seed)) for seed in seeds[job :: options.jobs]]
    for job in range(options.jobs)
  ]
  for operands in sorted({level.operands for level in stress_cells.LEVELS.values()}):
    sums(options.out, operands)  # here, as processes would write them at the same time
  for _ in in_processes(starts):
    pass
  left = [cell for cell in stress_cells.cells(options.seeds) if cell not in has_run]
  queues = queues_of(left, options.out, options.jobs)
  for done, line in enumerate(in_processes(queues, deadline), 1):
    if not same_start(line, lines):
      sys.exit(f"{LINES} has runs from other warm starts, such as another machine's: move it away")
    lines.append(line)
    replace_file(LINES, b"".join(map(json_line, lines)))
    print(
      f"{done} of {len(left)}: {line['level']}, {line['method']}, seed {line['seed']}:"
      f" {line['accuracy'][0]:.1%} -> {line['accuracy'][-1]:.1%} in {line['seconds']} s",
      flush=True,
    )


if __name__ == "__main__":
  main()
