"""Trains the same small job with grpo_jax and with TRL, and shows how far they are apart.

  pip install -e '.[plot]' torch trl==1.16.0
  python experiments/against_trl.py --out=/tmp/against_trl            # on the same tokens
  python experiments/against_trl.py --out=/tmp/against_trl --free     # each on its own tokens

The first command records a run of grpo_jax: the completions of every step with their token ids,
log-probs and rewards. TRL's GRPOTrainer then trains on these completions from the same weights. It
computes the advantages, the loss, the gradient and the update with its own code. The command prints
the largest differences, and exits with 1 where one is above its bound.

Rounding differs between the two, and each update carries it on into the next steps. To show how
much that explains, TRL also trains on the recording with another implementation of attention. The
table has the differences between TRL and TRL beside those between TRL and grpo_jax.

The second command lets both programs sample for themselves, with three seeds each, and draws
against_trl.png in experiments/.

Both start from a model that has imitated worked sums for some steps. `trl_job.py` has the settings.
With the same --out, finished runs are read and not repeated.
"""

import argparse
from collections.abc import Mapping, Sequence
import json
import os
from pathlib import Path
import statistics
import subprocess
import sys
from typing import Any

from needs import needs
import numpy as np

from grpo_jax.storage import reading

with needs("pip install -e '.[plot]' torch trl==1.16.0"):
  import matplotlib.pyplot as plt
  import safetensors.torch
  import torch
  from trl_job import Job, Replay, Step, replay, train_freely

Rows = Sequence[Mapping[str, Any]]  # the metrics of each step
Gaps = dict[str, list[float]]  # a quantity -> how far it is apart at each step

JOB = Job()
WARM_START = {"steps": 0, "warm_start.steps": 1000, "warm_start.learning_rate": 3e-3}
EARLY = 20  # steps after which rounding has not grown much yet
HERE = Path(__file__).parent
OURS, THEIRS = "grpo_jax", "TRL 1.16"
# The largest differences that are allowed in the first EARLY steps, and in all of them.
BOUNDS = {
  "loss": (1e-6, 1e-5),
  "grad norm, relative": (1e-5, 1e-4),
  "KL": (1e-6, 1e-5),
  "entropy": (1e-5, 1e-5),
  "advantage": (1e-6, 1e-6),
  "log-prob of a token": (1e-3, 1e-2),
}
WEIGHTS_BOUND = 1e-3  # of the weights at the end, relative to how far they moved


def grpo_jax(out: Path, module: str, name: str, *arguments: str) -> None:
  """Runs `python -m grpo_jax.MODULE ARGUMENTS` and writes its output to NAME.log."""
  environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(out / "compiled")}
  command = [sys.executable, "-m", f"grpo_jax.{module}", *arguments]
  with open(out / f"{name}.log", "a") as log:
    subprocess.run(command, check=True, stdout=log, stderr=log, cwd=HERE.parent, env=environment)


def train(out: Path, name: str, settings: Mapping[str, Any]) -> Path:
  """The folder of a run of grpo_jax with these settings. Starts or resumes it if it is not done."""
  workdir = out / name
  rows = reading.read_metrics(workdir) if (workdir / "metrics.jsonl").exists() else []
  if rows and rows[-1]["step"] == settings["steps"] + settings.get("warm_start.steps", 0):
    return workdir
  flags = [f"--config.{key}={value}" for key, value in settings.items()]
  common = ["--config.log.tensorboard=False", "--config.checkpoint.every=0"]
  arguments = ["--config=configs/default.py", f"--workdir={workdir}", *common, *flags]
  grpo_jax(out, "train", name, *arguments)
  return workdir


def export(out: Path, workdir: Path) -> Path:
  """The policy of a run as a transformers folder."""
  folder = workdir.with_name(f"{workdir.name}_exported")
  if not (folder / "model.safetensors").exists():
    grpo_jax(out, "export", workdir.name, f"--workdir={workdir}", f"--out={folder}")
  return folder


def warm_start(out: Path) -> Path:
  """The transformers folder that all runs start from."""
  return export(out, train(out, "warm_start", JOB.ours() | WARM_START))


def read_recording(workdir: Path) -> list[Step]:
  """The rows of completions/ of each step."""
  steps = []
  for step in range(1, JOB.steps + 1):
    lines = (workdir / "completions" / f"{step:06d}.jsonl").read_text().splitlines()
    steps.append([json.loads(line) for line in lines])
  return steps


def gaps(ours: Rows, theirs: Rows) -> Gaps:
  """How far the metrics of two runs are apart at each step."""
  pairs = list(zip(ours, theirs, strict=True))
  return {
    "loss": [abs(a["loss"] - b["loss"]) for a, b in pairs],
    "grad norm, relative": [abs(b["grad_norm"] / a["grad_norm"] - 1) for a, b in pairs],
    "KL": [abs(a["kl"] - b["kl"]) for a, b in pairs],
    "entropy": [abs(a["entropy"] - b["entropy"]) for a, b in pairs],
  }


def recorded_gaps(recording: Sequence[Step], trainer: Replay) -> Gaps:
  """How far TRL's advantages and log-probs are from the recorded ones at each step."""
  advantages = [
    max(abs(row["advantage"] - theirs) for row, theirs in zip(rows, advantages, strict=True))
    for rows, advantages in zip(recording, trainer.advantages, strict=True)
  ]
  return {"advantage": advantages, "log-prob of a token": trainer.logprob_gaps}


