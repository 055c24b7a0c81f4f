"""Builds the JSON schemas of tools that chat templates show to a model.

They equal those of `get_json_schema` in transformers, so that prompts look as they did when the
model was trained.
"""

from collections.abc import Callable
import enum
import inspect
import json
import re
import types
import typing
from typing import Any

from grpo_jax.registry import name_of
from grpo_jax.settings import ConfigError, shown

Schema = dict[str, Any]

_SCALARS = {
  int: "integer",
  float: "number",
  str: "string",
  bool: "boolean",
  type(None): "null",
}
_PLAIN: dict[Any, Schema] = {
  **{kind: {"type": name} for kind, name in _SCALARS.items()},
  list: {"type": "array"},
  tuple: {"type": "array"},
  dict: {"type": "object"},
  Any: {},
}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SECTION = re.compile(r"^[ \t]*(Args|Returns|Raises):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^([ \t]*)(\w+):[ \t]*(.*)$")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE | re.DOTALL)


def schema_of(function: Callable[..., Any]) -> Schema:
  """Builds the JSON schema of a typed function with a Google docstring.

  Args:
    function: The tool. Each argument has a type hint and a description. `(choices: [...])` at the
      end of a description lists the only values.

  Returns:
    {"type": "function", "function": {"name", "description", "parameters"}}. "function" also has
    "return" if the function has a type hint for its result and this has a JSON type.

  Raises:
    ConfigError: A hint, the docstring or a description is missing, or a hint has no JSON type.
  """
  if isinstance(schema := getattr(function, "schema", None), dict):
    return schema  # the tool of an MCP server, which provides the schema
  name = name_of(function)
  where = f"environment.tools: {name}"
  if not inspect.getdoc(function):
    raise ConfigError(f"{where} has no docstring: a model reads there what the tool does")
  description, sections = _sections(inspect.getdoc(function) or "")
  descriptions = _arguments(sections.get("Args", ""))
  hints, parameters = _hints(function, where)
  properties: dict[str, Schema] = {}
  for argument in parameters:
    if argument not in descriptions:
      raise ConfigError(f"{where}: its docstring does not describe the argument {argument}")
    type_schema = _schema(hints[argument], where)
    properties[argument] = _described(type_schema, descriptions[argument], where)
  required = [key for key, one in parameters.items() if one.default is inspect.Parameter.empty]
  arguments: Schema = {"type": "object", "properties": properties}
  arguments |= {"required": required} if required else {}
  tool: Schema = {"name": name, "description": description, "parameters": arguments}
  if "return" in hints:
    try:
      returned = _schema(hints["return"], where)
    except ConfigError:  # leave "return" out: the model never writes this value
      return {"type": "function", "function": tool}
    text = sections.get("Returns", "").strip()
    tool["return"] = returned | ({"description": text} if text else {})
  return {"type": "function", "function": tool}


def _hints(
  function: Callable[..., Any], where: str
) -> tuple[dict[str, Any], dict[str, inspect.Parameter]]:
  """Returns a function's type hints, and its parameters without an untyped self or cls."""
  try:
    hints = typing.get_type_hints(function)
    parameters = dict(inspect.signature(function).parameters)
  except Exception as error:  # a hint in quotes can be any expression
    raise ConfigError(f"{where}: its type hints cannot be read: {error}") from None
  first = next(iter(parameters), "")
  # Methods of environments are looked up in the class, so `self` is not bound.
  if first in ("self", "cls") and first not in hints:
    del parameters[first]
  for argument, parameter in parameters.items():
    if parameter.kind not in _BY_NAME:
      raise ConfigError(
        f"{where}: the argument {parameter} cannot be given by name, as a model gives arguments;"
        " give the tool a name for each of them, without *, ** and /"
      )
    if argument not in hints:
      raise ConfigError(f"{where}: the argument {argument} has no type hint")
  return hints, parameters


