"""The completions that TensorBoard and Weights & Biases show."""

from collections.abc import Sequence
import html
from typing import Any

MOST_SHOWN = 64  # completions of a step; all of them are in completions/
_FIRST = ("prompt", "completion", "reward", "advantage", "length")
_MARKDOWN = "\\`*_{}[]()#+-.!|~"  # html.escape handles & < >


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
  """The fields that a reader wants: no token ids and no log-probs."""
  scores = [name for name in rows[0] if name.startswith("rewards/")] if rows else []
  return [*_FIRST, *scores]


def completions_as_markdown(rows: Sequence[dict[str, Any]]) -> str:
  """A table in Markdown. The texts stay texts: nothing in them is read as Markdown or HTML."""
  names = columns(rows)
  lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
  for row in rows[:MOST_SHOWN]:
    lines.append("| " + " | ".join(_cell(row.get(name)) for name in names) + " |")
  return "\n".join(lines)


def _cell(value: Any) -> str:
  if isinstance(value, float):
    return f"{value:.4g}"
  if not isinstance(value, str):
    return "-" if value is None else str(value)
  text = html.escape(value, quote=False)
  escaped = (f"&#{ord(letter)};" if letter in _MARKDOWN else letter for letter in text)
  return "".join(escaped).replace("\n", "<br>")
