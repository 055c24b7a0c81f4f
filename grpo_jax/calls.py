"""Names with parameters, which a config writes as calls: `cosine(max_length=512)`.

The values are plain: numbers, strings in quotes, True, False, None, and lists, tuples and dicts of
these.
"""

import ast
from collections.abc import Iterator
import re
import typing
from typing import Any

from grpo_jax.settings import ConfigError, shown

_CALL = re.compile(r"(.*?[A-Za-z_]\w*)\((.*)\)", re.DOTALL)
_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""


def split(name: str) -> tuple[str, str]:
  """Splits `cosine(max_length=512)` into `cosine` and `(max_length=512)`, or `strict` and ""."""
  match = _CALL.fullmatch(name)
  return (match[1], name[match.end(1) :]) if match else (name, "")


def parse(name: str, key: str) -> tuple[str, dict[str, Any]]:
  """Splits a name in a config, and evaluates its parameters.

  Args:
    name: The name, such as `cosine(max_length=512)` or `strict`.
    key: The config key whose value contains the name, for error messages.

  Returns:
    (name, values by parameter), such as ("cosine", {"max_length": 512}).

  Raises:
    ConfigError: The parameters are not written as name=value with plain values.
  """
  function, arguments = split(name)
  if not arguments:
    return name, {}
  try:
    # `f` replaces the name, because path/file.py:function is no Python expression.
    call = ast.parse(f"f{arguments}", mode="eval").body
    # `call.func` is another call in f(x=1)(y=2), which `split` accepts.
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
      raise ValueError
    options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    if None in options or len(options) < len(call.keywords):  # **{...}, or a name twice
      raise ValueError
    return function, typing.cast(dict[str, Any], options)
  except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
    # The last two: a syntax tree that is too deep, as of a sum with thousands of terms.
    raise ConfigError(
      f"{key}: {shown(name)}: write parameters as {function}(name=value, ...), with plain values:"
      " numbers, strings in quotes, True, False, None or lists"
    ) from None


def split_list(text: str) -> list[str]:
  """Splits a comma-separated list, such as `a(x=1,y=2),b`, into entries without outer blanks.

  A comma inside brackets or quotes does not split. Empty entries are dropped.
  """
  return [entry.strip() for entry in _entries(text) if entry.strip()]


def _entries(text: str) -> Iterator[str]:
  """Yields the texts between the commas that are outside of brackets and quotes."""
  begin, depth, quote, is_escaped = 0, 0, "", False
  for index, character in enumerate(text):
    if quote:
      quote = "" if character == quote and not is_escaped else quote
      is_escaped = character == "\\" and not is_escaped
    elif character in _QUOTES:
      quote = character
    elif character in _OPENING or character in _CLOSING:
      depth += 1 if character in _OPENING else -1
    elif character == "," and depth == 0:
      yield text[begin:index]
      begin = index + 1
  yield text[begin:]
