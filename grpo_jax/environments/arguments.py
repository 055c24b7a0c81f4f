"""Converts the arguments that a model wrote to values, by the JSON schema of the tool.

Training, harnesses and the endpoint all use this module for tool calls.
"""

from collections.abc import Iterator, Mapping, Sequence
import json
import math
from typing import Any

Schema = Mapping[str, Any]

# Levels of nested lists and objects that are converted. Conversion is recursive, and Python limits
# recursion.
_DEEPEST = 64
_TYPES: dict[str, tuple[type, ...]] = {
  "integer": (int,),
  "number": (int, float),
  "string": (str,),
  "boolean": (bool,),
  "array": (list,),
  "object": (dict,),
  "null": (type(None),),
}
# The spellings of JSON, and those of Python and jinja2.
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


class UnquotedText(str):
  """An argument that the call contains without quotes. The schema decides which type it has."""


def parameters_of(schema: Schema) -> Mapping[str, Any]:
  """Returns the JSON schema of a tool's arguments. Empty if `schema` lacks it."""
  return _mapping(_mapping(schema.get("function")).get("parameters"))


def typed(schema: Schema, arguments: Mapping[str, Any]) -> dict[str, Any]:
  """Converts the arguments of a call to the types in the schema, as far as possible.

  Args:
    schema: The schema of the tool. It may be empty.
    arguments: The values by name. An `UnquotedText` becomes a value of another type if the schema
      allows that type, or names no types, and the text parses as such a value. Else it is a text.
  """
  parameters = parameters_of(schema)
  properties = _mapping(parameters.get("properties"))
  return {
    name: _value(properties.get(name), value, parameters, 0) for name, value in arguments.items()
  }


def check_arguments(schema: Schema, arguments: Any) -> str:
  """Returns the first error in the arguments of a call, a line for the model. "" if all fit."""
  function, parameters = schema["function"], parameters_of(schema)
  properties = _mapping(parameters.get("properties"))
  required, others = parameters.get("required"), parameters.get("additionalProperties")
  for name in required if isinstance(required, list) else ():
    if name not in arguments:
      return f"{function['name']}: the argument {name} is missing"
  for name, value in arguments.items():
    if name not in properties and others is not True and not _has_others(parameters):
      return f"{function['name']}: there is no argument {name!r:.80}"
    problem = _problem(_mapping(properties.get(name, others)), value)
    if problem:
      return f"{function['name']}: the argument {name} must be {problem}"
  return ""


def first_json(text: str) -> tuple[Any, str, str]:
  """Parses the JSON value that begins a text. Returns (value, rest of the text, error or "")."""
  text = text.strip()
  try:
    value, end = _DECODER.raw_decode(text)
  except (ValueError, RecursionError) as error:
    return None, "", f"it is not JSON ({' '.join(str(error).split()):.80})"
  return value, text[end:].strip(), ""


def _value(schema: Any, value: Any, root: Schema, depth: int) -> Any:
  """Converts a value and all values inside it. `root` resolves references, `depth` is the level."""
  schemas = list(_alternatives(schema, root))
  if isinstance(value, UnquotedText):
    value = _read(schemas, value)
  if depth == _DEEPEST:  # deeper values stay as they are
    return value
  if isinstance(value, list):
    items = next((one["items"] for one in schemas if "items" in one), None)
    return [_value(items, inner, root, depth + 1) for inner in value]
  if isinstance(value, dict):
    # `others` is the schema of the values whose names are not in `properties`.
    others = next((one["additionalProperties"] for one in schemas if _has_others(one)), None)
    by_name = dict[str, Any]()
    for one in schemas:
      by_name |= _mapping(one.get("properties"))
    return {
      name: _value(by_name.get(name, others), inner, root, depth + 1)
      for name, inner in value.items()
    }
  # A model may write 3.0 where the schema asks for an integer.
  names = _names(schemas)
  is_whole = type(value) is float and value.is_integer()
  return int(value) if is_whole and "integer" in names and "number" not in names else value


