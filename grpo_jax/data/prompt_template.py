"""Templates such as data.prompt: texts with names of fields in braces."""

from collections.abc import Iterator, Mapping
import string
from typing import Any

from grpo_jax.settings import ConfigError

_ABSENT = object()


def fields_of(template: str) -> list[str]:
  """The names in the braces of a template. Empty for a malformed one, which `fill` refuses."""
  try:
    return [field for _, field, _, _ in string.Formatter().parse(template) if field]
  except ValueError:
    return []


def value_of(example: Mapping[str, Any], field: str, default: Any = None) -> Any:
  """The value of a field such as `answer`, or of a nested field: `reward_model.ground_truth`.

  Returns:
    The value, or `default` if the example lacks the field.
  """
  if field in example:
    return example[field]
  value: Any = example
  for name in field.split("."):
    if not isinstance(value, Mapping) or name not in value:
      return default
    value = value[name]
  return value


def fill(template: str, example: Mapping[str, Any], key: str = "data.prompt") -> str:
  """Replaces the fields of a template by the values of the example.

  Args:
    template: The template.
    example: The values of the fields.
    key: The config key of the template, for error messages.

  Raises:
    ConfigError: The template is malformed or has no field. Or a field is more than a plain name
      ({question}) or nested name ({extra_info.question}), has no value, or is not a text or number.
  """
  names = ", ".join(f"{{{name}}}" for name in names_of(example))
  try:
    parts = list(string.Formatter().parse(template))
  except ValueError as error:
    raise ConfigError(
      f"{key}={template!r} cannot be filled ({error}); its fields are {names}, and a plain"
      " brace is written twice"
    ) from None
  if all(field is None for _, field, _, _ in parts):
    raise ConfigError(
      f"{key}={template!r} has no field, so all prompts would be the same; its fields are {names}"
    )
  texts = []
  for literal, field, width, conversion in parts:
    texts.append(literal)
    if field is None:
      continue
    # A width, as in {question:9999999999}, could fill memory. A conversion, as in {question!r},
    # makes no sense in a prompt.
    value = value_of(example, field, _ABSENT)
    if value is _ABSENT or width or conversion:
      raise ConfigError(
        f"{key}={template!r} cannot be filled: {{{field}}} with all that stands in its braces"
        f" is not a field of the examples; its fields are {names}, and a plain brace is written"
        " twice"
      )
    if value is None:
      of_task = f" of {example['task']}" if "task" in example else ""
      raise ConfigError(
        f"{key}={template!r} cannot be filled: an example{of_task} has no value in {field}"
      )
    if isinstance(value, Mapping):
      inner = ", ".join(f"{{{field}.{name}}}" for name in value)
      raise ConfigError(f"{key}={template!r}: {field} is an object; name a field of it: {inner}")
    if isinstance(value, list) and any(not isinstance(item, (str, int, float)) for item in value):
      raise ConfigError(
        f"{key}={template!r}: {field} is a list of messages, which only a chat template can"
        f" turn into text; set data.chat=True and data.prompt='{{{field}}}'"
      )
    texts.append(str(value))
  return "".join(texts)


def names_of(example: Mapping[str, Any]) -> Iterator[str]:
  """Yields the names of all fields. An object yields its nested fields instead."""
  for name, value in example.items():
    if isinstance(value, Mapping) and value:
      yield from (f"{name}.{inner}" for inner in names_of(value))
    else:
      yield name
