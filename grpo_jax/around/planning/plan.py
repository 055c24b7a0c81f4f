"""Prints the plan of a run: memory and work of its programs, or how to split its devices."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from absl import flags
from huggingface_hub import try_to_load_from_cache
import jax

from grpo_jax import model
from grpo_jax.around.planning import overlap, split, table
from grpo_jax.around.planning.phases import Phase, compiled
from grpo_jax.around.planning.topologies import devices_of
from grpo_jax.config import Config
from grpo_jax.console.exit_codes import DoesNotFit
from grpo_jax.data.tokenizers import tokenizer
from grpo_jax.model.huggingface import hub
from grpo_jax.parallel.chips import chip_of, memory_of
from grpo_jax.parallel.mesh import sizes_of
from grpo_jax.progress import doing
from grpo_jax.run.device_checks import check_batches
from grpo_jax.run.run import Run
from grpo_jax.run.stages import programs
from grpo_jax.settings import ConfigError


def plan_by_flags(config: Config, values: flags.FlagValues) -> None:
  """Prints a plan as the flags of grpo_jax.plan specify.

  Args:
    config: The config of the run.
    values: The flags.

  Raises:
    ConfigError: The flags or the config cannot be used.
    DoesNotFit: The run needs more memory than its devices have.
  """
  config = shape_alone(config)  # a plan then needs neither weights nor a tokenizer
  jax.config.update("jax_platforms", "cpu")  # the devices that exist are not needed
  # The time of compilation is part of the plan, so no program is read from the cache.
  jax.config.update("jax_enable_compilation_cache", False)
  if values["async"].value:
    _plan_apart_by_flags(config, values)
  else:
    plan(run_of(config, _devices_by_flags(values)), values.topology)


def shape_alone(config: Config) -> Config:
  """The config without settings that change no shape: the adapters' files and the tokenizer.

  If model.path names a model on the Hugging Face Hub, its folder in the local cache replaces it.

  Raises:
    ConfigError: The config.json of the named model is not on this machine.
  """
  folder, replace = config.model.path, dataclasses.replace
  if hub.is_name(folder):
    name, revision = hub.parts(folder)
    config_json = try_to_load_from_cache(name, "config.json", revision=revision)
    if not isinstance(config_json, str):  # not in the cache, or known to be missing on the Hub
      raise ConfigError(
        f"config key model.path is {folder!r}: a plan downloads nothing; give a folder that holds"
        " the model's config.json"
      )
    folder = config_json.removesuffix("/config.json")
  # Without a model's folder, the vocabulary of data.tokenizer decides the shape of the embedding.
  return replace(
    config,
    model=replace(config.model, path=folder),
    lora=replace(config.lora, path=""),
    data=replace(config.data, tokenizer="") if folder else config.data,
  )


def plan(run: Run, topology: str) -> None:
  """Compiles the programs of a run on a topology, and prints the memory and the work of each.

  `topology` is its name, for the first line.

  Raises:
    DoesNotFit: The run needs more memory than its devices have.
  """
  device = run.mesh.devices.flat[0]
  count = run.mesh.size + run.processes * run.config.mesh.sampler
  chip, memory = chip_of(device), memory_of(device)
  memory_in_words = "unknown memory" if memory is None else f"{memory / 1e9:,.2f} GB for programs"
  print(f"{device.device_kind}, {count} of {topology}: {memory_in_words} on each")
  print(run.parameters.describe())
  print(f"mesh {sizes_of(run.mesh)}; sampling on mesh {sizes_of(run.parameters.sampling.mesh)}")
  shape = run.parameters.model
  if shape.context > 1:
    print(model.exchanges_in_words(shape))
  estimate = sum(run.programs.estimate_of_update)
  print(
    f"an update computes {run.programs.micro_batch} prompts at once:"
    f" {estimate / 1e9:,.2f} GB by the estimate that chooses batch.micro_batch=0"
  )
  print(f"a layer keeps for its backward pass: {run.programs.saved_activations or 'everything'}")
  phases: list[Phase] = []
  needed = [*programs(run)]
  with doing("compiled", len(needed), "programs") as work:
    for program in needed:
      with doing(f"compiling {program.name}"):
        phases.append(compiled(program))
      work.advance()
  # Steps take less time if separate devices sample while the others learn.
  samples_beside = run.config.mesh.sampler > 0 and run.config.rollout.max_staleness > 0
  tables = (
    table.memory_table(phases),
    table.work_table(phases, chip),
    [*table.token_lines(phases, chip), *table.step_lines(phases, chip, samples_beside)],
    table.notes(phases),
    [table.verdict(phases, memory)],
  )
  for lines in tables:
    print("\n".join(["", *lines]))
  if memory is not None and max(phase.total for phase in phases) > memory:
    raise DoesNotFit


def run_of(config: Config, devices: Sequence[Any]) -> Run:
  """Makes the run for these devices."""
  # If a model's files define the vocabulary, the tokenizer does not influence the programs.
  tokens = tokenizer.characters("") if config.model.path else None
  run = Run(config, devices=devices, tokens=tokens)
  check_batches(config, run.hosts)
  return run


def plan_apart(
  job: overlap.Workload,
  round_seconds: Mapping[int, float],
  update_seconds: Mapping[int, float],
  devices: int,
  bounds: Sequence[int],
) -> None:
  """Simulates each split of the devices into sampler and learner, and prints a table of them.

  Args:
    job: The work of the run.
    round_seconds: Seconds of a round of decoding, by the number of devices.
    update_seconds: Seconds of all work of the learner in a step, by the number of devices.
    devices: The number of devices to split.
    bounds: The bounds on staleness to simulate.
  """
  round_s = overlap.seconds_on(round_seconds, devices)
  update_s = overlap.seconds_on(update_seconds, devices)
  # To compare with: all devices sample and learn in turn.
  in_turn, ahead = (
    overlap.simulate(job, round_s, update_s, bound, apart=False) for bound in (0, 1)
  )
  found = overlap.splits(job, round_seconds, update_seconds, devices, bounds)
  mean, longest = job.lengths_NG.mean(), job.lengths_NG.max()
  print(f"completions of {mean:,.0f} tokens on average, the longest of {longest:,}")
  print("\n".join(split.time_lines(round_seconds, update_seconds)))
  print()
  print("\n".join(split.split_lines(found, in_turn, ahead, devices)))


def compiled_times(config: Config, devices: Sequence[Any]) -> tuple[dict[int, float], ...]:
  """Compiles the programs for 1, 2, 4, ... and all devices, and computes their least times.

  Omits numbers of devices on which a program does not fit, or which do not suit mesh and batch.

  Returns:
    Seconds of a round of decoding, and of all work of the learner in a step, each by the number of
    devices.

  Raises:
    ConfigError: The chip is not known, or no number of devices can run the programs.
  """
  chip, memory = chip_of(devices[0]), memory_of(devices[0])
  if chip is None:
    raise ConfigError(
      f"the peaks of {devices[0].device_kind} are not known: give measured times, such as"
      " --round_ms=4:6.1 --update_s=4:5.5"
    )
  counts = sorted({*(2**i for i in range(len(devices).bit_length())), len(devices)})
  rounds: dict[int, float] = {}
  updates: dict[int, float] = {}
  for count in counts:
    try:
      run = run_of(config, devices[:count])
    except ConfigError as error:
      print(f"not on {count}: {error}")
      continue
    with doing(f"compiling for {count} devices"):
      phases = [compiled(program) for program in programs(run) if split.is_timed(program)]
    refused = [phase.name for phase in phases if memory and phase.total > memory]
    if refused:
      print(f"not on {count}: too little memory for {' and '.join(refused)}")
      continue
    rounds[count], updates[count] = split.least_times(phases, chip)
  if not rounds:
    raise ConfigError(f"none of {counts} devices can run the programs: choose more or others")
  return rounds, updates


def _plan_apart_by_flags(config: Config, values: flags.FlagValues) -> None:
  """Prints how to split the devices into a sampler and a learner, for --async.

  The times of rounds and updates are the measured ones in --round_ms and --update_s. Without these
  flags, they are computed from the compiled programs.

  Raises:
    ConfigError: Flags contradict each other or have a wrong form, or there is only one device.
  """
  job = split.job_of(config, values.workdir, values.reward_s)
  if bool(values.round_ms) != bool(values.update_s):
    raise ConfigError("flags --round_ms and --update_s are both measured times: give both, or none")
  if values.round_ms:
    rounds_ms = split.times_of_flag("round_ms", values.round_ms)
    rounds = {count: value / 1e3 for count, value in rounds_ms.items()}
    updates = split.times_of_flag("update_s", values.update_s)
    devices = values.chips or max(*rounds, *updates)  # the largest measured number
  else:
    device_list = _devices_by_flags(values)
    devices = len(device_list)
    rounds, updates = compiled_times(config, device_list)
  if devices < 2:
    raise ConfigError("--async: one device cannot be split; name more with --topology or --chips")
  bounds = [int(bound) for bound in values.staleness if bound.isdecimal()]
  if not bounds or len(bounds) < len(values.staleness):
    raise ConfigError(
      f"flag --staleness is {','.join(values.staleness)}: give whole numbers from 0 on, as in 0,1,2"
    )
  plan_apart(job, rounds, updates, devices, bounds)


def _devices_by_flags(values: flags.FlagValues) -> list[Any]:
  if not values.topology:
    raise ConfigError("flag --topology is missing: for example --topology=v5e:2x2")
  return devices_of(values.topology, values.chips)
