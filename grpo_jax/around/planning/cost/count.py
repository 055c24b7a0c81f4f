"""Adds up what a program does, with every loop as often as it runs."""

from collections.abc import Mapping
import dataclasses

from grpo_jax.around.planning.cost import hlo
from grpo_jax.around.planning.cost.hlo import Computation, Instruction, Module
from grpo_jax.around.planning.cost.links import OPCODES, counts_here, link_bytes
from grpo_jax.around.planning.cost.operations import flops
from grpo_jax.around.planning.cost.traffic import is_free, traffic


@dataclasses.dataclass(frozen=True)
class Cost:
  """The work of one device.

  Attributes:
    flops: Floating-point operations of matrix products and kernels.
    memory_bytes: Bytes read from and written to its main memory.
    link_bytes: Bytes sent to other devices.
  """

  flops: float = 0.0
  memory_bytes: float = 0.0
  link_bytes: float = 0.0

  def __add__(self, other: "Cost") -> "Cost":
    return Cost(
      self.flops + other.flops,
      self.memory_bytes + other.memory_bytes,
      self.link_bytes + other.link_bytes,
    )

  def __mul__(self, times: float) -> "Cost":
    return Cost(self.flops * times, self.memory_bytes * times, self.link_bytes * times)


@dataclasses.dataclass(frozen=True)
class Counted:
  """The cost of a program.

  Attributes:
    whole: The cost of the whole program.
    open_loops: The part of it in loops whose number of rounds depends on data.
    notes: Lines about instructions that could not be counted.
  """

  whole: Cost
  open_loops: Cost
  notes: tuple[str, ...]

  def __add__(self, other: "Counted") -> "Counted":
    notes = tuple(sorted({*self.notes, *other.notes}))
    return Counted(self.whole + other.whole, self.open_loops + other.open_loops, notes)

  def __mul__(self, times: float) -> "Counted":
    return Counted(self.whole * times, self.open_loops * times, self.notes)


def count(text: str, rounds: Mapping[int, float] | None = None) -> Counted:
  """Counts a compiled program.

  Args:
    text: The text of the program, as `compiled.as_text()` returns it.
    rounds: For loops that may end early, the number of rounds by the largest value that the counter
      can reach: a loop `while time < 33 and not done` is looked up as 33.
  """
  counter = _Counter(hlo.parse(text), rounds or {})
  whole = counter.computation(counter.module.entry)
  return Counted(whole, counter.open_loops, tuple(sorted(counter.notes)))


@dataclasses.dataclass(frozen=True)
class InstructionRuns:
  """How an instruction of a program runs.

  Attributes:
    instruction: It.
    times: How often it runs.
    memory_bytes: The bytes of memory that it reads and writes each time.
  """

  instruction: Instruction
  times: float
  memory_bytes: float


def instruction_runs(text: str, rounds: Mapping[int, float] | None = None) -> list[InstructionRuns]:
  """How each instruction of a program runs. Of a conditional, the branch that moves less counts.

  Args:
    text: The text of the program, as `compiled.as_text()` returns it.
    rounds: For loops that may end early, the number of rounds by the largest value that the counter
      can reach.
  """
  counter = _Counter(hlo.parse(text), rounds or {})
  found: list[InstructionRuns] = []

  def walk(name: str, times: float) -> None:
    computation = counter.module.computations[name]
    for x in computation:
      if x.opcode == "while":
        rounds_of_loop, _ = counter.rounds_of(x, computation)
        walk(x.called["body"][0], times * rounds_of_loop)
      elif x.opcode == "conditional":
        names = x.called.get("branch_computations") or _two_branches(x)
        # The larger branches of our programs are the rare ones, such as the draw of a greedy row.
        walk(min(names, key=lambda branch: counter.computation(branch).memory_bytes), times)
      elif x.opcode in ("call", "async-start"):
        walk(x.called["to_apply" if x.opcode == "call" else "calls"][0], times)
      elif not is_free(x):
        found.append(InstructionRuns(x, times, traffic(x, computation, counter.module)))

  walk(counter.module.entry, 1.0)
  return found


