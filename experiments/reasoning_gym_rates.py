"""Measures how often a model solves the problems of each task of reasoning_gym, before training.

  python experiments/reasoning_gym_rates.py --model=FOLDER --out=rates.jsonl
  python experiments/reasoning_gym_rates.py --out=rates.jsonl --table     # what is there so far

For each task it samples 8 completions of each of 32 training problems, as a run would: through the
chat template, with the sampler of training, scored by the verifier of the task. The model is loaded
once. Each task adds a line to the file, so the same command goes on where it ended. At the end it
prints a table in Markdown.

A group in which all completions have the same score teaches nothing. So "groups that differ" says
where GRPO has something to learn from: by score, and by right answers alone, which is what
reasoning_gym(partial=False) learns from.

Prompts are padded to a power of two, because each length compiles a program. A problem whose prompt
has more than --max_prompt_tokens tokens is left out, and the next one takes its place, of 128.
"""

import argparse
from collections.abc import Iterator, Sequence
import json
from pathlib import Path
import sys
import time
from typing import Any

import numpy as np

from grpo_jax import load_config
from grpo_jax.config import Config
from grpo_jax.data.loader import prompt_batch
from grpo_jax.data.prompts import PromptSet
from grpo_jax.data.tasks.reasoning_gym import Problems
from grpo_jax.evaluation.evaluator import first_scores
from grpo_jax.evaluation.policy import Policy, policy_of_config
from grpo_jax.problems import gym
from grpo_jax.rollouts.complete import make_rollout
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.settings import ConfigError

PROMPT = "{question}\n\nGive your final answer between <answer> and </answer>."
# A task that makes problems slowly is measured with those that it has made after so many seconds.
SECONDS = 600.0
MOST = 128  # problems that are made to find some with prompts that are short enough
SHORTEST = 64  # tokens that prompts are padded to
SETTINGS = (
  "model",
  "problems",
  "draws",
  "max_tokens",
  "max_prompt_tokens",
  "temperature",
  "prompt",
)

Row = dict[str, Any]


def config_of(args: argparse.Namespace) -> Config:
  """The config of a run on these tasks, with the memory for `args.rows` prompts at once."""
  return load_config(
    "default",
    {
      "model.path": args.model,
      "model.dtype": args.dtype,
      "data.task": "reasoning_gym",
      "data.path": ",".join(args.tasks),
      "data.chat": not args.no_chat,
      "data.prompt": args.prompt,
      "data.max_prompt_tokens": args.max_prompt_tokens,
      "batch.prompts": args.rows,
      "batch.group_size": args.draws,
      "sampling.max_tokens": args.max_tokens,
      "sampling.temperature": args.temperature,
      "reward.functions": ("reasoning_gym",),
      "reward.on_error": "none",
      "eval.function": "reasoning_gym",
    },
  )


def some_problems(name: str, policy: Policy, count: int) -> PromptSet | None:
  """The first prompts of a task that are short enough. None if there are none."""
  problems = Problems(gym.parse(name, "flag --tasks"), "train")
  run, began = policy.run, time.monotonic()
  fitting: list[Any] = []
  for index in range(MOST):
    example = {**problems[index], "task": name}
    try:
      PromptSet([example], run.tokenizer, run.config.data, count_all=True)
      fitting.append(example)
    except ConfigError as error:
      if "data.max_prompt_tokens" not in str(error):
        raise
    if len(fitting) == count or time.monotonic() - began > SECONDS:
      break
  if not fitting:
    return None
  prompts = PromptSet(fitting, run.tokenizer, run.config.data, count_all=True)
  longest = run.config.data.max_prompt_tokens
  power = 1 << (prompts.max_tokens - 1).bit_length()
  prompts.max_tokens = min(longest, max(SHORTEST, power))
  return prompts


def measure(name: str, policy: Policy, scorers: Scorers, args: argparse.Namespace) -> Row:
  """The line of a task."""
  began, run = time.monotonic(), policy.run
  row: Row = {"task": name, "category": gym.category_of(name), "problems": 0}
  prompts = some_problems(name, policy, args.problems)
  if prompts is None:
    return row
  rollout = make_rollout(run, args.draws, at_once=args.rows)
  params, key = run.parameters.for_sampling(policy.params), run.key("evaluate")
  # As many as always, so that no program is compiled for fewer.
  count = len(prompts)
  batch = prompt_batch(prompts, np.arange(max(count, args.rows)) % count, run.hosts)
  rollouts = rollout(params, batch, key, args.temperature)
  all_scores_PG = first_scores(scorers.training(rollouts, batch).rewards.scores_PGJ)[:count]
  scores_PG = np.nan_to_num(all_scores_PG)
  right_PG = scores_PG == 1
  return row | {
    "problems": len(prompts),
    "pass_rate": float(right_PG.mean()),
    "score": float(scores_PG.mean()),
    "differ": float((np.ptp(scores_PG, axis=1) > 0).mean()),
    "differ_right": float((np.ptp(right_PG.astype(int), axis=1) > 0).mean()),
    "unscored": int(np.isnan(all_scores_PG).sum()),
    "tokens": float(rollouts.completions.lengths_PG[:count].mean()),
    "cut_off": float((rollouts.completions.stopped_by_PG[:count] < 0).mean()),
    "prompt_tokens": float(batch.prompt_lengths_P[:count].mean()),
    "seconds": time.monotonic() - began,
  }


