r"""Finds the answer that a completion states, and rewrites it for a parser of formulas.

`in_tags` finds the text in <answer> tags, `stated_answer` finds the answer in a text, and
`as_formula` rewrites it. The last two reject text that gives no single answer: a box that was cut
off, "3 4", "5 hours 30 minutes". A list such as "3 and 4" is one answer.
"""

import re
import unicodedata

_LONGEST = 1000  # characters of an answer. A longer one may list many guesses
_TAIL = 5000  # characters at the end that are read if a text marks no answer

_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\[^\\]|[{}]", re.DOTALL)
_MARKS = r"(?:\$|\\[()\[\]]|[\s*])*"
_BETWEEN_BOXES = re.compile(rf"{_MARKS}(?:[,;]|,?\s*(?:and|or)\b){_MARKS}")
_DENIED = re.compile(r"(?:not|n['’]t|never)(?:\s+(?:be|equal to|exactly))?[\s$:*(\\\[]*$", re.I)
_ANSWER_IS = re.compile(
  r"\banswers?\b[^.\n]{0,80}?(?:[:=]|\b(?:is|are|equals|was|be)\b(?!['’]))[\s*:]*", re.I
)
_REASON = re.compile(r"[\s,]+(?:because|since|as|where|which|when|if|so|after|given)\b", re.I)
_FORMULA = re.compile(
  r"(?<!\\)(?:\$\$.{1,300}?\$\$|\$[^$\n]{1,300}\$|\\\(.{1,300}?\\\)|\\\[.{1,300}?\\\])", re.DOTALL
)
_SENTENCE = re.compile(r"\$\$.*?\$\$|\\\[.*?\\\]|(?:[^.\n]|\.(?=\S))*", re.DOTALL)
# A value that a text denies, as in "not 42 but 43".
_NOT_THIS = re.compile(
  r"(?:\bnot|n['’]t|\bnever|\banything but)\s+(?:[a-z]{1,15}\s+){0,2}"
  r"(?:\$[^$\n]{1,80}\$|[^\s,;a-z]*\d[^\s,;]*)",
  re.I,
)
_TWO_UNITS = re.compile(  # 5 hours 30 minutes
  r"\d[\d.,]*\s*[a-z]{1,9}\.?,?\s+(?:and\s+)?\d[\d.,]*\s*"
  r"(?:min|minutes?|sec|seconds?|inch|inches|oz|ounces?|cents?|months?|weeks?|days?|hours?)\b",
  re.I,
)

