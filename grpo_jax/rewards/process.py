"""Rewards for steps: lists of (end, number), `end` counting the characters of the completion up to the step's end."""

import re

from grpo_jax.rewards.answers import strict


def worked_steps(
  completions: list[str], question: list[str], answer: list[str], **columns
) -> list[list[tuple[int, float]]]:
  """For sums such as `7+15-6=`: a completion's parts between semicolons, each 1.0 if it is what stands there in the
  worked solution `7+15=22;22-6=16;#### 16`, else 0.0. The answer after `####` is a step wherever it comes."""
  return [
    _judged(text, _equations(sum_), gold) for text, sum_, gold in zip(completions, question, answer)
  ]


def _judged(text, equations, gold):
  steps, end = [], 0
  for i, part in enumerate(text.split(";")):
    end = min(end + len(part) + 1, len(text))
    if part.startswith("####"):
      right = strict(completions=[part], answer=[gold])[0]
    else:
      right = i < len(equations) and part == equations[i] and text[end - 1] == ";"
    steps.append((max(1, end), float(right)))
    if end == len(text):
      break
  return steps


def _equations(question):
  """`7+15-6=` -> [`7+15=22`, `22-6=16`]."""
  first, *terms = re.findall(r"[+-]?\d+", question)
  total, equations = int(first), []
  for term in terms:
    equations.append(f"{total}{term}={total + int(term)}")
    total += int(term)
  return equations
