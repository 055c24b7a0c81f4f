"""The template of a prompt (data.prompt): a text with the names of fields in braces."""

from collections.abc import Mapping
import string
from typing import Any

from grpo_jax.settings import ConfigError


def fill(template: str, example: Mapping[str, Any]) -> str:
  """The template with its fields replaced by those of the example.

  Raises:
    ConfigError: The template is damaged, has no field, or a field that is not the plain name of one
      of the example's texts.
  """
  names = ", ".join(f"{{{name}}}" for name in example)
  try:
    parts = list(string.Formatter().parse(template))
  except ValueError as error:
    raise ConfigError(
      f"data.prompt={template!r} cannot be filled ({error}); its fields are {names}, and a plain"
      " brace is written twice"
    ) from None
  if all(field is None for _, field, _, _ in parts):
    raise ConfigError(
      f"data.prompt={template!r} has no field, so all prompts would be the same; its fields are"
      f" {names}"
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
        f"data.prompt={template!r} cannot be filled: {{{field}}} with all that stands in its braces"
        f" is not a field of the examples; its fields are {names}, and a plain brace is written"
        " twice"
      )
    if isinstance(example[field], list):
      raise ConfigError(
        f"data.prompt={template!r}: {field} is a list of messages, which only a chat template can"
        f" turn into text; set data.chat=True and data.prompt='{{{field}}}'"
      )
    texts.append(str(example[field]))
  return "".join(texts)
