"""Trains every preset on the same sums, from the same warm starts, with the same budget.

  pip install -e '.[plot]' && python experiments/compare_algorithms.py --out=/tmp/compare

It writes a table and a plot: compare_algorithms.md and compare_algorithms.png in experiments/.

It takes about an hour and a half on two CPU cores. Run the same command again to resume after a
kill. Finished runs are read and not repeated, so you may add to --presets and --seeds later.

Each seed has one warm start: 1,000 supervised steps of configs/arithmetic.py with the default base
of the rotary angles, exported as a Hugging Face folder. Every preset starts from that folder and
makes 60 steps of 32 prompts x 8 completions. Each step makes four updates of 8 prompts, so that
ratios differ from 1 and the bounds on them have an effect. The learning rate falls from 1e-4 to 0.
Everything else comes from the preset.
"""

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import functools
import os
from pathlib import Path
import queue
import statistics
import subprocess
import sys
from typing import Any

import matplotlib.pyplot as plt

from grpo_jax.algo.presets import PRESETS
from grpo_jax.run import workdir as run_folder
from grpo_jax.run.reading import read_config

Rows = Sequence[Mapping[str, Any]]  # the metrics of one run
Results = Mapping[str, Sequence[Rows]]  # preset -> one run per seed

STEPS, EVERY, WARM_STEPS, TARGET = 60, 3, 1000, 0.9
COMMON = f"""
  steps={STEPS} warm_start.steps=0 algo.minibatches=4 sampling.max_tokens=40
  optimizer.learning_rate=1e-4 optimizer.schedule=linear optimizer.warmup_steps=0
  eval.every={EVERY} eval.examples=512 eval.batch=512 checkpoint.every=20 checkpoint.keep=1
  log.completions_every={STEPS} log.tensorboard=False
""".split()
HERE = Path(__file__).parent
COLUMNS = 7  # of the plot


def exported_folder(out: Path, seed: int) -> Path:
  """Where the warm start of this seed lies as a Hugging Face folder."""
  return out / f"warm_{seed}_exported"


class Machine:
  """Runs commands, `jobs` of them at a time. Each has some of the CPU cores to itself."""

  def __init__(self, out: Path, jobs: int) -> None:
    self._out = out
    self._free: queue.Queue[list[int]] = queue.Queue()
    cores = sorted(os.sched_getaffinity(0))
    for i in range(jobs):
      self._free.put(cores[i::jobs] or cores)

  def __call__(self, module: str, name: str, *arguments: str) -> None:
    """Runs `python -m grpo_jax.MODULE ARGUMENTS` and writes its output to NAME.log."""
    cores = self._free.get()
    try:
      environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(self._out / "compiled")}
      with open(self._out / f"{name}.log", "a") as log:
        subprocess.run(
          [sys.executable, "-m", f"grpo_jax.{module}", *arguments],
          check=True,
          stdout=log,
          stderr=log,
          cwd=HERE.parent,
          env=environment,
          preexec_fn=functools.partial(os.sched_setaffinity, 0, cores),
        )
    finally:
      self._free.put(cores)


def warm_start(machine: Machine, out: Path, seed: int) -> None:
  """Makes the folder that every preset of this seed starts from, unless it is there already."""
  name = f"warm_{seed}"
  workdir, folder = out / name, exported_folder(out, seed)
  if (folder / "model.safetensors").exists():
    return
  machine(
    "train",
    name,
    "--config=configs/arithmetic.py",
    f"--config.seed={seed}",
    "--config.steps=0",
    "--config.model.rope_theta=10000.0",
    "--config.sampling.max_tokens=40",
    f"--config.warm_start.steps={WARM_STEPS}",
    "--config.log.tensorboard=False",
    f"--workdir={workdir}",
  )
  machine("export", name, f"--workdir={workdir}", f"--out={folder}")


def train(machine: Machine, out: Path, preset: str, seed: int) -> Rows:
  """Returns the metrics of this preset and seed. Starts or resumes the run if it is not done."""
  name = f"{preset}_{seed}"
  workdir = out / name
  rows = run_folder.read(workdir) if (workdir / "metrics.jsonl").exists() else []
  if rows:
    check_settings(workdir)
  if not rows or rows[-1]["step"] < STEPS:
    machine(
      "train",
      name,
      f"--config=configs/arithmetic.py:{preset}",
      f"--config.seed={seed}",
      f"--config.model.path={exported_folder(out, seed)}",
      f"--workdir={workdir}",
      *(f"--config.{key}" for key in COMMON),
    )
    rows = run_folder.read(workdir)
    print(f"{preset} {seed}: {rows[-1]['eval/accuracy']:.1%}", flush=True)
  return rows


