"""Templates, such as data.prompt: texts with the names of fields in braces."""

from collections.abc import Mapping
import string
from typing import Any

from grpo_jax.settings import ConfigError


def fields_of(template: str) -> list[str]:
  """The names in the braces of a template. Those of a damaged one, which `fill` names, are none."""
  try:
    return [field for _, field, _, _ in string.Formatter().parse(template) if field]
  except ValueError:
    return []


def fill(template: str, example: Mapping[str, Any], key: str = "data.prompt") -> str:
  """The template with its fields replaced by those of the example.

  Args:
    template: The template.
    example: The values of the fields.
    key: The config key that holds the template, for error messages.

  Raises:
    ConfigError: The template is damaged, has no field, or a field that is not the plain name of one
      of the example's texts.
  """
  names = ", ".join(f"{{{name}}}" for name in example)
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
    # A field is a name and nothing else: a width could fill memory, and an attribute of a text
    # means nothing in a prompt.
    if field not in example or width or conversion:
      raise ConfigError(
        f"{key}={template!r} cannot be filled: {{{field}}} with all that stands in its braces"
        f" is not a field of the examples; its fields are {names}, and a plain brace is written"
        " twice"
      )
    value = example[field]
    if isinstance(value, list) and any(not isinstance(item, (str, int, float)) for item in value):
      raise ConfigError(
        f"{key}={template!r}: {field} is a list of messages, which only a chat template can"
        f" turn into text; set data.chat=True and data.prompt='{{{field}}}'"
      )
    texts.append(str(value))
  return "".join(texts)
