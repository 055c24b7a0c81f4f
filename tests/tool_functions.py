"""Tools with all kinds of type hints, for the tests of their schemas."""

import enum
from typing import Any, Literal

from grpo_jax.environments import built_in


class Unit(enum.Enum):
  METRE = "m"
  FOOT = "ft"


def plain(x: int, y: float = 2.0, name: str = "a", is_right: bool = True) -> str:
  """Does something
  in two lines.

  It has a paragraph, too.

  Args:
    x: The first number,
      which goes on here: and here.
    y: The second one.
    name: A name.
    is_right: Whether it is.

  Returns:
    A text.

  Raises:
    ValueError: Never.
  """


def nothing() -> None:
  """Takes nothing."""


def lists(a: list[int], b: list[list[str]], c: dict[str, float], d: tuple[int, str], e: list):
  """Takes lists.

  Args:
    a: A
    b: B
    c: C
    d: D
    e: E
  """


def unions(
  a: int | None,
  b: int | str,
  c: int | list[str] | None,
  d: Any,
  e: list | tuple,
  f: Literal["x", "y"] | None = None,
):
  """Takes unions.

  Args:
    a: A
    b: B
    c: C
    d: D
    e: E
    f: F
  """


def choices(drink: str, size: Literal["s", "m"], count: Literal[1, "all"], unit: Unit):
  """Makes a drink.

  Args:
    drink: What to drink (choices: ["tea", "coffee "])
    size: How much.
    count: How many.
    unit: Of length.
  """


async def waits(seconds: float) -> dict:
  """Waits.

  Args:
    seconds: How long.

  Returns:
    Something.
  """


def unknown_return(x: int) -> Unit | range:
  """Returns an object.

  Args:
    x: A number.
  """


class Box:
  def method(self, x: int) -> int:
    """Adds.

    Args:
      x: A number.
    """
    return x


FUNCTIONS = [
  plain,
  nothing,
  lists,
  unions,
  choices,
  waits,
  unknown_return,
  Box().method,
  Box.method,
  built_in.calculator,
]
