"""Makes folders of runs that never ran, to look at the page of a report with many runs.

python experiments/report_runs.py FOLDER [--settings=15] [--seeds=2] [--steps=1250]
python -m grpo_jax.report FOLDER --out=page.html

The rows have the names of real rows. Their numbers are drawn at random around curves that look like
those of training. Each setting has another learning rate and another KL coefficient.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.config import Config, to_dict

NOISY = """reward_std completions/min_length completions/max_length completions/tokens
sampler/filter_gap_mean rewards/strict/mean rewards/strict/unscored curriculum/seen
curriculum/pass_rate curriculum/solved curriculum/hopeless advantage/max advantage/min advantage/std
batch/completions batch/tokens clip_ratio/high_mean clip_ratio/low_mean ratio/max ratio/mean
ratio/min perf/padding sampler/logprob_gap_max sampler/logprob_gap_mean skipped_updates loss
learning_rate perf/tokens_per_second""".split()
WARM_STEPS = 100
QUESTION, ANSWERS = "7+15-6+9=", ("7+15=22;22-6=16;16+9=25;#### 25", "#### 24")


def rows_of(steps: int, pace: float, random: np.random.Generator) -> list[dict[str, Any]]:
  """The rows of a run: a warm start, and then GRPO at a pace."""
  rows: list[dict[str, Any]] = []
  for step in range(1, WARM_STEPS + 1):
    loss = 0.4 + 3 * np.exp(-step / 20) + random.normal(0, 0.03)
    rows.append({"step": step, "warm_start/loss": loss, "time/step": 0.08})
  tokens = 0
  for step in range(1, steps + 1):
    done = 1 - np.exp(-step * pace / steps)
    tokens += int(2000 + 6000 * done)
    noise = random.normal(0, 1, len(NOISY) + 8)
    rows.append(
      {"step": WARM_STEPS + step}
      | dict(zip(NOISY, noise.tolist()))
      | {
        "reward": 0.1 + 0.85 * done + 0.04 * noise[-1],
        "completions/mean_length": 8 + 24 * done + noise[-2],
        "completions/clipped_ratio": float(np.clip(0.1 * (1 - done) + 0.01 * noise[-3], 0, 1)),
        "frac_reward_zero_std": float(np.clip(0.1 + 0.7 * done + 0.05 * noise[-4], 0, 1)),
        "entropy": 1.2 * (1 - 0.9 * done) + 0.03 * noise[-5],
        "kl": 0.08 * done * pace + 0.004 * noise[-6],
        "grad_norm": float(np.exp(noise[-7] / 3)),
        "clip_ratio/region_mean": 0.01 * float(np.exp(noise[-8] / 2)),
        "num_tokens": tokens,
        "time/step": 0.32 + 0.2 * done,
        "time/sample": 0.2 + 0.1 * done,
        "time/reward": 0.02,
        "time/reference": 0.03,
        "time/update": 0.06 + 0.05 * done,
      }
    )
    if step % max(1, steps // 50) == 0:
      accuracy = float(np.clip(0.15 + 0.8 * done + 0.02 * noise[0], 0, 1))
      rows[-1] |= {"eval/accuracy": accuracy, "eval/accuracy_low": max(0.0, accuracy - 0.04)}
      rows[-1] |= {"eval/accuracy_high": min(1.0, accuracy + 0.03), "time/evaluate": 1.2}
  return rows


def completions_of(random: np.random.Generator) -> list[dict[str, Any]]:
  """Eight groups of eight completions."""
  rows = []
  for _ in range(64):
    right = int(random.integers(2))
    text = ANSWERS[1 - right]
    rows.append(
      {"prompt": QUESTION, "completion": text, "reward": float(right), "advantage": right - 0.5}
      | {"length": len(text), "rewards/strict": float(right)}
    )
  return rows


def make_run(folder: Path, config: Config, rows: list[dict[str, Any]]) -> None:
  """Writes the files of a run that a report reads."""
  (folder / "completions").mkdir(parents=True)
  (folder / "config.json").write_text(json.dumps(to_dict(config)))
  (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  random = np.random.default_rng(0)
  for step in (rows[-1]["step"] // 2, rows[-1]["step"]):
    lines = "".join(json.dumps(row) + "\n" for row in completions_of(random))
    (folder / "completions" / f"{step:06d}.jsonl").write_text(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("folder", type=Path)
  parser.add_argument("--settings", type=int, default=15)
  parser.add_argument("--seeds", type=int, default=2)
  parser.add_argument("--steps", type=int, default=1250)
  given = parser.parse_args()
  for setting in range(given.settings):
    rate, coefficient = (3e-5, 1e-4, 2e-4, 3e-4, 1e-3)[setting % 5], (0.0, 0.01, 0.04)[setting // 5]
    for seed in range(given.seeds):
      base = Config(seed=seed, steps=given.steps)
      config = dataclasses.replace(
        base,
        optimizer=dataclasses.replace(base.optimizer, learning_rate=3 * (rate / 3)),
        algo=dataclasses.replace(base.algo, kl_coef=coefficient),
        warm_start=dataclasses.replace(base.warm_start, steps=WARM_STEPS),
      )
      random = np.random.default_rng([setting, seed])
      rows = rows_of(given.steps, 2 + 0.4 * setting, random)
      make_run(given.folder / f"lr{rate}_kl{coefficient}_seed{seed}", config, rows)


if __name__ == "__main__":
  main()
