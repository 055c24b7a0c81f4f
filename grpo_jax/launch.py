"""Starts one run, or the runs of a sweep, on this machine or on a cluster.

python -m grpo_jax.launch --on=local --workdir=DIR [--sweep=FILE] -- --config=configs/arithmetic.py
python -m grpo_jax.launch --workdir=DIR [--sweep=FILE] --table

What follows -- are flags of grpo_jax.train. Run the same command again to go on with the runs that
are not finished. `--table` only shows how far they are.
"""

from collections.abc import Sequence
import dataclasses
import functools
from pathlib import Path
import sys
from typing import Any

from absl import flags

from grpo_jax import config as config_lib
from grpo_jax.config import Config
from grpo_jax.launchers import LAUNCHERS
from grpo_jax.launchers.launcher import Launcher
from grpo_jax.launchers.options import Options
from grpo_jax.launchers.progress import progress
from grpo_jax.launchers.sweep import load_sweep
from grpo_jax.launchers.table import table
from grpo_jax.launchers.units import Unit, units
from grpo_jax.run import cli
from grpo_jax.run.saved_config import as_json, check_same_run, load_config
from grpo_jax.settings import ConfigError


def main(train_flags: Sequence[str], argv: Sequence[str]) -> None:
  del argv
  values = flags.FLAGS
  if not values.workdir:
    raise ConfigError("flag --workdir is missing: name the folder of the run or of the sweep")
  workdir = cli.folder_of_flag("workdir", values.workdir)
  sweep = load_sweep(values.sweep) if values.sweep else None
  runs = units(str(workdir), train_flags, sweep)
  launcher = _launcher(is_needed=not values.table)
  if not values.table:
    options = _options()
    todo = _unfinished(runs, launcher)
    code = launcher.launch(todo, options) if todo else 0
    if values.dry_run:
      return
  print("\n".join(table(runs, launcher.queued(runs) if launcher else {})))
  if not values.table:
    sys.exit(code)


def _launcher(is_needed: bool) -> Launcher | None:
  name = flags.FLAGS.on
  choices = ", ".join(LAUNCHERS)
  if name is None and is_needed:
    raise ConfigError(f"flag --on is missing: choose one of {choices}")
  if name is not None and name not in LAUNCHERS:
    raise ConfigError(f"flag --on={name}: choose one of {choices}")
  return LAUNCHERS.get(name)


def _options() -> Options:
  """The options that the flags give. Refuses those that the launcher would not read."""
  name = flags.FLAGS.on
  given: dict[str, Any] = {}
  for field in dataclasses.fields(Options):
    value, launchers = flags.FLAGS[field.name].value, field.metadata["launchers"]
    if value != field.default and name not in launchers:
      raise ConfigError(
        f"flag --{field.name} is not for --on={name}: only for {', '.join(launchers)}"
      )
    given[field.name] = tuple(value) if isinstance(value, list) else value
  return Options(**given)


def _unfinished(runs: Sequence[Unit], launcher: Launcher) -> list[Unit]:
  """The runs to start. Says which are left alone, and why.

  Raises:
    ConfigError: The settings of a run cannot be used, or are not those of its folder.
  """
  queued = launcher.queued(runs)
  todo, finished = [], 0
  for run in runs:
    config = _config(run)
    found = progress(run.workdir, config.warm_start.steps + config.steps)
    finished += found.is_finished
    if found.holder or run.title in queued:
      words = queued.get(run.title) or f"{found.holder} trains it"
      print(f"left alone {run.title}: {words}", file=sys.stderr)
    elif not found.is_finished:
      todo.append(run)
  print(f"{len(runs)} runs: {finished} finished, {len(todo)} to start", file=sys.stderr)
  return todo


def _config(run: Unit) -> Config:
  try:
    config = cli.config_of(run.flags)
    file = Path(run.workdir) / "config.json"
    if file.is_file():
      old = config_lib.completed(load_config(file))
      check_same_run(file, as_json(old), as_json(config_lib.to_dict(config)))
  except ConfigError as error:
    raise ConfigError(f"{run.name}: {error}" if run.name else str(error)) from None
  return config


def _define_flags() -> None:
  flags.DEFINE_string("on", None, f"where to run: {', '.join(LAUNCHERS)}")
  flags.DEFINE_string("workdir", None, "the folder of the run, or the common one of the sweep")
  flags.DEFINE_string("sweep", None, "a Python file whose sweep() yields dicts of settings")
  flags.DEFINE_boolean("table", False, "start nothing, print how far the runs are")
  define = {int: flags.DEFINE_integer, bool: flags.DEFINE_boolean, str: flags.DEFINE_string}
  for field in dataclasses.fields(Options):
    meaning = field.metadata["meaning"]
    if isinstance(field.default, tuple):
      flags.DEFINE_multi_string(field.name, field.default, meaning)
    else:
      define[type(field.default)](field.name, field.default, meaning)


if __name__ == "__main__":
  _define_flags()
  end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
  cli.run(functools.partial(main, sys.argv[end + 1 :]), sys.argv[:end])
