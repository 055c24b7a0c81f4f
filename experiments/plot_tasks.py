"""Draws what runs on a mixture learn of each of its sources, and prints a table of their accuracy.

python experiments/plot_tasks.py tasks.png DIR/plain/0 DIR/plain/1 DIR/curriculum/0 ...

A run's folder lies in that of its method, and runs of a method are its seeds. There is a panel for
each source: the mean reward of its completions in training, over the completions that were drawn
(with dynamic sampling also those that were not learned from), and the greedy accuracy on held-out
problems with its 95% interval. The dashed line is the accuracy of whoever gives the most frequent
answer of the training problems to every problem. It is also the last line of the table. The
problems need a field `answer`.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from needs import needs
import numpy as np

from grpo_jax.config import Config
from grpo_jax.data.tasks import tasks
from grpo_jax.data.tasks.mixture import Mixture
from grpo_jax.evaluation.estimators import proportion
from grpo_jax.storage import reading
from grpo_jax.storage.reading import read_config

with needs("pip install -e '.[plot]'"):
  import matplotlib.pyplot as plt

Row = dict[str, Any]


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("picture")
  parser.add_argument("workdirs", nargs="+")
  parser.add_argument("--smooth", type=int, default=5, help="steps that a mean is over")
  args = parser.parse_args()
  workdirs = [Path(workdir).resolve() for workdir in args.workdirs]
  config = read_config(workdirs[0])
  constant = constant_answers(config)
  wide = min(3, len(constant))
  deep = -(-len(constant) // wide)
  size = 3.5 * wide, 2.7 * deep
  figure, grid = plt.subplots(deep, wide, figsize=size, constrained_layout=True, sharey=True)
  axes = np.ravel(grid)
  methods = list(dict.fromkeys(workdir.parent.name for workdir in workdirs))
  lines = ["| run | completions | " + " | ".join(constant) + " | all |"]
  lines.append("|---" * (len(constant) + 3) + "|")
  for workdir in workdirs:
    method, color = workdir.parent.name, f"C{methods.index(workdir.parent.name)}"
    rows = [dict(row) for row in reading.read_metrics(workdir)]
    drawn = completions_drawn(rows, read_config(workdir))
    is_first = method not in [line.get_label() for line in axes[0].get_lines()]
    for panel, source in zip(axes, constant):
      curve = dict(smoothed(rows, drawn, f"reward/{source}", args.smooth))
      panel.plot(
        [*curve], [*curve.values()], color=color, lw=1.1, label=method if is_first else None
      )
      draw_accuracy(panel, rows, drawn, source, color)
    evaluated = [row for row in rows if "eval/accuracy" in row]
    for row in [evaluated[0], evaluated[-1]] if workdir == workdirs[0] else evaluated[-1:]:
      name = f"{method}, seed {workdir.name}" if row["step"] else "before"
      names = [*(f"eval/accuracy/{source}" for source in constant), "eval/accuracy"]
      cells = [interval(row[one], row[f"{one}_low"], row[f"{one}_high"]) for one in names]
      lines.append(f"| {name} | {drawn[row['step']]:,} | " + " | ".join(cells) + " |")
  shares = [interval(*proportion(right, count)) for right, count in constant.values()]
  right, count = np.sum([*constant.values()], 0).tolist()
  lines.append(
    "| one answer | | " + " | ".join([*shares, interval(*proportion(right, count))]) + " |"
  )
  for panel in axes[len(constant) :]:
    panel.set_visible(False)
  for panel, (source, (right, count)) in zip(axes, constant.items()):
    panel.axhline(100 * right / count, color="grey", lw=0.9, ls="--")
    panel.set(title=source, xlabel="completions drawn", ylim=(0, None))
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
  figure.supylabel("reward in training, and greedy accuracy (dots), %", fontsize="medium")
  axes[0].legend(frameon=False, fontsize="small")
  figure.savefig(args.picture, dpi=110)
  print("\n".join(lines))


def constant_answers(config: Config) -> dict[str, tuple[int, int]]:
  """{source: (right answers, problems)} of the most frequent training answer, on the evaluation."""
  made = tasks.make_task(config.data)
  assert isinstance(made.train, Mixture) and isinstance(made.test, Mixture)
  test: dict[str, list[str]] = {source: [] for source in made.train.names}
  for index in range(min(config.eval.examples, len(made.test))):
    test[made.test.name_of(index)].append(made.test[index]["answer"])
  found = {}
  for source, part in zip(made.train.names, made.train.parts, strict=True):
    (answer, _), *_ = Counter(part[i]["answer"] for i in range(len(part))).most_common(1)
    found[source] = sum(one == answer for one in test[source]), len(test[source])
  return found


def completions_drawn(rows: list[Row], config: Config) -> dict[int, int]:
  """{step: completions that were drawn up to it}."""
  drawn, so_far = {}, 0
  for row in rows:
    if row["step"]:
      groups = int(row.get("dynamic_sampling/drawn", config.batch.prompts))
      so_far += groups * config.batch.group_size
    drawn[row["step"]] = so_far
  return drawn


def smoothed(
  rows: list[Row], drawn: dict[int, int], name: str, width: int
) -> Iterator[tuple[int, float]]:
  """Yields (completions drawn, mean of a metric in % over the last `width` steps that have it)."""
  values = []
  for row in rows:
    if row.get(name) is not None:
      values.append(100 * row[name])
      yield drawn[row["step"]], float(np.mean(values[-width:]))


def draw_accuracy(
  panel: plt.Axes, rows: list[Row], drawn: dict[int, int], source: str, color: str
) -> None:
  """The evaluations of a source, with their intervals."""
  names = [f"eval/accuracy/{source}{end}" for end in ("", "_low", "_high")]
  for row in rows:
    if names[0] in row:
      value, low, high = (100 * row[name] for name in names)
      bars = [[value - low], [high - value]]
      panel.errorbar(
        drawn[row["step"]], value, bars, color=color, capsize=2, lw=0.8, marker="o", markersize=3
      )


def interval(value: float, low: float, high: float) -> str:
  return f"{value:.0%} ({low:.0%} to {high:.0%})"


if __name__ == "__main__":
  main()
