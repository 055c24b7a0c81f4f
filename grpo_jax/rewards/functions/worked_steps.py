"""A process reward, which scores the steps of a completion instead of the whole."""

import re
from typing import Any

from grpo_jax.rewards.functions.final_number import strict
from grpo_jax.rewards.marks import in_process


@in_process
def worked_steps(
  completions: list[str], question: list[Any], answer: list[Any], **columns: Any
) -> list[list[tuple[int, float]]]:
  """Scores the steps of worked sums, for questions such as `7+15-6=`.

  Each step of a completion ends with a semicolon. Step i gets 1.0 if it equals step i of the worked
  solution `7+15=22;22-6=16;#### 16`, else 0.0. The answer after `####` may be any step, and is not
  scored if the gold answer is not a number.

  Returns:
    For each completion, steps (end, reward): `end` is the number of characters before their end.
  """
  return [
    _score_steps(completion, equations(sum_text), gold)
    for completion, sum_text, gold in zip(completions, question, answer)
  ]


def _score_steps(completion: str, equations: list[str], gold: str) -> list[tuple[int, float]]:
  steps, end = [], 0
  for i, part in enumerate(completion.split(";")):
    end = min(end + len(part) + 1, len(completion))
    if part.startswith("####"):
      reward = strict(completions=[part], answer=[gold])[0]
    else:
      is_finished = completion[end - 1 : end] == ";"
      reward = i < len(equations) and part == equations[i] and is_finished
    if reward is not None:
      steps.append((max(1, end), float(reward)))
    if end == len(completion):  # after a last semicolon, `split` returns one more, empty part
      break
  return steps


def equations(question: str) -> list[str]:
  """The steps of the worked solution: `7+15-6=` -> [`7+15=22`, `22-6=16`]."""
  first, *terms = re.findall(r"[+-]?\d+", question)
  total, equations = int(first), []
  for term in terms:
    equations.append(f"{total}{term}={total + int(term)}")
    total += int(term)
  return equations
