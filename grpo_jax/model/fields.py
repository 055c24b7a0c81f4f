"""Single values out of config.json."""

from typing import Any, Callable, Mapping, NoReturn

Refuse = Callable[[str, str], NoReturn]  # (key of config.json, what is wrong with it)


def value(values: Mapping[str, Any], key: str, hint: type, refuse: Refuse) -> Any:
  """A bool, or a positive int or float."""
  found = values.get(key)
  if type(found) not in ({int, float} if hint is float else {hint}) or (
    hint is not bool and found <= 0
  ):
    refuse(
      key,
      f"must be {'true or false' if hint is bool else f'a positive {hint.__name__}'}, got {found!r}",
    )
  return hint(found)


def quotient(values: Mapping[str, Any], key: str, by: str, refuse: Refuse) -> int:
  """Of two of them that must divide."""
  whole, part = value(values, key, int, refuse), value(values, by, int, refuse)
  if whole % part:
    refuse(key, f"({whole}) must be a multiple of {by} ({part})")
  return whole // part
