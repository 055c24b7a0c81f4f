"""Draws how some runs of one config went, step by step, and prints a table of their evaluations.

for seed in 0 1; do
  python -m grpo_jax.train --config=configs/smollm2.py --config.seed=$seed --workdir=DIR_$seed
done
pip install -e '.[plot]'
python experiments/plot_training.py experiments/smollm2.png DIR_0 DIR_1

The first panel has the greedy accuracy on held-out problems with its 95% intervals. The others are
of the completions that the runs learned from, as means over `--smooth` steps.

With --methods, runs in one folder are seeds of one method, such as DIR/grpo/0 and DIR/grpo/1. Then
curves are means over seeds, with a shade from the lowest to the highest, and there is a second
table.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from needs import needs
import numpy as np

from grpo_jax.storage import reading
from grpo_jax.storage.reading import read_config

with needs("pip install -e '.[plot]'"):
  import matplotlib.pyplot as plt

Row = dict[str, Any]
Runs = dict[str, dict[int, list[Row]]]
PANELS = {
  "reward": "mean reward of a step",
  "completions/mean_length": "mean length, tokens",
  "frac_reward_zero_std": "share of idle groups",
  "entropy": "entropy of groups that learn",
}
ENVIRONMENT = {  # where there is one
  "tools/call_frequency": "calls of a completion",
  "environment/turns": "turns of a completion",
}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("picture")
  parser.add_argument("workdirs", nargs="+")
  parser.add_argument("--smooth", type=int, default=5, help="steps that a mean is over")
  parser.add_argument("--until", type=int, default=10**9, help="the last step that is drawn")
  parser.add_argument("--methods", action="store_true", help="a run's folder lies in its method's")
  args = parser.parse_args()
  runs: Runs = {}  # by method or seed, and by seed
  for workdir in map(Path, args.workdirs):
    seed = read_config(workdir).seed
    rows = [dict(row) for row in reading.read_metrics(workdir) if row["step"] <= args.until]
    label = workdir.resolve().parent.name if args.methods else f"seed {seed}"
    runs.setdefault(label, {})[seed] = rows
  every = [row for seeds in runs.values() for rows in seeds.values() for row in rows]
  panels = PANELS | {key: text for key, text in ENVIRONMENT.items() if any(map(of(key), every))}
  count = 1 + len(panels)
  figure, axes = plt.subplots(1, count, figsize=(3 * count, 3), constrained_layout=True)
  for number, (label, seeds) in enumerate(runs.items()):
    color = f"C{number}"
    side = number - (len(runs) - 1) / 2  # bars of one step lie beside each other
    draw_accuracy(axes[0], list(seeds.values()), side, label=label, color=color)
    for panel, name in zip(axes[1:], panels):
      draw_range(panel, [smoothed(rows, name, args.smooth) for rows in seeds.values()], color)
  axes[0].set(title="held-out greedy accuracy, %", ylim=(0, None))
  axes[0].legend(frameon=False, loc="lower right", fontsize="small", ncols=1 + len(runs) // 4)
  for panel, title in zip(axes[1:], panels.values()):
    panel.set(title=title, ylim=(0, None))
  for panel in axes:
    panel.set_xlabel("GRPO step")
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
  figure.savefig(args.picture, dpi=110)
  print("\n".join(table(runs)))
  if args.methods:
    print()
    print("\n".join(totals(runs)))


def of(key: str) -> Callable[[Row], Any]:
  """What gets a metric of a row, 0 where it has none."""
  return lambda row: row.get(key, 0)


def accuracies(seeds: Sequence[Sequence[Row]]) -> tuple[np.ndarray, np.ndarray]:
  """Steps [N], and the mean accuracy of some seeds in % with the ends of its 95% interval [3, N].

  All seeds solve the same problems, so a mean has the interval of one seed.
  """
  evaluated = [[row for row in rows if "eval/accuracy" in row] for rows in seeds]
  steps = [row["step"] for row in min(evaluated, key=len)]
  means = [
    np.mean([[row[f"eval/{name}"] for row in rows[: len(steps)]] for rows in evaluated], 0)
    for name in ("accuracy", "accuracy_low", "accuracy_high")
  ]
  return np.array(steps), 100 * np.array(means)


def draw_accuracy(
  axes: plt.Axes, seeds: Sequence[Sequence[Row]], side: float, **style: str
) -> None:
  """The evaluations of a method's seeds, `side` bars to the right of their steps."""
  steps, (values, low, high) = accuracies(seeds)
  shifted = steps + side * 0.012 * steps.max()
  bars = [values - low, high - values]
  axes.errorbar(shifted, values, bars, capsize=2, lw=1.1, marker="o", markersize=3, **style)


