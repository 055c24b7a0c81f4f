"""Checks whether two runs are equal, bit by bit.

python -m grpo_jax.compare RUN RUN

It compares metrics.jsonl except for timings, completions/, the frozen reference, and the parameters
and optimizer states of the steps that both runs saved. For each of these it prints the first
difference with its step and its name. The exit code is 0 if the runs are equal, 1 if they differ,
and 2 if a folder does not hold a run.
"""

import functools
import sys

from grpo_jax import cli
from grpo_jax.around.reporting.differences import compare
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.storage.reading import read_config


def main(argv: list[str], folders: list[str]) -> None:
  del argv
  if len(folders) != 2:
    raise ConfigError("name the folders of two runs: grpo_jax.compare RUN RUN")
  for folder in folders:
    read_config(folder)  # raises ConfigError if the folder does not hold a run
  found = list(compare(*folders))
  for one in found:
    same = f"{one.steps} {'step is' if one.steps == 1 else 'steps are'} the same"
    print(f"{one.what}: {one.difference or (same if one.steps else 'neither run has any')}")
  differ = [one.what for one in found if one.difference]
  if differ:
    raise RunFailed(f"the runs differ in their {' and '.join(differ)}")


if __name__ == "__main__":
  given = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
  own = [argument for argument in sys.argv if argument not in given]
  cli.run(functools.partial(main, folders=given), own)
