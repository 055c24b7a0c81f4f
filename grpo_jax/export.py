"""Writes a run's policy as a Hugging Face folder that `transformers` loads; or its adapters, as one that `peft` does.

python -m grpo_jax.export --workdir=DIR --out=FOLDER [--step=N] [--adapter]
"""

from pathlib import Path

from absl import flags

from grpo_jax import model
from grpo_jax.model import hub
from grpo_jax.run import cli
from grpo_jax.settings import ConfigError


def main(argv):
  del argv
  if not flags.FLAGS.out:
    raise ConfigError("flag --out is missing: the folder to write")
  out = Path(flags.FLAGS.out).expanduser()
  policy = cli.open_policy()
  shape, params = policy.run.model, policy.params
  if flags.FLAGS.adapter:
    if shape.lora is None:
      raise ConfigError(
        "flag --adapter: this run trained all weights, it has no adapters; leave the flag out"
      )
    model.save_adapters(out, shape, params, *hub.parts(policy.run.config.model.path))
  else:
    model.save(out, shape, policy.run.parameters.policy(params))
  policy.run.tokenizer.save(out)
  what = (
    "adapters"
    if flags.FLAGS.adapter
    else "parameters, adapters merged,"
    if shape.lora
    else "parameters"
  )
  print(f"{policy.name}: its {what} (float32) and the tokenizer are in {out}")


if __name__ == "__main__":
  flags.DEFINE_bool(
    "adapter", False, "of a run with lora.rank: the adapters alone, as PEFT saves them, not merged"
  )
  flags.DEFINE_string("out", None, "the folder to write; either empty or not there yet")
  cli.define_policy_flags()
  cli.run(main)
