"""The tests of a program, in one format for all data sets."""

from collections.abc import Mapping
import dataclasses
import json
from typing import Any

Row = Mapping[str, Any]


class Unreadable(ValueError):
  """The tests of a row cannot be read. The text says why."""


@dataclasses.dataclass(frozen=True)
class Case:
  """An input of a program and the expected output.

  Attributes:
    input: The text for standard input, or the list of arguments of a call.
    output: The expected text on standard output, or the expected return value.
    function: The function of the program to call, or a method of its class Solution. "" runs the
      whole program.
    boxed: Whether `output` may be a list that contains only the expected value, as in APPS.
    near: Whether a printed number may differ by 1e-6, absolute or relative, from a number with a
      decimal point in `output`.
  """

  input: Any
  output: Any
  function: str = ""
  boxed: bool = False
  near: bool = False


@dataclasses.dataclass(frozen=True)
class ProgramTests:
  """The tests of a program: `cases`, or `asserts` if there are no cases.

  Attributes:
    cases: Inputs with their expected outputs.
    asserts: Code that uses the program under test, and raises an exception if it is wrong.
    setup: Code to run before the asserts.
    header: Code to run before the program, such as imports and the beginning of a function.
    entry: The function that the header begins. A program that does not define this function is
      taken as the continuation of the header.
    names: Names that each assert takes from the program, even if the assert redefines them.
  """

  cases: tuple[Case, ...] = ()
  asserts: tuple[str, ...] = ()
  setup: str = ""
  header: str = ""
  entry: str = ""
  names: tuple[str, ...] = ()


def text_in(row: Row, *names: str) -> str:
  """The first of the columns `names` that holds a text. Raises Unreadable if there is none."""
  for name in names:
    if isinstance(row.get(name), str):
      return row[name]
  raise Unreadable(f"it has no text {' or '.join(names)}")


def json_in(value: Any, name: str) -> Any:
  """Parses `value` as JSON if it is a text, and returns any other value unchanged.

  Raises:
    Unreadable: The text is not JSON. The error names the column `name`.
  """
  if not isinstance(value, str):
    return value
  if not value.strip():
    raise Unreadable(f"{name} is empty: leave such rows out")
  try:
    return json.loads(value)
  except (ValueError, RecursionError) as error:
    raise Unreadable(f"{name} is not JSON ({error!s:.80})") from None
