"""Says which instructions of a compiled program move the most bytes, for chips that need not exist.

  python experiments/compiled_bytes.py decode --topology=h100 [--rows=256]
  python experiments/compiled_bytes.py update --topology=h100

The model has the shape of Qwen2.5-0.5B. `decode` is one round of a chunk, with prompts of 64 tokens
and caches of 256 slots. `update` is one of 64 groups: a prompt of 64 tokens and 8 completions of
256. Each line is an instruction with how often it runs. Needs jax[cuda] or jax[tpu]. On a GPU, an
instruction is about one kernel. A copy of a large array shows here before it costs time.
"""

import argparse
from collections import defaultdict
from pathlib import Path
import re

import accelerator_model
from accelerator_parts import Part
import jax

from grpo_jax.around.planning.cost import instruction_runs
from grpo_jax.around.planning.topologies import devices_of
from grpo_jax.run.stages import programs


def stage_of(what: str, topology: str, rows: int) -> tuple[str, dict[int, float], float]:
  """The text of the compiled program, the rounds of its loops, and its temporary bytes."""
  jax.config.update("jax_platforms", "cpu")
  devices = devices_of(topology, 1)
  prompts = rows // accelerator_model.GROUP if what == "decode" else 64
  part = Part(Path(), tiny=False, device={})
  args = accelerator_model.sizes(part, accelerator_model.QWEN, prompts=prompts, plen=64, clen=256)
  run = accelerator_model.make_run(args, devices)
  name = {"decode": "sample", "update": "update"}[what]
  (program,) = [program for program in programs(run) if program.name == name]
  stage = program.stages[-1]
  rounds = dict.fromkeys(stage.rounds, 1.0) if what == "decode" else dict(stage.rounds)
  compiled = stage.lower().compile()
  return compiled.as_text(), rounds, compiled.memory_analysis().temp_size_in_bytes


def by_kind(text: str, rounds: dict[int, float]) -> tuple[dict[str, float], ...]:
  """Bytes and runs of instructions that differ in their number alone."""
  moved: dict[str, float] = defaultdict(float)
  runs: dict[str, float] = defaultdict(float)
  for each in instruction_runs(text, rounds):
    stem = re.sub(r"(\.\d+)*(\.clone)*$", "", each.instruction.name)
    shapes = ", ".join(f"{x.dtype}{list(x.dims)}" for x in each.instruction.arrays[:2])
    moved[f"{stem}  {shapes}"] += each.times * each.memory_bytes
    runs[f"{stem}  {shapes}"] += each.times
  return moved, runs


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("what", choices=("decode", "update"))
  parser.add_argument("--topology", default="h100", help="as for grpo_jax.plan")
  parser.add_argument("--rows", type=int, default=256, help="that are decoded")
  parser.add_argument("--most", type=int, default=30, help="lines")
  args = parser.parse_args()
  text, rounds, temporary = stage_of(args.what, args.topology, args.rows)
  moved, runs = by_kind(text, rounds)
  whole = sum(moved.values())
  print(
    f"{whole / 1e9:,.2f} GB, {sum(runs.values()):,.0f} instructions, {temporary:,} temporary bytes"
  )
  for name in sorted(moved, key=moved.__getitem__, reverse=True)[: args.most]:
    size = moved[name]
    print(
      f"{size / 1e9:9.2f} GB {runs[name]:8.0f} x {size / runs[name] / 1e6:10.2f} MB  {name:.90}"
    )


if __name__ == "__main__":
  main()
