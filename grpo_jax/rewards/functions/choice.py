"""A reward for the answers of multiple-choice questions."""

import re
from typing import Any

from grpo_jax.rewards.functions.stated import in_tags
from grpo_jax.rewards.gold import READABLE, gold_text
from grpo_jax.rewards.marks import answers_by, checked_by, in_process, reads
from grpo_jax.settings import ConfigError

# Allowed between the marker and the letter: emphasis, brackets, the opening of a formula, "Option".
_OPENING = (
  r"(?:[\s*_`:=(\[{$\"']|\\[(\[]|\\(?:boxed|text|textbf|mathbf|mathrm)(?![a-zA-Z])"
  r"|\b(?i:option|choice)\b)*"
)
_ANSWER = re.compile(_OPENING + r"([A-Z])(?![\w'’-])([^\n]{0,200})")
_GOLD = re.compile(r"\(?([A-Z])[).]?")
# A second letter right after the first: "A or B", "A/B", "A, C". Not the article of "B. A gas".
_ANOTHER = re.compile(
  r"(?:[\s*_`)\]}.$\"']|\\[)\]])*(?:[,/&]|\bor\b|\band\b)" + _OPENING + r"([A-Z])(?![\w'’-])"
)

_MARKER = "Answer:"
# The forms before a letter that count with the default marker. `denied` is "is not" or "isn't".
_STATES = re.compile(
  r"(?P<colon>answer\**:)|(?P<box>\\boxed\s*\{)"
  r"|\banswer is(?:(?P<denied>\s+not\b|n['’]t\b)|\b)",
  re.I,
)
# What follows a letter that is a word of a sentence, such as "A gas", or part of a formula.
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
  r"""1.0 if the completion states the letter of the gold answer, else 0.0.

  The letter is a capital and not part of a word, as in `Answer: B`, `Answer: **(B)** because ...`,
  `ANSWER: B`, `The answer is (B)` and `\boxed{B}`. The last of these forms counts, but a letter in
  <answer> tags takes precedence. If a completion states two letters, as in `Answer: A or B`, the
  score is 0.0.

  Args:
    completions: The texts.
    answer: The gold answers: a capital letter, written as `B`, `(B)` or `B.`.
    marker: The text before the letter. With any marker but `Answer:`, no other form counts.
    columns: Ignored.

  Returns:
    The scores. None if the gold answer is not a letter.
  """
  golds = [_GOLD.fullmatch((gold_text(gold) or "").strip()) for gold in answer]
  return [
    None if gold is None else float(_letter(text, marker) == gold[1])
    for text, gold in zip(completions, golds, strict=True)
  ]


def _letter(text: str, marker: str) -> str | None:
  """The letter that a text states, or None if it states none, denies it or states two."""
  if marker != _MARKER:
    _, found, tail = text.rpartition(marker)
    return (_read(tail, 0) or None) if found else None
  inside = in_tags(text)
  if inside is not None:
    letter = _read(inside, 0, _WORD)
    letter = _stated(inside) if letter is None else letter
    if letter is not None:
      return letter or None
  return _stated(text) or None


def _stated(text: str) -> str | None:
  """The last letter that a text states. None if it states none.

  "" if the last statement denies an answer or gives two letters, or if it is `Answer:` without a
  letter. Other forms without a letter are skipped, as in "This answer is supported by ...".
  """
  has_seen_box = False  # in the text after the match, because the loop begins at the end
  for match in reversed([*_STATES.finditer(text)]):
    if match["denied"]:
      return ""
    if match["colon"]:  # the form that was asked for, so no earlier form counts
      return _read(text, match.end()) or ""
    if match["box"] and has_seen_box:  # only the last box counts
      continue
    has_seen_box = has_seen_box or bool(match["box"])
    letter = _read(text, match.end(), _OPERATOR if match["box"] else _WORD)
    if letter is not None:
      return letter
  return None


def _read(text: str, start: int, no_answer: re.Pattern[str] | None = None) -> str | None:
  """The letter at a position of a text. "" for two letters, such as "A or B". None for no letter.

  Args:
    text: The text.
    start: The position, before any emphasis or brackets.
    no_answer: A pattern that matches after a letter which is a word or part of a formula.
  """
  match = _ANSWER.match(text, start)
  if match is None:
    return None
  letter, rest = match.groups()
  another = _ANOTHER.match(rest)
  if another and another[1] != letter:
    return ""
  return None if no_answer and no_answer.match(rest) else letter