def weights_gap(start: Path, ours: Path, trainer: Replay) -> float:
  """|ours - TRL's| / |ours - start| of all weights together, after the last step."""
  first, last = (safetensors.torch.load_file(x / "model.safetensors") for x in (start, ours))
  theirs = trainer.model.state_dict()

  def norm(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    return sum(float((one[name] - other[name]).double().square().sum()) for name in last) ** 0.5

  return norm(last, theirs) / norm(last, first)


def compare(out: Path) -> list[str]:
  """Records a run, replays it, prints the differences. Returns those that are above a bound."""
  start = warm_start(out)
  settings = {"model.path": start, "log.completions_every": 1}
  workdir = train(out, "recorded", JOB.ours() | settings)
  ours, recording = reading.read_metrics(workdir), read_recording(workdir)
  trainer = replay(JOB, start, recording, out / "replayed", attention="sdpa")
  theirs = trainer.metrics()
  other = replay(JOB, start, recording, out / "replayed", attention="eager").metrics()
  found = gaps(ours, theirs) | recorded_gaps(recording, trainer)
  weights = weights_gap(start, export(out, workdir), trainer)
  print(f"\n| the first batch | {OURS} | {THEIRS} |\n|---|---|---|")
  print(f"| loss | {ours[0]['loss']:.9f} | {theirs[0]['loss']:.9f} |")
  print(f"| grad norm | {ours[0]['grad_norm']:.7f} | {theirs[0]['grad_norm']:.7f} |\n")
  print("\n".join(table(found, gaps(theirs, other))))
  print(f"\nweights at the end: they differ by {weights:.1e} of the distance that they moved")
  return above_bounds(found, weights)


def table(found: Gaps, between_trl: Gaps) -> list[str]:
  """The largest gaps as a Markdown table: of TRL and grpo_jax, then of TRL and TRL."""
  spans = f"steps 1 to {EARLY} | 1 to {JOB.steps}"
  lines = [f"| largest difference | {spans} | of TRL and TRL: {spans} |", "|---|---|---|---|---|"]
  for name, values in found.items():
    largest = [*largest_of(values), *largest_of(between_trl.get(name, []))]
    cells = [f"{value:.1e}" for value in largest] + [""] * (4 - len(largest))
    lines.append(f"| {name} | {' | '.join(cells)} |")
  return lines


def largest_of(values: Sequence[float]) -> list[float]:
  """The largest value of the first EARLY steps, and that of all. NaN is the largest of all."""
  return [float(np.max(part)) for part in (values[:EARLY], values)] if values else []


def above_bounds(found: Gaps, weights: float) -> list[str]:
  """A line for each difference that is above its bound. NaN is above every bound."""
  measured = [
    (name, value, bound)
    for name, values in found.items()
    for value, bound in zip(largest_of(values), BOUNDS[name])
  ]
  measured.append(("weights", weights, WEIGHTS_BOUND))
  return [
    f"{name}: {value:.1e} is above {bound:.1e}"
    for name, value, bound in measured
    if not value <= bound
  ]


def run_freely(out: Path, seeds: Sequence[int]) -> None:
  """Trains with both programs and every seed, prints a table and draws against_trl.png."""
  start = warm_start(out)
  runs: dict[str, list[Rows]] = {OURS: [], THEIRS: []}
  for seed in seeds:
    settings = {"model.path": start, "seed": seed}
    runs[OURS].append(reading.read_metrics(train(out, f"ours_{seed}", JOB.ours() | settings)))
    file = out / f"trl_{seed}.json"
    if not file.exists():
      file.write_text(json.dumps(train_freely(JOB, start, seed, out / f"trl_{seed}")))
    runs[THEIRS].append(json.loads(file.read_text()))
  print(f"\n| reward of sampled answers | {' | '.join(f'seed {seed}' for seed in seeds)} |")
  print("|---" * (1 + len(seeds)) + "|")
  for program, of_seeds in runs.items():
    for words, part in (("first", slice(10)), ("last", slice(-10, None))):
      means = [statistics.mean(row["reward"] for row in rows[part]) for rows in of_seeds]
      cells = " | ".join(f"{mean:.1%}" for mean in means)
      print(f"| {program}, {words} 10 steps | {cells} |")
  plot(runs)


def plot(runs: Mapping[str, Sequence[Rows]]) -> None:
  """Draws a thin line for each seed, and a thick one for their mean."""
  figure, (reward, length) = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
  for color, (program, of_seeds) in zip(("tab:blue", "tab:orange"), runs.items()):
    for axes, name, scale in ((reward, "reward", 100), (length, "completions/mean_length", 1)):
      curves = [[scale * row[name] for row in rows] for rows in of_seeds]
      steps = range(1, 1 + len(curves[0]))
      for curve in curves:
        axes.plot(steps, curve, color=color, linewidth=0.7, alpha=0.5)
      means = [statistics.mean(values) for values in zip(*curves)]
      axes.plot(steps, means, color=color, linewidth=1.8, label=f"{program}, mean of the seeds")
  reward.set(title="right answers among the sampled ones, %", xlabel="GRPO steps", ylim=(0, 100))
  length.set(title="mean length of a sampled answer, tokens", xlabel="GRPO steps", ylim=(0, None))
  reward.legend(frameon=False, loc="lower right")
  for axes in (reward, length):
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
  figure.savefig(HERE / "against_trl.png", dpi=120)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
  parser.add_argument("--free", action="store_true", help="each program samples for itself")
  parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="of the free runs")
  args = parser.parse_args()
  out = args.out.expanduser().absolute()
  out.mkdir(parents=True, exist_ok=True)
  if args.free:
    run_freely(out, args.seeds)
    return
  failures = compare(out)
  sys.exit("\n".join(failures) if failures else 0)


if __name__ == "__main__":
  main()
