"""Rewards for answers that are formulas, through math-verify (pip install -e '.[math]')."""

import logging

from grpo_jax.settings import ConfigError

SECONDS = 5  # for one answer, to be read and to be compared: then it counts as wrong


def math(completions: list[str], answer: list[str], **columns) -> list[float | None]:
  r"""1.0 if the last answer of the text, \boxed{} before others, equals the gold one as an expression: 1/2 = \frac12 = 0.5.

  None where the gold cannot be read. Raises ConfigError where math-verify is not installed.
  """
  try:
    from math_verify import parse, verify  # here: an extra, and sympy is slow to import
  except ImportError:
    raise ConfigError(
      "reward math needs the package math-verify: pip install -e '.[math]'"
    ) from None
  logging.getLogger("math_verify").setLevel(
    logging.ERROR
  )  # it tells of each answer that took too long
  read = lambda text: parse(text, parsing_timeout=SECONDS, raise_on_error=False)
  golds = {gold: read(rf"\boxed{{{gold}}}") for gold in set(answer)}
  right = lambda text, gold: float(
    verify(gold, read(text), timeout_seconds=SECONDS, raise_on_error=False)
  )
  return [
    right(text, golds[gold]) if golds[gold] else None
    for text, gold in zip(completions, answer, strict=True)
  ]
