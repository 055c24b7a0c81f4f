"""Rewards for answers that are a number: 1.0 if the completion's answer equals the gold `answer`.

The functions differ in where they look for the completion's answer: `strict` after the last `####`,
`flexible` at the last number, `boxed` in the last `\\boxed{...}`. Another answer, or no answer,
scores 0.0. The score is None where the gold answer is not a number, so that the function does not
apply.

Numbers are compared as exact decimals, so 72 = 72.0 = 0072 = $72. They are never converted to
floats, and a number with an exponent is not an answer. The time is linear in the length of the
text, for any text.
"""

import collections
from collections.abc import Callable
import re
from typing import Any, NamedTuple
import unicodedata

from grpo_jax.rewards.marks import in_process

# What may stand between the marker and the number: emphasis, currency, the opening of a formula.
# Words may not.
_OPENING = r"(?:[\s*_`:=(\[{$€£¥]|\\[(\[$]|\\(?:boxed|text|textbf|mathbf|mathrm)(?![a-zA-Z]))*"
# A run of digits, commas and dots is matched as a whole, so that "1,0,0" is one malformed number,
# not three good ones.
_RUN = r"(?P<sign>[-+−]?)(?:\\?[$€£¥])?(?P<run>(?:(?<![\w.)])\.)?[0-9][0-9.,]*)"
_ANSWER = re.compile(_OPENING + _RUN)
_NUMBER = re.compile(_RUN + r"(?P<exponent>[eE][-+]?[0-9]+)?")
_DECIMAL = re.compile(r"([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.([0-9]+))?")
_CHANGES_THE_VALUE = re.compile(r"\\(?:pi|sqrt)|[π√]")
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!])(?=[0-9]{3})")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


class Number(NamedTuple):
  """An exact decimal, without leading zeros and without trailing zeros after the point.

  Two numbers of the same value are equal tuples.

  Attributes:
    negative: Whether the number is less than 0.
    whole: The digits before the decimal point, empty for 0.
    fraction: The digits after the decimal point.
  """

  negative: bool
  whole: str
  fraction: str


@in_process
def strict(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
  """1.0 if the answer directly follows the last `####` and no other number is on that line."""
  return _score(_after_anchor, completions, answer)


@in_process
def flexible(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
  """1.0 if the last number of the text is the answer."""
  return _score(_last_number, completions, answer)


@in_process
def boxed(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
  """1.0 if the last `\\boxed{...}` holds the answer and no other number."""
  return _score(_in_box, completions, answer)


def final_answer(text: str) -> Number | None:
  """The answer of a text, for a majority vote.

  It is the number after `####`, else the number in a box, else the last number of the text. None if
  the text has no number.
  """
  return _after_anchor(text) or _in_box(text) or _last_number(text)


def _score(
  find_answer: Callable[[str], Number | None], completions: list[str], answers: list[str]
) -> list[float | None]:
  golds = [_leading_number(answer) for answer in answers]
  return [
    None if gold is None else float(find_answer(text) == gold)
    for text, gold in zip(completions, golds, strict=True)
  ]


def _after_anchor(text: str) -> Number | None:
  _, anchor, tail = text.rpartition("####")
  return _leading_number(tail) if anchor else None


def _last_number(text: str) -> Number | None:
  last_match = collections.deque(_NUMBER.finditer(text), maxlen=1)
  if not last_match or last_match[0]["exponent"]:
    return None
  match = last_match[0]
  # After a term, the sign is an operator: the last number of "10-5" is 5 and not -5.
  before = text[match.start() - 1 : match.start()]
  sign_is_operator = before.isalnum() or before in tuple(")]}")
  sign = "" if sign_is_operator else match["sign"]
  number = _decimal(sign, match["run"])
  if number is not None:
    return number
  # A run that is not a number is a list without spaces, as in (3,72). Take its last member.
  last_member = match["run"].rstrip(".,").rpartition(",")[2]
  return _decimal("", last_member)


def _in_box(text: str) -> Number | None:
  _, box, tail = text.rpartition("\\boxed")
  tail = tail.lstrip()
  if not box or not tail.startswith("{"):
    return None
  depth = 0
  for match in _BRACE.finditer(tail):
    depth += {"{": 1, "}": -1}.get(match[0], 0)
    if depth == 0 and match[0] == "}":
      content = _LATEX_COMMA.sub(",", tail[1 : match.start()])
      return _leading_number(" ".join(content.splitlines()))
  return None


def _leading_number(text: str) -> Number | None:
  """The number at the start of `text`. None if the rest of the line has another number.

  A completion that gives two answers has not decided on either.
  """
  match = _ANSWER.match(text)
  if match is None:
    return None
  rest = text[match.end() :].partition("\n")[0]
  has_number = any(unicodedata.category(character)[0] == "N" for character in rest)
  if has_number or _CHANGES_THE_VALUE.search(rest):
    return None
  return _decimal(match["sign"], match["run"])


def _decimal(sign: str, run: str) -> Number | None:
  match = _DECIMAL.fullmatch(run.rstrip(".,"))  # "72." may end a sentence
  if match is None or not match[0]:
    return None
  whole = match[1].replace(",", "").lstrip("0")
  fraction = (match[2] or "").rstrip("0")
  is_zero = not whole and not fraction
  return Number(sign in ("-", "−") and not is_zero, whole, fraction)
