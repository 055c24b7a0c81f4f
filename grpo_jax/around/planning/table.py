"""Formats a plan: tables of the memory and the work of one device."""

from collections.abc import Sequence

from grpo_jax.around.planning.phases import Phase, seconds_by_limit
from grpo_jax.console.text import shorten
from grpo_jax.parallel.chips import Chip

_WIDTH = 100
_UNKNOWN = "-"
_DOUBTS = (
  "Not known: fragmentation of the memory at run time, arrays of reward models, and work between",
  "the programs. Times are bounds from peaks. Decode loops count as if no completion ended early.",
)


def memory_table(phases: Sequence[Phase]) -> list[str]:
  """The memory of one device in each phase, in GB. Omits kinds below 5 MB in all phases."""
  kinds = list(dict.fromkeys(kind for phase in phases for kind in phase.memory))
  rows = [["GB on one device", *(phase.name for phase in phases)]]
  for kind in kinds:
    sizes = [phase.memory.get(kind, 0.0) for phase in phases]
    if any(size >= 5e6 for size in sizes):
      rows.append([kind, *(_number(size / 1e9) if size else "" for size in sizes)])
  totals = [_UNKNOWN if phase.failure else _number(phase.total / 1e9) for phase in phases]
  return columns([*rows, ["total", *totals]])


def work_table(phases: Sequence[Phase], chip: Chip | None) -> list[str]:
  """The work of one device in a run of each program, and its least times if the chip is known."""
  header = ["one run", "a step", "TFLOP", "memory GB", "links GB"]
  header += ["compute s", "memory s", "links s", "limit", "compile s"]
  rows = [header]
  for phase in phases:
    seconds = _number(phase.compile_seconds, 1)
    if phase.counted is None:
      rows.append([phase.name, phase.runs, *[_UNKNOWN] * 7, seconds])  # 3 amounts, 4 bounds
      continue
    done = phase.counted.whole
    amounts = (done.flops / 1e12, done.memory_bytes / 1e9, done.link_bytes / 1e9)
    bounds = [_UNKNOWN] * 4
    if chip is not None:
      limits = seconds_by_limit(done, chip)
      bounds = [*map(_short, limits.values()), max(limits, key=limits.__getitem__)]
    rows.append([phase.name, phase.runs, *map(_short, amounts), *bounds, seconds])
  return columns(rows)


def token_lines(phases: Sequence[Phase], chip: Chip | None) -> list[str]:
  """A line for each program that decodes: its mean work in a round, if no completion ends early."""
  lines = []
  for phase in phases:
    if phase.counted is None or not phase.tokens:
      continue
    done = phase.counted.open_loops * (1 / phase.tokens)  # a round of the decoding loop
    line = (
      f"{phase.name}, each of {phase.tokens} rounds: {_short(done.flops / 1e9)} GFLOP,"
      f" {_short(done.memory_bytes / 1e6)} MB memory, {_short(done.link_bytes / 1e6)} MB links"
    )
    if chip is not None:
      limits = seconds_by_limit(done, chip)
      slowest = max(limits, key=limits.__getitem__)
      line += f": at least {_short(limits[slowest] * 1e3)} ms ({slowest})"
    lines.append(line)
  return lines


def step_lines(phases: Sequence[Phase], chip: Chip | None, is_beside: bool = False) -> list[str]:
  """A line with a lower bound on a step's time, or [] if the chip or a program's work is unknown.

  `is_beside` means that separate devices sample while the others learn.
  """
  if chip is None or any(phase.failure for phase in phases):
    return []
  sampling = learning = 0.0
  for phase in phases:
    if not phase.runs.isdecimal():  # does not run in every step
      continue
    seconds = int(phase.runs) * max(seconds_by_limit(phase.counted.whole, chip).values())
    if phase.tokens:
      sampling += seconds
    else:
      learning += seconds
  seconds = max(sampling, learning) if is_beside else sampling + learning
  return [f"a step without evaluation takes at least {_short(seconds)} s"]


def notes(phases: Sequence[Phase]) -> list[str]:
  """Lines about work that could not be compiled or counted, and about costs that no plan knows."""
  lines = []
  for phase in phases:
    if phase.failure:
      lines.append(f"{phase.name} cannot be compiled: {phase.failure}")
    elif phase.counted is not None:
      lines += [f"{phase.name}: {note}" for note in phase.counted.notes]
    if phase.host_bytes:
      size = _number(phase.host_bytes / 1e9)
      lines.append(f"{phase.name}: {size} GB of each device's activations lie in the host's memory")
  return [*(shorten(line, 3 * _WIDTH) for line in lines), *_DOUBTS]


def verdict(phases: Sequence[Phase], memory: float | None) -> str:
  """A line that says whether the phase with the most memory fits on a device.

  Args:
    phases: All phases.
    memory: The memory of one device in bytes, or None if it is not known.
  """
  most = max(phases, key=lambda phase: phase.total)
  size = "" if memory is None else f"{memory / 1e9:,.2f} GB"
  if most.failure:  # counts as infinite memory, of which nothing can be said in numbers
    return f"does not fit: {most.name} needs more than one device has{size and f', {size}'}"
  needs = f"{most.name} needs {most.total / 1e9:,.2f} GB"
  if memory is None:
    return f"the memory of this device is not known; {needs}"
  fits = "fits" if most.total <= memory else "does not fit"
  return f"{fits}: {needs} of {size}, {most.total / memory:.0%}"


def _number(value: float, digits: int = 2) -> str:
  return f"{value:,.{digits}f}"


def _short(value: float) -> str:
  """Three significant digits, or all digits before the decimal point if there are more."""
  return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
  """Formats rows of cells as lines. Aligns the first column left and the others right."""
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  first, *others = widths
  return [
    "  ".join([row[0].ljust(first), *(x.rjust(width) for x, width in zip(row[1:], others))])
    for row in rows
  ]
