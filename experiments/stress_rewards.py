"""Rewards of the stress test: noisy ones, and one that pays for length."""

from collections.abc import Callable
from typing import Annotated, Any
import zlib

from grpo_jax.rewards.functions.final_number import strict
from grpo_jax.rewards.functions.worked_steps import equations
from grpo_jax.rewards.marks import in_process
from grpo_jax.settings import fraction


@in_process
def noisy(
  completions: list[str],
  answer: list[str],
  prompts: list[str],
  step: int,
  *,
  rate: Annotated[float, fraction("1 is all")] = 0.1,
  kind: str = "flipped",
  **columns: Any,
) -> list[float]:
  """strict(), with a share of the rewards wrong. Which ones depends on the step, place and text.

  Args:
    completions: The texts.
    answer: The gold answers.
    prompts: Their prompts.
    step: The number of the step.
    rate: Of all rewards that could be wrong, the share that is.
    kind: "flipped" makes 1 of 0 and 0 of 1. "false_positives" makes 1 of 0 alone.
    columns: Not read.
  """
  scores = []
  right = strict(completions=completions, answer=answer)
  for place, (text, prompt, score) in enumerate(zip(completions, prompts, right, strict=True)):
    is_noisy = zlib.crc32(f"{step}/{place}/{prompt}/{text}".encode()) < rate * 2**32
    if is_noisy and (kind == "flipped" or not score):
      score = 1.0 - score
    scores.append(score)
  return scores


@in_process
def long(
  completions: list[str],
  answer: list[str],
  prompts: list[str],
  log_metric: Callable[[str, float], None],
  *,
  bonus: float = 0.1,
  most: int = 64,
  **columns: Any,
) -> list[float]:
  """strict(), and a bonus in proportion to the length of the completion.

  It logs the share of tokens beyond those of the worked solution, as `wasted`.

  Args:
    completions: The texts. A token of this task is a character.
    answer: The gold answers.
    prompts: The sums.
    log_metric: Of the run.
    bonus: That of the longest completion.
    most: The length of the longest completion.
    columns: Not read.
  """
  lengths = [len(text) for text in completions]
  needed = [_worked_length(prompt, gold) for prompt, gold in zip(prompts, answer, strict=True)]
  wasted = sum(max(0, length - least) for length, least in zip(lengths, needed))
  log_metric("wasted", wasted / max(1, sum(lengths)))
  right = strict(completions=completions, answer=answer)
  return [score + bonus * length / most for score, length in zip(right, lengths)]


def _worked_length(question: str, answer: str) -> int:
  return len(";".join([*equations(question), f"#### {answer}"]))
