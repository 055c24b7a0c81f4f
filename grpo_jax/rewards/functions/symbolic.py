"""A reward for answers that are formulas. It needs math-verify: pip install -e '.[math]'."""

from collections.abc import Callable
from fractions import Fraction
import logging
import re
from typing import Any

from grpo_jax.rewards.functions.stated import affirmed, as_formula, last_formula, stated_answer
from grpo_jax.rewards.marks import prepared_by
from grpo_jax.settings import ConfigError

# The time limit for parsing an answer, and again for comparing it. A slower answer counts as wrong.
SECONDS = 5

_DECIMAL = re.compile(r"[-+]?(?:[0-9]{1,400}(?:\.[0-9]{1,400})?|\.[0-9]{1,400})")
_PERCENT = re.compile(r"\s*\\?%\s*$")
_EQUALS = re.compile(r"(?<![\\<>!])=")
_NO_EQUATION = re.compile(r"[,<>]|\\(?:le|ge|ne|in|lt|gt)(?:q|qq)?(?![a-zA-Z])")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_VARIABLE = re.compile(r"[a-zA-Z]")


def _import() -> tuple[Callable[..., Any], Callable[..., Any], Any]:
  """math-verify's functions parse and verify, and what makes parse read LaTeX alone.

  Raises:
    ConfigError: It is not installed.
  """
  try:
    # Imported here because it is an optional package, and because sympy is slow to import.
    from math_verify import LatexExtractionConfig, parse, verify
  except ImportError:
    raise ConfigError(
      "reward math needs the package math-verify: pip install -e '.[math]'"
    ) from None
  # Below this level it logs a warning for every answer that reaches the time limit.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  return parse, verify, LatexExtractionConfig(boxed_match_priority=0)


def warm_up() -> None:
  """Makes a first comparison, which imports what is left and fills caches."""
  parse, verify, _ = _import()
  verify(parse(r"\boxed{\frac12}"), parse("0.5"))


@prepared_by(warm_up)
def math(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
  r"""1.0 if the answer of the text equals the gold answer as an expression, else 0.0.

  For example, 1/2 equals \frac12 and 0.5. The answer is the content of the last \boxed{}, else what
  follows ####, else what follows "the answer is", else the last formula or line of the text.

  Returns:
    The scores. None where the gold answer is not a formula that math-verify can parse.

  Raises:
    ConfigError: math-verify is not installed.
  """
  compare = _Compare(*_import())
  golds = {text: as_formula(text) for text in set(answer)}
  applies = {text: bool(gold and compare.read_formula(gold)) for text, gold in golds.items()}
  return [
    float(compare(golds[gold], completion)) if applies[gold] else None
    for completion, gold in zip(completions, answer, strict=True)
  ]


class _Compare:
  """Whether a completion's answer equals a gold formula, as math-verify says."""

  def __init__(
    self, parse: Callable[..., Any], verify: Callable[..., Any], latex_alone: Any
  ) -> None:
    self._parse, self._verify, self._latex_alone = parse, verify, latex_alone

  def __call__(self, gold: str, completion: str) -> bool:
    stated = stated_answer(completion)
    formula = as_formula(last_formula(completion) if stated is None else stated)
    if stated is None and not (formula and self.read_formula(formula)):
      return self._equal(self.read_formula(gold), self._read(affirmed(completion)))
    return bool(formula) and all(self._side_is_right(gold, side) for side in _sides(gold, formula))

  def read_formula(self, formula: str) -> list[Any]:
    """What math-verify makes of a formula. Empty where it can parse nothing of it."""
    # Else it takes the last number of what it cannot parse.
    return self._read(rf"\boxed{{{formula}}}", extraction_config=[self._latex_alone])

  def _read(self, text: str, **options: Any) -> list[Any]:
    found: list[Any] = self._parse(text, parsing_timeout=SECONDS, raise_on_error=False, **options)
    return found

  def _equal(self, gold: list[Any], found: list[Any]) -> bool:
    return bool(
      self._verify(
        gold,
        found,
        timeout_seconds=SECONDS,
        raise_on_error=False,
        allow_set_relation_comp=True,  # 0 <= x < 1 is [0, 1)
      )
    )

  def _side_is_right(self, gold: str, side: str) -> bool:
    bare_gold, bare_side = _PERCENT.sub("", gold), _PERCENT.sub("", side)
    pairs = {(gold, side)}
    if (gold == bare_gold) != (side == bare_side):  # 25% answers 25, and 25 answers 25%
      pairs.add((bare_gold, bare_side))
    return any(self._formulas_are_equal(*pair) for pair in pairs)

  def _formulas_are_equal(self, gold: str, formula: str) -> bool:
    if _DECIMAL.fullmatch(gold) and _DECIMAL.fullmatch(formula):
      return Fraction(gold) == Fraction(formula)  # math-verify rounds to six places
    return self._equal(self.read_formula(gold), self.read_formula(formula))


def _sides(gold: str, formula: str) -> list[str]:
  """What must equal the gold answer: of the equation 36 + 36 = 72 both sides, of x = 72 one.

  A list such as x = 1, x = 2 is one side, and so is a formula with other relations.
  """
  if "=" in gold or "=" not in formula or _NO_EQUATION.search(formula):
    return [formula]
  sides = [side.strip() for side in _EQUALS.split(formula)]
  numbers = [side for side in sides if side and not _VARIABLE.search(_COMMAND.sub("", side))]
  return numbers or [formula]
