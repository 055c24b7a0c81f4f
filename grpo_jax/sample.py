"""Prints completions of a prompt.

python -m grpo_jax.sample --workdir=DIR --prompt='7+15-6+9=' [--n=4] [--temperature=1.0]
python -m grpo_jax.sample --workdir=DIR --question='Ann has 3 boxes of ...'
python -m grpo_jax.sample --config=configs/gsm8k.py --config.model.path=FOLDER --question='...'
"""

import dataclasses
import sys

from absl import flags
import jax
import numpy as np

from grpo_jax.data.loader import PromptBatch, prompt_batch
from grpo_jax.data.prompts import Prompts
from grpo_jax.run import cli
from grpo_jax.run.build import Run
from grpo_jax.run.rollout import Rollouts
from grpo_jax.run.terminal_text import visible
from grpo_jax.settings import LARGEST_INT, SMALLEST_FLOAT, ConfigError, is_text, shown


def main(argv: list[str]) -> None:
  del argv
  values = flags.FLAGS
  _check_flags()
  cli.join_processes()
  policy = cli.open_policy()
  run, sampling = policy.run, policy.run.config.sampling
  temperature = sampling.temperature if values.temperature is None else values.temperature
  max_tokens = sampling.max_tokens if values.max_tokens is None else values.max_tokens
  prompts = _prompts(run)
  length = int(prompts.prompt_lengths_P[0])
  if length + max_tokens > run.parameters.model.max_positions:
    raise ConfigError(
      f"a prompt of {length} tokens and a completion of {max_tokens} (flag --max_tokens) do not fit"
      f" the model's {run.parameters.model.max_positions} positions"
    )
  greedy = temperature == 0
  count = 1 if greedy else values.n  # greedy completions would all be the same
  print(f"{policy.name}: prompt of {length} tokens, temperature {temperature:g}", flush=True)
  rollout = run.rollout(count, greedy, max_tokens)
  key = jax.random.fold_in(run.key("sample"), values.seed)
  params = run.parameters.for_sampling(policy.params)
  _print(rollout(params, prompts, key, temperature), count)


def printable(text: str, on_terminal: bool) -> str:
  """A completion as it is printed.

  On a terminal, control characters other than newlines become escapes, because a model's text could
  otherwise steer it. A file gets the text as it is.
  """
  return "\n".join(map(visible, text.split("\n"))) if on_terminal else text


def _check_flags() -> None:
  values = flags.FLAGS
  if not values.prompt and not values.question:
    raise ConfigError(
      "flag --prompt is missing: the text to complete (or --question, to be put into data.prompt)"
    )
  if values.prompt and values.question:
    raise ConfigError(
      "give --prompt or --question, not both: a question is put into data.prompt and, with"
      " data.chat, into the chat template; a prompt goes to the model as it is"
    )
  for name, least, most in (
    ("n", 1, 2**16),
    ("temperature", 0, 1000),
    ("max_tokens", 1, LARGEST_INT),
    ("seed", -LARGEST_INT, LARGEST_INT),
    ("step", 0, LARGEST_INT),
  ):
    value = values[name].value
    if value is not None and not least <= value <= most:  # NaN is refused, too
      raise ConfigError(
        f"flag --{name} is {shown(value)}: it must be at least {least} and at most {most}"
      )
  if values.temperature and values.temperature < SMALLEST_FLOAT:
    raise ConfigError(f"flag --temperature is {values.temperature}: for the likeliest token set 0")
  text = values.prompt or values.question
  if not is_text(text):
    raise ConfigError("flag --prompt or --question: it is not text in UTF-8")


def _prompts(run: Run) -> PromptBatch:
  """The prompt of the flags, once for each part of a batch that the mesh makes."""
  text = flags.FLAGS.question or flags.FLAGS.prompt
  data = dataclasses.replace(run.config.data, max_prompt_tokens=2**31)
  if flags.FLAGS.prompt:
    data = dataclasses.replace(data, prompt="{question}", chat=False)
  prompts = Prompts([{"question": text}], run.tokenizer, data)
  prompts.max_tokens = len(prompts.make([0])[0].ids)
  return prompt_batch(prompts, np.zeros(run.hosts.row_shards, int), run.hosts)


def _print(rollouts: Rollouts, count: int) -> None:
  completions = rollouts.completions
  for g in range(count):
    length = int(completions.lengths_PG[0, g])
    tokens = "token" if length == 1 else "tokens"
    end = "stopped" if completions.stopped_by_PG[0, g] >= 0 else "cut off"
    logprob = completions.logprobs_PGT[0, g].sum()
    print(f"\n--- {g + 1}: {length} {tokens}, {end}, log-prob {logprob:.2f}")
    print(printable(rollouts.texts_PG[0, g], sys.stdout.isatty()))


if __name__ == "__main__":
  flags.DEFINE_string("prompt", None, "the text to complete, as the model reads it")
  flags.DEFINE_string("question", None, "a problem, which data.prompt and data.chat then frame")
  flags.DEFINE_integer("n", 4, "how many completions")
  flags.DEFINE_float(
    "temperature", None, "0 takes the likeliest token (default: sampling.temperature)"
  )
  flags.DEFINE_integer("max_tokens", None, "longest completion (default: sampling.max_tokens)")
  flags.DEFINE_integer("seed", 0, "another seed gives other completions")
  cli.define_policy_flags()
  cli.run(main)
