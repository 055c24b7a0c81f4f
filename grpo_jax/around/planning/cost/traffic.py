"""Counts the traffic of one instruction with the device's main memory.

An instruction reads its operands from memory and writes its result there. `traffic` adds up these
bytes. For two reasons, they can be fewer than the bytes of the arrays:

* A fusion is one kernel for several instructions. Only the operands and results of the whole fusion
  go through memory, no values in between.
* An instruction may use only a slice of an operand, as a loop over stacked layers reads the weights
  of one layer. Then only the slice counts. Likewise, if a result is an operand with a slice
  replaced, only the slice counts, because the compiler writes it in place.

Arrays in faster memory on the chip do not count: `main_bytes` are the bytes in main memory.
"""

import math
import re

from grpo_jax.around.planning.cost.hlo import Array, Computation, Instruction, Module
from grpo_jax.around.planning.cost.links import OPCODES, counts_here
from grpo_jax.around.planning.cost.operations import declared

# Opcodes that move no data: they rename, group or select arrays, or order other instructions.
FREE = frozenset(
  "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id domain"
  " opt-barrier add-dependency async-update".split()
)
# Custom calls of the compiler for TPUs that move no data.
_FREE_CALLS = (
  "AllocateBuffer",
  "AssumeGatherIndicesInBound",
  "AsyncCollectiveDone",
  "AsyncCollectiveStart",
  "ConcatBitcast",
  "GatherScatterIndicesBitpacked",
  "Sharding",
  "SPMDFullToShardShape",
  "SPMDShardToFullShape",
)
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the number of the operand that is written
_RENAMES = ("bitcast", "reshape")
_VIEWS = (*_RENAMES, "convert", "copy")  # inside a fusion, they map each element to one element


def is_free(instruction: Instruction) -> bool:
  """Whether an instruction moves no data."""
  if instruction.opcode == "custom-call":
    return instruction.attribute(r'custom_call_target="([^"]*)"') in _FREE_CALLS
  return instruction.opcode in FREE or instruction.opcode.endswith("-done")


def traffic(instruction: Instruction, computation: Computation, module: Module) -> float:
  """The bytes that an instruction reads from main memory and writes to it.

  Args:
    instruction: The instruction, which is not inside a fusion.
    computation: The computation that contains the instruction and its operands.
    module: The program, which contains the computations of fusions.
  """
  if is_free(instruction):
    return 0.0
  opcode = instruction.opcode
  inputs = [computation.operand(instruction, i) for i in range(len(instruction.operands))]
  if opcode == "fusion":
    inside = module.computations[instruction.called["calls"][0]]
    reads = sum(_read_by_fusion(x, inside, number, module) for number, x in enumerate(inputs))
    return reads + _written_by_fusion(instruction, inside)
  if opcode in _SLICES:
    indices = sum(x.main_bytes for x in inputs[1:])
    return _moved(instruction.bytes, inputs[0].arrays) + instruction.main_bytes + indices
  if opcode in _UPDATES:
    update, *_ = inputs[_UPDATES[opcode]].arrays
    others = sum(x.main_bytes for x in inputs[1:])
    return others + _moved(update.bytes, instruction.arrays)
  if opcode in ("copy-start", "slice-start"):
    # ((source), destination, context) or (destination, source, context)
    part = min(array.bytes for array in instruction.arrays[:2])
    return sum(_moved(part, (array,)) for array in instruction.arrays[:2])
  # A collective reads its operands and writes its result. Some list both as results. If only the
  # result is listed, as by all-reduce-start, it is as large as the operands.
  if opcode.endswith("-start"):
    operands = sum(x.main_bytes for x in inputs)
    return max(instruction.main_bytes, 2 * operands)
  if opcode == "custom-call":
    estimate = declared(instruction, "bytes_accessed")
    if estimate:
      return estimate
  return sum(x.main_bytes for x in inputs) + instruction.main_bytes


def _read_by_fusion(
  operand: Instruction, inside: Computation, number: int, module: Module
) -> float:
  """The bytes that a fusion reads of its operand `number`: only slices if it uses only slices."""
  parameter = inside.parameters.get(number)
  if parameter is None:
    return operand.main_bytes
  sliced = _sliced(parameter, inside, module)
  return _moved(operand.bytes if sliced is None else min(sliced, operand.bytes), operand.arrays)


