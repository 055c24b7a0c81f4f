"""Measures what speculative decoding could gain, from the completions of runs.

  python experiments/speculation.py tokens WORKDIR          # tokens for each pass of the model
  python experiments/speculation.py cost --model=FOLDER     # what a pass of several tokens costs

A drafter proposes the next k tokens, and one pass of the model checks all of them. The rule of
Leviathan (2211.17192) accepts a proposed token with the probability that the model gives it. The
token that a run drew next was drawn with just this probability. So the share of proposals that
equal it is the share that would be accepted, and no model is needed to measure it.

Two drafters need no second model. `prompt lookup` looks for the last n tokens earlier in the prompt
and the completion, and proposes what followed there. `last epoch` takes the completion that the
same prompt had before: it looks for the last n tokens there. A pass yields one token and those that
were accepted, so speculation gains if there are more of them than a pass of k + 1 tokens costs.
"""

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
from pathlib import Path
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

import grpo_jax
from grpo_jax import model

Ids = Sequence[int]
LENGTHS = (1, 2, 4, 8)  # k
MATCHES = (3, 2, 1)  # the longest match counts
PROMPT_TOKENS = 128


def proposal(context: Ids, source: Ids, k: int) -> Ids:
  """The k tokens that followed in `source` the last time that it had the end of `context`."""
  for n in MATCHES:
    end = tuple(context[-n:])
    for start in range(len(source) - n - 1, -1, -1):
      if tuple(source[start : start + n]) == end:
        return source[start + n : start + n + k]
  return ()


def passes(prompt: Ids, completion: Ids, before: Ids | None, k: int) -> int:
  """The passes that draw a completion. `before` is what to look in, or None for the row itself."""
  done = count = 0
  while done < len(completion):
    context = [*prompt, *completion[:done]]
    proposed = proposal(context, context if before is None else before, k)
    count += 1
    for token in proposed:
      if done == len(completion) or token != completion[done]:
        break
      done += 1
    done += 1  # the model draws the token after those that were accepted
  return count


def tokens(workdir: Path) -> Iterator[str]:
  """A line for each drafter and k."""
  earlier: dict[tuple[int, ...], Ids] = {}
  looked: list[tuple[Ids, Ids, Ids | None]] = []
  for step in grpo_jax.completion_steps(workdir):
    drawn: dict[tuple[int, ...], Ids] = {}
    for row in grpo_jax.read_completions(workdir, step):
      prompt, completion = tuple(row["prompt_ids"]), row["completion_ids"]
      looked.append((prompt, completion, earlier.get(prompt)))
      drawn[prompt] = completion
    earlier.update(drawn)
  again = [row for row in looked if row[2] is not None]
  lengths = [len(completion) for _, completion, _ in looked]
  yield f"{len(looked)} completions of {statistics.mean(lengths):.1f} tokens"
  for k in LENGTHS:
    yield f"prompt lookup, k = {k}: {rate([(*row[:2], None) for row in looked], k):.2f} a pass"
  if again:
    yield f"{len(again)} of them of a prompt that had another before"
  for k in LENGTHS if again else ():
    yield f"last epoch, k = {k}: {rate(again, k):.2f} a pass"


def rate(rows: Sequence[tuple[Ids, Ids, Ids | None]], k: int) -> float:
  """Tokens for each pass."""
  drawn = sum(len(completion) for _, completion, _ in rows)
  return drawn / sum(passes(*row, k) for row in rows)


def cost(folder: str, dtype: str, rows: Sequence[int], slots: int) -> Iterator[str]:
  """A line for each number of rows: what a pass of k + 1 tokens takes, divided by one of one."""
  config, params = model.load(folder)
  config = dataclasses.replace(config, dtype=dtype)
  step: Any = jax.jit(
    lambda tokens_BT, positions_BT, cache: model.forward(
      params, config, tokens_BT, positions_BT, cache
    )
  )
  for R in rows:
    lengths = jnp.full(R, PROMPT_TOKENS)
    prompts = jnp.ones((R, PROMPT_TOKENS), jnp.int32)
    at = jnp.broadcast_to(jnp.arange(PROMPT_TOKENS), prompts.shape)
    prefix = model.as_prefix(model.features(params, config, prompts, at)[1], lengths)
    cache = model.empty_cache(config, prefix, 1, slots)
    times = {}
    for k in (0, *LENGTHS):
      taken = jnp.ones((R, k + 1), jnp.int32), PROMPT_TOKENS + jnp.zeros((R, k + 1), jnp.int32)
      jax.block_until_ready(step(*taken, cache))
      spent = []
      for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(step(*taken, cache))
        spent.append(time.perf_counter() - start)
      times[k] = min(spent)
    ratios = ", ".join(f"k = {k}: {times[k] / times[0]:.2f}" for k in LENGTHS)
    yield f"{R} rows, {times[0] * 1e3:.1f} ms for one token; {ratios}"


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("what", choices=("tokens", "cost"))
  parser.add_argument("workdir", nargs="?", type=Path, help="of a run, for tokens")
  parser.add_argument("--model", help="a Hugging Face folder, for cost")
  parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32], help="for cost")
  parser.add_argument("--slots", type=int, default=128, help="of the cache, for cost")
  parser.add_argument("--dtype", default="float32", help="for cost")
  args = parser.parse_args()
  lines = (
    tokens(args.workdir)
    if args.what == "tokens"
    else cost(args.model, args.dtype, args.rows, args.slots)
  )
  for line in lines:
    print(line, flush=True)


if __name__ == "__main__":
  main()
