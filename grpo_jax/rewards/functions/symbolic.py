"""A reward for answers that are formulas. It needs math-verify: pip install -e '.[math]'."""

from collections.abc import Callable
import logging
from typing import Any

from grpo_jax.rewards.marks import prepared_by
from grpo_jax.settings import ConfigError

# The time limit for parsing an answer, and again for comparing it. A slower answer counts as wrong.
SECONDS = 5


def _import() -> tuple[Callable[..., Any], Callable[..., Any]]:
  """math-verify's functions parse and verify. Raises ConfigError if it is not installed."""
  try:
    # Imported here because it is an optional package, and because sympy is slow to import.
    from math_verify import parse, verify
  except ImportError:
    raise ConfigError(
      "reward math needs the package math-verify: pip install -e '.[math]'"
    ) from None
  # Below this level it logs a warning for every answer that reaches the time limit.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  return parse, verify


def warm_up() -> None:
  """Makes a first comparison, which imports what is left and fills caches."""
  parse, verify = _import()
  verify(parse(r"\boxed{\frac12}"), parse("0.5"))


@prepared_by(warm_up)
def math(completions: list[str], answer: list[str], **columns: Any) -> list[float | None]:
  r"""1.0 if the last formula of the text equals the gold answer as an expression, else 0.0.

  For example, 1/2 equals \frac12 and 0.5. A formula in \boxed{} takes precedence over others.

  Returns:
    The scores. None where the gold answer is not a formula that math-verify can parse.

  Raises:
    ConfigError: math-verify is not installed.
  """
  parse, verify = _import()

  def read(text: str) -> list[Any]:
    return parse(text, parsing_timeout=SECONDS, raise_on_error=False)

  def compare(gold: list[Any], completion: str) -> float:
    is_equal = verify(gold, read(completion), timeout_seconds=SECONDS, raise_on_error=False)
    return float(is_equal)

  golds = {text: read(rf"\boxed{{{text}}}") for text in set(answer)}
  return [
    compare(golds[gold_text], completion) if golds[gold_text] else None
    for completion, gold_text in zip(completions, answer, strict=True)
  ]
