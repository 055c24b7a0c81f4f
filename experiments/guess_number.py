"""Trains a small model from random weights to guess a number, a game of textarena.

  pip install -e '.[textarena]'
  python experiments/guess_number.py --out=/tmp/guess [--seed=0] [--steps=80]

The number lies between 1 and 20, and there are ten guesses. The game says "higher" or "lower". Its
reward is 1 for the number, and less for a last guess that is far off. The warm start imitates games
of a player who guesses at random. The same command again resumes.
"""

import argparse
import json
from pathlib import Path
import random

import grpo_jax
from grpo_jax.environments.adapters.games import TextArena

GAME = "GuessTheNumber-v0"
PLAYS = 4000


def play(seed: int) -> str:
  """A game of a player who guesses at random, as the tokens of a completion have it."""
  rng, game = random.Random(f"plays/{seed}"), TextArena(GAME)
  game.reset({"seed": seed})
  left, text, is_over = list(range(1, 21)), "", False
  while left and not is_over and text.count("]") < 10:
    guess = left.pop(rng.randrange(len(left)))
    text += f"[{guess}]"
    messages, _, is_over = game.step({"role": "assistant", "content": f"[{guess}]"})
    text += "".join(message["content"] for message in messages)
  return text


def write_plays(folder: Path) -> None:
  """Writes train.jsonl with random games, and test.jsonl with seeds that they do not have."""
  folder.mkdir(parents=True, exist_ok=True)
  for split, count, first in (("train", PLAYS, 0), ("test", 256, 10**6)):
    rows = [
      {"question": "", "answer": "", "seed": seed, "solution": play(seed)}
      for seed in range(first, first + count)
    ]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / f"{split}.jsonl").write_text(text)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=Path, required=True)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--steps", type=int, default=80)
  args = parser.parse_args()
  data = args.out / "data"
  if not data.exists():
    write_plays(data)
  changes = {
    "seed": args.seed,
    "steps": args.steps,
    "data.task": "columns",
    "data.path": str(data),
    "data.prompt": "",
    "data.max_prompt_tokens": 640,
    "environment.name": f"textarena:{GAME}",
    "environment.max_turns": 12,  # the game ends after the move that follows the tenth guess
    "environment.turn_tokens": 8,
    "sampling.stop": ("]",),
    "sampling.max_tokens": 448,
    "reward.functions": ("environment",),
    "eval.function": "environment",
    "eval.every": 25,
    "eval.examples": 256,
    "eval.batch": 128,
    "batch.prompts": 16,
    "batch.group_size": 16,
    "warm_start.steps": 150,
    "warm_start.batch": 32,
    "warm_start.learning_rate": 3e-3,
    "optimizer.learning_rate": 6e-4,
    "optimizer.warmup_steps": 10,
    "checkpoint.every": 50,
  }
  grpo_jax.train(grpo_jax.load_config("default", changes), args.out / f"seed_{args.seed}")


if __name__ == "__main__":
  main()
