"""Writes a run's policy as a Hugging Face folder, or its adapters as a PEFT folder.

python -m grpo_jax.export --workdir=DIR --out=FOLDER [--step=N] [--adapter]
"""

import contextlib

from absl import flags

from grpo_jax import model
from grpo_jax.model import hub
from grpo_jax.model.folders import new_folder
from grpo_jax.run import cli
from grpo_jax.settings import ConfigError


def main(argv: list[str]) -> None:
  del argv
  if not flags.FLAGS.out:
    raise ConfigError("flag --out is missing: the folder to write")
  out = cli.folder_of_flag("out", flags.FLAGS.out)
  cli.join_processes()
  policy = cli.open_policy()
  parameters = policy.run.parameters
  shape = parameters.model
  if flags.FLAGS.adapter and shape.lora is None:
    raise ConfigError(
      "flag --adapter: this run trained all weights and has no adapters; leave the flag out"
    )
  hosts = policy.run.hosts
  # `out` appears when the weights and the tokenizer are both in it.
  with new_folder(out) if hosts.is_first else contextlib.nullcontext() as folder:
    if flags.FLAGS.adapter:
      base, revision = hub.parts(policy.run.config.model.path)
      model.save_adapters(folder, shape, policy.params, base, revision, hosts.fetch)
      written = "adapters"
    else:
      model.save(folder, shape, parameters.policy(policy.params), hosts.fetch)
      written = "parameters, adapters merged," if shape.lora else "parameters"
    if folder is not None:
      policy.run.tokenizer.save(folder)
  print(f"{policy.name}: its {written} (float32) and the tokenizer are in {out}")


if __name__ == "__main__":
  flags.DEFINE_bool("adapter", False, "write the adapters of a LoRA run alone, not merged")
  flags.DEFINE_string("out", None, "the folder to write: it must be empty or not exist yet")
  cli.define_policy_flags()
  cli.run(main)