def _sliced(source: Instruction, inside: Computation, module: Module) -> float | None:
  """The bytes of the slices that a fusion reads of an array, or None if it reads the whole array.

  It checks each instruction that uses the array. A slice counts with its size. The users of a
  renamed or converted array are checked in turn. Any other use reads the whole array. The array is
  the result of the instruction `source` in the fusion's computation `inside`.
  """
  total = 0.0
  for user in inside.users[source.name]:
    if (user.is_root and user.opcode == "tuple") or _is_elsewhere(user, inside):
      continue  # passes the array on without reading it
    if user.opcode in _RENAMES:  # a root has no users and adds 0: it is only passed on
      further = _sliced(user, inside, module)
      if further is None:
        return None
      total += further
    elif _is_view(user, module):
      further = None if user.is_root else _sliced(user, inside, module)
      if further is None:
        return None
      total += further * source.bytes / user.bytes  # bytes in the dtype before the conversion
    elif user.opcode == "fusion":
      further = _sliced_by_fusion(source, user, module)
      if further is None:
        return None
      total += further
    elif user.operands.index(source.name) != 0 or user.operands.count(source.name) > 1:
      return None  # the array is an index or an update, which is read whole
    elif user.opcode in _SLICES:
      total += user.bytes
    elif user.opcode not in _UPDATES:  # updates write a slice into the array without reading it
      return None
  return total


def _is_view(user: Instruction, module: Module) -> bool:
  """Whether an instruction inside a fusion only renames, copies or converts its operand."""
  if user.opcode != "fusion":
    return user.opcode in _VIEWS
  inside = module.computations[user.called["calls"][0]]
  return {x.opcode for x in inside} <= {"parameter", *_VIEWS} and len(user.operands) == 1


def _sliced_by_fusion(source: Instruction, fusion: Instruction, module: Module) -> float | None:
  """`_sliced` for the array `source`, of which an inner `fusion` has one or more operands."""
  inside = module.computations[fusion.called["calls"][0]]
  total = 0.0
  for number, operand in enumerate(fusion.operands):
    parameter = inside.parameters.get(number)
    if operand != source.name or parameter is None:
      continue
    further = _sliced(parameter, inside, module)
    if further is None:
      return None
    total += further
  return total


def _written_by_fusion(instruction: Instruction, inside: Computation) -> float:
  """The bytes that a fusion writes: whole results, or only the slices that it updates in place."""
  root = inside.root
  if "AsyncCollectiveDone" in root.attributes:
    return 0.0  # the fusions that started and continued the collective wrote its result
  # The instructions that compute the results: the operands of the root if it is a tuple.
  roots = [root]
  if root.opcode == "tuple":
    roots = [inside.operand(root, i) for i in range(len(root.operands))]
  # If instructions and results do not match one to one, slices are unknown: results that alias
  # operands count 0, and all others count whole.
  if len(roots) != len(instruction.arrays):
    aliases = instruction.attribute(r"output_to_operand_aliasing=\{(.*?\))\}")
    skipped = {int(number) for number in re.findall(r"\{(\d+)\}: ", aliases)}
    return sum(x.main_bytes for i, x in enumerate(instruction.arrays) if i not in skipped)
  return sum(_moved(_written(x, inside), (to,)) for x, to in zip(roots, instruction.arrays))


def _written(root: Instruction, inside: Computation) -> float:
  """The bytes that a fusion writes for one result, which the instruction `root` computes."""
  while root.opcode in _RENAMES:
    root = inside.operand(root, 0)
  if root.opcode in _UPDATES:
    return inside.operand(root, _UPDATES[root.opcode]).bytes
  is_passed_on = root.opcode == "parameter" or _is_elsewhere(root, inside)
  return 0.0 if is_passed_on else root.bytes


def _is_elsewhere(instruction: Instruction, inside: Computation) -> bool:
  """Whether an instruction belongs to an asynchronous collective that another fusion counts."""
  if "AsyncCollectiveDone" in instruction.attributes:
    return True
  return instruction.opcode in OPCODES and not counts_here(instruction, inside)


def _moved(size: float, arrays: tuple[Array, ...]) -> float:
  """`size` bytes, scaled by the share of the arrays' bytes that are in main memory."""
  whole = math.fsum(array.bytes for array in arrays)
  return size * math.fsum(array.main_bytes for array in arrays) / whole if whole else 0.0
