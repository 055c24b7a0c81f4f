"""Prints what an update sends over a mesh, for several sizes of micro-batches.

python experiments/gradients_sent.py --topology=v5e:2x2
  A small model on four devices, which need not exist: by the compiler of jax[tpu]. `cpu:4` are
  simulated devices of this machine. With data alone, gradients should travel once.
"""

import argparse

import jax

from grpo_jax.around.planning.phases import compiled
from grpo_jax.around.planning.plan import run_of
from grpo_jax.around.planning.topologies import devices_of
from grpo_jax.config import from_dict
from grpo_jax.configs import default
from grpo_jax.run.stages import programs

MESHES = (dict(data=4, fsdp=1), dict(data=2, fsdp=2), dict(data=1, fsdp=4))


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--topology", required=True)
  args = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")
  devices = devices_of(args.topology, None)[:4]
  for mesh in MESHES:
    for prompts in (4, 8, 16):
      c = default.get_config()
      c.mesh.update(mesh)
      c.model.update(embed_dim=512, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=128)
      c.model.update(mlp_dim=2048, dtype="bfloat16")
      c.batch.update(prompts=16, group_size=4, micro_batch=prompts)
      c.data.max_prompt_tokens, c.sampling.max_tokens = 128, 256
      c.warm_start.steps = c.eval.every = 0
      run = run_of(from_dict(c.to_dict()), devices)
      (update,) = [program for program in programs(run) if program.name == "update"]
      sent = compiled(update).counted.whole.link_bytes
      print(f"{mesh}, {prompts} of 16 prompts at once: {sent / 1e6:.1f} MB sent by a device")


if __name__ == "__main__":
  main()
