"""Prints completions of a prompt.

python -m grpo_jax.sample --workdir=DIR --prompt='7+15-6+9=' [--n=4] [--temperature=1.0]
python -m grpo_jax.sample --workdir=DIR --question='Ann has 3 boxes of ...'
python -m grpo_jax.sample --config=configs/gsm8k.py --config.model.path=FOLDER --question='...'
python -m grpo_jax.sample --workdir=DIR --question='What is it?' --image=FILE [--image=FILE2]
"""

import json
import sys
from typing import TYPE_CHECKING

from absl import flags

from grpo_jax import cli
from grpo_jax.console.text import visible
from grpo_jax.environments.returned import as_text
from grpo_jax.evaluation.limits import check_numbers
from grpo_jax.settings import ConfigError, is_text

if TYPE_CHECKING:
  from grpo_jax.evaluation.policy import Completion


def main(argv: list[str]) -> None:
  """Samples completions of the prompt or question of the flags, and prints them."""
  del argv
  values = flags.FLAGS
  _check_flags()
  cli.join_processes()
  policy = cli.open_policy()
  sampling = policy.run.config.sampling
  temperature = sampling.temperature if values.temperature is None else values.temperature
  max_tokens = sampling.max_tokens if values.max_tokens is None else values.max_tokens
  prompt = policy.prompt(
    values.question or values.prompt, framed=bool(values.question), images=values.image
  )
  length = int(prompt.prompt_lengths_P[0])
  print(f"{policy.name}: prompt of {length} tokens, temperature {temperature:g}", flush=True)
  if values.prompt and policy.run.config.data.chat:
    print(
      "the prompt is sent as it is, without the chat template of data.chat: --question uses it",
      flush=True,
    )
  _print(policy.complete(prompt, values.n, temperature, max_tokens, values.seed))


def printable(text: str, on_terminal: bool) -> str:
  """Makes the text of a completion safe to print.

  On a terminal, control characters other than newlines become escapes, because the text of a model
  could otherwise control the terminal. A file gets the text unchanged.
  """
  return "\n".join(map(visible, text.split("\n"))) if on_terminal else text


def _check_flags() -> None:
  """Raises ConfigError unless --prompt or --question is set, and the numbers are in range."""
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
  names = ("n", "temperature", "max_tokens", "seed", "step")
  check_numbers({name: values[name].value for name in names}, "flag --")
  text = values.prompt or values.question
  if not is_text(text):
    raise ConfigError("flag --prompt or --question: it is not text in UTF-8")


def _print(completions: list["Completion"]) -> None:
  """Prints a header for each completion, and its turns or its text."""
  for number, completion in enumerate(completions, start=1):
    tokens = "token" if completion.length == 1 else "tokens"
    end = "stopped" if completion.stopped else "cut off"
    print(f"\n--- {number}: {completion.length} {tokens}, {end}, log-prob {completion.logprob:.2f}")
    for turn in completion.turns:
      calls = [
        json.dumps(one["function"], ensure_ascii=False) for one in turn.get("tool_calls", ())
      ]
      text = "\n".join([as_text(turn["content"]), *calls])
      print(f"[{turn['role']}] {printable(text, sys.stdout.isatty())}")
    if not completion.turns:
      print(printable(completion.text, sys.stdout.isatty()))


if __name__ == "__main__":
  flags.DEFINE_string("prompt", None, "the text to complete, as the model reads it")
  flags.DEFINE_string(
    "question", None, "a problem, for the field of data.prompt and for the chat template"
  )
  flags.DEFINE_multi_string("image", [], "an image of the prompt; give it again for another one")
  flags.DEFINE_integer("n", 4, "how many completions")
  flags.DEFINE_float(
    "temperature", None, "0 takes the likeliest token (default: sampling.temperature)"
  )
  flags.DEFINE_integer("max_tokens", None, "longest completion (default: sampling.max_tokens)")
  flags.DEFINE_integer("seed", 0, "another seed gives other completions")
  cli.define_policy_flags()
  cli.run(main)