_SIGNS = {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "×": r"\times ", "÷": "/", "∞": r"\infty "}
_SIGNS |= dict.fromkeys("−－﹣‒‐‑", "-")
_LONG_DASH = re.compile(r"(?<![\w)}.\s])\s*[–—]\s*(?=[\d.\\(½¼¾])|(?<=\s)[–—](?=\s)|^[–—]")
_UNBOXED = re.compile(r"\\(?:boxed|fbox|displaystyle|left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*")
_WRITTEN = re.compile(r"\\(?:text(?:bf|rm|it)?|math(?:bf|rm|it)|mbox)\s*\{([^{}]*)\}")
_CHOICE = re.compile(r"\s*(?:\([A-E]\)|[A-E][.)])(?:[\s~]|\\ )*(?=[^\s,)])")
_MATH = re.compile(r"\\?\$|(?<!\\)\\[()\[\]]|\*\*|`|[€£¥]")
# The same sign between all groups of 1 234 567.
_GAP = r"(?P<gap>[ \xa0\u2009\u202f_'’]|~|\\[,;:! ]|\{,\}|,\\!)"
_GROUPS = re.compile(
  rf"(?<![\w.,}}^\\])(?<!\d\s)\d{{1,3}}{_GAP}\d{{3}}(?:(?P=gap)\d{{3}})*(?![\w,]|\s\d+(?!\d*/))"
)
_SPACES = re.compile(r"[~\xa0\u2009\u202f]|(?<!\\)\\[,;:! ]")
_POWER = re.compile(r"(?<=[\w)}])[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_DECIMAL = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_EXPONENT = re.compile(rf"(?<![\w.])({_DECIMAL})[eE]([-+]?\d{{1,3}})(?![\w.])")
_MIXED = re.compile(r"(?<![\w.)}/^*] )(?<![\w.)}/^])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\s*[\d/.])")
# The word or sign between the numbers of "3 and 4", "3 or 4" and "3; 4".
_ENUMERATION = re.compile(r"\s*,?\s*(?:\b(?:and|or)\b|\\q?quad(?![a-z])|;)\s*")

# Words that change the value. They are not removed, so that the answer is rejected.
_OF_THE_VALUE = re.compile(
  r"\b(?:not|never|less|more|fewer|greater|least|most|below|above|under|over|between|to|half"
  r"|quarter|third|twice|thrice|double|triple|times|hundred|thousand|million|billion|trillion"
  r"|dozens?|squared|cubed|factorial|root|pi|sqrt|sin|cos|tan|log|ln|exp|mod|minus|plus)\b|n['’]t",
  re.I,
)
_LABEL = re.compile(r"[a-z]{2,}(?: +[a-z]+)* *=(?= *[-+.\d\\])", re.I)  # "AB = 72", "total = 72"
# The words in "the total is 72".
_BEFORE = re.compile(r"[\s,:]*((?:[a-z][a-z'’]+[,:]?\s+)+)(?=[-+]?\s*(?:[.\d]|\\[dt]?frac))", re.I)
_UNIT = r"(?:\s*(?:°|\^\{?\\circ\}?)\s*[CFK]?|\s*[kcdm]?m\s*\^\{?[23]\}?|\s*[a-z]{1,5}/[a-z]{1,5})"
_AFTER = re.compile(  # `rest` is what follows 72 in "72 apples" and "72 km/h"
  rf"(?<=[\d}}])(?:\s*\\?%)?(?P<rest>{_UNIT}?(?:\s+[a-z]{{3,}}(?:[\s,.'’/-]+[a-z]+)*)?)\s*$",
  re.I,
)
_RELATION = re.compile(r"\s*(?:[<>]|\\(?:leq?|geq?|neq?|lt|gt)(?![a-z]))")
_TWO_NUMBERS = re.compile(  # "3 4", "5 to 6", and a step such as "x => 4"
  r"(?<!_)\d\s+[a-z]*\s*\.?\d|\\(?:implies|iff|to|(?:[Ll]ong)?[Rr]ightarrow)(?![a-z])|[=-]>", re.I
)
_ABOUT = re.compile(r"\s*(?:\\(?:approx|sim|simeq|cong)(?![a-z])|≈|=)")  # "≈ 5", "= 5"
_WORD = re.compile(r"(?<![\\a-zA-Z{])[a-zA-Z]{3,}(?![a-zA-Z}])")
_FUNCTION = re.compile(r"sqrt|sin|cos|tan|cot|sec|csc|log|exp|max|min|mod|gcd|lcm|arc\w+")


def in_tags(text: str, tag: str = "answer") -> str | None:
  """The text in the last pair of <answer> and </answer>. None if there is no pair.

  Args:
    text: A completion.
    tag: The name of the tags.
  """
  before, closing, _ = text.rpartition(f"</{tag}>")
  _, opening, inside = before.rpartition(f"<{tag}>")
  return inside.strip() if closing and opening else None


def stated_answer(text: str) -> str | None:
  r"""Finds the answer that a text gives.

  It is the content of the last \boxed{}, else what follows the last ####, else what follows "the
  answer is" up to the end of the sentence. Boxes with only a comma, "and" or "or" between them are
  one answer.

  Returns:
    The answer as it is written. "" if the text denies it, or ends within a box. None if the text
    marks no answer.
  """
  boxes, open_box = _boxes(text)
  anchor = text.rfind("####")
  # The last box is cut off: only a later #### gives an answer.
  if open_box >= 0 and (not boxes or boxes[-1][0] < open_box):
    return _first_line(text[anchor + 4 :]) if anchor > open_box else ""
  if boxes:
    return _in_boxes(text, boxes)
  if anchor >= 0:
    return _first_line(text[anchor + 4 :])
  text = without_denied_values(text)
  for match in reversed([*_ANSWER_IS.finditer(text)]):
    sentence = _SENTENCE.match(text, match.end())
    # "The answer is as follows" gives none: words need a digit or a formula among them.
    if sentence and (not _WORD.search(sentence[0]) or re.search(r"[\d\\$]", sentence[0])):
      return _REASON.split(sentence[0], maxsplit=1)[0]  # "12 because ..." gives 12
  return None


def without_denied_values(text: str) -> str:
  """Returns the end of a text, without values that it denies, as in "not 42".

  Quantities in two units, as in "5 hours 30 minutes", are removed, too, because neither number is
  the answer alone.
  """
  return _TWO_UNITS.sub(" ", _NOT_THIS.sub(" ", text[-_TAIL:]))


def has_formula(text: str) -> bool:
  """Whether a text has a formula between delimiters such as $."""
  return _FORMULA.search(text) is not None


def last_formula(text: str) -> str:
  """The last formula of a text that marks no answer: between delimiters, else the last line.

  Returns:
    The formula as it is written. "" if it has no number, or other numbers follow it.
  """
  text = without_denied_values(text).rstrip(" .\n")
  found = [*_FORMULA.finditer(text)]
  last = found[-1][0] if found else text.rpartition("\n")[2]
  rest = text[found[-1].end() :] if found else ""
  return last if _has_number(last) and not _has_number(rest) else ""


def as_formula(answer: str) -> str:
  """Rewrites an answer for math-verify, without words and units around a number.

  "the total is 72 dollars" becomes "72", and "3 and 4" becomes "3, 4".

  Returns:
    The formula. "" if the answer is too long, or still has words, or numbers side by side as in
    "3 4". An answer without digits, such as "yes", keeps its words.
  """
  if len(answer) > _LONGEST:
    return ""
  text = _in_latex(answer)
  if not any(character.isdigit() for character in text):  # words are removed only around numbers
    return text.strip(" .")
  text = _NOT_THIS.sub(" ", text).strip().rstrip(".?,;: ")
  text = re.sub(r"\bminus\s+(?=\d)", "-", text, flags=re.I)
  for opening in (_LABEL, _ABOUT):  # "total = 72" and "≈ 72" become "72"
    found = opening.match(text)
    text = text[found.end() :] if found else text
  # Words before or after the number go unless they change the value, as "less than" does.
  before = _BEFORE.match(text)
  if before and not _OF_THE_VALUE.search(before[1]):
    text = text[before.end() :]
  after = _AFTER.search(text)
  if after and not _OF_THE_VALUE.search(after["rest"]):
    text = text[: after.start("rest")]
  text = _ENUMERATION.sub(", ", text).strip(" ,")
  if _TWO_NUMBERS.search(text) or _has_words(text):
    return ""
  # math-verify needs both sides of a relation: "< 5" becomes "x< 5".
  return "x" + text if _RELATION.match(text) else text


def _boxes(text: str) -> tuple[list[tuple[int, int, int]], int]:
  """Finds the outermost boxes, as (start, start of the content, end of the content).

  Also returns the start of the last box that is not closed, or -1.
  """
  # `braces` are those that are open: the match of a box, None for others. `depth` counts boxes. An
  # escaped brace, as in "\{", matches `_BRACE` too, but is none of the cases below.
  boxes, braces, depth = [], list[re.Match[str] | None](), 0
  for match in _BRACE.finditer(text):
    if match["box"]:
      braces.append(match)
      depth += 1
    elif match[0] == "{":
      braces.append(None)
    elif match[0] == "}" and braces:
      opened = braces.pop()
      depth -= opened is not None
      if opened is not None and depth == 0:
        boxes.append((opened.start(), opened.end(), match.start()))
  return boxes, max((one.start() for one in braces if one is not None), default=-1)


def _in_boxes(text: str, boxes: list[tuple[int, int, int]]) -> str:
  contents = []
  for (start, first, end), before in zip(boxes[::-1], [*boxes[-2::-1], None]):
    contents.append(text[first:end])
    if before is None or not _BETWEEN_BOXES.fullmatch(text, before[2] + 1, start):
      break
  return "" if _DENIED.search(text[max(0, start - 40) : start]) else ", ".join(contents[::-1])


def _first_line(text: str) -> str:
  return text.lstrip().partition("\n")[0]


def _in_latex(answer: str) -> str:
  """Rewrites an answer in plain LaTeX: Unicode digits, signs and spaces, boxes, delimiters."""
  answer = re.sub(r"[ \t\r\n]+", " ", answer).strip()
  text = "".join(_SIGNS.get(one) or _digit(one) for one in _LONG_DASH.sub("-", answer))
  text = re.sub(r"(?<=\d)\s*[–—]\s*(?=\d)", " to ", text)  # a range, which is then rejected
  text = _UNBOXED.sub(" ", text)
  if any(character.isdigit() for character in text):  # "(A) 5" becomes "5"
    text = _CHOICE.sub("", _WRITTEN.sub(r" \1 ", text).lstrip(), count=1)
  text = _GROUPS.sub(lambda match: re.sub(r"\D", "", match[0]), _MATH.sub(" ", text).strip())
  text = re.sub(r"\\(?:lor|land|vee|wedge)(?![a-zA-Z])", " or ", _SPACES.sub(" ", text))
  text = _POWER.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
  text = _EXPONENT.sub(r"\1 \\times 10^{\2}", text)
  return _MIXED.sub(_mixed, text).strip()


def _digit(character: str) -> str:
  """Converts a digit of any alphabet to 0-9, and ½ to 1/2. Returns other characters unchanged."""
  if unicodedata.category(character) == "Nd":
    return str(unicodedata.decimal(character))
  if unicodedata.decomposition(character).startswith("<fraction>"):
    return " " + unicodedata.normalize("NFKC", character).replace("⁄", "/")
  return character


def _mixed(match: re.Match[str]) -> str:
  whole, above, below = match.groups()
  is_proper = len(above) <= len(below) <= 9 and int(above) < int(below)
  return rf"{whole}\frac{{{above}}}{{{below}}}" if is_proper else match[0]


def _has_number(text: str) -> bool:
  return any(character.isnumeric() for character in text)


def _has_words(formula: str) -> bool:
  """Whether a formula has words other than function names and letters next to an operator."""
  for match in _WORD.finditer(formula):
    beside = formula[: match.start()].rstrip()[-1:] + formula[match.end() :].lstrip()[:1]
    if not _FUNCTION.fullmatch(match[0]) and not set(beside) & set("+-*/^=<>(_"):
      return True
  return False
