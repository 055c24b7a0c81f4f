"""Converts settings from and to nested plain values, such as those of a run's config.json."""

from collections.abc import Mapping
import dataclasses
import difflib
from typing import Any, get_type_hints

from grpo_jax.settings import LARGEST_FLOAT, ConfigError, Missing, shown


def from_dict(values: Mapping[str, Any], section: type, saved: bool = False) -> Any:
  """Builds the dataclass `section` from nested plain values. See `grpo_jax.config.from_dict`."""
  return _section(values, section, saved, "", section)


def _section(values: Mapping[str, Any], section: Any, saved: bool, prefix: str, root: type) -> Any:
  """Builds one section of a config, with the sections inside it.

  Args:
    values: The values of the section by name.
    section: The dataclass.
    saved: Whether the values are of an earlier run, so that `Setting.before` replaces a default.
    prefix: The section's name in error messages, such as "algo.".
    root: The dataclass of the whole config, for error messages.
  """
  kinds = get_type_hints(section)
  for key in values:
    _check_is_text(key)
    if key not in kinds:
      raise _unknown_key(prefix + key, root)
  converted = {}
  for field in dataclasses.fields(section):
    key, kind = prefix + field.name, kinds[field.name]
    if dataclasses.is_dataclass(kind):
      inner = values.get(field.name, {})
      if not isinstance(inner, Mapping):
        raise ConfigError(f"config key {key} must be a section of keys, got {shown(inner)}")
      converted[field.name] = _section(inner, kind, saved, f"{key}.", root)
      continue
    declared = field.metadata["setting"]
    # `before` is None where earlier versions behaved as the default says.
    default = declared.before if saved and declared.before is not None else declared.default
    is_set = field.name in values
    converted[field.name] = _converted(values[field.name], kind, key) if is_set else default
  return section(**converted)


def to_dict(config: Any) -> dict[str, Any]:
  """Converts a config to nested plain values, the inverse of `from_dict`. Tuples become lists."""
  return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def keys(section: Any, prefix: str = "") -> dict[str, Any]:
  """Returns the type of each key, such as algo.clip_high. For a section it is the dataclass."""
  out = {}
  for name, kind in get_type_hints(section).items():
    out[prefix + name] = kind
    if dataclasses.is_dataclass(kind):
      out |= keys(kind, f"{prefix}{name}.")
  return out


def check_key(name: str, section: type) -> None:
  """Raises ConfigError unless `name` is the key of a setting in the config `section`."""
  _check_is_text(name)
  all_keys = keys(section)
  if name not in all_keys:
    raise _unknown_key(name, section)
  if dataclasses.is_dataclass(all_keys[name]):
    inside = (f"{name}.{key}" for key in get_type_hints(all_keys[name]))
    raise ConfigError(f"config key {name} is a section: set one of {', '.join(inside)}")


def wrong_type(name: str, value: Any, kind: Any) -> ConfigError:
  """The error for a value of the wrong type for key `name`."""
  if value is None or isinstance(value, Missing):
    hint = f"{value}, or " if value else ""
    return ConfigError(f"config key {name} has no value yet: {hint}set it with --config.{name}=...")
  return ConfigError(f"config key {name} must be {_TYPE_NAMES[kind]}, got {shown(value)}")


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
  """Converts a value to `kind`, the type of key `name`. Raises ConfigError if it does not fit."""
  if hasattr(kind, "__args__"):
    element = kind.__args__[0]
    if isinstance(value, (list, tuple)) and all(_fits(item, element) for item in value):
      return tuple(element(item) for item in value)
  elif _fits(value, kind):
    return kind(value)
  raise wrong_type(name, value, kind)


def _fits(value: Any, kind: type) -> bool:
  """Whether a value has the type `kind`. An int may stand for a float."""
  if kind is float and type(value) is int:
    return abs(value) <= LARGEST_FLOAT  # beyond it, float() may fail
  return type(value) is kind


def _plain(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    return to_dict(value)
  return list(value) if isinstance(value, tuple) else value


def _check_is_text(key: Any) -> None:
  if not isinstance(key, str):
    raise ConfigError(f"config key {shown(key)} is not a string: write a key such as 'seed'")


def _unknown_key(name: str, root: Any) -> ConfigError:
  """The error for a key that does not exist, with the key that the user probably meant."""
  if name in getattr(root, "removed", {}):
    return ConfigError(f"config key {name} is gone: {root.removed[name].instead}")
  all_keys = list(keys(root))
  section, _, last = name.rpartition(".")
  siblings = [key.rpartition(".")[2] for key in all_keys if key.rpartition(".")[0] == section]
  close = difflib.get_close_matches(last, siblings, n=1)
  candidates = [f"{section}.{key}".strip(".") for key in close]
  if not candidates:  # the right key in the wrong section
    candidates = [key for key in all_keys if key.rpartition(".")[2] == last]
  if not candidates:  # a misspelt section, perhaps
    # With the default cutoff of 0.6, unrelated keys of one section would match each other.
    candidates = difflib.get_close_matches(name, all_keys, n=1, cutoff=0.8)
  if candidates:
    return ConfigError(f"config key {name} is unknown: did you mean {' or '.join(candidates)}?")
  if siblings:
    where = f"{section or 'a config'} has {', '.join(siblings)}"
  else:
    where = "they are all in grpo_jax/config.py"
  return ConfigError(f"config key {name} is unknown: {where}")