def _sections(doc: str) -> tuple[str, dict[str, str]]:
  """Splits a docstring into the text before its sections, and the sections by name."""
  marks = list(_SECTION.finditer(doc))
  described = doc[: marks[0].start()] if marks else doc
  ends = [*(mark.start() for mark in marks[1:]), len(doc)]
  sections = {mark[1]: doc[mark.end() : end] for mark, end in zip(marks, ends)}
  return described.strip(), sections


def _arguments(section: str) -> dict[str, str]:
  """Parses a section Args into descriptions by argument. Deeper-indented lines continue one."""
  texts: dict[str, list[str]] = {}
  indent, latest = "", ""
  for line in section.split("\n"):
    match = _ARGUMENT.match(line)
    # A line NAME: TEXT is a new argument, unless it is indented more than the latest.
    if match and (not latest or len(match[1]) <= len(indent)):
      indent, latest = match[1], match[2]
      texts[latest] = [match[3]]
    elif latest and line.strip():
      texts[latest].append(line.strip())
  return {name: " ".join(lines).strip() for name, lines in texts.items()}


def _described(schema: Schema, text: str, where: str) -> Schema:
  """Adds the description `text` to a schema. `(choices: [...])` in it becomes the field enum."""
  match = _CHOICES.search(text)
  if match is None:
    return schema | {"description": text}
  try:
    choices = [choice.strip() for choice in json.loads(match[1])]
  except (ValueError, AttributeError, TypeError):
    raise ConfigError(f"{where}: choices must be a list of texts, got {shown(match[1])}") from None
  return schema | {"enum": choices, "description": text[: match.start()].strip()}


def _schema(hint: Any, where: str) -> Schema:
  """Builds the JSON schema of a type hint. Raises ConfigError, beginning with `where`."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin is None and isinstance(hint, type) and issubclass(hint, enum.Enum):
    return _one_of([member.value for member in hint], where)
  if origin in _PLAIN and not arguments:  # typing.List, Dict and Tuple without brackets
    return dict(_PLAIN[origin])
  if origin is None:
    if not isinstance(hint, typing.Hashable) or hint not in _PLAIN:
      raise ConfigError(f"{where}: the type hint {shown(hint)} has no JSON type")
    return dict(_PLAIN[hint])
  if origin in (typing.Union, types.UnionType):
    return _union(arguments, where)
  if origin is typing.Literal:
    return _one_of(list(arguments), where)
  if origin is list:
    return {"type": "array", "items": _schema(arguments[0], where)}
  # tuple[int] and tuple[int, ...] are refused, as in transformers, which recommends list[int].
  if origin is tuple and len(arguments) > 1 and ... not in arguments:
    return {"type": "array", "prefixItems": [_schema(one, where) for one in arguments]}
  if origin is dict:  # arguments: (type of keys, type of values). Keys in JSON are always texts
    return {"type": "object", "additionalProperties": _schema(arguments[1], where)}
  raise ConfigError(f"{where}: the type hint {shown(hint)} has no JSON schema; take list or dict")


def _union(kinds: tuple[Any, ...], where: str) -> Schema:
  """Builds the JSON schema of a union of type hints. None makes it nullable."""
  schemas = [_schema(kind, where) for kind in kinds if kind is not type(None)]
  if len(schemas) == 1:  # an optional type
    made = schemas[0]
  elif all(one.keys() == {"type"} and isinstance(one["type"], str) for one in schemas):
    names = sorted({one["type"] for one in schemas})
    made = {"type": names[0] if len(names) == 1 else names}
  else:
    made = {"anyOf": schemas}
  return made | ({"nullable": True} if type(None) in kinds else {})


def _one_of(values: list[Any], where: str) -> Schema:
  """Builds a schema that allows only these values. It lists each JSON type once, in their order."""
  if not values or any(type(value) not in _SCALARS for value in values):
    raise ConfigError(f"{where}: the choices {shown(values)} are not all numbers, texts or None")
  names = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
  return {"type": names[0] if len(names) == 1 else names, "enum": values}
