"""Reads single fields of config.json and checks their types."""

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

Refuse = Callable[[str, str], NoReturn]  # raises ConfigError; takes a key and what is wrong with it


def read_field(values: Mapping[str, Any], key: str, kind: type, refuse: Refuse) -> Any:
  """A bool, or a positive int or float. An int is accepted where `kind` is float."""
  found = values.get(key)
  types = (int, float) if kind is float else (kind,)
  # `type` and not isinstance, because a bool is an instance of int.
  if type(found) not in types or (kind is not bool and found <= 0):
    wanted = "true or false" if kind is bool else f"a positive {kind.__name__}"
    refuse(key, f"must be {wanted}, got {found!r}")
  return kind(found)


def read_quotient(
  values: Mapping[str, Any], dividend_key: str, divisor_key: str, refuse: Refuse
) -> int:
  """One positive int divided by another, which must leave no remainder."""
  dividend = read_field(values, dividend_key, int, refuse)
  divisor = read_field(values, divisor_key, int, refuse)
  if dividend % divisor:
    refuse(dividend_key, f"({dividend}) must be a multiple of {divisor_key} ({divisor})")
  return dividend // divisor