def draw_range(axes: plt.Axes, curves: Sequence[tuple[list[int], list[float]]], color: str) -> None:
  """The mean of some seeds' curves, and a shade from the lowest to the highest, at common steps."""
  by_step = [dict(zip(*curve)) for curve in curves]
  # A step in which no group learns has no entropy.
  steps = sorted(set.intersection(*map(set, by_step)))
  values = np.array([[curve[step] for step in steps] for curve in by_step])
  axes.plot(steps, values.mean(0), color=color, lw=1.3)
  if len(values) > 1:
    axes.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15, lw=0)


def smoothed(rows: Sequence[Row], name: str, width: int) -> tuple[list[int], list[float]]:
  """Steps, and the means of a metric over the `width` steps up to each. NaN is left out."""
  found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
  values = [value for _, value in found]
  means = [float(np.nanmean(values[max(0, i + 1 - width) : i + 1])) for i in range(len(values))]
  return [step for step, _ in found], means


def table(runs: Runs) -> list[str]:
  """A table in Markdown of the evaluations, with their 95% intervals."""
  everything = [rows for seeds in runs.values() for rows in seeds.values()]
  steps = sorted({row["step"] for rows in everything for row in rows if "eval/accuracy" in row})
  lines = ["| run | " + " | ".join(f"step {step}" for step in steps) + " |"]
  lines.append("|---" * (len(steps) + 1) + "|")
  for label, seeds in runs.items():
    for seed, rows in sorted(seeds.items()):
      at = {row["step"]: row for row in rows if "eval/accuracy" in row}
      cells = [
        f"{at[step]['eval/accuracy']:.1%} ({at[step]['eval/accuracy_low']:.1%} to"
        f" {at[step]['eval/accuracy_high']:.1%})"
        if step in at
        else ""
        for step in steps
      ]
      name = label if label == f"seed {seed}" else f"{label}, seed {seed}"
      lines.append(f"| {name} | " + " | ".join(cells) + " |")
  return lines


def totals(runs: Runs) -> list[str]:
  """A table in Markdown of what each method's runs came to, as means over its seeds."""
  last = 10
  lines = [
    f"| method | accuracy | reward, last {last} steps | length | idle groups | entropy | clipped"
    " tokens | sampled tokens | seconds a step |",
    "|---|---|---|---|---|---|---|---|---|",
  ]
  for label, seeds in runs.items():
    trained = [[row for row in rows if "reward" in row] for rows in seeds.values()]

    def late(name: str, trained: list[list[Row]] = trained) -> float:
      values = [row[name] for rows in trained for row in rows[-last:] if row.get(name) is not None]
      return float(np.nanmean(values)) if values else 0.0

    value, low, high = accuracies(list(seeds.values()))[1][:, -1]
    tokens = np.mean([sum(row["completions/tokens"] for row in rows) for rows in trained])
    seconds = np.median([row["time/step"] for rows in trained for row in rows])
    lines.append(
      f"| {label} | {value:.1f}% ({low:.1f}% to {high:.1f}%) | {late('reward'):.2f}"
      f" | {late('completions/mean_length'):.1f} | {late('frac_reward_zero_std'):.2f}"
      f" | {late('entropy'):.3f} | {late('clip_ratio/region_mean'):.1%} | {tokens:,.0f}"
      f" | {seconds:.0f} |"
    )
  return lines


if __name__ == "__main__":
  main()
