"""Rewards for answers that are a number: 1.0 if the completion's answer equals the gold `answer`.

The answer of a completion is the number after the last `####` for `strict`, the last number for
`flexible`, and the number in the last `\\boxed{...}` for `boxed`. A wrong or missing answer scores
0.0. If the gold answer is missing or not a number, the score is None.

Numbers are compared exactly, not as floats, so 72 = 72.0 = 0072 = $72 = 144/2. A number with an
exponent is not an answer. `strict` and `boxed` also accept x = 72 and quotients. The time is linear
in the length of the text, for any text.
"""

import collections
from collections.abc import Callable
from fractions import Fraction
import re
from typing import Any, NamedTuple
import unicodedata

from grpo_jax.rewards.gold import READABLE, gold_text
from grpo_jax.rewards.marks import answers_by, in_process, reads

# Allowed between the marker and the number: emphasis, currency, the opening of a formula. No words,
# except for the name in x = 72, see `_BEFORE`.
_OPENING = r"(?:[\s*_`:=(\[{$€£¥]|\\[(\[$]|\\(?:boxed|text|textbf|mathbf|mathrm)(?![a-zA-Z]))*"
# A run of digits, commas and dots is one match, so that "1,0,0" is not three valid numbers.
_RUN = r"(?P<sign>[-+−–]?)(?:\\?[$€£¥])?(?P<run>(?:(?<![\w.)])\.)?[0-9][0-9.,]*)"
_BEFORE = rf"{_OPENING}(?:[A-Za-z]\w{{0,19}}\s?={_OPENING})?"
_ANSWER = re.compile(_BEFORE + _RUN)
_DIVISOR = re.compile(r"\s*[/÷]\s*(?P<run>[0-9][0-9.,]*)")
_FRACTION = re.compile(
  rf"{_BEFORE}(?P<sign>[-+−–]?)\\[dt]?frac\s*"
  r"(?:\{\s*(?P<above>-?[0-9]+)\s*\}\s*\{\s*(?P<below>-?[0-9]+)\s*\}"
  r"|(?P<above_digit>[0-9])(?P<below_digit>[0-9]))"
)
_NUMBER = re.compile(_RUN + r"(?P<exponent>[eE][-+]?[0-9]+)?")
_DECIMAL = re.compile(r"([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.([0-9]+))?")
# Behind a number: signs, words and single letters that are more than a unit, such as 5k and 2x.
# Letters that are common units are left out, as in 5m, 5g and 5h.
_CHANGES_THE_VALUE = re.compile(
  r"\\(?:pi|sqrt|infty)|[π√∞]|n['’]t\b"
  r"|\A(?:!|\s*[/–—](?!\s*[a-zA-Z])|[b-eiknp-rt-zBKM](?![a-zA-Z]))"
  r"|\b(?:not|or|dozens?|hundred|thousand|million|billion|squared|cubed)\b"
)
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!]|[\xa0\u2009\u202f])(?=[0-9]{3})")
_LONGEST_PART = 30  # digits of a numerator or denominator
_MOST_PLACES = 200  # decimal places, more than a finite quotient of such numbers can have
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MINUS = ("-", "−", "–")


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


# A quotient without a finite decimal form, such as 1/3, is a Fraction.
Value = Number | Fraction


def _answers_by(find_answer: Callable[[str], Value | None]) -> Callable[..., Any]:
  """Sets the mark `answer_of`, for maj@k. find_answer(text) returns the number in a text."""

  def answer_of(completions: list[str], **columns: Any) -> list[Value | None]:
    del columns
    return [find_answer(text) for text in completions]

  return answers_by(answer_of)


@in_process
@_answers_by(lambda text: _after_anchor(text))
@reads(answer=READABLE)
def strict(completions: list[str], answer: list[Any], **columns: Any) -> list[float | None]:
  """1.0 if the answer directly follows the last `####` and no other number is on that line."""
  return _score(_after_anchor, completions, answer)


@in_process
@_answers_by(lambda text: _last_number(text))
@reads(answer=READABLE)
def flexible(completions: list[str], answer: list[Any], **columns: Any) -> list[float | None]:
  """1.0 if the last number of the text is the answer."""
  return _score(_last_number, completions, answer, quotients=False)


@in_process
@_answers_by(lambda text: _in_box(text))
@reads(answer=READABLE)
def boxed(completions: list[str], answer: list[Any], **columns: Any) -> list[float | None]:
  """1.0 if the last `\\boxed{...}` holds the answer and no other number."""
  return _score(_in_box, completions, answer)


