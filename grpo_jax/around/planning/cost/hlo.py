"""Parses XLA's text of an optimized program: computations, instructions and shapes of arrays."""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import math
import re

_BITS = {"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "bf16": 16, "c64": 64, "c128": 128}
_LEAF = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%[\w.\-]+)")
_COMMENT = re.compile(r"/\*.*?\*/")  # XLA numbers the parts of a long tuple: /*index=5*/


@dataclasses.dataclass(frozen=True)
class Array:
  """The shape and memory space of one array.

  Attributes:
    dtype: XLA's name of the dtype, such as bf16.
    dims: The length of each dimension.
    space: The memory space of the array. 0 is the device's main memory. A TPU has faster memories
      on the chip.
  """

  dtype: str
  dims: tuple[int, ...]
  space: int = 0

  @property
  def bytes(self) -> float:
    """The bytes of the array, without padding."""
    bits = _BITS.get(self.dtype)
    if bits is None:
      digits = re.match(r"[a-z]+(\d+)", self.dtype)
      bits = int(digits[1]) if digits else 0  # a token or an opaque value
    return math.prod(self.dims) * bits / 8

  @property
  def main_bytes(self) -> float:
    """The bytes of the array if it is in the device's main memory, else 0."""
    return self.bytes if self.space == 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction.

  Attributes:
    name: The unique name of the instruction.
    opcode: The name of the operation, such as `fusion`.
    arrays: The results: one array, or the leaves of a tuple in their order.
    operands: The names of the instructions whose results are the operands.
    inputs: The text between the parentheses, such as the value of a constant.
    attributes: The text after the parentheses.
    is_root: Whether its result is the result of its computation.
  """

  name: str
  opcode: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  inputs: str
  attributes: str
  is_root: bool

  @property
  def bytes(self) -> float:
    """The bytes of all results."""
    return sum(array.bytes for array in self.arrays)

  @property
  def main_bytes(self) -> float:
    """The bytes of the results that are in the device's main memory."""
    return sum(array.main_bytes for array in self.arrays)

  @functools.cached_property
  def called(self) -> dict[str, tuple[str, ...]]:
    """The names of the called computations by attribute, such as {"body": ("region_1",)}."""
    return {key: tuple(_NAME.findall(names)) for key, names in _CALLED.findall(self.attributes)}

  def attribute(self, pattern: str) -> str:
    """The first group of the first match of a pattern in the attributes, "" without a match."""
    found = re.search(pattern, self.attributes)
    return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
  """A computation. `instructions` holds them by name, in the order in which they run."""

  name: str
  instructions: Mapping[str, Instruction]

  def __iter__(self) -> Iterator[Instruction]:
    return iter(self.instructions.values())

  @property
  def root(self) -> Instruction:
    """The instruction whose result is the result of the computation."""
    *_, last = [x for x in self if x.is_root] or list(self)
    return last

  @functools.cached_property
  def parameters(self) -> dict[int, Instruction]:
    """The parameters by their index."""
    return {int(x.inputs): x for x in self if x.opcode == "parameter"}

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    """The instructions that use each instruction's result, by the name of the latter."""
    users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
    for instruction in self:
      for name in set(instruction.operands):
        users.setdefault(name, []).append(instruction)
    return users

  def operand(self, instruction: Instruction, number: int) -> Instruction:
    """The instruction whose result is operand `number` of another instruction."""
    return self.instructions[instruction.operands[number]]


@dataclasses.dataclass(frozen=True)
class Module:
  """A program: all computations by name, the name of the first, and how many devices run it."""

  computations: Mapping[str, Computation]
  entry: str
  devices: int


def parse(text: str) -> Module:
  """Parses the text that `compiled.as_text()` returns."""
  text = _COMMENT.sub("", text)
  computations: dict[str, Computation] = {}
  entry = ""
  instructions: dict[str, Instruction] = {}
  for line in text.split("\n"):
    start = _COMPUTATION.match(line)
    if start:
      instructions = {}
      computations[start[2]] = Computation(start[2], instructions)
      entry = start[2] if start[1] else entry
    elif _INSTRUCTION.match(line):
      instruction = _instruction(line)
      instructions[instruction.name] = instruction
  header = text.split("\n", 1)[0]
  counts = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", header)
  return Module(computations, entry, math.prod(map(int, counts)))


def _instruction(line: str) -> Instruction:
  """Parses a line such as `ROOT %add.3 = f32[8]{0} add(%x, %y), metadata={...}`."""
  start = _INSTRUCTION.match(line)
  rest = line[start.end() :]
  end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
  shape, rest = rest[:end], rest[end:].lstrip()
  opcode, _, _ = rest.partition("(")
  rest = rest[len(opcode) :]
  if opcode == "fusion-start":  # asynchronous fusion on a GPU, of shape (inputs, output, context)
    opcode, shape = "fusion", shape[_closing(shape[1:]) + 2 : shape.rindex(",")]
  end = _closing(rest)
  inputs, attributes = rest[1:end], rest[end + 1 :]
  operands = () if opcode == "constant" else tuple(_NAME.findall(inputs))
  return Instruction(start[2], opcode, _arrays(shape), operands, inputs, attributes, bool(start[1]))


@functools.lru_cache(maxsize=4096)
def _arrays(shape: str) -> tuple[Array, ...]:
  """Parses the leaves of a shape such as (f32[2,3]{1,0}, s32[])."""
  arrays = []
  for dtype, dims, layout in _LEAF.findall(shape):
    sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)
    space = re.search(r"S\((\d+)\)", layout)
    arrays.append(Array(dtype, sizes, int(space[1]) if space else 0))
  return tuple(arrays)


def _closing(text: str) -> int:
  """The index of the parenthesis that closes the parenthesis at index 0."""
  depth = 0
  for match in re.finditer(r"[()]", text):
    depth += 1 if match[0] == "(" else -1
    if depth == 0:
      return match.start()
  raise ValueError(f"unbalanced parentheses: {text:.80}")
