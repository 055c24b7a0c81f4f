"""Prints completions of a prompt.

  python -m grpo_jax.sample --workdir=DIR --prompt='7+15-6+9=' [--n=4] [--temperature=1.0] [--max_tokens=64]
  python -m grpo_jax.sample --config=configs/gsm8k.py --config.model.path=FOLDER --prompt='...'
"""
import dataclasses

import jax
import numpy as np
from absl import flags

from grpo_jax import cli
from grpo_jax.config import ConfigError


def main(argv):
  del argv
  f = flags.FLAGS
  if not f.prompt:
    raise ConfigError("flag --prompt is missing: the text to complete")
  if f.n < 1:
    raise ConfigError(f"flag --n is {f.n}: it must be at least 1")
  change = {k: v for k, v in (("temperature", f.temperature), ("max_tokens", f.max_tokens)) if v is not None}
  policy = cli.open_policy()
  run = policy.run
  tokens = run.tokenizer.encode(f.prompt)
  rows = run.mesh.shape["data"] * run.mesh.shape["fsdp"]
  prompts_PS = np.repeat(np.array(tokens, np.int32)[None], rows, axis=0)
  arrays = run.put((prompts_PS, np.full(rows, len(tokens), np.int32)))
  sampler = run.sampler(dataclasses.replace(run.config.sampling, **change), f.n)
  key = jax.random.fold_in(run.key("sample"), f.seed)
  out = run.fetch(sampler(run.sampling_params(policy.params), *arrays, key))
  print(f"{policy.name}, prompt of {len(tokens)} tokens")
  for g in range(f.n):
    n = out.lengths_PG[0, g]
    end = "stopped" if out.stopped_by_PG[0, g] >= 0 else "cut off"
    print(f"\n--- {g + 1}: {n} tokens, {end}, log-prob {out.logprobs_PGT[0, g, :n].sum():.2f}")
    print(run.tokenizer.decode(out.tokens_PGT[0, g, :n].tolist()))


if __name__ == "__main__":
  flags.DEFINE_string("prompt", None, "the text to complete, as the model is given it")
  flags.DEFINE_integer("n", 4, "completions")
  flags.DEFINE_float("temperature", None, "0 = the likeliest token (default: sampling.temperature)")
  flags.DEFINE_integer("max_tokens", None, "longest completion (default: sampling.max_tokens)")
  flags.DEFINE_integer("seed", 0, "another one gives other completions")
  cli.define_policy_flags()
  cli.run(main)
