"""Texts for a screen: only characters that can be printed, and no more of them than fit."""


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
