"""A reward for answers that are formulas. It needs math-verify: pip install -e '.[math]'."""

from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
import itertools
import logging
import re
from typing import Any, NamedTuple

from grpo_jax.rewards.functions.stated import (
  as_formula,
  has_formula,
  in_tags,
  last_formula,
  stated_answer,
  without_denied_values,
)
from grpo_jax.rewards.gold import READABLE, gold_text
from grpo_jax.rewards.marks import answers_by, prepared_by, reads
from grpo_jax.settings import ConfigError

# The time limit for parsing an answer, and again for comparing it. A slower answer counts as wrong.
SECONDS = 5

# A decimal, a power of ten, or their product.
_DECIMAL = re.compile(
  r"(?=[-+]?[.0-9])(?P<sign>[-+]?)(?P<digits>[0-9]{1,400}(?:\.[0-9]{1,400})?|\.[0-9]{1,400})?"
  r"(?P<power>(?(digits)\s*(?:\\times|\\cdot|\*)\s*)10\s*\^\s*"
  r"(?:\{\s*(?P<braced>[-+]?[0-9]{1,4})\s*\}|(?P<bare>[0-9])(?![0-9])))?"
)
_PERCENT = re.compile(r"\s*\\?%\s*$")
_EQUALS = re.compile(r"(?<![\\<>!])=")
_NO_EQUATION = re.compile(r"[,<>]|\\(?:le|ge|ne|in|lt|gt)(?:q|qq)?(?![a-zA-Z])")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_VARIABLE = re.compile(r"[a-zA-Z]")
_PLACES = 6  # decimal places in which a decimal must agree with a formula
_SMALL_DIGITS = 3  # significant digits that must agree if a small number has fewer in these places
_FLOAT_DIGITS, _EXACT_DIGITS = 12, 60  # digits that must agree: formulas with and without decimals


class _Packages(NamedTuple):
  """The functions of math-verify and sympy that are used here.

  Attributes:
    parse: Parses a text to expressions.
    verify: Compares two expressions.
    latex_alone: A config with which `parse` reads only LaTeX.
    limited: A decorator that limits a function to `SECONDS`.
    took_too_long: The exception that such a function raises after that.
    float: Sympy's class of decimals, which also converts a text to one.
  """

  parse: Callable[..., Any]
  verify: Callable[..., Any]
  latex_alone: Any
  limited: Callable[..., Any]
  took_too_long: type[BaseException]
  float: Callable[[str], Any]


def _import() -> _Packages:
  """Imports math-verify and sympy.

  Raises:
    ConfigError: math-verify is not installed.
  """
  try:
    # Imported here because it is an optional package, and because sympy is slow to import.
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException
    from math_verify.utils import timeout
    import sympy
  except ImportError:
    raise ConfigError(
      "reward math needs the package math-verify: pip install -e '.[math]'"
    ) from None
  # By default, math-verify logs a warning for every answer that reaches the time limit.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  # With priority 0, `parse` reads a box before any other formula in the text.
  latex_alone = LatexExtractionConfig(boxed_match_priority=0)
  return _Packages(parse, verify, latex_alone, timeout(SECONDS), TimeoutException, sympy.Float)


def warm_up() -> None:
  """Makes a first comparison, which imports modules and fills caches."""
  packages = _import()
  packages.verify(packages.parse(r"\boxed{\frac12}"), packages.parse("0.5"))


def formulas(completions: list[str], **columns: Any) -> list[str | None]:
  """The answer that `math` reads in each completion, or None."""
  del columns
  read = _Compare(_import()).answer_of
  return [read(text) or None for text in completions]


def same_formula(first: str, second: str) -> bool:
  """Whether two answers are equal: whether one is right if the other is the gold answer."""
  # x = 72 is right if 72 is the gold answer, but not the other way round.
  gold, formula = (second, first) if "=" in first else (first, second)
  return _Compare(_import()).is_right(gold, formula)


@prepared_by(warm_up)
@answers_by(formulas, same_formula)
@reads(answer=READABLE)
def math(completions: list[str], answer: list[Any], **columns: Any) -> list[float | None]:
  r"""1.0 if the answer of the text equals the gold answer as an expression, else 0.0.

  For example, 1/2 equals \frac12 and 0.5. The answer is the content of the last \boxed{}, else what
  follows ####, else what follows "the answer is", else the last formula or line of the text. If the
  text has <answer> tags, only the text in the last pair is read.

  Returns:
    The scores. None if the gold answer is missing, or math-verify cannot parse it.

  Raises:
    ConfigError: math-verify is not installed.
  """
  compare = _Compare(_import())
  gold_texts = [gold_text(one) or "" for one in answer]
  # By text, because the completions of a prompt have the same gold answer.
  golds = {text: as_formula(text) for text in set(gold_texts)}
  is_read = {text: bool(gold and compare.read_formula(gold)) for text, gold in golds.items()}
  return [
    float(compare(golds[text], completion)) if is_read[text] else None
    for completion, text in zip(completions, gold_texts, strict=True)
  ]


