"""A reward for the answers of multiple-choice questions."""

import re
from typing import Any

from grpo_jax.rewards.gold import READABLE, gold_text
from grpo_jax.rewards.marks import checked_by, in_process, reads
from grpo_jax.settings import ConfigError

# What may stand between the marker and the letter: emphasis, brackets, the opening of a formula.
_OPENING = r"(?:[\s*_`:=(\[{$\"']|\\(?:boxed|text|textbf|mathbf|mathrm)(?![a-zA-Z]))*"
_ANSWER = re.compile(_OPENING + r"([A-Z])(?![\w'’-])([^\n]*)")
_GOLD = re.compile(r"\(?([A-Z])[).]?")
# A second letter right after the first: "A or B", "A/B", "A, C". Not the article of "B. A gas".
_ANOTHER = re.compile(r"[\s*)\]}.$]*(?:[,/&]|\bor\b|\band\b)[\s*(\[{$]*([A-Z])(?![\w'’-])")


def _check_marker(where: str, options: dict[str, Any]) -> None:
  if not options["marker"]:
    raise ConfigError(f"{where}(marker=''): give what stands before the letter, such as 'Answer:'")


@in_process
@checked_by(_check_marker)
@reads(answer=READABLE)
def choice(
  completions: list[str], answer: list[Any], *, marker: str = "Answer:", **columns: Any
) -> list[float | None]:
  """1.0 if the letter after the last marker is that of the gold answer, else 0.0.

  The letter is a capital and stands alone, as in `Answer: B`, `Answer: **(B)** because ...` or
  `Answer: $\\boxed{B}$`. A completion that gives two letters, such as `Answer: A or B`, has not
  decided on either.

  Args:
    completions: The texts.
    answer: The gold answers: a capital letter, as `B`, `(B)` or `B.`.
    marker: What stands before the answer.
    columns: Not read.

  Returns:
    The scores. None where the gold answer is not a letter.
  """
  golds = [_GOLD.fullmatch((gold_text(gold) or "").strip()) for gold in answer]
  return [
    None if gold is None else float(_letter(text, marker) == gold[1])
    for text, gold in zip(completions, golds, strict=True)
  ]


def _letter(text: str, marker: str) -> str | None:
  _, found, tail = text.rpartition(marker)
  match = _ANSWER.match(tail) if found else None
  if match is None:
    return None
  letter, rest = match.groups()
  another = _ANOTHER.match(rest)
  return None if another and another[1] != letter else letter
