"""Times steps whose environment sleeps for two seconds in a tenth of its calls.

python experiments/slow_tool.py [--steps=6] [--seconds=2]

A random model plays conversations of four turns of 24 tokens each. Each turn is answered by an
environment in a worker, which sleeps at most once in a conversation. The script prints the median
time of a step with an environment that never sleeps, and with one that does. If rows that wait
stopped the others, each round of answers would cost two seconds.
"""

import argparse
from pathlib import Path
import statistics
import tempfile

from grpo_jax.config import Config, from_dict
from grpo_jax.configs import arithmetic
from grpo_jax.storage.reading import read_metrics
from grpo_jax.training.loop import run_steps

ENVIRONMENT = """
import time, zlib

class Slow:
  def __init__(self):
    self.turns = 0
    self.has_slept = False

  def reset(self, example):
    return []

  def step(self, message):
    self.turns += 1
    if not self.has_slept and zlib.crc32(message["content"].encode()) % 10 == 0:
      self.has_slept = True
      time.sleep({seconds})
    return "Go on.", 1.0 if "7" in message["content"] else 0.0, False
"""


def config_of(folder: Path, seconds: float, steps: int) -> Config:
  """The config of a run whose environment sleeps for so long."""
  path = folder / f"slow{seconds:g}.py"
  path.write_text(ENVIRONMENT.format(seconds=seconds))
  c = arithmetic.get_config()
  c.steps, c.warm_start.steps, c.eval.every = steps, 0, 0
  c.batch.update(prompts=8, group_size=8)
  c.sampling.update(max_tokens=160)
  c.environment.update(name=f"{path}:Slow", max_turns=4, turn_tokens=24)
  c.reward.update(functions=("environment",), weights=(1.0,), workers=32)
  c.algo.kl_coef = 0.0
  c.log.update(completions_every=0, tensorboard=False)
  return from_dict(c.to_dict())


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--steps", type=int, default=6)
  parser.add_argument("--seconds", type=float, default=2.0)
  args = parser.parse_args()
  found = []
  with tempfile.TemporaryDirectory() as name:
    for seconds in (0.0, args.seconds):
      run_steps(config_of(Path(name), seconds, args.steps), Path(name) / f"run{seconds:g}")
      rows = read_metrics(Path(name) / f"run{seconds:g}")[2:]
      found.append(statistics.median(row["time/step"] for row in rows))
      turns = statistics.median(row["environment/turns"] for row in rows)
      print(f"sleeps {seconds:g} s: a step takes {found[-1]:.2f} s, {turns:.1f} turns a completion")
  bound = 1.25 * found[0] + args.seconds
  print(f"1.25 times the first, plus {args.seconds:g} s, is {bound:.2f} s")


if __name__ == "__main__":
  main()
