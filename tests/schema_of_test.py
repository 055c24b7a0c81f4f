"""The JSON schemas of tools are those that transformers gives."""

import json
from pathlib import Path
import typing

import pytest
from tool_functions import FUNCTIONS, Unit

from grpo_jax.environments.schema import schema_of
from grpo_jax.settings import ConfigError

# Written by tests/golden/make_schemas.py.
EXPECTED = json.loads((Path(__file__).parent / "golden/tools/schemas.json").read_text())


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_schemas_are_those_of_transformers(number):
  assert schema_of(FUNCTIONS[number]) == EXPECTED[number]


def without_hint(x):
  """A.

  Args:
    x: B
  """


def without_doc(x: int):
  return x


def without_description(x: int):
  """A."""


def of_an_object(x: Unit | range):
  """A.

  Args:
    x: B
  """


def bad_choices(x: str):
  """A.

  Args:
    x: B (choices: tea)
  """


def unreadable(x: "no_such_name"):  # noqa: F821
  """A.

  Args:
    x: B
  """


def of_any_number(x: int, *others: int):
  """A.

  Args:
    x: B
    others: C
  """


def of_any_name(**others: int):
  """A.

  Args:
    others: C
  """


def by_position(x: int, /):
  """A.

  Args:
    x: B
  """


@pytest.mark.parametrize(
  "hint, schema",
  [
    (typing.List, {"type": "array"}),  # noqa: UP006  they are what is tested
    (typing.Tuple, {"type": "array"}),  # noqa: UP006
    (typing.Dict, {"type": "object"}),  # noqa: UP006
    (typing.Optional[typing.List], {"type": "array", "nullable": True}),  # noqa: UP006, UP045
    (list[typing.Dict], {"type": "array", "items": {"type": "object"}}),  # noqa: UP006
    (typing.Annotated[int, "a number"], {"type": "integer"}),
  ],
)
def test_hints_of_typing_without_brackets_are_those_of_the_builtins(hint, schema):
  """As transformers 5.23 has them."""

  def tool(x):
    """A.

    Args:
      x: B
    """

  tool.__annotations__ = {"x": hint}
  parameters = schema_of(tool)["function"]["parameters"]
  assert parameters["properties"]["x"] == schema | {"description": "B"}


@pytest.mark.parametrize(
  "function, words",
  [
    (of_any_number, r"the argument \*others: int cannot be given by name"),
    (of_any_name, r"the argument \*\*others: int cannot be given by name"),
    (by_position, "the argument x: int cannot be given by name"),
    (without_hint, "x has no type hint"),
    (without_doc, "no docstring"),
    (without_description, "does not describe the argument x"),
    (of_an_object, "has no JSON type"),
    (bad_choices, "choices must be a list of texts"),
    (unreadable, "cannot be read"),
  ],
)
def test_what_is_missing_is_named_with_the_function(function, words):
  with pytest.raises(ConfigError, match=words) as caught:
    schema_of(function)
  assert function.__name__ in str(caught.value) and "\n" not in str(caught.value)
