"""Writes a run's policy as a Hugging Face folder, or its adapters as a PEFT folder.

python -m grpo_jax.export --workdir=DIR --out=FOLDER [--step=N] [--adapter] [--push=OWNER/NAME]
"""

from typing import TYPE_CHECKING

from absl import flags

from grpo_jax import cli
from grpo_jax.progress import doing
from grpo_jax.settings import ConfigError

if TYPE_CHECKING:
  from grpo_jax.model import ModelConfig


def main(argv: list[str]) -> None:
  """Writes the policy of the flags into the folder --out and, with --push, uploads the folder."""
  del argv
  if not flags.FLAGS.out:
    raise ConfigError("flag --out is missing: the folder to write")
  out = cli.folder_of_flag("out", flags.FLAGS.out)
  from grpo_jax.model.huggingface import hub  # here: --help and mistakes in flags need no jax

  if flags.FLAGS.push:
    hub.check_repository(flags.FLAGS.push, "flag --push")  # before the policy is loaded
  cli.join_processes()
  policy = cli.open_policy()
  shape, adapter = policy.run.parameters.model, flags.FLAGS.adapter
  if adapter and shape.lora is None:
    raise ConfigError(
      "flag --adapter: this run trained all weights and has no adapters; leave the flag out"
    )
  policy.export(out, adapter)
  all_weights = "parameters, adapters merged," if shape.lora else "parameters"
  written = "adapters" if adapter else all_weights
  print(f"{policy.name}: its {written} (float32) and the tokenizer are in {out}")
  if adapter and is_misread_by_peft(shape):
    print(
      "note: PEFT takes adapters of gate_proj, up_proj and down_proj for those of experts in most"
      " families that have some; grpo_jax reads them as they are. For PEFT, leave these out of"
      " lora.targets, or export without --adapter"
    )
  if flags.FLAGS.push and policy.run.hosts.is_first:
    with doing(f"uploading {flags.FLAGS.push}"):
      lines = hub.push(out, flags.FLAGS.push)
    print("\n".join(lines))


def is_misread_by_peft(shape: "ModelConfig") -> bool:
  """Whether PEFT 0.21 would take adapters of the MLPs beside experts for adapters of experts."""
  return bool(shape.num_experts and {"gate", "up", "down"} & {*shape.lora.targets})


if __name__ == "__main__":
  flags.DEFINE_bool("adapter", False, "write the adapters of a LoRA run alone, not merged")
  flags.DEFINE_string("out", None, "the folder to write: it must be empty or not exist yet")
  flags.DEFINE_string("push", None, "OWNER/NAME: a repository of huggingface.co to upload it to")
  cli.define_policy_flags()
  cli.run(main)