class _Counter:
  """Counts each computation once and remembers it."""

  def __init__(self, module: Module, rounds: Mapping[int, float]):
    self.module = module
    self.open_loops = Cost()
    self.notes: set[str] = set()
    self._rounds = rounds
    self._known: dict[str, Cost] = {}

  def computation(self, name: str) -> Cost:
    """The cost of running a computation that is not fused."""
    if name not in self._known:
      computation = self.module.computations[name]
      costs = (self._instruction(x, computation) for x in computation if not is_free(x))
      self._known[name] = sum(costs, Cost())
    return self._known[name]

  def _instruction(self, instruction: Instruction, computation: Computation) -> Cost:
    """The cost of an instruction, with that of the computations that it calls."""
    opcode, called = instruction.opcode, instruction.called
    if opcode == "while":
      return self._loop(instruction, computation)
    if opcode == "call":
      return self.computation(called["to_apply"][0])
    if opcode == "async-start":
      return self.computation(called["calls"][0])
    if opcode == "conditional":
      return self._branches(instruction)
    moved = traffic(instruction, computation, self.module)
    if opcode == "fusion":
      inside = self._fused(self.module.computations[called["calls"][0]])
      return inside + Cost(memory_bytes=moved)
    return self._work(instruction, computation) + Cost(memory_bytes=moved)

  def _fused(self, inside: Computation) -> Cost:
    """The work inside a fusion, which does not touch the main memory."""
    total = Cost()
    for instruction in inside:
      if instruction.opcode == "fusion":
        total += self._fused(self.module.computations[instruction.called["calls"][0]])
      elif instruction.opcode not in OPCODES or counts_here(instruction, inside):
        total += self._work(instruction, inside)
    return total

  def _work(self, instruction: Instruction, computation: Computation) -> Cost:
    """Operations and bytes to other devices."""
    if instruction.opcode in OPCODES:
      sent = link_bytes(instruction, computation, self.module.devices)
      return Cost(link_bytes=sent)
    done = flops(instruction, computation)
    if instruction.opcode == "custom-call" and not done and not is_free(instruction):
      target = instruction.attribute(r'custom_call_target="([^"]*)"')
      self.notes.add(f"the operations of {target} are not counted: it does not declare them")
    return Cost(flops=done)

  def _branches(self, instruction: Instruction) -> Cost:
    self.notes.add("of the branches of a conditional, the one with the most operations is counted")
    called = instruction.called
    names = called.get("branch_computations") or _two_branches(instruction)
    costs = [self.computation(name) for name in names]
    return max(costs, key=lambda cost: (cost.flops, cost.memory_bytes))

  def _loop(self, loop: Instruction, computation: Computation) -> Cost:
    condition, body = loop.called["condition"][0], loop.called["body"][0]
    times, is_open = self.rounds_of(loop, computation)
    all_rounds = (self.computation(body) + self.computation(condition)) * times
    if is_open:
      self.open_loops += all_rounds
    return all_rounds

  def rounds_of(self, loop: Instruction, computation: Computation) -> tuple[float, bool]:
    """How often a loop runs, and whether only the caller knew it."""
    condition = loop.called["condition"][0]
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if known:
      return int(known), False
    opcodes, constants = self._inside(condition)
    if not {"and", "or", "not", "reduce"} & opcodes and len(constants) == 1:
      start, step = _start_and_step(loop, computation, self.module)
      return -((start - constants.pop()) // step), False
    ends = constants & set(self._rounds)
    if not ends:
      self.notes.add(f"a loop of unknown length is counted once: {loop.name}")
      return 1, False
    return self._rounds[max(ends)], True

  def _inside(self, name: str) -> tuple[set[str], set[int]]:
    """The opcodes and the integer constants of a condition, with those of its fusions."""
    opcodes, constants = set(), set()
    for instruction in self.module.computations[name]:
      opcodes.add(instruction.opcode)
      if instruction.opcode == "constant" and instruction.arrays[0].dtype in ("s32", "s64", "u32"):
        constants.add(int(instruction.inputs))
      for called in instruction.called.get("calls", ()):
        further = self._inside(called)
        opcodes |= further[0]
        constants |= further[1]
    return opcodes, constants


def _two_branches(conditional: Instruction) -> list[str]:
  pattern = r"{}_computation=%([\w.\-]+)"
  return [conditional.attribute(pattern.format(branch)) for branch in ("true", "false")]


def _start_and_step(loop: Instruction, computation: Computation, module: Module) -> tuple[int, int]:
  """Where a counting loop starts and what a round adds, where the program says so. Else 0 and 1.

  A TPU's loop over the parts of a product, whose weights arrive from other devices, has the work of
  two rounds in its body and adds 2.
  """
  condition, body = (module.computations[loop.called[key][0]] for key in ("condition", "body"))
  counters = [x for x in condition if x.opcode == "get-tuple-element"]
  carried = computation.operand(loop, 0)
  if len(counters) != 1 or carried.opcode != "tuple":
    return 0, 1
  number = int(counters[0].attribute(r"index=(\d+)"))
  start = _constant(computation.operand(carried, number), computation)
  step = 0
  if body.root.opcode == "tuple":
    counted = body.operand(body.root, number)
    if counted.opcode == "add":
      step = sum(_constant(body.operand(counted, term), body) for term in range(2))
  return start, max(step, 1)


def _constant(instruction: Instruction, computation: Computation) -> int:
  """The value of a constant or of its copy. 0 for anything else."""
  while instruction.opcode in ("copy", "bitcast"):
    instruction = computation.operand(instruction, 0)
  return int(instruction.inputs) if instruction.opcode == "constant" else 0
