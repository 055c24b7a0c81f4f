"""Gold answers: the column `answer`, with which reward functions compare completions."""

from typing import Any

READABLE = (str, int, float)  # the types of gold answers. A number is converted to its text


def gold_text(answer: Any) -> str | None:
  """Converts a gold answer to text. None if there is none, or it is of another type."""
  return str(answer) if isinstance(answer, READABLE) else None
