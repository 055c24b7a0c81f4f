"""Compiles the programs of a run: what one device holds and does while each of them runs."""

from collections.abc import Mapping
import dataclasses
import time
from typing import Any

import jax

from grpo_jax.parallel.chips import Chip
from grpo_jax.planning import cost
from grpo_jax.planning.programs import Program
from grpo_jax.sampler.decode import capacities


@dataclasses.dataclass(frozen=True)
class Phase:
  """One program, compiled.

  Attributes:
    name, runs, tokens: As in `Program`.
    memory: Bytes on one device by kind. Empty if the program cannot be compiled.
    counted: What one device does in one run, or None in that case.
    compile_seconds: How long its compilation took.
    failure: Why it needs more memory than the device has, by its compiler. "" if it was compiled.
  """

  name: str
  runs: str
  tokens: int
  memory: Mapping[str, float]
  counted: cost.Counted | None
  compile_seconds: float
  failure: str = ""

  @property
  def total(self) -> float:
    """The bytes that one device holds, infinity if the program cannot be compiled."""
    return float("inf") if self.failure else sum(self.memory.values())


def compiled(program: Program) -> Phase:
  """Compiles a program, which may take minutes, and counts what it does."""
  start = time.perf_counter()
  failure, memory, counted = "", {}, None
  try:
    executable = program.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    failure = str(error).splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")
  seconds = time.perf_counter() - start
  if not failure:
    rounds = decode_rounds(program.tokens + 1) | {program.parts: program.parts}
    counted = cost.count(executable.as_text(), rounds)
    temporary = _temporary(executable)
    cache = counted.carried_bytes if program.tokens else 0.0
    memory = _memory(program, executable.memory_analysis(), temporary, cache)
  return Phase(program.name, program.runs, program.tokens, memory, counted, seconds, failure)


def decode_rounds(max_tokens: int) -> dict[int, float]:
  """The most rounds of the sampler's decode loops, by the token at which each ends.

  The first token is drawn before the loops. Loops with the same end share its rounds equally,
  though only the first of them has any: their sum is right.
  """
  ends = [min(max_tokens, capacity + 1) for capacity in capacities(max_tokens)]
  rounds = {end: end - start for start, end in zip([1, *ends], ends) if end > start}
  return {end: count / ends.count(end) for end, count in rounds.items()}


def seconds_by_limit(done: cost.Cost, chip: Chip) -> dict[str, float]:
  """The time that each limit of a chip takes at least, if nothing else held it up."""
  return {
    "compute": done.flops / chip.flops,
    "memory": done.memory_bytes / chip.memory_bandwidth,
    "links": done.link_bytes / chip.link_bandwidth,
  }


def _temporary(executable: Any) -> float:
  """The bytes that a program holds at its worst moment beside its arguments and outputs.

  What the compiler for TPUs calls temporary counts arrays that share a place several times. Its
  peak is the size of the place where its buffers lie.
  """
  sizes = executable.memory_analysis()
  device = next(iter(jax.tree.leaves(executable.input_shardings)[0].device_set))
  if device.platform != "tpu":
    return sizes.temp_size_in_bytes
  new_outputs = max(0, sizes.output_size_in_bytes - sizes.alias_size_in_bytes)
  return max(0, sizes.peak_memory_in_bytes - sizes.argument_size_in_bytes - new_outputs)


def _memory(program: Program, sizes: Any, temporary: float, cache: float) -> dict[str, float]:
  """Bytes by kind: what the run holds, and what the program adds to it."""
  # At most `temporary`: a compiler may keep a part in a faster memory or in an argument's place.
  inner = {
    "cache": min(cache, temporary),
    "gradients": min(program.gradients, temporary),
  }
  named = sum(program.held[kind] for kind in program.taken)
  return {
    **program.held,
    "other arguments": max(0.0, sizes.argument_size_in_bytes - named),
    **inner,
    "temporary arrays": temporary - sum(inner.values()),
    "outputs": max(0.0, sizes.output_size_in_bytes - sizes.alias_size_in_bytes),
    "code": sizes.generated_code_size_in_bytes,
  }
