"""Bytes that one device sends to others, with the algorithms of a ring.

Of n devices, each sends (n - 1) / n of the whole array in an all-gather, a reduce-scatter and an
all-to-all, and twice that in an all-reduce, which is a reduce-scatter and an all-gather. (Patarasuk
and Yuan, "Bandwidth optimal all-reduce algorithms", 2009.)
"""

import math
import re

from grpo_jax.around.planning.cost.hlo import Computation, Instruction

_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Opcodes whose instruction sends bytes. The matching -done instruction sends none.
OPCODES = frozenset((*_COLLECTIVES, *(f"{name}-start" for name in _COLLECTIVES)))


def link_bytes(instruction: Instruction, computation: Computation, devices: int) -> float:
  """The bytes that a device sends for one collective, by the shares at the top of this file.

  Args:
    instruction: The collective, whose opcode is in OPCODES.
    computation: The computation that the instruction stands in.
    devices: How many devices run the program.
  """
  kind = instruction.opcode.removesuffix("-start")
  operands = sum(
    computation.operand(instruction, i).bytes for i in range(len(instruction.operands))
  )
  if kind == "collective-permute":
    return operands
  n = _group_size(instruction, devices)
  share = (n - 1) / n
  if kind == "all-gather":
    # An operand is one device's part, and the whole array is n of them.
    return operands * n * share
  # The compiler for TPUs writes a reduce-scatter as an all-reduce in a fusion of this name.
  if kind == "all-reduce" and not computation.name.startswith("all-reduce-scatter"):
    return 2 * operands * share
  return operands * share


def counts_here(instruction: Instruction, computation: Computation) -> bool:
  """Whether a collective inside a fusion is counted there.

  The compiler for TPUs cuts an asynchronous collective into a fusion that starts it, fusions that
  continue it and one that ends it. All hold the collective, with a number of their chain. Only the
  first is counted.
  """
  if not instruction.attribute(r'chain_id="(\d+)"'):
    return True
  return any("AsyncCollectiveStart" in x.attributes for x in computation)


def _group_size(instruction: Instruction, devices: int) -> int:
  """How many devices exchange with each other."""
  mesh = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", instruction.attributes)
  if mesh:
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh[1]))
    axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])
    return math.prod(int(part or sizes[axis]) for axis, part in axes)
  iota = instruction.attribute(r"replica_groups=\[\d+,(\d+)\]<=")
  if iota:
    return int(iota)
  first = instruction.attribute(r"replica_groups=\{\{([\d,]+)\}")
  return len(first.split(",")) if first else devices
