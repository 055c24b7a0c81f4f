"""Draws how some runs of one config went, step by step, and prints a table of their evaluations.

for seed in 0 1; do
  python -m grpo_jax.train --config=configs/smollm2.py --config.seed=$seed --workdir=DIR_$seed
done
pip install -e '.[plot]'
python experiments/plot_training.py experiments/smollm2.png DIR_0 DIR_1

The first panel has the greedy accuracy on held-out problems with its 95% intervals. The others are
of the completions that the runs learned from, as means over `--smooth` steps.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from grpo_jax.storage import reading
from grpo_jax.storage.reading import read_config

Row = dict[str, Any]
PANELS = {
  "reward": "mean reward of a step",
  "completions/mean_length": "mean length, tokens",
  "frac_reward_zero_std": "share of idle groups",
  "entropy": "entropy of groups that learn",
}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("picture")
  parser.add_argument("workdirs", nargs="+")
  parser.add_argument("--smooth", type=int, default=5, help="steps that a mean is over")
  parser.add_argument("--until", type=int, default=10**9, help="the last step that is drawn")
  args = parser.parse_args()
  runs = {}
  for workdir in args.workdirs:
    rows = [dict(row) for row in reading.read_metrics(workdir)]
    runs[read_config(workdir).seed] = [row for row in rows if row["step"] <= args.until]
  figure, axes = plt.subplots(1, 5, figsize=(15, 3), constrained_layout=True)
  for number, (seed, rows) in enumerate(sorted(runs.items())):
    color = f"C{number}"
    draw_accuracy(axes[0], rows, f"seed {seed}", color)
    for panel, name in zip(axes[1:], PANELS):
      steps, values = smoothed(rows, name, args.smooth)
      panel.plot(steps, values, color=color, lw=1.3)
  axes[0].set(title="held-out greedy accuracy, %", ylim=(0, 100))
  axes[0].legend(frameon=False, loc="upper left")
  for panel, title in zip(axes[1:], PANELS.values()):
    panel.set(title=title, ylim=(0, None))
  for panel in axes:
    panel.set_xlabel("GRPO step")
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
  figure.savefig(args.picture, dpi=110)
  print("\n".join(table(runs)))


def draw_accuracy(axes: plt.Axes, rows: Sequence[Row], label: str, color: str) -> None:
  """The evaluations of a run, with bars for their 95% intervals."""
  evaluated = [row for row in rows if "eval/accuracy" in row]
  steps = [row["step"] for row in evaluated]
  values, low, high = (
    100 * np.array([row[f"eval/{name}"] for row in evaluated])
    for name in ("accuracy", "accuracy_low", "accuracy_high")
  )
  bars = [values - low, high - values]
  axes.errorbar(steps, values, yerr=bars, color=color, capsize=3, lw=1.3, marker="o", label=label)


def smoothed(rows: Sequence[Row], name: str, width: int) -> tuple[list[int], list[float]]:
  """Steps, and the means of a metric over the `width` steps up to each. NaN is left out."""
  found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
  values = [value for _, value in found]
  means = [float(np.nanmean(values[max(0, i + 1 - width) : i + 1])) for i in range(len(values))]
  return [step for step, _ in found], means


def table(runs: dict[int, list[Row]]) -> list[str]:
  """A table in Markdown of the evaluations, with their 95% intervals."""
  steps = sorted({row["step"] for rows in runs.values() for row in rows if "eval/accuracy" in row})
  lines = ["| seed | " + " | ".join(f"step {step}" for step in steps) + " |"]
  lines.append("|---" * (len(steps) + 1) + "|")
  for seed, rows in sorted(runs.items()):
    at = {row["step"]: row for row in rows if "eval/accuracy" in row}
    cells = [
      f"{at[step]['eval/accuracy']:.1%} ({at[step]['eval/accuracy_low']:.1%} to"
      f" {at[step]['eval/accuracy_high']:.1%})"
      if step in at
      else ""
      for step in steps
    ]
    lines.append(f"| {seed} | " + " | ".join(cells) + " |")
  return lines


if __name__ == "__main__":
  main()
