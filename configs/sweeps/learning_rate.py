"""Two learning rates for the quick start, each with two seeds.

Command:  python -m grpo_jax.launch --on=local --workdir=/tmp/learning_rate
            --sweep=configs/sweeps/learning_rate.py -- --config=configs/arithmetic.py
Time:     that of four runs of configs/arithmetic.py.
Result:   four folders in /tmp/learning_rate, and a table with a line for each learning rate.

A sweep is a function that yields a dict for each run: values by the keys of grpo_jax/config.py.
Runs that differ in nothing but their seed are one line of the table.
"""

from collections.abc import Iterator
from typing import Any


def sweep() -> Iterator[dict[str, Any]]:
  for learning_rate in (1e-4, 2e-4):
    for seed in (0, 1):
      yield {"optimizer.learning_rate": learning_rate, "seed": seed}
