"""A reward for the answers of multiple-choice questions."""

import re
from typing import Any

from grpo_jax.rewards.functions.stated import in_tags
from grpo_jax.rewards.gold import READABLE, gold_text
from grpo_jax.rewards.marks import answers_by, checked_by, in_process, reads
from grpo_jax.settings import ConfigError

# What may stand between the marker and the letter: emphasis, brackets, the opening of a formula.
_OPENING = r"(?:[\s*_`:=(\[{$\"']|\\(?:boxed|text|textbf|mathbf|mathrm)(?![a-zA-Z]))*"
_ANSWER = re.compile(_OPENING + r"([A-Z])(?![\w'’-])([^\n]{0,200})")
_GOLD = re.compile(r"\(?([A-Z])[).]?")
# A second letter right after the first: "A or B", "A/B", "A, C". Not the article of "B. A gas".
_ANOTHER = re.compile(r"[\s*)\]}.$]*(?:[,/&]|\bor\b|\band\b)[\s*(\[{$]*([A-Z])(?![\w'’-])")

_MARKER = "Answer:"
# What stands before the letter where no other marker is given.
_SAID = re.compile(
  r"(?P<colon>answer\**:)|(?P<box>\\boxed\s*\{)"
  r"|\banswer is(?:(?P<denied>\s+not\b|n['’]t\b)|\b(?:\s+(?:option|choice)\b)?)",
  re.I,
)
# Behind a letter that is a word of a sentence, such as "A gas", or a part of a formula.
_WORD = re.compile(r"\s+(?!(?:because|since|as|and|or|which|with|for|by)\b)[a-z]")
_OPERATOR = re.compile(r"\s*[-+=^/<>|\\_]")


def _check_marker(where: str, options: dict[str, Any]) -> None:
  if not options["marker"]:
    raise ConfigError(f"{where}(marker=''): give what stands before the letter, such as 'Answer:'")


def _letters(completions: list[str], *, marker: str = _MARKER, **columns: Any) -> list[str | None]:
  del columns
  return [_letter(text, marker) for text in completions]


@in_process
@answers_by(_letters)
@checked_by(_check_marker)
@reads(answer=READABLE)
def choice(
  completions: list[str], answer: list[Any], *, marker: str = _MARKER, **columns: Any
) -> list[float | None]:
  r"""1.0 if the letter that the completion states is that of the gold answer, else 0.0.

  The letter is a capital and stands alone, as in `Answer: B`, `Answer: **(B)** because ...`,
  `ANSWER: B`, `The answer is (B)` and `\boxed{B}`, of which the last one counts. What stands in
  <answer> tags counts before them. A completion that gives two letters, such as `Answer: A or B`,
  has not decided on either.

  Args:
    completions: The texts.
    answer: The gold answers: a capital letter, as `B`, `(B)` or `B.`.
    marker: The text before the answer. Where it is another than `Answer:`, nothing else is read.
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
  """The letter that a text decides on, or None."""
  if marker != _MARKER:
    _, found, tail = text.rpartition(marker)
    return (_read(tail, 0) or None) if found else None
  inside = in_tags(text)
  if inside is not None:
    letter = _read(inside, 0, _WORD)
    letter = _said(inside) if letter is None else letter
    if letter is not None:
      return letter or None
  return _said(text) or None


def _said(text: str) -> str | None:
  """The last letter that a text states. "" where it is denied, or is one of two. None without one.

  `Answer:` decides, whatever follows. The other forms are skipped where no letter follows, because
  a sentence such as "This answer is supported by ..." states none.
  """
  box_is_open = True
  for match in reversed([*_SAID.finditer(text)]):
    if match["denied"]:
      return ""
    if match["colon"]:
      return _read(text, match.end()) or ""
    if match["box"] and not box_is_open:  # only the last box counts
      continue
    box_is_open = box_is_open and not match["box"]
    letter = _read(text, match.end(), _OPERATOR if match["box"] else _WORD)
    if letter is not None:
      return letter
  return None


def _read(text: str, start: int, no_answer: re.Pattern[str] | None = None) -> str | None:
  """The letter at a place of a text. "" for two letters, such as "A or B". None without a letter.

  Args:
    text: The text.
    start: The place.
    no_answer: A pattern. Where it follows the letter, the letter is a word or a part of a formula.
  """
  match = _ANSWER.match(text, start)
  if match is None:
    return None
  letter, rest = match.groups()
  another = _ANOTHER.match(rest)
  if another and another[1] != letter:
    return ""
  return None if no_answer and no_answer.match(rest) else letter