def check_settings(workdir: Path) -> None:
  """Exits if the run in this folder was made with other settings than COMMON."""
  saved: Any = read_config(str(workdir))
  for key, value in (item.split("=") for item in COMMON):
    found = functools.reduce(getattr, key.split("."), saved)
    if str(found) != value and found != type(found)(value):
      sys.exit(f"{workdir} was made with {key}={found}, not {value}: name another --out")


def curve(rows: Rows) -> list[tuple[int, float]]:
  """The evaluations of a run as (step, accuracy)."""
  return [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]


def final_accuracies(runs: Sequence[Rows]) -> list[float]:
  return [curve(rows)[-1][1] for rows in runs]


def ranked(results: Results) -> list[tuple[str, Sequence[Rows]]]:
  """The presets with their runs, best mean accuracy first."""

  def mean_accuracy(item: tuple[str, Sequence[Rows]]) -> float:
    return statistics.mean(final_accuracies(item[1]))

  return sorted(results.items(), key=lambda item: -mean_accuracy(item))


def steps_to_target(rows: Rows) -> str:
  """The first evaluated step whose accuracy reaches TARGET, or "never"."""
  return next((str(step) for step, accuracy in curve(rows) if accuracy >= TARGET), "never")


def table(results: Results) -> str:
  """A Markdown table with a row per preset.

  The entropy is that of the tokens in the loss, averaged over the last ten steps.
  """
  lines = [
    f"| preset | accuracy after {STEPS} steps: mean (range) | steps to {TARGET:.0%}, each seed | "
    "mean length | entropy at the end |",
    "|---|---|---|---|---|",
  ]
  for preset, runs in ranked(results):
    ends = final_accuracies(runs)
    accuracy = f"{statistics.mean(ends):.1%} ({min(ends):.1%} to {max(ends):.1%})"
    reached = ", ".join(steps_to_target(rows) for rows in runs)
    length = statistics.mean(rows[-1]["eval/mean_length"] for rows in runs)
    entropy = statistics.mean(row["entropy"] for rows in runs for row in rows[-10:])
    lines.append(f"| {preset} | {accuracy} | {reached} | {length:.1f} | {entropy:.3f} |")
  return "\n".join(lines) + "\n"


def mean_curve(runs: Sequence[Rows]) -> tuple[list[int], list[float]]:
  """Evaluated steps, and the mean accuracy of the runs at each of them in percent."""
  steps = [step for step, _ in curve(runs[0])]
  by_step = zip(*([accuracy for _, accuracy in curve(rows)] for rows in runs))
  return steps, [100 * statistics.mean(accuracies) for accuracies in by_step]


def plot(results: Results, seeds: Sequence[int], path: Path) -> None:
  """Draws one small plot per preset: each seed in colour, the means of all presets in grey."""
  height = -(-len(results) // COLUMNS)
  figure, axes = plt.subplots(
    height,
    COLUMNS,
    figsize=(13, 1.9 * height + 0.4),
    sharex=True,
    sharey=True,
    constrained_layout=True,
    squeeze=False,
  )
  for ax in axes.flat[len(results) :]:
    ax.set_visible(False)
  for ax, (preset, runs) in zip(axes.flat, ranked(results)):
    for other_runs in results.values():
      ax.plot(*mean_curve(other_runs), color="0.85", linewidth=0.8)
    lines = [
      ax.plot([step for step, _ in curve(rows)], [100 * a for _, a in curve(rows)], linewidth=1)[0]
      for rows in runs
    ]
    ax.set_title(preset, fontsize=9)
    ax.axhline(100 * TARGET, color="0.6", linewidth=0.5, linestyle=":")
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_ylim(60, 100)
  figure.legend(
    lines,
    [f"seed {seed}" for seed in seeds],
    frameon=False,
    fontsize=8,
    ncols=len(seeds),
    loc="outside upper right",
  )
  figure.supxlabel("GRPO steps", fontsize=9)
  figure.supylabel("held-out greedy accuracy, %", fontsize=9)
  figure.savefig(path, dpi=110)


def parse_arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
  parser.add_argument(
    "--presets", nargs="*", default=list(PRESETS), choices=list(PRESETS), metavar="PRESET"
  )
  parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
  parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
  return parser.parse_args()


def main() -> None:
  args = parse_arguments()
  out = args.out.expanduser().absolute()
  out.mkdir(parents=True, exist_ok=True)
  machine = Machine(out, args.jobs)
  with ThreadPoolExecutor(args.jobs) as pool:
    list(pool.map(lambda seed: warm_start(machine, out, seed), args.seeds))
    jobs = {
      (preset, seed): pool.submit(train, machine, out, preset, seed)
      for seed in args.seeds
      for preset in args.presets
    }
    results = {p: [jobs[p, seed].result() for seed in args.seeds] for p in args.presets}
  (HERE / "compare_algorithms.md").write_text(table(results))
  plot(results, args.seeds, HERE / "compare_algorithms.png")
  print(table(results))


if __name__ == "__main__":
  main()
