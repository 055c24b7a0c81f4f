"""Gold answers: the column `answer`, with which functions compare what a completion says."""

from typing import Any

READABLE = (str, int, float)  # what a gold answer may be. A number counts as its text


def gold_text(answer: Any) -> str | None:
  """A gold answer as a text. None where the row has none, or has a list or an object there."""
  return str(answer) if isinstance(answer, READABLE) else None
