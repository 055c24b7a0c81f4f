"""Draws the curves of some runs of one config, and prints a table of them.

for seed in 0 1 2 3 4 5 6 7 8 9; do
  python -m grpo_jax.train --config=configs/arithmetic.py --config.seed=$seed \
    --workdir=/tmp/arithmetic_$seed
done
pip install -e '.[plot]'
python experiments/plot_curves.py experiments/arithmetic.png /tmp/arithmetic_?

experiments/countdown.png is of configs/countdown.py and experiments/shapes.png of
configs/shapes.py, each with seeds 0 to 2.

Accuracy and length are those of greedy answers to held-out problems. All runs need the same number
of steps, of the warm start and of GRPO.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import statistics
import sys

from needs import needs

from grpo_jax.storage import reading
from grpo_jax.storage.reading import read_config

with needs("pip install -e '.[plot]'"):
  import matplotlib.pyplot as plt

STEPS = "GRPO steps after the warm start"
IN_TABLE = (0, 20, 50, 100)  # and the last
SUMMARIES: Mapping[str, Callable[[Iterable[float]], float]] = {
  "lowest": min,
  "median": statistics.median,
  "highest": max,
}
ACCURACY, LENGTH = "eval/accuracy", "eval/mean_length"

Row = Mapping[str, float]
Run = Mapping[int, Row]  # GRPO step -> its row of metrics


def main(picture: str, workdirs: Sequence[str]) -> None:
  """Draws one thin line for each of the runs in these folders, and a thick one for their median."""
  runs = {read_config(workdir).seed: evaluations(workdir) for workdir in workdirs}
  figure, (accuracy, length) = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
  percents = [{step: 100 * row[ACCURACY] for step, row in run.items()} for run in runs.values()]
  draw(accuracy, percents)
  draw(length, [{step: row[LENGTH] for step, row in run.items()} for run in runs.values()])
  accuracy.set(title="held-out greedy accuracy, %", xlabel=STEPS, ylim=(0, 100))
  length.set(title="mean length of an answer, tokens", xlabel=STEPS, ylim=(0, None))
  accuracy.legend(frameon=False, loc="lower right")
  figure.savefig(picture, dpi=120)
  print("\n".join(table(runs)))


def evaluations(workdir: str) -> Run:
  """The rows of a run that have an evaluation."""
  first = read_config(workdir).warm_start.steps
  rows = reading.read_metrics(workdir)
  return {int(row["step"]) - first: row for row in rows if ACCURACY in row}


def draw(axes: plt.Axes, runs: Sequence[Mapping[int, float]]) -> None:
  """One curve for each run, and their median."""
  for i, run in enumerate(runs):
    label = "one seed" if i == 0 else None
    axes.plot(list(run), list(run.values()), color="tab:blue", alpha=0.45, lw=0.8, label=label)
  median = {step: statistics.median(run[step] for run in runs) for step in runs[0]}
  label = f"median of {len(runs)} seeds"
  axes.plot(list(median), list(median.values()), color="black", lw=2, label=label)
  axes.grid(alpha=0.3)
  axes.spines[["top", "right"]].set_visible(False)


def table(runs: Mapping[int, Run]) -> list[str]:
  """A table in Markdown: accuracy at some steps and at the end, and length at start and end."""
  end = max(next(iter(runs.values())))
  steps = [step for step in (*IN_TABLE, end) if all(step in run for run in runs.values())]
  lines = [f"| seed | {' | '.join(map(str, steps))} | length |", "|---" * (len(steps) + 2) + "|"]
  for seed, run in sorted(runs.items()):
    accuracies = " | ".join(f"{run[step][ACCURACY]:.1%}" for step in steps)
    length = f"{run[0][LENGTH]:.1f} -> {run[end][LENGTH]:.1f}"
    lines.append(f"| {seed} | {accuracies} | {length} |")
  for name, summary in SUMMARIES.items():
    columns = ([run[step][ACCURACY] for run in runs.values()] for step in steps)
    lines.append(f"| {name} | " + " | ".join(f"{summary(x):.1%}" for x in columns) + " | |")
  return lines


if __name__ == "__main__":
  if len(sys.argv) < 3:
    sys.exit(__doc__)
  main(sys.argv[1], sys.argv[2:])
