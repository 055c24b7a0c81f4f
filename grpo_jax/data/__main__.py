"""Shows the data of a run, without a model's weights.

python -m grpo_jax.data --config=configs/X.py --step=100   the prompts of a step
python -m grpo_jax.data --config=configs/X.py --stats      lengths, duplicates, test overlap
python -m grpo_jax.data --workdir=DIR --step=100           the prompts of a step of a run
python -m grpo_jax.data --list                             the tasks of reasoning_gym
python -m grpo_jax.data --knobs=chain_sum                  the knobs and a problem of one task

--step is the number of a step in metrics.jsonl. --stats reads every row, which finds all
unreadable rows.
"""

import shutil

from absl import flags

from grpo_jax import cli
from grpo_jax.config import Config
from grpo_jax.progress import doing
from grpo_jax.rewards import plugins
from grpo_jax.settings import ConfigError, check_ranges
from grpo_jax.storage.reading import read_config


def main(argv: list[str]) -> None:
  """Prints the data that the flags select."""
  del argv
  values = flags.FLAGS
  if values.list or values.knobs is not None:
    from grpo_jax.console.show_gym import knob_lines, task_lines

    with doing("reading the tasks of reasoning_gym"):
      lines = task_lines() if values.knobs is None else knob_lines(values.knobs)
      print("\n".join(lines))
    return
  if (values.step is None) == (not values.stats):  # both flags are set, or none
    raise ConfigError("give either --step=N or --stats, or --list for the tasks of reasoning_gym")
  if values.prompts < 1:
    raise ConfigError(f"flag --prompts={values.prompts}: it must be at least 1")
  config = _config()
  plugins.load(config.plugins)  # the config may have names that they register
  check_ranges(config)
  from grpo_jax.console.show_data import (  # here: --help and mistakes in flags need no jax
    drawn,
    statistics_lines,
    step_lines,
  )

  with doing("reading the data"):
    if values.stats:
      for line in statistics_lines(config):
        print(line, flush=True)  # the next line may have to wait for another split
    else:
      width = shutil.get_terminal_size((100, 24)).columns
      print("\n".join(step_lines(drawn(config, values.step), values.prompts, width)))


def _config() -> Config:
  values = flags.FLAGS
  if (values.workdir is None) == (values.config is None):
    raise ConfigError("give either --config=configs/X.py or --workdir=DIR")
  if values.workdir is None:
    return cli.config_from_flags()
  return read_config(cli.folder_of_run(values.workdir))


if __name__ == "__main__":
  cli.define_config_flag()
  flags.DEFINE_string("workdir", None, "instead of --config: the folder of a run")
  flags.DEFINE_integer("step", None, "the prompts of this step, counted as in metrics.jsonl")
  flags.DEFINE_bool("stats", False, "lengths, duplicates, and overlap of training and test")
  flags.DEFINE_bool("list", False, "the tasks of reasoning_gym, which data.path may name")
  flags.DEFINE_string("knobs", None, "the knobs and a problem of this task of reasoning_gym")
  flags.DEFINE_integer("prompts", 12, "how many prompts of the step are shown")
  cli.run(main)
