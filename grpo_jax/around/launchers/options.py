"""Declares the options of launchers: their defaults, meanings, and launchers that read them."""

import dataclasses
from typing import Any

from absl import flags

from grpo_jax.settings import ConfigError

ALL = ("local", "slurm", "ray", "xmanager")


def _option(default: Any, meaning: str, *launchers: str, lowest: int = 0) -> Any:
  """Declares a dataclass field from which `define` makes a flag of the type of its default.

  Args:
    default: The default value of the flag.
    meaning: The help text of the flag.
    *launchers: The launchers that read the option. The others refuse the flag. None means all.
    lowest: The lowest allowed value of an integer.
  """
  metadata = {"meaning": meaning, "launchers": launchers or ALL, "lowest": lowest}
  return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of a launcher. No option changes what a run computes."""

  hosts: int = _option(
    1,
    "hosts of one run; with --on=local, processes of one run on the CPU",
    "local",
    "slurm",
    "ray",
    lowest=1,
  )
  at_once: int = _option(
    0, "runs at once; 0 = one with --on=local|xmanager, else as many as there is room"
  )
  dry_run: bool = _option(False, "print what would be started, and start nothing")
  tasks_per_host: int = _option(
    1, "processes on each host: as many as it has GPUs, and one on a CPU", "slurm", lowest=1
  )
  time_limit: str = _option("", "limit of a job as Slurm writes it, such as 24:00:00", "slurm")
  stop_ahead: int = _option(
    300,
    "seconds before the limit at which a run saves, and its job is queued again: more than a step"
    " and a save take",
    "slurm",
    lowest=1,
  )
  partition: str = _option("", "where jobs are queued; '' = the cluster's default", "slurm")
  sbatch: tuple[str, ...] = _option(
    (), "another option of sbatch, such as --sbatch=--gres=gpu:8; can be given repeatedly", "slurm"
  )
  engine_hosts: int = _option(
    0, "more hosts of each run, which serve rollout.engine and are named to the run", "slurm"
  )
  engine: tuple[str, ...] = _option(
    (),
    "with engine_hosts: a flag of grpo_jax.engine, such as --engine=--program=/venv/bin/vllm; can"
    " be given repeatedly",
    "slurm",
  )
  ray_resources: str = _option(
    "", 'what a run reserves on each host beside a CPU, as JSON such as {"GPU": 8}', "ray"
  )
  restarts: int = _option(
    3, "how often a run goes on from its checkpoint after it has lost a host", "ray"
  )
  xm: tuple[str, ...] = _option(
    (),
    "a flag of experiments/xm_launch.py, such as --xm=--executor=vertex; can be given repeatedly",
    "xmanager",
  )


def define(values: flags.FlagValues) -> None:
  """Defines a flag in `values` for each field of `Options`.

  The help of a flag names the launchers that read it, unless all do.
  """
  for field in dataclasses.fields(Options):
    launchers = field.metadata["launchers"]
    prefix = "" if launchers == ALL else f"--on={'|'.join(launchers)}: "
    arguments = (field.name, field.default, prefix + field.metadata["meaning"])
    if isinstance(field.default, bool):  # before int, of which bool is a subclass
      flags.DEFINE_boolean(*arguments, flag_values=values)
    elif isinstance(field.default, int):
      lowest = field.metadata["lowest"]
      flags.DEFINE_integer(*arguments, lower_bound=lowest, flag_values=values)
    elif isinstance(field.default, tuple):
      flags.DEFINE_multi_string(*arguments, flag_values=values)
    else:
      flags.DEFINE_string(*arguments, flag_values=values)


def options_of(values: flags.FlagValues, on: str) -> Options:
  """The options in the values of the flags, for the launcher named `on`.

  Raises:
    ConfigError: A flag that this launcher does not read differs from its default.
  """
  settings: dict[str, Any] = {}
  for field in dataclasses.fields(Options):
    value, launchers = values[field.name].value, field.metadata["launchers"]
    # A repeatable flag has a list as its value. Its default in `Options` is a tuple.
    settings[field.name] = tuple(value) if isinstance(value, list) else value
    if settings[field.name] != field.default and on not in launchers:
      raise ConfigError(
        f"flag --{field.name} does nothing with --on={on}: it is for {', '.join(launchers)}"
      )
  return Options(**settings)
