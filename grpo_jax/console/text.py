"""Texts for a screen: makes characters printable, and shortens texts."""

from collections.abc import Sequence
import os

_COMMON = 12  # a longer common beginning or end is left out


def visible(text: str) -> str:
  """Makes a text printable: newlines become ↵, other control characters become escapes.

  A model's text could otherwise control the terminal.
  """
  return "".join(map(_visible_character, text))


def shorten(text: str, length: int) -> str:
  """Shortens a text to `length` characters in the middle, because the end has the answer."""
  if len(text) <= length:
    return text
  if length < 3:  # a narrow terminal may have no room, or less than none
    return "…"[: max(0, length)]
  head = (length - 3) // 2
  tail = length - 3 - head
  return f"{text[:head].rstrip()} … {text[len(text) - tail :].lstrip()}"


def without_common_parts(texts: Sequence[str]) -> list[str]:
  """Removes a long beginning or end that all texts share, such as a chat template's."""
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
