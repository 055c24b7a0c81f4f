"""Objects and exceptions of users as text, whose own code may do anything."""

from collections.abc import Callable
import pathlib
import traceback
from typing import Any

_FOLDER = str(pathlib.Path(__file__).parent)


def describe(error: BaseException, file: pathlib.Path | None = None) -> str:
  """An exception in one line: its type, its message, and the line of the user's code.

  Args:
    error: The exception.
    file: The file of the user. None means the file in which it was raised.
  """
  text = " ".join(text_of(error).split())
  named = f"{type(error).__name__}: {text:.200}" if text else type(error).__name__
  if isinstance(error, SyntaxError):
    return named  # it names its file and line itself
  calls = [f"{_FOLDER}/{name}.py" for name in ("call", "answer")]
  frames = [
    frame
    for frame in traceback.extract_tb(error.__traceback__)
    if (frame.filename not in calls if file is None else frame.filename == str(file))
  ]
  return f"{named} ({frames[-1].filename} line {frames[-1].lineno})" if frames else named


def text_of(value: Any, convert: Callable[[Any], str] = str) -> str:
  """str(value) or repr(value), of an object of the user whose own method may raise."""
  try:
    return convert(value)
  except Exception:
    return f"{type(value).__name__} that cannot be printed"
