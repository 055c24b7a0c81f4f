"""Trains a policy with GRPO.

python -m grpo_jax.train --config=configs/arithmetic.py --workdir=DIR [--config.section.key=value]

Run the same command again to resume from the newest checkpoint.

In Python: `grpo_jax.train(config, workdir, callback)`. Importing this module sets `grpo_jax.train`
to the module, whatever it was before. So the module itself can be called like its function `train`.
"""

from pathlib import Path
import sys
from types import ModuleType
from typing import Any

from absl import flags

from grpo_jax import cli
from grpo_jax.config import Config
from grpo_jax.console.stop import raising_on_second_signal
from grpo_jax.data.tasks.tasks import given_path
from grpo_jax.parallel.processes import initialize_distributed
from grpo_jax.registry import name_of
from grpo_jax.run.caller_state import leaving_nothing_behind
from grpo_jax.settings import ConfigError
from grpo_jax.storage import bucket
from grpo_jax.training.callback import Callback, Step, with_last_row


def train(
  config: Config,
  workdir: str | Path,
  callback: Callback | None = None,
  *,
  data: Any = None,
) -> Step:
  """Trains a run to its end, from its newest checkpoint if it has one.

  During training, the first Ctrl-C (a notebook's stop button) or SIGTERM lets the current step
  finish, saves the run and raises Stopped. A second one raises KeyboardInterrupt at once.

  Args:
    config: The config of the run.
    workdir: The folder of the run. It is created if it does not exist.
    callback: Called with a `Step` after each step, on the first process. If it returns True, the
      run is saved and `train` returns.
    data: Rows that replace data.path: a list of dicts, a `datasets.Dataset`, any object with
      `__len__` and `__getitem__`, or a dict of these with the keys `train` and perhaps `test`, such
      as a `DatasetDict`. data.task says how the rows are read, like the rows of a file.

  Returns:
    The last step that was trained. The run has more steps if the callback asked to stop.

  Raises:
    ConfigError: The config or the folder cannot be used. Nothing was run.
    RunFailed: The run cannot go on, for example because a reward function or the callback raised
      something. What could be saved is saved.
    Stopped: The run was interrupted. It is saved, and the same call resumes it.
  """
  if not isinstance(config, Config):
    raise ConfigError(
      f"train needs a grpo_jax.Config and got a {type(config).__name__}: see grpo_jax.load_config"
    )
  config = config.replace({})  # checks the types of the values, which dataclasses do not
  if data is not None:
    config = config.replace({"data.path": given_path(config.data, data)})
  folder = bucket.folder(workdir)
  if callback is not None:
    try:
      name_of(callback)  # raises unless it can be called
    except ConfigError as error:
      raise ConfigError(f"the callback cannot be called: {error}") from None
  from grpo_jax.training.loop import run_steps  # here: --help and mistakes in flags need no jax

  with leaving_nothing_behind():  # a notebook gets JAX's settings and the devices' memory back
    step = run_steps(config, folder, callback, raising_on_second_signal).step
  # A run that was finished before has trained no step, so its log has the metrics.
  return step if step.metrics else with_last_row(step)


class _CallableModule(ModuleType):
  """A module that can be called like its function `train`."""

  def __call__(
    self,
    config: Config,
    workdir: str | Path,
    callback: Callback | None = None,
    *,
    data: Any = None,
  ) -> Step:
    return train(config, workdir, callback, data=data)

  __call__.__doc__ = train.__doc__


def main(argv: list[str]) -> None:
  """Trains the run of --config in --workdir."""
  del argv
  config = cli.config_from_flags()
  if not flags.FLAGS.workdir:
    raise ConfigError("flag --workdir is missing: name a folder for metrics and checkpoints")
  workdir = cli.folder_of_run(flags.FLAGS.workdir)
  from grpo_jax.training.loop import run_steps  # here: --help and mistakes in flags need no jax

  initialize_distributed()
  run_steps(config, workdir)


if __name__ == "__main__":
  cli.define_config_flag()
  flags.DEFINE_string(
    "workdir", None, "the run's folder: created, or resumed if it has a checkpoint"
  )
  cli.run(main)
else:
  sys.modules[__name__].__class__ = _CallableModule
