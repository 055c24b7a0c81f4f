"""Prints what is wrong in the greedy answers of runs on word problems: a line of JSON for each run.

python experiments/word_problem_errors.py DIR_0 DIR_1 ... [--examples=192]

`right` is what the reward function `flexible` calls right. Of the other answers, `no expression`
have none such as 405 + 316, `reading` have another one than the problem asks for, and `reckoning`
have the one that it asks for and a wrong result. `calls` is the share that calls a tool.
"""

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
import json
import re
from typing import Any

from grpo_jax import load_policy
from grpo_jax.rewards.functions.final_number import flexible

_EXPRESSION = re.compile(r"(\d[\d,]*)\s*([-+*/x×÷])\s*(\d[\d,]*)")
_SIGNS = {"x": "*", "×": "*", "÷": "/"}


def error_of(texts: Sequence[str], example: Mapping[str, Any]) -> str:
  """What is wrong in an answer, or "right".

  Args:
    texts: The turns of the policy.
    example: The problem, with its answer and solution.
  """
  if flexible([texts[-1]], answer=[example["answer"]]) == [1.0]:
    return "right"
  found = _EXPRESSION.search(" ".join(texts))
  if not found:
    return "no expression"
  left, right = (number.replace(",", "") for number in (found[1], found[3]))
  sign = _SIGNS.get(found[2], found[2])
  asked = example["solution"].split(" = ")[0].split()
  is_turned = sign in "+*" and [right, sign, left] == asked
  return "reckoning" if [left, sign, right] == asked or is_turned else "reading"


def text_of(turn: Mapping[str, Any]) -> str:
  """What the policy wrote in a turn: a text, and the arguments of its calls."""
  arguments = (call["function"]["arguments"] for call in turn.get("tool_calls", ()))
  written = (str(value) for values in arguments for value in values.values())
  return " ".join([turn["content"], *written])


def errors(workdir: str, count: int) -> dict[str, Any]:
  """How many greedy answers of a run's newest policy have each error, and how many call a tool."""
  policy = load_policy(workdir)
  prompts = policy.run.prompts("test")
  found: Counter[str] = Counter()
  calls = 0
  count = min(count, len(prompts))
  for number in range(count):
    example = prompts.example(number)
    (answer,) = policy.sample(example["question"], temperature=0)
    turns = [text_of(turn) for turn in answer.turns if turn["role"] == "assistant"]
    calls += len(turns) > 1
    found[error_of(turns or [answer.text], example)] += 1
  return {"run": workdir, **found, "calls": calls / count}


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("workdirs", nargs="+")
  parser.add_argument("--examples", type=int, default=192, help="of so many test problems")
  args = parser.parse_args()
  for workdir in args.workdirs:
    print(json.dumps(errors(workdir, args.examples)), flush=True)


if __name__ == "__main__":
  main()
