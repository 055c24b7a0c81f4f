"""How old rollouts may be, with and without corrections, on the task of the quick start.

  pip install -e '.[plot]'
  python experiments/staleness.py run /tmp/staleness --seeds=0,1,2
  python experiments/staleness.py plot experiments/staleness.png

The first command makes the warm start of seed 0, takes STEPS GRPO steps from it in every cell, with
prompts and draws of the cell's seed, and writes one line for each cell to
experiments/staleness.jsonl. The same command again goes on
with the cells that have no line. Batches are drawn ahead on the same devices, with fixed weights,
so the numbers do not depend on time. The second command draws all lines.
"""

import json
from pathlib import Path
import shutil
import sys
from typing import Any

import grpo_jax

LINES = Path(__file__).with_name("staleness.jsonl")
STEPS = 100
STALENESS = (1, 4, 16)
# The first has no correction: the clipped ratio is to the policy that drew.
CORRECTIONS: dict[str, dict[str, Any]] = {
  "none": {},
  "truncated": {"algo.correction": "truncate", "algo.correction_high": 2.0},
}
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
  for seed in seeds:
    cells = [(0, "none")] + [(s, name) for s in STALENESS for name in CORRECTIONS]
    for staleness, name in cells:
      if (seed, staleness, name) in done:
        continue
      start = warm_start(out)
      changes = SHORT | CORRECTIONS[name] | {"warm_start.steps": 0, "model.path": str(start)}
      workdir = out / f"{seed}_{staleness}_{name}"
      shutil.rmtree(workdir, ignore_errors=True)
      train(seed, workdir, changes | {"rollout.max_staleness": staleness})
      rows = grpo_jax.read_metrics(workdir)
      accuracy = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
      ess = [row["ratio/ess"] for row in rows if "ratio/ess" in row]
      line = {"seed": seed, "staleness": staleness, "correction": name, "accuracy": accuracy}
      line["least_ratio_ess"] = min(ess, default=1.0)
      with open(LINES, "a") as file:
        file.write(json.dumps(line) + "\n")


def warm_start(out: Path) -> Path:
  """The folder of the model that has imitated solutions. It is made if it is not there."""
  folder = out / "warm"
  if not folder.exists():
    workdir = out / "warm_run"
    train(0, workdir, {"steps": 0, "log.tensorboard": False})
    grpo_jax.load_policy(workdir).export(folder)
  return folder


def train(seed: int, workdir: Path, changes: dict[str, Any]) -> None:
  """Trains by the recipe of the quick start, with other settings."""
  grpo_jax.train(grpo_jax.load_config("arithmetic", {"seed": seed} | changes), workdir)


def lines() -> list[dict[str, Any]]:
  """What has been measured."""
  return [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []


def plot(picture: str) -> None:
  """Draws the accuracy by step, one panel for each staleness, and prints the last values."""
  import matplotlib.pyplot as plt

  found = lines()
  figure, panels = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True, constrained_layout=True)
  colors = dict(zip(CORRECTIONS, ("tab:red", "tab:blue")))
  for panel, staleness in zip(panels, STALENESS):
    panel.set(title=f"max_staleness {staleness}", xlabel="GRPO steps", ylim=(0, 100))
    for line in found:
      is_fresh = line["staleness"] == 0
      if line["staleness"] not in (0, staleness):
        continue
      points = {int(step): 100 * value for step, value in line["accuracy"].items()}
      name = "in turn" if is_fresh else line["correction"]
      color = "tab:gray" if is_fresh else colors[name]
      label = name if line["seed"] == 0 else None
      panel.plot(points.keys(), points.values(), color=color, lw=1, label=label)
  panels[0].set(ylabel="held-out greedy accuracy, %")
  panels[0].legend(frameon=False, loc="lower right")
  figure.savefig(picture, dpi=120)
  print("staleness  correction  accuracy of each seed after the last step, %")
  for staleness in (0, *STALENESS):
    for name in CORRECTIONS:
      ends = [
        f"{100 * list(line['accuracy'].values())[-1]:5.1f}"
        for line in sorted(found, key=lambda line: line["seed"])
        if (line["staleness"], line["correction"]) == (staleness, name)
      ]
      if ends:
        print(f"{staleness:9}  {name:10}  {'  '.join(ends)}")


def main() -> None:
  """Runs or draws."""
  if sys.argv[1] == "plot":
    plot(sys.argv[2])
    return
  seeds = [int(seed) for seed in sys.argv[3].removeprefix("--seeds=").split(",")]
  run(Path(sys.argv[2]), seeds)


if __name__ == "__main__":
  main()
