"""Counts the bytes that one device sends to others in collectives with ring algorithms.

In an all-gather, a reduce-scatter or an all-to-all, each of n devices sends (n - 1) / n of the
whole array. An all-reduce is a reduce-scatter and an all-gather, so it sends twice as much.
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009.)
"""

import math
import re

from grpo_jax.around.planning.cost.hlo import Computation, Instruction

_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Opcodes whose instruction sends bytes. The matching -done instruction sends none.
OPCODES = frozenset((*_COLLECTIVES, *(f"{name}-start" for name in _COLLECTIVES)))


def link_bytes(instruction: Instruction, computation: Computation, devices: int) -> float:
  """The bytes that a device sends in one collective.

  Args:
    instruction: The collective, whose opcode is in OPCODES.
    computation: The computation that contains the instruction.
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
    # The operand is one device's shard. The whole array has n shards.
    return operands * n * share
  # The compiler for TPUs writes a reduce-scatter as an all-reduce in a fusion of this name.
  if kind == "all-reduce" and not computation.name.startswith("all-reduce-scatter"):
    return 2 * operands * share
  return operands * share


def counts_here(instruction: Instruction, computation: Computation) -> bool:
  """Whether to count a collective in the fusion `computation` that contains it.

  The compiler for TPUs splits an asynchronous collective into a fusion that starts it, fusions that
  continue it and one that ends it. Each contains the collective with the same chain_id, so only
  the first one counts.
  """
  if not instruction.attribute(r'chain_id="(\d+)"'):
    return True
  return any("AsyncCollectiveStart" in x.attributes for x in computation)


def _group_size(instruction: Instruction, devices: int) -> int:
  """The size of a collective's groups, written as mesh axes, as [2,4]<=[8] or as {{0,1},{2,3}}."""
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
