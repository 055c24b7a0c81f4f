"""Rewards for answers that are one number: 1.0 if the completion's number equals the gold `answer`, else 0.0.

They differ in where they look: `strict` after the last `####`, `flexible` at the last number, `boxed` in the last
`\\boxed{...}`. Numbers are compared as exact decimals (72 = 72.0 = 0072 = $72; never through floats, no exponents), at
any length in linear time. The score is None where the gold itself is no number: the reward does not apply.
"""

import re
import unicodedata
from typing import Callable, NamedTuple

# What may stand between the marker and the number: emphasis, currency, the opening of a formula. No words.
_OPENING = r"(?:[\s*_`:=(\[{$€£¥]|\\[(\[$]|\\(?:boxed|text|textbf|mathbf|mathrm)(?![a-zA-Z]))*"
# One run of digits, commas and dots, taken whole, so that "1,0,0" is one malformed number and not three good ones.
_RUN = r"(?P<sign>[-+−]?)(?:\\?[$€£¥])?(?P<run>(?:(?<![\w.)])\.)?[0-9][0-9.,]*)"
_ANSWER = re.compile(_OPENING + _RUN)
_NUMBER = re.compile(_RUN + r"(?P<exponent>[eE][-+]?[0-9]+)?")
_DECIMAL = re.compile(r"([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.([0-9]+))?")
_CHANGES_THE_VALUE = re.compile(r"\\(?:pi|sqrt)|[π√]")
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!])(?=[0-9]{3})")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


class Number(NamedTuple):
  """An exact decimal without leading or trailing zeros; equal values are equal tuples."""

  negative: bool
  whole: str
  fraction: str


def strict(completions: list[str], answer: list[str], **columns) -> list[float | None]:
  """1.0 if the number right after the last `####` is the answer and no other number follows on its line."""
  return _score(_after_anchor, completions, answer)


def flexible(completions: list[str], answer: list[str], **columns) -> list[float | None]:
  """1.0 if the last number of the text is the answer."""
  return _score(_last, completions, answer)


def boxed(completions: list[str], answer: list[str], **columns) -> list[float | None]:
  """1.0 if the last `\\boxed{...}` holds the answer and no other number."""
  return _score(_in_box, completions, answer)


def final_answer(text: str) -> Number | None:
  """What a text answers, for votes: the number after `####`, else in a box, else the last one; None if none."""
  return _after_anchor(text) or _in_box(text) or _last(text)


def _score(find: Callable[[str], Number | None], completions, answers):
  golds = [_leading(answer) for answer in answers]
  return [
    None if gold is None else float(find(text) == gold)
    for text, gold in zip(completions, golds, strict=True)
  ]


def _after_anchor(text: str) -> Number | None:
  _, anchor, tail = text.rpartition("####")
  return _leading(tail) if anchor else None


def _last(text: str) -> Number | None:
  match = None
  for match in _NUMBER.finditer(text):
    pass
  if match is None or match["exponent"]:
    return None
  before = text[match.start() - 1 : match.start()]
  is_operator = before.isalnum() or before in tuple(")]}")  # 10-5 ends in 5, not in -5
  sign = "" if is_operator else match["sign"]
  number = _decimal(sign, match["run"])
  # A run that is no number is a list without spaces, as in (3,72): its last member is the last number.
  return number or _decimal("", match["run"].rstrip(".,").rpartition(",")[2])


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
      return _leading(" ".join(content.splitlines()))
  return None


def _leading(text: str) -> Number | None:
  """The number that `text` opens with, unless the rest of its line holds another one: naming two is no answer."""
  match = _ANSWER.match(text)
  if match is None:
    return None
  rest = text[match.end() :].partition("\n")[0]
  if _CHANGES_THE_VALUE.search(rest) or any(unicodedata.category(c)[0] == "N" for c in rest):
    return None
  return _decimal(match["sign"], match["run"])


def _decimal(sign: str, run: str) -> Number | None:
  match = _DECIMAL.fullmatch(run.rstrip(".,"))  # what ends a sentence is not part of the number
  if match is None or not match[0]:
    return None
  whole, fraction = match[1].replace(",", "").lstrip("0"), (match[2] or "").rstrip("0")
  return Number(sign in ("-", "−") and bool(whole or fraction), whole, fraction)
