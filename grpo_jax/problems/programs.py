"""The tests of a program, whichever data set they come from."""

from collections.abc import Mapping
import dataclasses
import json
from typing import Any

Row = Mapping[str, Any]


class Unreadable(ValueError):
  """The tests of a row cannot be read. The text says why."""


@dataclasses.dataclass(frozen=True)
class Case:
  """An input of a program, and what the program should make of it.

  Attributes:
    input: The text on standard input, or the arguments of a call.
    output: The text on standard output, or the value that the call returns.
    function: The function of the program to call, or a method of its class Solution. "" runs the
      whole program.
    boxed: Whether `output` may be a list with the value in it, as APPS writes values.
    near: Whether a printed number may differ by 1e-6, absolute or relative, from one that `output`
      writes with a point.
  """

  input: Any
  output: Any
  function: str = ""
  boxed: bool = False
  near: bool = False


@dataclasses.dataclass(frozen=True)
class ProgramTests:
  """The tests of a program: `cases`, or `asserts` where there are none.

  Attributes:
    cases: Inputs with their outputs.
    asserts: Programs that call the one under test, and raise an exception if it is wrong.
    setup: Code that the asserts need before them.
    header: Code before the program, such as imports and the head of a function.
    entry: The function that the header begins. A program that does not define it goes on where the
      header ends.
    names: Names of the program that each assert gets, whatever else it defines.
  """

  cases: tuple[Case, ...] = ()
  asserts: tuple[str, ...] = ()
  setup: str = ""
  header: str = ""
  entry: str = ""
  names: tuple[str, ...] = ()


def text_in(row: Row, *names: str) -> str:
  """The first of some columns of a row that is a text. Raises Unreadable without one."""
  for name in names:
    if isinstance(row.get(name), str):
      return row[name]
  raise Unreadable(f"it has no text {' or '.join(names)}")


def json_in(value: Any, name: str) -> Any:
  """A value, or the JSON value in it if it is a text. Raises Unreadable, which names `name`."""
  if not isinstance(value, str):
    return value
  if not value.strip():
    raise Unreadable(f"{name} is empty: leave such rows out")
  try:
    return json.loads(value)
  except (ValueError, RecursionError) as error:
    raise Unreadable(f"{name} is not JSON ({error!s:.80})") from None
