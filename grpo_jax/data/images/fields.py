"""The settings of an image processor, in the JSON files of a model's folder."""

from collections.abc import Collection, Mapping
import math
from pathlib import Path
from typing import Any, NoReturn

from grpo_jax import files
from grpo_jax.settings import ConfigError, shown

_NESTED = "image_processor"  # the field of processor_config.json that transformers 5 writes


class Fields:
  """A JSON object with settings. Reading checks a field, and null counts as absent."""

  def __init__(self, values: Mapping[str, Any], file: str) -> None:
    """Reads from `values`. `file` is the name of the file in error messages."""
    self._values, self._file = values, file

  def get(self, name: str) -> Any:
    """The value of a field without a check, or None."""
    return self._values.get(name)

  def flag(self, name: str, default: Any) -> bool:
    """A boolean field. Like the methods below, it raises ConfigError for any other value."""
    value = self._or(name, default)
    if not isinstance(value, bool):
      self.refuse(name, "it must be true or false")
    return value

  def number(self, name: str, default: float) -> float:
    """A positive number."""
    value = self._or(name, default)
    if not _is_number(value) or value <= 0:
      self.refuse(name, "it must be a number above 0")
    return float(value)

  def count(self, name: str, default: int | None = None) -> int:
    """A whole number of at least 1."""
    value = self._or(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
      self.refuse(name, "it must be a whole number, at least 1")
    return value

  def channels(self, name: str, default: Any) -> tuple[float, ...]:
    """Three numbers, for red, green and blue."""
    value = self._or(name, default)
    if not isinstance(value, (list, tuple)) or len(value) != 3 or not all(map(_is_number, value)):
      self.refuse(name, "it must be a list of three numbers")
    return tuple(map(float, value))

  def choice(self, name: str, choices: Collection[Any], default: Any) -> Any:
    """A field whose value must be in `choices`."""
    value = self._or(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value not in choices:
      self.refuse(name, f"it must be one of {', '.join(map(str, choices))}")
    return value

  def inside(self, name: str, default: Mapping[str, Any]) -> "Fields":
    """The fields of a nested object, such as size."""
    value = self._or(name, default)
    if not isinstance(value, Mapping):
      self.refuse(name, f"it must be an object with {', '.join(default)}")
    return Fields(value, f"{self._file}: {name}")

  def must_be_true(self, *names: str) -> None:
    """Raises ConfigError if one of these fields is false."""
    for name in names:
      if not self.flag(name, True):
        self.refuse(name, "only true is supported")

  def must_be_false(self, *names: str) -> None:
    """Raises ConfigError if one of these fields is true."""
    for name in names:
      if self.flag(name, False):
        self.refuse(name, "only false is supported")

  def refuse(self, name: str, requirement: str) -> NoReturn:
    """Raises ConfigError with the name, the value and the requirement of a field."""
    value = shown(self._values.get(name))
    raise ConfigError(f"model.path: {self._file}: {name} is {value}: {requirement}")

  def _or(self, name: str, default: Any) -> Any:
    value = self._values.get(name)
    return default if value is None else value


def read(folder: Path) -> tuple[Fields, Fields] | None:
  """Reads the fields of a folder's image processor, and of the processor that contains it.

  transformers 5 writes both into processor_config.json. Older folders have preprocessor_config.json
  for the image processor.

  Args:
    folder: The folder of a model.

  Returns:
    (fields of the image processor, fields of the processor), or None if the folder has no image
    processor.

  Raises:
    ConfigError: A file cannot be read.
  """
  outer = read_json(folder / "processor_config.json")
  around = Fields(outer or {}, "processor_config.json")
  if outer and isinstance(outer.get(_NESTED), Mapping):
    return Fields(outer[_NESTED], f"processor_config.json: {_NESTED}"), around
  inner = read_json(folder / "preprocessor_config.json")
  if inner is None:
    return None
  return Fields(inner, "preprocessor_config.json"), around


def read_json(path: Path) -> dict[str, Any] | None:
  """Reads the object in a JSON file, or None without a file. Raises ConfigError if that fails."""
  if not path.exists():
    return None
  try:
    return files.json_object(files.read_bytes(path))
  except (OSError, ValueError) as error:
    reason = " ".join(str(error).split())
    raise ConfigError(f"model.path: {path} cannot be read ({reason:.200})") from None


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
