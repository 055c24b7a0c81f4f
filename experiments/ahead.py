"""What it is worth to draw batches ahead, with rewards and devices that are simulated by sleeping.

python experiments/ahead.py rewards    a reward that takes as long as sampling, on the same devices
python experiments/ahead.py tail       completions with a long tail, on devices of their own

`rewards` samples and learns for real, and its reward function sleeps. `tail` runs the whole program
on two simulated devices of this machine. It sleeps for each round of decoding and for each update,
so that its times are those of the schedule and not of this machine's cores, and compares them with
what `python -m grpo_jax.plan --async` predicts.
"""

import os

os.environ["JAX_NUM_CPU_DEVICES"] = "2"
os.environ["JAX_PLATFORMS"] = "cpu"

import argparse
from collections.abc import Callable, Sequence
import dataclasses
from pathlib import Path
import statistics
import tempfile
import time
from typing import Any

import numpy as np

from grpo_jax.around.planning.overlap import simulate
from grpo_jax.around.planning.split import job_of
from grpo_jax.config import Config, from_dict
from grpo_jax.configs import arithmetic
from grpo_jax.sampler.stream import Stream
from grpo_jax.storage.reading import read_metrics
from grpo_jax.training import loop
from grpo_jax.training.loop import run_steps

STEPS, WARM_UP = 20, 6
ROUND_SECONDS, UPDATE_SECONDS = 0.02, 1.8
REWARD = """
import time

def reward(completions, **_):
  time.sleep({seconds})
  return [float(len(text) % 5) for text in completions]
"""


def main() -> None:
  """Runs the measurement that the command line names."""
  measures: dict[str, Callable[[Path], None]] = {"rewards": rewards, "tail": tail}
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("measure", choices=measures)
  measure = measures[parser.parse_args().measure]
  with tempfile.TemporaryDirectory() as folder:
    measure(Path(folder))


def config_of(folder: Path, seconds: float, staleness: int, **mesh: int) -> Config:
  """A run whose reward takes so many seconds."""
  (folder / "reward.py").write_text(REWARD.format(seconds=seconds))
  c = arithmetic.get_config()
  c.steps, c.warm_start.steps, c.eval.every = STEPS, 0, 0
  c.batch.update(prompts=16, group_size=8)
  c.sampling.max_tokens = 128
  c.reward.update(functions=(f"{folder}/reward.py:reward",), weights=(1.0,), workers=8)
  c.algo.update(old_logprobs="sampler")
  c.log.update(completions_every=1, tensorboard=False)
  c.mesh.update(mesh)
  c.rollout.max_staleness = staleness
  return from_dict(c.to_dict())


def rows_of(config: Config, workdir: Path) -> list[dict[str, Any]]:
  """The rows of metrics of a run, without those of steps that compile."""
  run_steps(config, workdir)
  return read_metrics(workdir)[WARM_UP:]


def median(rows: Sequence[dict[str, Any]], name: str) -> float:
  """The median of a metric."""
  return statistics.median(row[name] for row in rows)


def rewards(folder: Path) -> None:
  """A step in turn and a step with rewards beside the next batch."""
  sampling = median(rows_of(config_of(folder, 0, 0), folder / "plain"), "time/sample")
  found = []
  for staleness in (0, 1):
    config = config_of(folder, sampling, staleness)
    found.append(median(rows_of(config, folder / f"s{staleness}"), "time/step"))
  print(f"sampling takes {sampling:.2f} s, and so does the reward")
  print(f"a step in turn takes {found[0]:.2f} s, ahead {found[1]:.2f} s: {found[1] / found[0]:.2f}")


def tail(folder: Path) -> None:
  """The idle share of the learner and the time of a step, by staleness, and as predicted."""
  _sleep_where_devices_would_compute()
  print("staleness  learner idle  sampler idle  step s  predicted s")
  for staleness in (0, 1, 2, 4):
    workdir = folder / f"tail{staleness}"
    config = config_of(folder, 0, staleness, sampler=1, data=1)
    rows = rows_of(config, workdir)
    seconds = statistics.mean(row["time/step"] for row in rows)
    waited = [
      row.get("rollout/learner_idle", 1 - UPDATE_SECONDS / row["time/step"]) for row in rows
    ]
    weights = [row["time/step"] for row in rows]
    idle = float(np.average(waited, weights=weights))
    sampler = [row.get("rollout/sampler_idle", np.nan) for row in rows[: -staleness - 1]]
    job = dataclasses.replace(job_of(config, str(workdir), 0.0), chunk=1, steps=60, warm_up=20)
    predicted = simulate(job, ROUND_SECONDS, UPDATE_SECONDS, staleness).step_seconds
    print(
      f"{staleness:9}  {idle:12.1%}  {np.mean(sampler):12.1%}  {seconds:6.2f}  {predicted:11.2f}"
    )


def _sleep_where_devices_would_compute() -> None:
  """Makes each round of decoding and each update take a certain time."""
  keep, update = Stream._append_drawn, loop.GrpoStep._update

  def keep_later(self: Any, row_R: Any, drawn: Any, is_new_R: Any, version: int) -> None:
    time.sleep(ROUND_SECONDS * int(drawn.is_drawn_RN.any(0).sum()))
    keep(self, row_R, drawn, is_new_R, version)

  def update_later(self: Any, state: Any, batch: Any) -> Any:
    began = time.perf_counter()
    result = update(self, state, batch)
    time.sleep(max(0.0, UPDATE_SECONDS - (time.perf_counter() - began)))
    return result

  Stream._append_drawn, loop.GrpoStep._update = keep_later, update_later  # type: ignore[method-assign]


if __name__ == "__main__":
  main()
