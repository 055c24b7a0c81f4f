"""How old rollouts may be, and which correction keeps a run learning: the task of the quick start.

  pip install -e '.[plot]'
  python experiments/staleness.py run /tmp/staleness --seeds=0,1,2
  python experiments/staleness.py plot experiments/staleness.png

The first command makes a warm start for each seed and takes STEPS GRPO steps from it in every cell,
with prompts and draws of the seed. It writes one line for each cell to experiments/staleness.jsonl.
The cells that tell most come first. The same command again goes on with those that have no line.
Batches are drawn ahead on the same devices, with fixed weights, so the numbers do not depend on
time. The second command draws the ways that all seeds have finished.
"""

import argparse
import json
from pathlib import Path
import shutil
from typing import Any, NamedTuple

from needs import needs

import grpo_jax

LINES = Path(__file__).with_name("staleness.jsonl")
STEPS = 100


class Way(NamedTuple):
  """How a cell learns from older tokens.

  Attributes:
    preset: The algorithm. "grpo" is that of the quick start.
    changes: Other settings.
    color: Of its line.
  """

  preset: str
  changes: dict[str, Any]
  color: str


_AT_MOST_2 = {"algo.correction": "truncate", "algo.correction_high": 2.0}
# The first has no correction: the clipped ratio is to the policy that drew. The presets change more
# than the correction. Neither has a KL term. aipo does not divide by the deviation, and sums over a
# completion. m2po takes the mean over tokens, and makes four updates per batch.
WAYS = {
  "none": Way("grpo", {}, "tab:red"),
  "truncated": Way("grpo", _AT_MOST_2, "tab:blue"),
  "masked": Way(
    "grpo",
    {"algo.correction": "mask", "algo.correction_low": 0.5, "algo.correction_high": 5.0},
    "tab:green",
  ),
  "truncated, sequence": Way(
    "grpo", _AT_MOST_2 | {"algo.correction_level": "sequence"}, "tab:cyan"
  ),
  "aipo": Way("aipo", {}, "tab:purple"),
  "m2po": Way("m2po", {}, "tab:orange"),
  "m2po, 1 update": Way("m2po", {"algo.minibatches": 1}, "tab:brown"),
}
CELLS = [
  *((16, way) for way in WAYS),
  (0, "none"),
  *((staleness, way) for staleness in (4, 1) for way in ("none", "truncated")),
]
SHORT = {
  "steps": STEPS,
  "optimizer.warmup_steps": 20,
  "optimizer.schedule": "constant",
  "checkpoint.every": 0,
  "log.completions_every": 0,
  "log.tensorboard": False,
  "reward.workers": 0,
}


def run(out: Path, seeds: list[int]) -> None:
  """Runs the cells that have no line."""
  done = {(line["seed"], line["staleness"], line["correction"]) for line in lines()}
  for staleness, name in CELLS:
    for seed in seeds:
      if (seed, staleness, name) not in done:
        take_steps(out, seed, staleness, name)


def take_steps(out: Path, seed: int, staleness: int, name: str) -> None:
  """Runs a cell and writes its line."""
  way, start = WAYS[name], warm_start(out, seed)
  changes = SHORT | way.changes | {"warm_start.steps": 0, "model.path": str(start)}
  workdir = out / f"{seed}_{staleness}_{name}"
  shutil.rmtree(workdir, ignore_errors=True)
  train(way.preset, seed, workdir, changes | {"rollout.max_staleness": staleness})
  rows = grpo_jax.read_metrics(workdir)
  accuracy = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
  line = {"seed": seed, "staleness": staleness, "correction": name, "accuracy": accuracy}
  for metric in ("ratio/ess", "correction/ess"):
    line[f"least {metric}"] = min((row[metric] for row in rows if metric in row), default=None)
  with open(LINES, "a") as file:
    file.write(json.dumps(line) + "\n")


def warm_start(out: Path, seed: int) -> Path:
  """The folder of the model of a seed that has imitated solutions. It is made if not there."""
  folder = out / f"warm_{seed}"
  if not folder.exists():
    workdir = out / f"warm_run_{seed}"
    train("grpo", seed, workdir, {"steps": 0, "log.tensorboard": False})
    grpo_jax.load_policy(workdir).export(folder)
  return folder


def train(preset: str, seed: int, workdir: Path, changes: dict[str, Any]) -> None:
  """Trains by the recipe of the quick start, with other settings."""
  config = grpo_jax.load_config(f"arithmetic:{preset}", {"seed": seed} | changes)
  grpo_jax.train(config, workdir)


def lines() -> list[dict[str, Any]]:
  """What has been measured."""
  return [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []


def plot(picture: str) -> None:
  """Draws the accuracy by step, one panel for each staleness and seed, and prints a table."""
  with needs("pip install -e '.[plot]'"):
    import matplotlib.pyplot as plt

  found = {(line["staleness"], line["correction"], line["seed"]): line for line in lines()}
  seeds = sorted({seed for *_, seed in found})
  whole = [cell for cell in CELLS if all((*cell, seed) in found for seed in seeds)]
  rows = sorted({staleness for staleness, _ in whole} - {0})
  figure, panels = plt.subplots(
    len(rows),
    len(seeds),
    figsize=(11, 0.7 + 3.2 * len(rows)),
    sharex=True,
    sharey=True,
    squeeze=False,
    layout="constrained",
  )
  for staleness, row in zip(rows, panels, strict=True):
    row[0].set(ylabel=f"max_staleness {staleness}: accuracy, %")
    for seed, panel in zip(seeds, row, strict=True):
      panel.set(xlim=(0, STEPS), ylim=(75, 100))  # they begin below
      panel.grid(alpha=0.3)
      for cell in whole:
        if cell[0] in (0, staleness):
          points = percent(found[*cell, seed])
          name, color = ("in turn", "black") if cell[0] == 0 else (cell[1], WAYS[cell[1]].color)
          panel.plot(points.keys(), points.values(), color=color, lw=1.4, label=name)
  for seed, panel in zip(seeds, panels[0], strict=True):
    panel.set(title=f"seed {seed}")
  for panel in panels[-1]:
    panel.set(xlabel="GRPO steps")
  figure.legend(*panels[-1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
  figure.savefig(picture, dpi=110)
  print("| staleness | correction | after 20 steps | after 30 | after 100 |\n|---|---|---|---|---|")
  for staleness, name in sorted(whole, key=lambda cell: cell[0]):
    of_seeds = [percent(found[staleness, name, seed]) for seed in seeds]
    cells = [", ".join(f"{x[step]:.1f}%" for x in of_seeds) for step in (20, 30, STEPS)]
    print(f"| {staleness} | {name} | {' | '.join(cells)} |")


def percent(line: dict[str, Any]) -> dict[int, float]:
  """The held-out greedy accuracy of a cell by step, in percent."""
  return {int(step): 100 * value for step, value in line["accuracy"].items()}


def main() -> None:
  """Runs or draws."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  commands = parser.add_subparsers(dest="command", required=True)
  running = commands.add_parser("run", help="run the cells that have no line yet")
  running.add_argument("folder", type=Path, help="holds the folders of the runs")
  running.add_argument("--seeds", default="0,1,2", help="with commas between")
  commands.add_parser("plot", help="draw what has run").add_argument("picture")
  flags = parser.parse_args()
  if flags.command == "plot":
    plot(flags.picture)
  else:
    run(flags.folder, [int(seed) for seed in flags.seeds.split(",")])


if __name__ == "__main__":
  main()
