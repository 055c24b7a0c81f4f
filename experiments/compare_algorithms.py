"""Trains every preset on the same arithmetic from the same warm starts with the same budget; writes a table and a plot.

  pip install -e '.[plot]' && python experiments/compare_algorithms.py --out=/tmp/compare

About an hour and a half on two CPU cores. Killed and started again, it goes on where it was; runs that are there are read,
not done again, so --presets and --seeds may grow. Into experiments/: compare_algorithms.md and compare_algorithms.png.

A seed has one warm start: 1,000 supervised steps of configs/arithmetic.py, exported as a Hugging Face folder. From it, each
preset makes 60 steps of 32 prompts x 8 completions, each step four updates of 8 prompts, so that ratios differ from 1 and
every bound on them can act; the learning rate falls from 1e-4 to 0. All else is the preset's row.
"""

import argparse
import functools
import os
import queue
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt

from grpo_jax.algo.presets import PRESETS
from grpo_jax.run import workdir as metrics
from grpo_jax.run.cli import saved_config

STEPS, EVERY, WARM_STEPS, TARGET = 60, 3, 1000, 0.9
COMMON = f"""
  steps={STEPS} warm_start.steps=0 algo.minibatches=4 optimizer.learning_rate=1e-4 optimizer.schedule=linear
  optimizer.warmup_steps=0 eval.every={EVERY} eval.examples=512 eval.batch=512 checkpoint.every=20 checkpoint.keep=1
  log.completions_every={STEPS} log.tensorboard=False
""".split()
HERE = Path(__file__).parent


class Machine:
  """Runs commands, `jobs` at a time, each on its own share of the cores."""

  def __init__(self, out, jobs):
    self._out, self._free = out, queue.Queue()
    cores = sorted(os.sched_getaffinity(0))
    for i in range(jobs):
      self._free.put(cores[i::jobs] or cores)

  def __call__(self, module, name, *arguments):
    """python -m grpo_jax.MODULE; what it says goes to NAME.log."""
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
          preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    finally:
      self._free.put(cores)


def warm_start(run, out, seed):
  """The folder that every preset of this seed starts from."""
  workdir, folder = out / f"warm_{seed}", out / f"warm_{seed}_exported"
  if not (folder / "model.safetensors").exists():
    run(
      "train",
      f"warm_{seed}",
      "--config=configs/arithmetic.py",
      f"--config.seed={seed}",
      "--config.steps=0",
      f"--config.warm_start.steps={WARM_STEPS}",
      "--config.log.tensorboard=False",
      f"--workdir={workdir}",
    )
    run("export", f"warm_{seed}", f"--workdir={workdir}", f"--out={folder}")
  return folder


def trained(run, out, preset, seed):
  """The rows of the preset's run, which is made or gone on with if need be."""
  workdir = out / f"{preset}_{seed}"
  rows = metrics.read(workdir) if (workdir / "metrics.jsonl").exists() else []
  if rows:
    check(workdir)
  if not rows or rows[-1]["step"] < STEPS:
    run(
      "train",
      f"{preset}_{seed}",
      f"--config=configs/arithmetic.py:{preset}",
      f"--config.seed={seed}",
      f"--config.model.path={out / f'warm_{seed}_exported'}",
      f"--workdir={workdir}",
      *(f"--config.{key}" for key in COMMON),
    )
    print(f"{preset} {seed}: {metrics.read(workdir)[-1]['eval/accuracy']:.1%}", flush=True)
  return metrics.read(workdir)


def check(workdir):
  """A folder of other settings is not mixed with these."""
  saved = saved_config(workdir)
  for key, value in (item.split("=") for item in COMMON):
    found = functools.reduce(getattr, key.split("."), saved)
    if str(found) != value and found != type(found)(value):
      sys.exit(f"{workdir} was made with {key}={found}, not {value}: name another --out")


def curve(rows):
  """[(step, accuracy)]."""
  return [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]


def table(results):
  """A row per preset, best mean accuracy first. The entropy is of a token of the loss, over the last ten steps."""
  lines = [
    f"| preset | accuracy after {STEPS} steps: mean (range) | steps to {TARGET:.0%}, each seed | mean length | "
    "entropy at the end |",
    "|---|---|---|---|---|",
  ]
  for preset, runs in ranked(results):
    ends = [curve(rows)[-1][1] for rows in runs]
    reached = [
      next((str(step) for step, accuracy in curve(rows) if accuracy >= TARGET), "never")
      for rows in runs
    ]
    length = statistics.mean(rows[-1]["eval/mean_length"] for rows in runs)
    entropy = statistics.mean(row["entropy"] for rows in runs for row in rows[-10:])
    lines.append(
      f"| {preset} | {statistics.mean(ends):.1%} ({min(ends):.1%} to {max(ends):.1%}) | {', '.join(reached)} | "
      f"{length:.1f} | {entropy:.3f} |"
    )
  return "\n".join(lines) + "\n"


def ranked(results):
  return sorted(
    results.items(), key=lambda item: -statistics.mean(curve(rows)[-1][1] for rows in item[1])
  )


def plot(results, seeds, path):
  """One small picture per preset: accuracy over the steps, every seed, and all the presets' means in grey."""
  mean = lambda runs: [
    100 * statistics.mean(a) for a in zip(*([a for _, a in curve(rows)] for rows in runs))
  ]
  columns = 7
  figure, axes = plt.subplots(
    -(-len(results) // columns),
    columns,
    figsize=(13, 1.9 * -(-len(results) // columns) + 0.4),
    sharex=True,
    sharey=True,
    constrained_layout=True,
    squeeze=False,
  )
  for ax in axes.flat[len(results) :]:
    ax.set_visible(False)
  for ax, (preset, runs) in zip(axes.flat, ranked(results)):
    for others in results.values():
      ax.plot([step for step, _ in curve(others[0])], mean(others), color="0.85", linewidth=0.8)
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


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
  parser.add_argument(
    "--presets", nargs="*", default=list(PRESETS), choices=list(PRESETS), metavar="PRESET"
  )
  parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
  parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
  a = parser.parse_args()
  out = a.out.expanduser().absolute()
  out.mkdir(parents=True, exist_ok=True)
  run = Machine(out, a.jobs)
  with ThreadPoolExecutor(a.jobs) as pool:
    list(pool.map(lambda seed: warm_start(run, out, seed), a.seeds))
    jobs = {
      (preset, seed): pool.submit(trained, run, out, preset, seed)
      for seed in a.seeds
      for preset in a.presets
    }
    results = {preset: [jobs[preset, seed].result() for seed in a.seeds] for preset in a.presets}
  (HERE / "compare_algorithms.md").write_text(table(results))
  plot(results, a.seeds, HERE / "compare_algorithms.png")
  print(table(results))


if __name__ == "__main__":
  main()
