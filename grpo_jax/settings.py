"""What a setting is: a type, a default, a range and a meaning, written down once.

The sections in `grpo_jax/config.py` are dataclasses whose fields are made by `setting`. The
variants of the algorithm in `grpo_jax/algo/` bring their own, as dicts from names to `Setting`s.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import difflib
from typing import TYPE_CHECKING, Any, get_type_hints


class ConfigError(ValueError):
  """Bad input from the user: one line that names the key or file and says what to do."""


class RunFailed(Exception):
  """A run that began and cannot go on: one line that says what failed and what is saved."""


@dataclasses.dataclass(frozen=True)
class Range:
  """The values that a setting may have.

  Attributes:
    contains: Returns whether a value is allowed.
    requirement: What an error message says, such as "it must be at least 1".
    choices: The allowed names, where the range is a list of names.
  """

  contains: Callable[[Any], bool]
  requirement: str
  choices: tuple[str, ...] = ()


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
  listed = ", ".join(repr(name) for name in names)
  return Range(lambda value: value in names, f"choose one of {listed}", tuple(names))


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


def check_ranges(config: Any, prefix: str = "") -> None:
  """Raises ConfigError for the first setting of a tree of dataclasses that is out of its range."""
  for field in dataclasses.fields(config):
    key, value = prefix + field.name, getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      check_ranges(value, f"{key}.")
    elif not field.metadata["setting"].range.contains(value):
      requirement = field.metadata["setting"].range.requirement
      raise ConfigError(f"config key {key} is {value!r}: {requirement}")


class Settings:
  """A read-only set of settings with their values as attributes.

  `grpo_jax.algo.settings.Algo` is one. Its fields are collected from the variants, which is why a
  type checker cannot know them.
  """

  if TYPE_CHECKING:

    def __getattr__(self, name: str) -> Any: ...


def from_dict(values: Mapping[str, Any], section: type, saved: bool = False) -> Any:
  """Nested plain values as the dataclass `section`. See `grpo_jax.config.from_dict`."""
  return _section(values, section, saved, "", section)


def _section(values: Mapping[str, Any], section: Any, saved: bool, prefix: str, root: type) -> Any:
  kinds = get_type_hints(section)
  for key in values:
    if key not in kinds:
      raise _unknown_key(prefix + key, root)
  converted = {}
  for field in dataclasses.fields(section):
    key, kind = prefix + field.name, kinds[field.name]
    if dataclasses.is_dataclass(kind):
      inner = values.get(field.name, {})
      if not isinstance(inner, Mapping):
        raise ConfigError(f"config key {key} must be a section of keys, got {inner!r}")
      converted[field.name] = _section(inner, kind, saved, f"{key}.", root)
      continue
    declared = field.metadata["setting"]
    missing = declared.before if saved and declared.before is not None else declared.default
    given = field.name in values
    converted[field.name] = _converted(values[field.name], kind, key) if given else missing
  return section(**converted)


def to_dict(config: Any) -> dict[str, Any]:
  """The inverse of `from_dict`, as JSON holds it: tuples become lists."""
  return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def keys(section: Any, prefix: str = "") -> dict[str, Any]:
  """Every key, such as algo.clip_high, with its type. A section has its dataclass as its type."""
  out = {}
  for name, kind in get_type_hints(section).items():
    out[prefix + name] = kind
    if dataclasses.is_dataclass(kind):
      out |= keys(kind, f"{prefix}{name}.")
  return out


def check_key(name: str, section: type) -> None:
  """Raises ConfigError unless `name` is the key of a setting."""
  all_keys = keys(section)
  if name not in all_keys:
    raise _unknown_key(name, section)
  if dataclasses.is_dataclass(all_keys[name]):
    inside = (f"{name}.{key}" for key in get_type_hints(all_keys[name]))
    raise ConfigError(f"config key {name} is a section: set one of {', '.join(inside)}")


def wrong_type(name: str, value: Any, kind: Any) -> ConfigError:
  """The error for a value of the wrong type for key `name`."""
  if value is None:
    return ConfigError(f"config key {name} has no value yet: give it one with --config.{name}=...")
  return ConfigError(f"config key {name} must be {_TYPE_NAMES[kind]}, got {value!r}")


_TYPE_NAMES = {
  int: "a whole number",
  float: "a number",
  bool: "True or False",
  str: "a string",
  tuple[int, ...]: "a list of whole numbers",
  tuple[float, ...]: "a list of numbers",
  tuple[str, ...]: "a list of strings",
}


def _converted(value: Any, kind: Any, name: str) -> Any:
  if hasattr(kind, "__args__"):
    element = kind.__args__[0]
    if isinstance(value, (list, tuple)) and all(_fits(item, element) for item in value):
      return tuple(element(item) for item in value)
  elif _fits(value, kind):
    return kind(value)
  raise wrong_type(name, value, kind)


def _fits(value: Any, kind: type) -> bool:
  return type(value) is kind or (kind is float and type(value) is int)


def _plain(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    return to_dict(value)
  return list(value) if isinstance(value, tuple) else value


def _unknown_key(name: str, root: type) -> ConfigError:
  """The error for a key that does not exist, with the key that was probably meant."""
  all_keys = list(keys(root))
  section, _, last = name.rpartition(".")
  siblings = [key.rpartition(".")[2] for key in all_keys if key.rpartition(".")[0] == section]
  close = difflib.get_close_matches(last, siblings, n=1)
  candidates = [f"{section}.{key}".strip(".") for key in close]
  if not candidates:  # the right key in the wrong section
    candidates = [key for key in all_keys if key.rpartition(".")[2] == last]
  if not candidates:
    candidates = difflib.get_close_matches(name, all_keys, n=1, cutoff=0.8)
  if candidates:
    return ConfigError(f"config key {name} is unknown: did you mean {' or '.join(candidates)}?")
  if siblings:
    where = f"{section or 'a config'} has {', '.join(siblings)}"
  else:
    where = "they are all in grpo_jax/config.py"
  return ConfigError(f"config key {name} is unknown: {where}")


def _with_note(requirement: str, note: str) -> str:
  return f"{requirement}; {note}" if note else requirement
