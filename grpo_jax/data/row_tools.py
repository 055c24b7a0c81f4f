"""The tools of a row: its column `tools`, as in TRL's data sets.

The column has a list, perhaps as JSON text. An entry is the name or the schema of a tool.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any

from grpo_jax.settings import ConfigError, shown

Schema = dict[str, Any]

COLUMN = "tools"


def of_row(value: Any, schemas: Sequence[Schema]) -> list[Schema]:
  """Selects the run's tools that a row names. The run's schemas replace the row's.

  Args:
    value: The value of the column. None means all tools, and an empty list means no tools.
    schemas: The schemas of the tools of environment.tools.

  Returns:
    The selected entries of `schemas`, in the order of the row.

  Raises:
    ConfigError: The column has another form, or names a tool that the run does not have.
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
  """The schemas in a row's column, for a run without an environment, which answers no calls.

  The model reads them. Empty if the column has anything but schemas, because it may have another
  meaning.
  """
  try:
    entries = _list_of(value)
  except ConfigError:
    return []
  are_schemas = all(isinstance(entry, Mapping) and _is_function(entry) for entry in entries)
  return [dict(entry) for entry in entries] if are_schemas else []


def _list_of(value: Any) -> list[Any]:
  """The entries of the column. Raises ConfigError if it is not a list."""
  if isinstance(value, str):
    try:
      value = json.loads(value)
    except (ValueError, RecursionError):
      value = None
  if not isinstance(value, list):
    raise ConfigError(f"the column {COLUMN} must be a list of names or schemas of tools")
  return value


def _name_of(entry: Any) -> str:
  """The name of the tool of an entry. Raises ConfigError for a malformed entry."""
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
