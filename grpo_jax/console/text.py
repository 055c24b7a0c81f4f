"""Texts for a screen: only characters that can be printed, and no more of them than fit."""

from collections.abc import Sequence
import os

_COMMON = 12  # characters that all texts share and that are worth leaving out


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


def without_common_parts(texts: Sequence[str]) -> list[str]:
  """The texts without a long beginning or end that all of them share, such as a chat template's."""
  if len(set(texts)) == 1:
    return list(texts)
  begin = len(os.path.commonprefix(texts))
  end = len(os.path.commonprefix([text[begin:][::-1] for text in texts]))
  begin, end = (size if size > _COMMON else 0 for size in (begin, end))
  opening, closing = "… " if begin else "", " …" if end else ""
  return [f"{opening}{text[begin : len(text) - end]}{closing}" for text in texts]


def _visible_character(character: str) -> str:
  if character == "\n":
    return "↵"
  if character.isprintable():
    return character
  return character.encode("unicode_escape").decode()
