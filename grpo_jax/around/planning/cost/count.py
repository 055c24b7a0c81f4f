"""Adds up the work of a program's instructions. Each loop counts as often as it runs."""

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
    memory_bytes: Bytes read from and written to the device's main memory.
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
    open_loops: The cost of the loops whose number of rounds depends on data, part of `whole`.
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
    rounds: How many rounds to count for loops that may end early, by the limit of their counter.
      The key of a loop `while time < 33 and not done` is 33.
  """
  counter = _Counter(hlo.parse(text), rounds or {})
  whole = counter.computation(counter.module.entry)
  return Counted(whole, counter.open_loops, tuple(sorted(counter.notes)))


@dataclasses.dataclass(frozen=True)
class InstructionRuns:
  """How an instruction of a program runs.

  Attributes:
    instruction: The instruction.
    times: How often it runs.
    memory_bytes: The bytes of main memory that it reads and writes each time.
  """

  instruction: Instruction
  times: float
  memory_bytes: float


def instruction_runs(text: str, rounds: Mapping[int, float] | None = None) -> list[InstructionRuns]:
  """Lists how each instruction of a program runs, in conditionals only the cheapest branch.

  experiments/compiled_bytes.py prints the instructions that move the most bytes.

  Args:
    text: The text of the program, as `compiled.as_text()` returns it.
    rounds: How many rounds to count for loops that may end early, as in `count`.
  """
  counter = _Counter(hlo.parse(text), rounds or {})
  found: list[InstructionRuns] = []

  def walk(name: str, times: float) -> None:
    # Lists the instructions of computation `name`, which runs `times` times.
    computation = counter.module.computations[name]
    for x in computation:
      if x.opcode == "while":
        rounds_of_loop, _ = counter.rounds_of(x, computation)
        walk(x.called["body"][0], times * rounds_of_loop)
      elif x.opcode == "conditional":
        names = x.called.get("branch_computations") or _two_branches(x)
        # In grpo_jax, the larger branches run rarely, such as sampling for a greedy row.
        walk(min(names, key=lambda branch: counter.computation(branch).memory_bytes), times)
      elif x.opcode in ("call", "async-start"):
        walk(x.called["to_apply" if x.opcode == "call" else "calls"][0], times)
      elif not is_free(x):
        found.append(InstructionRuns(x, times, traffic(x, computation, counter.module)))

  walk(counter.module.entry, 1.0)
  return found


class _Counter:
  """Computes and caches the cost of computations. `open_loops` and `notes` are as in `Counted`."""

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
    """The cost of an instruction, including the computations that it calls."""
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
    """The cost of the instructions in a fusion. Between them, no data goes to main memory."""
    total = Cost()
    for instruction in inside:
      if instruction.opcode == "fusion":
        total += self._fused(self.module.computations[instruction.called["calls"][0]])
      elif instruction.opcode not in OPCODES or counts_here(instruction, inside):
        total += self._work(instruction, inside)
    return total

  def _work(self, instruction: Instruction, computation: Computation) -> Cost:
    """The operations of an instruction, and the bytes that it sends to other devices."""
    if instruction.opcode in OPCODES:
      sent = link_bytes(instruction, computation, self.module.devices)
      return Cost(link_bytes=sent)
    done = flops(instruction, computation)
    if instruction.opcode == "custom-call" and not done and not is_free(instruction):
      target = instruction.attribute(r'custom_call_target="([^"]*)"')
      self.notes.add(f"the operations of {target} are not counted: it does not declare them")
    return Cost(flops=done)

  def _branches(self, instruction: Instruction) -> Cost:
    """The cost of the branch of a conditional with the most operations."""
    self.notes.add("of the branches of a conditional, the one with the most operations is counted")
    called = instruction.called
    names = called.get("branch_computations") or _two_branches(instruction)
    costs = [self.computation(name) for name in names]
    return max(costs, key=lambda cost: (cost.flops, cost.memory_bytes))

  def _loop(self, loop: Instruction, computation: Computation) -> Cost:
    """The cost of all rounds of a loop, which it also adds to `open_loops` if they are open."""
    condition, body = loop.called["condition"][0], loop.called["body"][0]
    times, is_open = self.rounds_of(loop, computation)
    all_rounds = (self.computation(body) + self.computation(condition)) * times
    if is_open:
      self.open_loops += all_rounds
    return all_rounds

  def rounds_of(self, loop: Instruction, computation: Computation) -> tuple[float, bool]:
    """How many rounds a loop has, and whether this number comes from the caller's `rounds`.

    The program states it as known_trip_count, or as a counter with a single constant limit. A loop
    with another condition may end early, so its limit is looked up in `rounds`.
    """
    condition = loop.called["condition"][0]
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if known:
      return int(known), False
    opcodes, constants = self._inside(condition)
    # These opcodes mean that the condition tests more than the counter.
    if not {"and", "or", "not", "reduce"} & opcodes and len(constants) == 1:
      start, step = _start_and_step(loop, computation, self.module)
      return -((start - constants.pop()) // step), False  # (limit - start) / step, rounded up
    # A condition may have further constants, such as 0. Those that the caller names are limits.
    limits = constants & set(self._rounds)
    if not limits:
      self.notes.add(f"a loop of unknown length is counted once: {loop.name}")
      return 1, False
    return self._rounds[max(limits)], True

  def _inside(self, name: str) -> tuple[set[str], set[int]]:
    """The opcodes and integer constants in computation `name`, including those in its fusions."""
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
  """The names of both branches of a conditional on a bool, which has attributes for each."""
  pattern = r"{}_computation=%([\w.\-]+)"
  return [conditional.attribute(pattern.format(branch)) for branch in ("true", "false")]


def _start_and_step(loop: Instruction, computation: Computation, module: Module) -> tuple[int, int]:
  """The start value of a loop's counter, and the step by which each round increases it.

  They are 0 and 1 if the program does not state them as constants. On a TPU, a matrix product whose
  weights arrive shard by shard is a loop that handles two shards in each round. Its step is 2.

  Args:
    loop: A `while` instruction whose condition compares a counter with a constant.
    computation: The computation that contains the loop.
    module: The program.
  """
  condition, body = (module.computations[loop.called[key][0]] for key in ("condition", "body"))
  counters = [x for x in condition if x.opcode == "get-tuple-element"]
  carried = computation.operand(loop, 0)
  if len(counters) != 1 or carried.opcode != "tuple":
    return 0, 1
  index = int(counters[0].attribute(r"index=(\d+)"))  # of the counter in the carried tuple
  start = _constant(computation.operand(carried, index), computation)
  step = 0
  if body.root.opcode == "tuple":
    next_value = body.operand(body.root, index)
    if next_value.opcode == "add":
      # One term is the old counter, which counts 0 here, so the sum is the other term.
      step = sum(_constant(body.operand(next_value, term), body) for term in range(2))
  return start, max(step, 1)


def _constant(instruction: Instruction, computation: Computation) -> int:
  """The value of an integer constant or of a copy of it. 0 for any other instruction."""
  while instruction.opcode in ("copy", "bitcast"):
    instruction = computation.operand(instruction, 0)
  return int(instruction.inputs) if instruction.opcode == "constant" else 0