def _score(
  find_answer: Callable[[str], Value | None],
  completions: list[str],
  answers: list[Any],
  quotients: bool = True,
) -> list[float | None]:
  """Compares answers with gold answers, which may be quotients such as 1/2 if `quotients`.

  `flexible` reads no quotients in completions, so a gold quotient would never be reached.
  """
  golds = [_leading_number(gold_text(answer) or "", quotients) for answer in answers]
  return [
    None if gold is None else float(find_answer(text) == gold)
    for text, gold in zip(completions, golds, strict=True)
  ]


def _after_anchor(text: str) -> Value | None:
  _, anchor, tail = text.rpartition("####")
  return _leading_number(tail) if anchor else None


def _last_number(text: str) -> Value | None:
  """The last number of a text. None if there is none, or it is invalid or has an exponent."""
  last_match = collections.deque(_NUMBER.finditer(text), maxlen=1)
  if not last_match or last_match[0]["exponent"]:
    return None
  match = last_match[0]
  # A sign after a term is an operator: the last number of "10-5" is 5, not -5. At the start of the
  # text `before` is "", which is in the text ")]}" but not in the tuple.
  before = text[match.start() - 1 : match.start()]
  sign_is_operator = before.isalnum() or before in tuple(")]}")
  sign = "" if sign_is_operator else match["sign"]
  number = _decimal(sign, match["run"])
  if number is not None:
    return number
  # A run that is not a number is a list without spaces, as in (3,72). The last member counts.
  last_member = match["run"].rstrip(".,").rpartition(",")[2]
  return _decimal("", last_member)


def _in_box(text: str) -> Value | None:
  _, box, tail = text.rpartition("\\boxed")
  tail = tail.lstrip()
  if not box or not tail.startswith("{"):
    return None
  depth = 0
  for match in _BRACE.finditer(tail):
    depth += {"{": 1, "}": -1}.get(match[0], 0)
    if depth == 0 and match[0] == "}":
      return _leading_number(" ".join(tail[1 : match.start()].splitlines()))
  return None


def _leading_number(text: str, quotients: bool = True) -> Value | None:
  """The number at the start of `text`, after markup. With `quotients`, 1/2 and \\frac12 count.

  It reads gold answers and, for `strict` and `boxed`, the answers of completions. Returns None if
  `text` does not start with a number, or if the rest of the line has another number or changes the
  value. A completion is then wrong, and a row with such a gold answer has no score.
  """
  text = _LATEX_COMMA.sub(",", text)  # 1{,}000 becomes 1,000
  fraction = _FRACTION.match(text) if quotients else None
  match = fraction or _ANSWER.match(text)
  if match is None:
    return None
  divisor = _DIVISOR.match(text, match.end()) if quotients and not fraction else None
  rest = text[(divisor or match).end() :].partition("\n")[0]
  has_number = any(unicodedata.category(character)[0] == "N" for character in rest)
  if has_number or _CHANGES_THE_VALUE.search(rest):
    return None
  if fraction:  # written as \frac{1}{2}, or as \frac12
    numerator = match["above"] or match["above_digit"]
    denominator = match["below"] or match["below_digit"]
    return _quotient(match["sign"], numerator, denominator)
  if divisor is not None:
    return _quotient(match["sign"], match["run"], divisor["run"])
  return _decimal(match["sign"], match["run"])


def _quotient(sign: str, above: str, below: str) -> Value | None:
  """The value of above / below, negated if `sign`, which is before the fraction, is a minus.

  None if one of them is too long or not a number, or below is 0.
  """
  if max(len(above), len(below)) > _LONGEST_PART:
    return None
  parts = [
    _decimal("-" if part.startswith("-") else "", part.lstrip("-")) for part in (above, below)
  ]
  values = [
    Fraction(f"{'-' * one.negative}{one.whole or 0}.{one.fraction or 0}") for one in parts if one
  ]
  if len(values) < 2 or not values[1]:
    return None
  value = values[0] / values[1] * (-1 if sign in _MINUS else 1)
  scaled = value * 10**_MOST_PLACES
  if scaled.denominator != 1:
    return value
  # A finite decimal becomes a `Number`, so that 1/2 equals 0.5.
  digits = str(abs(scaled.numerator)).zfill(_MOST_PLACES + 1)
  run = f"{digits[:-_MOST_PLACES]}.{digits[-_MOST_PLACES:]}"
  return _decimal("-" if value < 0 else "", run)


def _decimal(sign: str, run: str) -> Number | None:
  """Parses a run of digits, commas and dots. None if it is not a number, such as 1,0,0."""
  match = _DECIMAL.fullmatch(run.rstrip(".,"))  # "72." may end a sentence
  if match is None or not match[0]:
    return None
  whole = match[1].replace(",", "").lstrip("0")
  fraction = (match[2] or "").rstrip("0")
  is_zero = not whole and not fraction
  return Number(sign in _MINUS and not is_zero, whole, fraction)
