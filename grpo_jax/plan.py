"""Says whether a run fits on devices, and what bounds its speed, without such devices.

python -m grpo_jax.plan --config=configs/X.py [--config.section.key=value] --topology=v5e:2x2
python -m grpo_jax.plan --config=configs/X.py --topology=cpu:4

It compiles the programs of the run and reads what they hold and do. For TPUs it needs their
compiler, pip install 'jax[tpu]'. Of a model it needs config.json alone, and no data.
The exit code is 0 if the run fits, and 3 if it does not.
"""

from collections.abc import Sequence
import os
import re
from typing import Any

from absl import flags
import jax
from jax.experimental import topologies

from grpo_jax import cli
from grpo_jax.console.exit_codes import DoesNotFit
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.parallel.chips import chip_of, memory_of
from grpo_jax.parallel.mesh import sizes_of
from grpo_jax.planning import table
from grpo_jax.planning.phases import Phase, compiled
from grpo_jax.planning.programs import programs, shape_alone
from grpo_jax.programs.checks import check_batches
from grpo_jax.programs.run import Run
from grpo_jax.settings import ConfigError
from grpo_jax.timing import told_if_slow


def devices_of(topology: str, chips: int | None) -> list[Any]:
  """The devices of a topology, which need not exist. The devices of a CPU do.

  Args:
    topology: Such as v5e:2x2, or cpu:N for N devices on this machine.
    chips: How many chips to take, from the first on. None means all.

  Raises:
    ConfigError: There is no such topology, or the compiler for it is not installed.
  """
  if topology.startswith("cpu"):
    cpu = re.fullmatch(r"cpu(?::([1-9]\d{0,3}))?", topology)
    if not cpu:
      raise ConfigError(f"flag --topology={topology}: write cpu:N for N devices of this machine")
    jax.config.update("jax_num_cpu_devices", int(cpu[1] or 1))
    devices = jax.devices("cpu")
  else:
    devices = _tpu_devices(topology)
  places = list(dict.fromkeys(_chip(device) for device in devices))
  if chips is not None and not 1 <= chips <= len(places):
    raise ConfigError(f"flag --chips={chips}: {topology} has {len(places)} chips")
  return [device for device in devices if _chip(device) in places[:chips]]


def plan(run: Run, topology: str) -> None:
  """Prints the plan of a run.

  Raises:
    DoesNotFit: The run needs more memory than its devices have.
  """
  device, count = run.mesh.devices.flat[0], run.mesh.size
  chip, memory = chip_of(device), memory_of(device)
  size = "unknown memory" if memory is None else f"{memory / 1e9:,.2f} GB for programs"
  print(f"{device.device_kind}, {count} of {topology}: {size} on each")
  print(run.parameters.describe())
  print(f"mesh {sizes_of(run.mesh)}; sampling on mesh {sizes_of(run.parameters.sampling.mesh)}")
  estimate = sum(run.programs.estimate_of_update)
  print(
    f"an update computes {run.programs.micro_batch} prompts at once:"
    f" {estimate / 1e9:,.2f} GB by the estimate that chooses batch.micro_batch=0"
  )
  phases: list[Phase] = []
  for program in programs(run):
    with told_if_slow(f"compiling {program.name}"):
      phases.append(compiled(program))
  tables = (
    table.memory_table(phases),
    table.work_table(phases, chip),
    [*table.token_lines(phases, chip), *table.step_lines(phases, chip)],
    table.notes(phases),
    [table.verdict(phases, memory)],
  )
  for lines in tables:
    print("\n".join(["", *lines]))
  if memory is not None and max(phase.total for phase in phases) > memory:
    raise DoesNotFit


def _tpu_devices(topology: str) -> Sequence[Any]:
  # Read by libtpu when it is loaded: it shall look for no TPU, and wait for no other process.
  settings = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Any name it knows keeps it from a warning. The topology is what counts.
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  }
  os.environ.update(settings)
  # By default, libtpu describes the two cores of a v4 as two devices. Programs run on both as one.
  options = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
  try:
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **options)
  except Exception as error:  # each version of libtpu has errors of its own
    if "not installed" in str(error):
      raise ConfigError(
        f"flag --topology={topology} needs the compiler for TPUs: pip install 'jax[tpu]'"
      ) from None
    reason = " ".join(str(error).split())
    raise ConfigError(
      f"flag --topology={topology}: {reason:.200}; name one such as v5e:2x2, v5p:2x2x4 or cpu:4"
    ) from None
  return described.devices


def _chip(device: Any) -> Any:
  """What tells chips apart: where they are."""
  return tuple(getattr(device, "coords", (device.id,)))


def main(argv: list[str]) -> None:
  del argv
  config = shape_alone(cli.config_from_flags())
  topology = flags.FLAGS.topology
  if not topology:
    raise ConfigError("flag --topology is missing: for example --topology=v5e:2x2")
  jax.config.update("jax_platforms", "cpu")  # the devices that exist are not needed
  # A stored program says less of itself, and the time of its compilation is part of the plan.
  jax.config.update("jax_enable_compilation_cache", False)
  devices = devices_of(topology, flags.FLAGS.chips)
  # The tokenizer has no influence on the programs of a model whose vocabulary is known.
  tokens = tokenizer.characters("") if config.model.path else None
  run = Run(config, devices=devices, tokens=tokens)
  check_batches(config, run.hosts)
  plan(run, topology)


if __name__ == "__main__":
  cli.define_config_flag()
  flags.DEFINE_string("topology", None, "TPUs, such as v5e:2x2 or v5p:2x2x4, or cpu:N")
  flags.DEFINE_integer("chips", None, "how many of its chips to use (default: all)")
  cli.run(main)
