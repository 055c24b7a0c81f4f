"""Writes a run's policy as a Hugging Face folder that `transformers` loads.

  python -m grpo_jax.export --workdir=DIR --out=FOLDER [--step=N]
"""
from pathlib import Path

import jax
from absl import flags

from grpo_jax import cli, model
from grpo_jax.config import ConfigError


def main(argv):
  del argv
  if not flags.FLAGS.out:
    raise ConfigError("flag --out is missing: the folder to write")
  out = Path(flags.FLAGS.out).expanduser()
  policy = cli.open_policy()
  model.save(out, policy.run.model, policy.params)
  policy.run.tokenizer.save(out)
  count = sum(x.size for x in jax.tree.leaves(policy.params))
  print(f"{policy.name}: {count:,} parameters (float32) and the tokenizer are in {out}")


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "the folder to write; either empty or not there yet")
  cli.define_policy_flags()
  cli.run(main)
