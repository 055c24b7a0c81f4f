"""The options of launchers: each with its default, meaning and launchers, once."""

import dataclasses
from typing import Any

from absl import flags

from grpo_jax.settings import ConfigError

ALL = ("local", "slurm", "ray", "xmanager")


def _option(default: Any, meaning: str, *launchers: str, lowest: int = 0) -> Any:
  """A field that is a flag of `grpo_jax.launch`, of the type of its default.

  Args:
    default: The value where the user gives none.
    meaning: The help of the flag.
    *launchers: The launchers that read the option, or none for all. The others refuse the flag.
    lowest: The lowest value of a number.
  """
  metadata = {"meaning": meaning, "launchers": launchers or ALL, "lowest": lowest}
  return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Options:
  """How runs are started. No option changes what a run computes."""

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
  """Defines them. The help of a flag says which launchers read it, if not all do."""
  for field in dataclasses.fields(Options):
    launchers = field.metadata["launchers"]
    of = "" if launchers == ALL else f"--on={'|'.join(launchers)}: "
    given = (field.name, field.default, of + field.metadata["meaning"])
    if isinstance(field.default, bool):
      flags.DEFINE_boolean(*given, flag_values=values)
    elif isinstance(field.default, int):
      lowest = field.metadata["lowest"]
      flags.DEFINE_integer(*given, lower_bound=lowest, flag_values=values)
    elif isinstance(field.default, tuple):
      flags.DEFINE_multi_string(*given, flag_values=values)
    else:
      flags.DEFINE_string(*given, flag_values=values)


def options_of(values: flags.FlagValues, on: str) -> Options:
  """The options that the flags give to the launcher `on`.

  Raises:
    ConfigError: The launcher does not read one of them.
  """
  given: dict[str, Any] = {}
  for field in dataclasses.fields(Options):
    value, launchers = values[field.name].value, field.metadata["launchers"]
    given[field.name] = tuple(value) if isinstance(value, list) else value
    if given[field.name] != field.default and on not in launchers:
      raise ConfigError(
        f"flag --{field.name} does nothing with --on={on}: it is for {', '.join(launchers)}"
      )
  return Options(**given)
