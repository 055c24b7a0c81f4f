"""Distils the quick start's final model into a fresh warm start, and compares with GRPO alone.

  pip install -e '.[plot]' && python experiments/distill.py --out=/tmp/distill

It prints after how many steps each student reaches the teacher's accuracy, and writes distill.png
to experiments/. It takes about half an hour on two CPU cores. The same command again resumes.

The teacher is configs/arithmetic.py with seed 0, as it is. The students start from one warm start
of seed 1, with these settings in place of those of the recipe: `grpo` has the reward alone,
`teacher` the teacher alone, `both` the sum.
"""

import argparse
from pathlib import Path
from typing import Any

from needs import needs

import grpo_jax

with needs("pip install -e '.[plot]'"):
  import matplotlib.pyplot as plt

HERE = Path(__file__).parent
STEPS, EVERY = 100, 5
STUDENT = {
  "seed": 1,
  "steps": STEPS,
  "warm_start.steps": 0,
  "eval.every": EVERY,
  "optimizer.schedule": "constant",
  "optimizer.warmup_steps": 10,
  "checkpoint.every": 50,
  "log.tensorboard": False,
}


def settings_of_students(teacher: Path) -> dict[str, dict[str, Any]]:
  """What each student adds to STUDENT."""
  with_teacher = {"reward.teacher": str(teacher)}
  return {
    "grpo": {},
    "teacher": {**with_teacher, "reward.weights": (0.0,)},
    "both": with_teacher,
  }


def exported(workdir: Path, changes: dict[str, Any]) -> Path:
  """Trains configs/arithmetic.py with these changes. Returns its folder in Hugging Face's form."""
  folder = workdir.with_name(f"{workdir.name}_exported")
  if not folder.exists():
    grpo_jax.train(grpo_jax.load_config("arithmetic", changes), workdir)
    grpo_jax.load_policy(workdir).export(folder)
  return folder


def curve(workdir: Path) -> tuple[list[int], list[float]]:
  """The evaluated steps of a run and their accuracies, the one before the first step included."""
  rows = [row for row in grpo_jax.read_metrics(workdir) if "eval/accuracy" in row]
  return [row["step"] for row in rows], [row["eval/accuracy"] for row in rows]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--out", type=Path, required=True, help="a folder for the runs")
  out = parser.parse_args().out
  teacher = exported(out / "teacher_run", {})
  target = curve(out / "teacher_run")[1][-1]
  warm = exported(out / "warm_run", {"seed": 1, "steps": 0})
  figure, ax = plt.subplots(figsize=(6, 3.5), constrained_layout=True)
  print(f"the teacher's held-out accuracy: {target:.1%}")
  for name, changes in settings_of_students(teacher).items():
    config = grpo_jax.load_config("arithmetic", {**STUDENT, "model.path": str(warm), **changes})
    grpo_jax.train(config, out / name)
    steps, accuracies = curve(out / name)
    reached = next((step for step, x in zip(steps, accuracies) if x >= target), None)
    when = f"after {reached} steps" if reached is not None else f"not within {STEPS} steps"
    print(f"{name}: reaches it {when}; {accuracies[-1]:.1%} at the end")
    ax.plot(steps, [100 * x for x in accuracies], label=name)
  ax.axhline(100 * target, color="gray", linewidth=0.8, linestyle="--", label="the teacher")
  ax.set(xlabel="step", ylabel="held-out accuracy, %", ylim=(0, 100))
  ax.legend(frameon=False, loc="lower right")
  ax.spines[["top", "right"]].set_visible(False)
  figure.savefig(HERE / "distill.png", dpi=110)


if __name__ == "__main__":
  main()