class _Compare:
  """Compares the answer of a completion with a gold formula, with math-verify."""

  def __init__(self, packages: _Packages) -> None:
    self._packages = packages

  def __call__(self, gold: str, completion: str) -> bool:
    formula, text = self._found(completion)
    if text:
      return self._equal(self.read_formula(gold), self._read(text))
    return self.is_right(gold, formula)

  def is_right(self, gold: str, formula: str) -> bool:
    """Whether a formula, or "", equals a gold formula."""
    return bool(formula) and all(self._side_is_right(gold, side) for side in _sides(gold, formula))

  def answer_of(self, completion: str) -> str:
    """The formula of a completion. "" if there is none."""
    formula, text = self._found(completion)
    # The last value that math-verify returns is the text that it has parsed.
    return str(([*self._read(text)] or [""])[-1]) if text else formula

  def _found(self, completion: str) -> tuple[str, str]:
    """Returns (formula, "") for a completion, or ("", text) if math-verify must search a text."""
    inside = in_tags(completion)
    completion = completion if inside is None else inside
    stated = stated_answer(completion)
    if stated is None and inside is not None and not ("\n" in inside or has_formula(inside)):
      stated = inside  # one line in tags is the answer, even without a number
    formula = as_formula(last_formula(completion) if stated is None else stated)
    if stated is None and not (formula and self.read_formula(formula)):
      return "", without_denied_values(completion)
    return formula, ""

  def read_formula(self, formula: str) -> list[Any]:
    """Parses a formula with math-verify to expressions. Empty if it cannot be parsed."""
    decimal = _DECIMAL.fullmatch(formula)
    if decimal and decimal["power"] and "." in formula:
      return [self._packages.float(_without_power(decimal))]
    # The box and the config keep math-verify from taking a number out of text it cannot parse.
    return self._read(rf"\boxed{{{formula}}}", extraction_config=[self._packages.latex_alone])

  def _read(self, text: str, **options: Any) -> list[Any]:
    found: list[Any] = self._packages.parse(
      text, parsing_timeout=SECONDS, raise_on_error=False, **options
    )
    return found

  def _equal(self, gold: list[Any], found: list[Any]) -> bool:
    return any(self._pair_is_equal(*pair) for pair in itertools.product(gold, found))

  def _pair_is_equal(self, gold: Any, found: Any) -> bool:
    """Whether two expressions are equal, also relative to the size of their numbers.

    math-verify rounds to `float_rounding` places where one of the two is a decimal, by default 6,
    and otherwise to `numeric_precision` places, by default 15. So it takes all small numbers for
    equal. A pair that is equal by these places is compared again, with places enough for its
    smallest number.
    """
    if not self._agrees(gold, found):
      return False
    # Texts are compared as they are, without a tolerance.
    if isinstance(gold, str) or gold == found:
      return True
    try:
      place = self._packages.limited(_lowest_place)([gold, found])
    except (Exception, self._packages.took_too_long):  # sympy cannot compute one of the two
      return False
    has_float = any(one.has(self._packages.float) for one in (gold, found))
    # Enough decimal places for the first digits of the smallest number.
    return self._agrees(
      gold,
      found,
      float_rounding=max(_PLACES, _SMALL_DIGITS - 1 - place),
      numeric_precision=(_FLOAT_DIGITS if has_float else _EXACT_DIGITS) - place,
    )

  def _agrees(self, gold: Any, found: Any, **precision: int) -> bool:
    return bool(
      self._packages.verify(
        gold,
        found,
        timeout_seconds=SECONDS,
        raise_on_error=False,
        allow_set_relation_comp=True,  # 0 <= x < 1 is [0, 1)
        **precision,
      )
    )

  def _side_is_right(self, gold: str, side: str) -> bool:
    bare_gold, bare_side = _PERCENT.sub("", gold), _PERCENT.sub("", side)
    pairs = {(gold, side)}
    if (gold == bare_gold) != (side == bare_side):  # 25% answers 25, and 25 answers 25%
      pairs.add((bare_gold, bare_side))
    return any(self._formulas_are_equal(*pair) for pair in pairs)

  def _formulas_are_equal(self, gold: str, formula: str) -> bool:
    decimals = [match for match in map(_DECIMAL.fullmatch, (gold, formula)) if match]
    if len(decimals) == 2:
      first, second = map(Fraction, map(_without_power, decimals))
      return first == second  # math-verify rounds to six places
    return self._equal(self.read_formula(gold), self.read_formula(formula))


def _sides(gold: str, formula: str) -> list[str]:
  """The sides of a formula that must equal the gold answer: both of 36 + 36 = 72, one of x = 72.

  A list such as x = 1, x = 2 is one side, and so is a formula with other relations.
  """
  if "=" in gold or "=" not in formula or _NO_EQUATION.search(formula):
    return [formula]
  sides = [side.strip() for side in _EQUALS.split(formula)]
  numbers = [side for side in sides if side and not _VARIABLE.search(_COMMAND.sub("", side))]
  return numbers or [formula]


def _without_power(decimal: re.Match[str]) -> str:
  """Rewrites a match of `_DECIMAL` in e-notation, such as 1.6e-19."""
  exponent = decimal["braced"] or decimal["bare"] or 0
  return f"{decimal['sign']}{decimal['digits'] or 1}e{exponent}"


def _lowest_place(expressions: Iterable[Any]) -> int:
  """The decimal exponent of the smallest number in sympy expressions, at most 0: -19 for 1.6e-19.

  A comparison rounds to places that are counted from there. A number is a maximal subexpression
  without variables. The smallest is that with the least absolute value, 0 aside.
  """
  place = 0
  for one in expressions:
    if not getattr(one, "is_number", False):
      # A matrix has the method `flat`.
      parts = one.flat() if hasattr(one, "flat") else getattr(one, "args", ())
      place = min(place, _lowest_place(parts))
      continue
    size = abs(one.doit().evalf())
    # A precision of one bit means that the value is 0, up to rounding.
    if size.is_Float and size and size._prec > 1:
      place = min(place, Decimal(str(size)).adjusted())
  return place