def table(rows: Sequence[Row], problems: int) -> Iterator[str]:
  """The rows as Markdown, those first of which most groups differ.

  Args:
    rows: A task each.
    problems: How many a task should have. Fewer are named.
  """
  yield (
    "| task | category | pass rate | mean score | groups that differ | by right answers | tokens"
    " | cut off |"
  )
  yield "|---|---|---|---|---|---|---|---|"
  differ = [row for row in rows if row["problems"] and row["differ"]]
  for row in sorted(differ, key=lambda row: (-row["differ_right"], -row["differ"], row["task"])):
    few = f" ({row['problems']} problems)" if row["problems"] < problems else ""
    yield (
      f"| `{row['task']}`{few} | {row['category']} | {row['pass_rate']:.1%} | {row['score']:.3f}"
      f" | {row['differ']:.0%} | {row['differ_right']:.0%} | {row['tokens']:.0f}"
      f" | {row['cut_off']:.0%} |"
    )
  for words, left in (
    ("No group differs", [row for row in rows if row["problems"] and not row["differ"]]),
    ("No prompt is short enough", [row for row in rows if not row["problems"]]),
  ):
    if left:
      names = sorted(f"`{row['task']}`" for row in left)
      yield ""
      yield f"{words}: {', '.join(names)}."


def read(file: Path, settings: Row) -> tuple[Row, list[Row]]:
  """What the file was measured with, and its rows. A row that was cut off is removed from it.

  Args:
    file: It is made if it does not exist.
    settings: What it must have been measured with. Empty if that does not matter.

  Raises:
    SystemExit: It was measured with other settings.
  """
  if not file.exists():
    if not settings:
      sys.exit(f"{file} does not exist: measure it with --model first")
    file.write_text(json.dumps(settings) + "\n")
    return settings, []
  whole = file.read_text().rpartition("\n")[0]
  file.write_text(whole + "\n")
  first, *rows = map(json.loads, whole.split("\n"))
  if settings and first != settings:
    sys.exit(f"{file} was measured with {first}: choose another --out")
  return first, rows


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
  """The flags."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--model", help="a Hugging Face folder, or OWNER/NAME")
  parser.add_argument("--out", type=Path, default=Path("reasoning_gym_rates.jsonl"))
  parser.add_argument("--tasks", default="", help="names with commas between them; all if empty")
  parser.add_argument("--problems", type=int, default=32)
  parser.add_argument("--draws", type=int, default=8)
  parser.add_argument("--rows", type=int, default=32, help="prompts that are sampled at once")
  parser.add_argument("--max_tokens", type=int, default=128)
  parser.add_argument("--max_prompt_tokens", type=int, default=1024)
  parser.add_argument("--temperature", type=float, default=1.0)
  parser.add_argument("--dtype", default="float32")
  parser.add_argument("--prompt", default=PROMPT)
  parser.add_argument("--no_chat", action="store_true", help="for a model without a chat template")
  parser.add_argument("--table", action="store_true", help="print the table and measure nothing")
  args = parser.parse_args(argv)
  args.tasks = [name for name in args.tasks.split(",") if name] or gym.names()
  return args


def main() -> None:
  args = arguments()
  if args.table:
    measured_with, rows = read(args.out, {})
    print("\n".join(table(rows, measured_with["problems"])))
    return
  _, rows = read(args.out, {name: getattr(args, name) for name in SETTINGS})
  done = {row["task"] for row in rows}
  left = [name for name in args.tasks if name not in done]
  if left:
    policy = policy_of_config(config_of(args))
    scorers = Scorers(policy.run)
    try:
      for name in left:
        row = measure(name, policy, scorers, args)
        with args.out.open("a") as file:
          file.write(json.dumps(row) + "\n")
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    finally:
      scorers.close()
  print("\n".join(table(rows, args.problems)))


if __name__ == "__main__":
  main()
