"""Starts one run, or the runs of a sweep, on this machine or on a cluster.

python -m grpo_jax.launch --on=local --workdir=DIR [--sweep=FILE] -- --config=configs/arithmetic.py
python -m grpo_jax.launch --workdir=DIR [--sweep=FILE] --table

The flags after -- are flags of grpo_jax.train. Run the same command again to continue the runs that
are not finished. --table starts nothing and shows the progress of the runs.
"""

from collections.abc import Sequence
import functools
from pathlib import Path
import re
import sys

from absl import flags

from grpo_jax import cli
from grpo_jax import config as config_lib
from grpo_jax.around.launchers import LAUNCHERS
from grpo_jax.around.launchers import options as options_lib
from grpo_jax.around.launchers.launcher import Launcher, say
from grpo_jax.around.launchers.progress import progress
from grpo_jax.around.launchers.sweep import load_sweep
from grpo_jax.around.launchers.table import table
from grpo_jax.around.launchers.units import Unit, units
from grpo_jax.config import Config
from grpo_jax.console.exit_codes import DONE, STOPPED
from grpo_jax.run.checks import check_config
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.storage.reading import as_begun
from grpo_jax.storage.saved_config import as_json, check_same_run, read_values


def launch(values: flags.FlagValues, train_flags: Sequence[str]) -> int:
  """Starts the runs that are not finished, and prints a table of all runs.

  With --table it only prints, and with --dry_run it only says what it would start.

  Args:
    values: The flags of `define_flags`.
    train_flags: The flags of grpo_jax.train that all runs have.

  Returns:
    The exit code: 0 if all runs are finished or, with a launcher that does not wait, submitted; 75
    if the same command has to be run again; 1 if a run failed.

  Raises:
    ConfigError: The flags, the sweep or a folder cannot be used. Nothing was started.
    RunFailed: The cluster's scheduler reports an error.
  """
  if not values.workdir:
    raise ConfigError("flag --workdir is missing: name the folder of the run or of the sweep")
  workdir = cli.folder_of_flag("workdir", values.workdir)
  # A table needs a launcher only to show which runs are queued, so that --on is optional.
  launcher = None if values.table and not values.on else _launcher(values.on)
  sweep = load_sweep(values.sweep) if values.sweep else None
  runs = units(str(workdir), train_flags, sweep)
  _check_kind(workdir, sweep is not None)
  if values.table:
    if not workdir.is_dir():
      raise ConfigError(f"flag --workdir={workdir}: there is no such folder")
    print("\n".join(table(runs, launcher.queued(runs) if launcher else {})))
    return DONE
  if not train_flags:
    raise ConfigError("write flags of grpo_jax.train after --: -- --config=configs/arithmetic.py")
  options = options_lib.options_of(values, values.on)
  last_steps = [_checked_last_step(run, options.engine_hosts > 0) for run in runs]
  # This waits for jobs that are ending, because only then is it clear which runs to start.
  is_settled = options.dry_run or launcher.settle(runs)
  todo = _to_start(runs, last_steps, launcher, options.dry_run)
  code = launcher.launch(todo, options) if todo else DONE
  if options.dry_run:
    return code
  print("\n".join(table(runs, launcher.queued(runs))))
  are_finished = all(progress(run.workdir).is_finished for run in runs)
  must_run_again = not is_settled or (launcher.waits and not are_finished)
  return STOPPED if code == DONE and must_run_again else code


def _launcher(name: str | None) -> Launcher:
  """The launcher that --on names. Raises ConfigError if --on is missing or unknown."""
  choices = ", ".join(LAUNCHERS)
  if name is None:
    raise ConfigError(f"flag --on is missing: choose one of {choices}")
  if name not in LAUNCHERS:
    raise ConfigError(f"flag --on={name} is unknown: choose one of {choices}")
  return LAUNCHERS[name]


