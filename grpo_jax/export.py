"""Writes a run's policy as a Hugging Face folder that `transformers` loads.

  python -m grpo_jax.export --workdir=DIR --out=FOLDER [--step=N]
"""
from absl import flags

from grpo_jax import cli, model
from grpo_jax.config import ConfigError


def main(argv):
  del argv
  out = flags.FLAGS.out
  if not out:
    raise ConfigError("flag --out is missing: the folder to write")
  policy = cli.open_policy()
  model.save(out, policy.run.model, policy.params)
  policy.run.tokenizer.save(out)
  print(f"{policy.name} -> {out}")


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "the folder to write; it must not exist or be empty")
  cli.define_policy_flags()
  cli.run(main)
