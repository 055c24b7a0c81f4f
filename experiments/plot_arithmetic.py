"""Draws experiments/arithmetic.png: accuracy and answer length over some runs of the quick start.

for seed in 0 1 2; do
  python -m grpo_jax.train --config=configs/arithmetic.py --config.seed=$seed \
    --workdir=/tmp/arithmetic_$seed
done
pip install -e '.[plot]'
python experiments/plot_arithmetic.py /tmp/arithmetic_0 /tmp/arithmetic_1 /tmp/arithmetic_2

Accuracy and length are those of greedy answers to held-out problems.
"""

from collections.abc import Sequence
from pathlib import Path
import sys

import matplotlib.pyplot as plt

from grpo_jax.run import workdir as run_folder
from grpo_jax.run.cli import saved_config

STEPS = "GRPO steps after the warm start"


def main(workdirs: Sequence[str]) -> None:
  """Draws one line for each of the runs in these folders."""
  figure, (accuracy, length) = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
  for workdir in workdirs:
    config = saved_config(workdir)
    rows = [row for row in run_folder.read(workdir) if "eval/accuracy" in row]
    steps = [row["step"] - config.warm_start.steps for row in rows]
    accuracy.plot(steps, [100 * row["eval/accuracy"] for row in rows], label=f"seed {config.seed}")
    length.plot(steps, [row["eval/mean_length"] for row in rows])
  accuracy.set(title="held-out greedy accuracy, %", xlabel=STEPS, ylim=(0, 100))
  length.set(title="mean length of an answer, tokens", xlabel=STEPS, ylim=(0, None))
  accuracy.legend(frameon=False, loc="lower right")
  for axes in (accuracy, length):
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
  figure.savefig(Path(__file__).with_name("arithmetic.png"), dpi=120)


if __name__ == "__main__":
  if len(sys.argv) < 2:
    sys.exit(__doc__)
  main(sys.argv[1:])
