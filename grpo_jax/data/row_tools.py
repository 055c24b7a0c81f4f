"""The tools that a row brings: its column `tools`, as TRL's data sets have it.

It holds a list, or the text of one in JSON. An entry is the name of a tool, or its schema.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any

from grpo_jax.settings import ConfigError, shown

Schema = dict[str, Any]

COLUMN = "tools"


def of_row(value: Any, schemas: Sequence[Schema]) -> list[Schema]:
  """The tools of a row, as the run's schemas: the model reads the tools that its calls reach.

  Args:
    value: The value of the column. None means all tools, and an empty list none.
    schemas: The schemas of the tools of environment.tools.

  Returns:
    Some of the schemas, in the order of the row.

  Raises:
    ConfigError: The column holds something else, or names a tool that the run does not have.
  """
  if value is None:
    return list(schemas)
  by_name = {schema["function"]["name"]: schema for schema in schemas}
  names = [_name_of(entry) for entry in _list_of(value)]
  for name in names:
    if name not in by_name:
      raise ConfigError(
        f"the column {COLUMN} names {name!r:.80}, and environment.tools has {', '.join(by_name)}:"
        " add that tool, or give the column another name if it means something else"
      )
  return [by_name[name] for name in dict.fromkeys(names)]


def given(value: Any) -> list[Schema]:
  """The schemas of a row whose run has no tools: the model reads them, and nobody answers calls.

  A column of this name that holds something else is a column like others.
  """
  try:
    entries = _list_of(value)
  except ConfigError:
    return []
  are_schemas = all(isinstance(entry, Mapping) and _is_function(entry) for entry in entries)
  return [dict(entry) for entry in entries] if are_schemas else []


def _list_of(value: Any) -> list[Any]:
  if isinstance(value, str):
    try:
      value = json.loads(value)
    except (ValueError, RecursionError):
      value = None
  if not isinstance(value, list):
    raise ConfigError(f"the column {COLUMN} must be a list of names or schemas of tools")
  return value


def _name_of(entry: Any) -> str:
  if isinstance(entry, str):
    return entry
  if isinstance(entry, Mapping):
    function = entry["function"] if _is_function(entry) else entry
    if isinstance(function.get("name"), str):
      return function["name"]
  raise ConfigError(
    f"the column {COLUMN} holds {shown(entry):.80}: an entry must be the name of a tool, or its"
    " schema"
  )


def _is_function(entry: Mapping[str, Any]) -> bool:
  function = entry.get("function")
  return isinstance(function, Mapping) and isinstance(function.get("name"), str)
