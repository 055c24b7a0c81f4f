"""For mkdocstrings: each section of the config as a table of its settings."""

import ast
from typing import Any

import griffe


class ConfigTables(griffe.Extension):
  """Adds `Attributes` to the docstring of a class whose fields are made by `setting(...)`."""

  def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
    rows = [_row(field) for field in cls.attributes.values() if _is_setting(field)]
    if rows and cls.docstring:
      cls.docstring.value += "\n\nAttributes:\n" + "\n".join(rows)


def _is_setting(field: griffe.Attribute) -> bool:
  return isinstance(field.value, griffe.ExprCall) and str(field.value.function) == "setting"


def _row(field: griffe.Attribute) -> str:
  default, meaning = ast.parse(str(field.value), mode="eval").body.args[:2]
  text = ast.literal_eval(meaning).replace("*", r"\*")
  return f"  {field.name} ({field.annotation}): Default `{ast.unparse(default)}`: {text}."