def _read(schemas: Sequence[Schema], text: UnquotedText) -> Any:
  """Converts an unquoted text to the value of another type that `schemas` allow, or to a str."""
  choices = [choice for one in schemas for choice in _choices(one)]
  names = _names(schemas)
  texts = [choice for choice in choices if isinstance(choice, str)]
  if text in texts:  # so "5" in an enum stays a text
    return str(text)
  word = text.strip()
  # `_WORDS` lacks spellings such as TRUE, which are texts unless the schema allows a boolean.
  if "boolean" in names and word.lower() in ("true", "false"):
    return word.lower() == "true"
  found, rest, problem = (_WORDS[word], "", "") if word in _WORDS else first_json(word)
  if problem or rest:
    return str(text)
  # A schema that names no types allows all.
  if not names or any(choice == found and _is_same_kind(choice, found) for choice in choices):
    return found
  # Without str: a text that contains quotes keeps them, because this format does not quote texts.
  kinds = {kind for name in names for kind in _TYPES[name]} - {str}
  is_whole = type(found) is float and found.is_integer() and "integer" in names
  return found if type(found) in kinds or is_whole else str(text)


def _alternatives(schema: Any, root: Schema) -> Iterator[Schema]:
  """Yields a schema and the options in anyOf, oneOf and allOf. Resolves each reference once."""
  queue, seen = [schema], set[str]()  # `seen`: references, which may form a cycle
  for one in queue:  # also those that the loop appends
    if not isinstance(one, Mapping):
      continue
    reference = one.get("$ref")
    if isinstance(reference, str):
      if reference not in seen:
        queue.append(_target(reference, root))
      seen.add(reference)
      continue
    yield one
    for key in ("anyOf", "oneOf", "allOf"):
      options = one.get(key)
      queue += options if isinstance(options, list) else []


def _target(reference: str, root: Schema) -> Any:
  """Returns the schema that a reference such as "#/$defs/Point" points to, or None."""
  found: Any = root
  for name in reference.removeprefix("#/").split("/"):
    found = _mapping(found).get(name)
  return found


def _names(schemas: Sequence[Schema]) -> set[str]:
  """Returns the JSON types that the schemas allow. Empty if they name no types and no choices."""
  found = set[str]()
  for one in schemas:
    names = one.get("type")
    names = names if isinstance(names, list) else [names]
    choices = _choices(one)
    if names == [None]:  # without `type`, the types of the listed values count
      names = [name for name, kinds in _TYPES.items() for one in choices if type(one) in kinds]
    found.update(name for name in names if isinstance(name, str) and name in _TYPES)
    if one.get("nullable") is True:
      found.add("null")
  return found


def _choices(schema: Schema) -> list[Any]:
  """Returns the values that enum and const list. [] if the schema has neither."""
  choices = schema.get("enum")
  made = list(choices) if isinstance(choices, list) else []
  return [*made, schema["const"]] if "const" in schema else made


def _is_same_kind(first: Any, second: Any) -> bool:
  return isinstance(first, bool) == isinstance(second, bool)  # True == 1


def _has_others(schema: Schema) -> bool:
  return isinstance(schema.get("additionalProperties"), Mapping)


def _mapping(value: Any) -> Mapping[str, Any]:
  """Returns a value if it is a mapping, or else {}. Schemas in a request may have any form."""
  return value if isinstance(value, Mapping) else {}


def _problem(schema: Schema, value: Any) -> str:
  """Returns "" if a value fits a schema, or else what it must be. Does not check items of lists."""
  if value is None and schema.get("nullable"):
    return ""
  names = schema.get("type")
  names = names if isinstance(names, list) else [names]
  names = [name for name in names if isinstance(name, str)]
  kinds = [kind for name in names for kind in _TYPES.get(name, ())]
  if kinds and type(value) not in kinds:  # not isinstance, because True is no integer
    return f"of the type {' or '.join(names)}"
  choices = schema.get("enum")
  if isinstance(choices, list) and value not in choices:
    return f"one of {json.dumps(choices)}"
  return ""


def _refuse_constant(name: str) -> None:
  raise ValueError(f"{name} is no number")


def _finite(digits: str) -> float:
  number = float(digits)
  if math.isinf(number):
    raise ValueError(f"{digits} is too large")
  return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
