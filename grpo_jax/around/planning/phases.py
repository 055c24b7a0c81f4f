"""Compiles the programs of a run, and finds the memory and the work of one device in each."""

from collections.abc import Mapping
import dataclasses
import time
from typing import Any

import jax

from grpo_jax.around.planning import cost
from grpo_jax.parallel.chips import Chip
from grpo_jax.run.stages import Program, Stage


@dataclasses.dataclass(frozen=True)
class Phase:
  """The result of compiling one program.

  Attributes:
    name: The name of the program's work, such as "sample".
    runs: How often the program runs in a step, as a text. "3/50" is 3 times every 50 steps.
    tokens: The most tokens that the program decodes for each row. 0 if it decodes none.
    memory: Bytes on one device by kind. Empty if the program cannot be compiled.
    counted: The work of one device in one run, or None if the program cannot be compiled.
    compile_seconds: How long the compilation took.
    failure: The compiler's message if the program needs more memory than the device has, else "".
    host_bytes: How many bytes of one device's activations the program keeps in the host's memory.
  """

  name: str
  runs: str
  tokens: int
  memory: Mapping[str, float]
  counted: cost.Counted | None
  compile_seconds: float
  failure: str = ""
  host_bytes: float = 0.0

  @property
  def total(self) -> float:
    """The bytes in use on one device, infinity if the program cannot be compiled."""
    return float("inf") if self.failure else sum(self.memory.values())


def compiled(program: Program) -> Phase:
  """Compiles a program, which may take minutes, and counts its memory and its work.

  The memory is the largest of all stages, and the work is the sum over all stages.
  """
  start = time.perf_counter()
  failure, memory, counted, host_bytes = "", dict[str, float](), None, 0.0
  try:
    for stage in program.stages:
      executable = stage.lower().compile()
      done = cost.count(executable.as_text(), stage.rounds) * stage.runs
      counted = done if counted is None else counted + done
      sizes = executable.memory_analysis()
      of_stage = _memory(program, sizes, _temporary(executable), stage)
      memory = max(memory, of_stage, key=lambda bytes_by_kind: sum(bytes_by_kind.values()))
      host_bytes = max(host_bytes, sizes.host_temp_size_in_bytes)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):  # this is how XLA says that memory is too small
      raise
    failure = str(error).splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")
    memory, counted = {}, None
  seconds = time.perf_counter() - start
  return Phase(
    program.name, program.runs, program.tokens, memory, counted, seconds, failure, host_bytes
  )


def seconds_by_limit(done: cost.Cost, chip: Chip) -> dict[str, float]:
  """The least seconds of some work by each limit of a chip: compute, memory and links."""
  return {
    "compute": done.flops / chip.flops,
    "memory": done.memory_bytes / chip.memory_bandwidth,
    "links": done.link_bytes / chip.link_bandwidth,
  }


def _temporary(executable: Any) -> float:
  """The peak bytes of a compiled program on one device, besides its arguments and outputs.

  The TPU compiler's `temp_size_in_bytes` counts memory that arrays share once for each of them. The
  peak counts it once, but includes buffers on the host, arguments and outputs.
  """
  sizes = executable.memory_analysis()
  device = next(iter(jax.tree.leaves(executable.input_shardings)[0].device_set))
  if device.platform != "tpu":
    return sizes.temp_size_in_bytes
  new_outputs = max(0, sizes.output_size_in_bytes - sizes.alias_size_in_bytes)
  peak = sizes.peak_memory_in_bytes - sizes.host_temp_size_in_bytes
  return max(0, peak - sizes.argument_size_in_bytes - new_outputs)


def _memory(program: Program, sizes: Any, temporary: float, stage: Stage) -> dict[str, float]:
  """The bytes of one device by kind, while a stage of a program runs.

  The run holds some arrays all the time (`Program.held`), such as weights. The stage adds its other
  arguments, its outputs and its temporary arrays. Gradients and the cache have their own entries.

  Args:
    program: The program.
    sizes: The compiler's memory_analysis() of the stage.
    temporary: The bytes of the stage's temporary arrays, gradients included.
    stage: The stage.
  """
  # At most `temporary`: a compiler may keep gradients in faster memory or reuse an argument's.
  gradients = min(program.gradients, temporary)
  # `held` already counts the arguments that the run holds.
  arguments = sizes.argument_size_in_bytes - sum(program.held[kind] for kind in program.taken)
  # An aliased output uses the memory of an argument.
  outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
  cache = stage.cache
  # A stage either has the cache as an argument, or creates and returns it.
  if arguments >= cache:
    arguments -= cache
  else:
    outputs -= cache
  return {
    **program.held,
    "visual tokens": program.held.get("visual tokens", 0.0) + stage.visual,
    "other arguments": max(0.0, arguments),
    "cache": cache,
    "gradients": gradients,
    "temporary arrays": temporary - gradients,
    "outputs": max(0.0, outputs),
    "code": sizes.generated_code_size_in_bytes,
  }
