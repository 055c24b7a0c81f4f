"""The texts that a terminal shows: short forms of metrics, durations and completions."""

from collections.abc import Mapping
from typing import Any

_FORMATS = (
  ("warm_start/loss", "loss {:.3f}"),
  ("reward", "reward {:.2f}"),
  ("eval/accuracy", "accuracy {:.1%}"),
  ("kl", "kl {:.2g}"),
  ("completions/mean_length", "len {:.1f}"),
  ("perf/tokens_per_second", "{:.0f} tok/s"),
)


def step_parts(metrics: Mapping[str, Any], seconds_left: float | None) -> list[str]:
  """The parts of a step's line, such as ["reward 0.71", "left 2m10s"]."""
  parts = [form.format(metrics[name]) for name, form in _FORMATS if metrics.get(name) is not None]
  if metrics.get("skipped_updates"):
    parts.append("update skipped: gradient not finite")
  if seconds_left is not None:
    parts.append(f"left {duration(seconds_left)}")
  return parts


def duration(seconds: float) -> str:
  """A duration in two units at most: 45s, 2m10s, 3h05m, 2d04h."""
  s = round(seconds)
  if s < 60:
    return f"{s}s"
  if s < 3600:
    return f"{s // 60}m{s % 60:02d}s"
  if s < 86400:
    return f"{s // 3600}h{s % 3600 // 60:02d}m"
  return f"{s // 86400}d{s % 86400 // 3600:02d}h"


def visible(text: str) -> str:
  """Printable characters only: newlines become ↵, other control characters become escapes.

  A model's text could otherwise steer the terminal.
  """
  return "".join(map(_visible_character, text))


def shorten(text: str, length: int) -> str:
  """At most `length` characters. Leaves out the middle, because the end holds the answer."""
  if len(text) <= length:
    return text
  head = (length - 3) // 2
  tail = length - 3 - head
  return f"{text[:head].rstrip()} … {text[len(text) - tail :].lstrip()}"


def _visible_character(character: str) -> str:
  if character == "\n":
    return "↵"
  if character.isprintable():
    return character
  return character.encode("unicode_escape").decode()
