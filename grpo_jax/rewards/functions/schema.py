"""A reward for completions that are JSON and match a schema.

It needs jsonschema: pip install -e '.[schema]'.
"""

import json
from pathlib import Path
import re
from typing import Any

from grpo_jax.rewards.marks import checked_by
from grpo_jax.settings import ConfigError

# A block between fences. `findall` skips whole blocks, so the fence that closes one opens no other.
# Text may stand before an opening fence that has at most one word after it.
_BLOCK = re.compile(
  r"^(?:[ \t]*```+[^`\n]*|[^`\n]*```+\w*[ \t]*)\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE
)


def _check_file(where: str, options: dict[str, Any]) -> None:
  text = _read(options["file"], where) if options["file"] else "{}"
  _validator(text, f"{where}(file={options['file']!r})")


@checked_by(_check_file)
def json_schema(
  completions: list[str], schema: list[Any] | None = None, *, file: str = "", **columns: Any
) -> list[float | None]:
  """1.0 if the completion is JSON that a JSON Schema accepts, else 0.0.

  The JSON is the last block between ``` lines, or the whole completion if there is none. References
  in a schema to other files or addresses are not followed, and score 0.0.

  A pattern in a schema can take exponential time.

  Args:
    completions: The texts.
    schema: The schema of each completion: an object, or the text of one, or None. Ignored if `file`
      is not empty.
    file: A file with the schema of all completions.
    columns: Ignored.

  Returns:
    The scores. None for a completion without a schema.

  Raises:
    ConfigError: jsonschema is not installed, or there is no column `schema` and no file, or a
      schema is not valid.
  """
  if file:
    schema = [_read(file, "json_schema")] * len(completions)
  elif schema is None:
    raise ConfigError(
      "reward json_schema needs a column `schema`, or a file, as in json_schema(file='schema.json')"
    )
  validators: dict[str, Any] = {}
  scores: list[float | None] = []
  for text, row_schema in zip(completions, schema, strict=True):
    if row_schema is None:
      scores.append(None)
      continue
    schema_text = row_schema if isinstance(row_schema, str) else json.dumps(row_schema)
    if schema_text not in validators:
      validators[schema_text] = _validator(schema_text, "reward json_schema")
    scores.append(float(_accepts(validators[schema_text], text)))
  return scores


def _accepts(validator: Any, text: str) -> bool:
  blocks = _BLOCK.findall(text)
  try:
    value = json.loads(blocks[-1] if blocks else text, parse_constant=_refuse)
    return validator.is_valid(value)
  except (ValueError, RecursionError):  # invalid JSON, or an int of more than 4,300 digits
    return False
  except Exception as error:
    if type(error).__module__.startswith(("referencing", "jsonschema")):  # an external reference
      return False
    raise


def _refuse(constant: str) -> None:
  raise ValueError(f"{constant} is not JSON")


def _validator(text: str, where: str) -> Any:
  """Makes a validator from the text of a JSON Schema. Raises ConfigError if it is not valid."""
  try:
    # Imported here because it is an optional package.
    import jsonschema
    import referencing
  except ImportError:
    raise ConfigError(
      "reward json_schema needs the package jsonschema: pip install -e '.[schema]'"
    ) from None
  try:
    schema = json.loads(text)
    validator_class = jsonschema.validators.validator_for(schema)  # by the schema's "$schema"
    validator_class.check_schema(schema)
  except (ValueError, RecursionError) as error:
    raise ConfigError(f"{where}: the schema is not JSON: {error}") from None
  except jsonschema.SchemaError as error:
    raise ConfigError(f"{where}: it is not a JSON Schema: {error.message:.200}") from None
  # With an empty registry, a reference to an address is an error instead of a request.
  return validator_class(schema, registry=referencing.Registry())


def _read(file: str, where: str) -> str:
  try:
    return Path(file).expanduser().read_text(encoding="utf-8-sig")
  except (OSError, ValueError, RuntimeError) as error:
    raise ConfigError(f"{where}(file={file!r}): it cannot be read: {error}") from None