def _to_start(
  runs: Sequence[Unit], last_steps: Sequence[int], launcher: Launcher, is_dry: bool
) -> list[Unit]:
  """Returns the runs to start. Prints which runs are running or queued already, and a summary.

  Args:
    runs: All runs.
    last_steps: The step at which each run is finished.
    launcher: The launcher, which knows the runs that are queued.
    is_dry: Whether nothing will be started, so that a failure to read the queue is a warning.

  Raises:
    RunFailed: The queue cannot be read.
  """
  try:
    queued = launcher.queued(runs)  # run.title -> a description such as "job 12_3 pending"
  except RunFailed as error:
    if not is_dry:
      raise
    say(f"warning: {error}")
    queued = {}
  todo, finished = [], 0
  for run, last_step in zip(runs, last_steps):
    state = progress(run.workdir, last_step)
    if state.holder or run.title in queued:
      why = queued.get(run.title) or f"{state.holder} trains it"
      say(f"left alone {run.title}: {why}")
    elif state.is_finished:
      finished += 1
    else:
      todo.append(run)
  say(
    f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}: {finished} finished, {len(todo)} to start"
  )
  return todo


def _checked_last_step(run: Unit, gets_servers: bool) -> int:
  """Checks the flags of a run, and returns the step at which the run is finished.

  Args:
    run: The run.
    gets_servers: Whether the launcher will start the engine's servers and set their URLs.

  Raises:
    ConfigError: The flags are not valid, or the run began with other flags.
  """
  try:
    config = cli.config_of(run.flags)
    if gets_servers:
      if not config.rollout.engine:
        raise ConfigError("flag --engine_hosts needs --config.rollout.engine=vllm, or sglang")
      # The URL only satisfies the checks: the hosts are known when the job runs.
      config = config.replace({"rollout.engine_urls": ("http://HOST:8000",)})
    check_config(config)
    _check_folder(Path(run.workdir), config)
  except ConfigError as error:
    raise ConfigError(f"run {run.name}: {error}" if run.name else str(error)) from None
  return config.warm_start.steps + config.steps


def _check_folder(workdir: Path, config: Config) -> None:
  """Raises ConfigError if the folder holds a run that must not continue under `config`."""
  file = workdir / "config.json"
  if file.is_file() and any((workdir / name).exists() for name in ("metrics.jsonl", "checkpoints")):
    config, old = as_begun(config, workdir), config_lib.completed(read_values(file))
    check_same_run(file, as_json(old), as_json(config_lib.to_dict(config)))


def _check_kind(workdir: Path, is_sweep: bool) -> None:
  """Raises ConfigError if a sweep names the folder of a run, or a run the folder of a sweep."""
  is_run = (workdir / "config.json").exists()
  if is_sweep and is_run:
    raise ConfigError(f"flag --workdir={workdir} is the folder of a run: name another for a sweep")
  if not is_sweep and not is_run and any(workdir.glob("*/config.json")):
    raise ConfigError(f"flag --workdir={workdir} is the folder of a sweep: add --sweep=FILE")


def define_flags(values: flags.FlagValues) -> None:
  """Defines the flags that `launch` reads, including one flag for each option of a launcher."""
  on = f"where to run: {', '.join(LAUNCHERS)}"
  workdir = "the folder of the run, or the common one of a sweep's runs"
  sweep = "a Python file whose sweep() yields the settings of each run"
  table_alone = "start nothing, and print how far the runs are"
  flags.DEFINE_string("on", None, on, flag_values=values)
  flags.DEFINE_string("workdir", None, workdir, flag_values=values)
  flags.DEFINE_string("sweep", None, sweep, flag_values=values)
  flags.DEFINE_boolean("table", False, table_alone, flag_values=values)
  options_lib.define(values)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Splits a command line into the arguments before -- and the arguments after it."""
  end = argv.index("--") if "--" in argv else len(argv)
  return list(argv[:end]), list(argv[end + 1 :])


def main(argv: Sequence[str], train_flags: Sequence[str], misplaced: Sequence[str]) -> None:
  """Calls `launch`. `misplaced` are flags of grpo_jax.train that come before --, an error."""
  del argv
  if misplaced:
    raise ConfigError(f"flag {misplaced[0]} is one of grpo_jax.train: write it after --")
  sys.exit(launch(flags.FLAGS, train_flags))


if __name__ == "__main__":
  define_flags(flags.FLAGS)
  before, after = split(sys.argv)
  of_train = [flag for flag in before if re.match(r"--?config(\.|=|$)", flag)]
  own = [flag for flag in before if flag not in of_train]
  cli.run(functools.partial(main, train_flags=after, misplaced=of_train), own)
