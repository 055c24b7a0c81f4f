"""What a setting is: a type, a default, a range and a meaning, written down once.

The sections in `grpo_jax/config.py` are dataclasses whose fields are made by `setting`. The
variants of the algorithm in `grpo_jax/algo/` bring their own, as dicts from names to `Setting`s.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any


class ConfigError(ValueError):
  """Bad input from the user: one line that names the key or file and says what to do."""


@dataclasses.dataclass(frozen=True)
class Range:
  """The values that a setting may have.

  Attributes:
    contains: Returns whether a value is allowed.
    requirement: What an error message says, such as "it must be at least 1".
  """

  contains: Callable[[Any], bool]
  requirement: str


def at_least(low: float, note: str = "") -> Range:
  """Values from `low` on. `note` is added to the error message, such as "0 is off"."""
  return Range(lambda value: value >= low, _with_note(f"it must be at least {low}", note))


def above(low: float, note: str = "") -> Range:
  """Values greater than `low`."""
  return Range(lambda value: value > low, _with_note(f"it must be above {low}", note))


def fraction(note: str = "") -> Range:
  """Values greater than 0 and at most 1."""
  return Range(lambda value: 0 < value <= 1, _with_note("it must be in (0, 1]", note))


def below_one(note: str = "") -> Range:
  """Values from 0 on and less than 1."""
  return Range(lambda value: 0 <= value < 1, _with_note("it must be in [0, 1)", note))


def zero_or_above(low: float, note: str = "") -> Range:
  """0, or values greater than `low`."""
  requirement = _with_note(f"it must be 0 or above {low}", note)
  return Range(lambda value: value == 0 or value > low, requirement)


def one_of(names: Collection[str]) -> Range:
  """One of `names`."""
  choices = ", ".join(repr(name) for name in names)
  return Range(lambda value: value in names, f"choose one of {choices}")


ANY = Range(lambda value: True, "any value is allowed")


@dataclasses.dataclass(frozen=True)
class Setting:
  """One setting, without its name.

  Attributes:
    default: The value where the user gives none. Its type is the setting's type.
    meaning: What it does, for the reader of the code and of the error messages.
    range: The values that are allowed.
    before: The value of a config that was saved before this setting existed: the one that gives
      the behaviour of that time. None means the default.
  """

  default: Any
  meaning: str
  range: Range = ANY
  before: Any = None


def setting(default: Any, meaning: str, range: Range = ANY, before: Any = None) -> Any:
  """A dataclass field that carries its `Setting`."""
  return field_of(Setting(default, meaning, range, before))


def field_of(one: Setting) -> Any:
  """A dataclass field for a `Setting`."""
  return dataclasses.field(default=one.default, metadata={"setting": one})


def check_range(key: str, value: Any, allowed: Range) -> None:
  """Raises ConfigError if `value`, of config key `key`, is not in the range."""
  if not allowed.contains(value):
    raise ConfigError(f"config key {key} is {value!r}: {allowed.requirement}")


class Settings:
  """A read-only set of settings with their values as attributes.

  `grpo_jax.algo.settings.Algo` is one. Its fields are collected from the variants, which is why a
  type checker cannot know them.
  """

  if TYPE_CHECKING:

    def __getattr__(self, name: str) -> Any: ...


def _with_note(requirement: str, note: str) -> str:
  return f"{requirement}; {note}" if note else requirement
