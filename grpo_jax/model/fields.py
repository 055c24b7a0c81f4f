"""Reads single fields of config.json and checks their types."""

from collections.abc import Callable, Mapping
import math
from typing import Any, NoReturn

from grpo_jax.settings import LARGEST_INT, shown

Refuse = Callable[[str, str], NoReturn]  # raises ConfigError; takes a key and what is wrong with it


def read_field(values: Mapping[str, Any], key: str, kind: type, refuse: Refuse) -> Any:
  """A bool, or a positive int or float. An int is accepted where `kind` is float."""
  found = values.get(key)
  types = (int, float) if kind is float else (kind,)
  # `type` and not isinstance, because a bool is an instance of int.
  if type(found) not in types or not (kind is bool or _is_positive(found)):
    wanted = "true or false" if kind is bool else f"a positive {kind.__name__}"
    refuse(key, f"must be {wanted}, got {shown(found)}")
  return kind(found)


def _is_positive(number: float) -> bool:
  """Whether a number is above 0 and no larger than any that a model can have."""
  largest = LARGEST_INT if type(number) is int else math.inf
  return 0 < number <= largest and number < math.inf


def read_quotient(
  values: Mapping[str, Any], dividend_key: str, divisor_key: str, refuse: Refuse
) -> int:
  """One positive int divided by another, which must leave no remainder."""
  dividend = read_field(values, dividend_key, int, refuse)
  divisor = read_field(values, divisor_key, int, refuse)
  if dividend % divisor:
    refuse(dividend_key, f"({dividend}) must be a multiple of {divisor_key} ({divisor})")
  return dividend // divisor
