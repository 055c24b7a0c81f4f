"""Reads the arguments that a model wrote as values, by the JSON schema of the tool.

Training, harnesses and the endpoint all read the calls of tools with this module.
"""

from collections.abc import Iterator, Mapping, Sequence
import json
import math
from typing import Any

Schema = Mapping[str, Any]

_DEEPEST = 64  # levels of lists and objects that are looked into
_TYPES: dict[str, tuple[type, ...]] = {
  "integer": (int,),
  "number": (int, float),
  "string": (str,),
  "boolean": (bool,),
  "array": (list,),
  "object": (dict,),
  "null": (type(None),),
}
# As JSON writes them, and as Python and jinja2 do.
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}


class UnquotedText(str):
  """An argument that stands in a call without quotes. The schema decides what it means."""


def parameters_of(schema: Schema) -> Mapping[str, Any]:
  """The JSON schema of the arguments of a tool. Empty where a request gives none."""
  return _mapping(_mapping(schema.get("function")).get("parameters"))


def typed(schema: Schema, arguments: Mapping[str, Any]) -> dict[str, Any]:
  """The arguments of a call as the values that the schema wants, where they can be read so.

  Args:
    schema: The schema of the tool.
    arguments: The values by name. An `UnquotedText` in them may stand for any value. It becomes a
      text where the schema wants a text, or where it cannot be read as a value that the schema
      wants. Without a schema, it becomes the value that it reads as.
  """
  parameters = parameters_of(schema)
  properties = _mapping(parameters.get("properties"))
  return {
    name: _value(properties.get(name), value, parameters, 0) for name, value in arguments.items()
  }


def check_arguments(schema: Schema, arguments: Any) -> str:
  """The first error in the arguments of a call, in a line for the model. "" if there is none."""
  function = schema["function"]
  properties = function["parameters"].get("properties", {})
  for name in function["parameters"].get("required", ()):
    if name not in arguments:
      return f"{function['name']}: the argument {name} is missing"
  for name, value in arguments.items():
    if name not in properties:
      return f"{function['name']}: there is no argument {name!r:.80}"
    problem = _problem(properties[name], value)
    if problem:
      return f"{function['name']}: the argument {name} must be {problem}"
  return ""


def first_json(text: str) -> tuple[Any, str, str]:
  """(the JSON value with which a text begins, the rest of the text, the error or "")."""
  text = text.strip()
  try:
    value, end = _DECODER.raw_decode(text)
  except (ValueError, RecursionError) as error:
    return None, "", f"it is not JSON ({' '.join(str(error).split()):.80})"
  return value, text[end:].strip(), ""


def _value(schema: Any, value: Any, root: Schema, depth: int) -> Any:
  """A value, with all values inside it, as a schema wants them."""
  schemas = list(_alternatives(schema, root))
  if isinstance(value, UnquotedText):
    value = _read(schemas, value)
  if depth == _DEEPEST:
    return value
  if isinstance(value, list):
    items = next((one["items"] for one in schemas if "items" in one), None)
    return [_value(items, inner, root, depth + 1) for inner in value]
  if isinstance(value, dict):
    others = next((one["additionalProperties"] for one in schemas if _has_others(one)), None)
    by_name = dict[str, Any]()
    for one in schemas:
      by_name |= _mapping(one.get("properties"))
    return {
      name: _value(by_name.get(name, others), inner, root, depth + 1)
      for name, inner in value.items()
    }
  names = _names(schemas)
  is_whole = type(value) is float and value.is_integer()
  return int(value) if is_whole and "integer" in names and "number" not in names else value


def _read(schemas: Sequence[Schema], text: UnquotedText) -> Any:
  """The value that a text without quotes stands for, or the text."""
  choices = [choice for one in schemas for choice in _choices(one)]
  names = _names(schemas)
  if text in [choice for choice in choices if isinstance(choice, str)]:
    return str(text)
  word = text.strip()
  if "boolean" in names and word.lower() in ("true", "false"):
    return word.lower() == "true"
  found, rest, problem = (_WORDS[word], "", "") if word in _WORDS else first_json(word)
  if problem or rest:
    return str(text)
  if not names or any(choice == found and _is_same_kind(choice, found) for choice in choices):
    return found
  # A text in quotes is a text that has quotes.
  kinds = {kind for name in names for kind in _TYPES[name]} - {str}
  is_whole = type(found) is float and found.is_integer() and "integer" in names
  return found if type(found) in kinds or is_whole else str(text)


def _alternatives(schema: Any, root: Schema) -> Iterator[Schema]:
  """The alternatives of a schema, with its references resolved. Each reference counts once."""
  queue, seen = [schema], set[str]()
  for one in queue:
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
  """The schema that a reference such as "#/$defs/Point" points to, or None."""
  found: Any = root
  for name in reference.removeprefix("#/").split("/"):
    found = _mapping(found).get(name)
  return found


def _names(schemas: Sequence[Schema]) -> set[str]:
  """The JSON types that schemas allow. Empty where they say nothing."""
  found = set[str]()
  for one in schemas:
    names = one.get("type")
    names = names if isinstance(names, list) else [names]
    choices = _choices(one)
    if names == [None]:
      names = [name for name, kinds in _TYPES.items() for one in choices if type(one) in kinds]
    found.update(name for name in names if isinstance(name, str) and name in _TYPES)
    if one.get("nullable") is True:
      found.add("null")
  return found


def _choices(schema: Schema) -> list[Any]:
  """The only values that a schema allows, or none if it allows others."""
  choices = schema.get("enum")
  made = list(choices) if isinstance(choices, list) else []
  return [*made, schema["const"]] if "const" in schema else made


def _is_same_kind(first: Any, second: Any) -> bool:
  return isinstance(first, bool) == isinstance(second, bool)  # True == 1


def _has_others(schema: Schema) -> bool:
  return isinstance(schema.get("additionalProperties"), Mapping)


def _mapping(value: Any) -> Mapping[str, Any]:
  """A value if it is an object. The schemas of a request may be anything."""
  return value if isinstance(value, Mapping) else {}


def _problem(schema: Schema, value: Any) -> str:
  """The type or values that a value must have, or "" if it has. Items of lists are not checked."""
  if value is None and schema.get("nullable"):
    return ""
  names = schema.get("type", [])
  names = [names] if isinstance(names, str) else names
  kinds = [kind for name in names for kind in _TYPES.get(name, ())]
  if kinds and type(value) not in kinds:  # True is no integer
    return f"of the type {' or '.join(names)}"
  if "enum" in schema and value not in schema["enum"]:
    return f"one of {json.dumps(schema['enum'])}"
  return ""


def _refuse_constant(name: str) -> None:
  raise ValueError(f"{name} is no number")


def _finite(digits: str) -> float:
  number = float(digits)
  if math.isinf(number):
    raise ValueError(f"{digits} is too large")
  return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
