"""Prints completions of a prompt.

python -m grpo_jax.sample --workdir=DIR --prompt='7+15-6+9=' [--n=4] [--temperature=1.0]
python -m grpo_jax.sample --workdir=DIR --question='Ann has 3 boxes of ...'
python -m grpo_jax.sample --config=configs/gsm8k.py --config.model.path=FOLDER --question='...'
"""

import dataclasses

import jax
import numpy as np
from absl import flags

from grpo_jax.data.loader import Prompts
from grpo_jax.run import cli
from grpo_jax.settings import ConfigError


def main(argv):
  del argv
  f = flags.FLAGS
  if not f.prompt and not f.question:
    raise ConfigError(
      "flag --prompt is missing: the text to complete (or --question, to be put into data.prompt)"
    )
  if f.prompt and f.question:
    raise ConfigError(
      "give --prompt or --question, not both: a question is put into data.prompt and, with data.chat, "
      "into the chat template; a prompt is given to the model as it is"
    )
  for name, value, least in (
    ("n", f.n, 1),
    ("temperature", f.temperature, 0),
    ("max_tokens", f.max_tokens, 1),
  ):
    if value is not None and value < least:
      raise ConfigError(f"flag --{name} is {value}: it must be at least {least}")
  policy = cli.open_policy()
  run, change = policy.run, {"temperature": f.temperature, "max_tokens": f.max_tokens}
  sampling = dataclasses.replace(
    run.config.sampling, **{k: v for k, v in change.items() if v is not None}
  )
  data = dataclasses.replace(run.config.data, max_prompt_tokens=2**31)
  if f.prompt:
    data = dataclasses.replace(data, prompt="{question}", chat=False)
  tokens = Prompts([{"question": f.question or f.prompt}], run.tokenizer, data).tokens[0]
  if len(tokens) + sampling.max_tokens > run.model.max_positions:
    raise ConfigError(
      f"a prompt of {len(tokens)} tokens and a completion of {sampling.max_tokens} (flag --max_tokens) "
      f"do not fit the model's {run.model.max_positions} positions"
    )
  rows = run.model.row_shards
  arrays = run.put((np.tile(tokens, (rows, 1)), np.full(rows, len(tokens), np.int32)))
  count = f.n if sampling.temperature else 1  # at temperature 0 all would be the same
  print(
    f"{policy.name}: prompt of {len(tokens)} tokens, temperature {sampling.temperature:g}",
    flush=True,
  )
  key = jax.random.fold_in(run.key("sample"), f.seed)
  out = run.fetch(
    run.sampler(sampling, count)(run.parameters.for_sampling(policy.params), *arrays, key)
  )
  for g in range(count):
    n = int(out.lengths_PG[0, g])
    end = "stopped" if out.stopped_by_PG[0, g] >= 0 else "cut off"
    print(
      f"\n--- {g + 1}: {n} token{'s' * (n != 1)}, {end}, log-prob {out.logprobs_PGT[0, g, :n].sum():.2f}"
    )
    print(run.tokenizer.decode(out.tokens_PGT[0, g, :n].tolist()))


if __name__ == "__main__":
  flags.DEFINE_string("prompt", None, "the text to complete, as the model is given it")
  flags.DEFINE_string(
    "question", None, "instead of --prompt: a problem, which data.prompt and data.chat then frame"
  )
  flags.DEFINE_integer("n", 4, "completions")
  flags.DEFINE_float(
    "temperature", None, "0 = the likeliest token each time, once (default: sampling.temperature)"
  )
  flags.DEFINE_integer("max_tokens", None, "longest completion (default: sampling.max_tokens)")
  flags.DEFINE_integer("seed", 0, "another one gives other completions")
  cli.define_policy_flags()
  cli.run(main)
