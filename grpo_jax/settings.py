"""Declares settings: the default, the range and the meaning of each, written down once.

`setting` makes the fields of the sections in `grpo_jax/config.py`, and of the `Settings` that the
variants of the algorithm in `grpo_jax/algo/` read.
"""

from collections.abc import Callable, Collection
import dataclasses
import ipaddress
import math
import os
from pathlib import Path
import traceback
from typing import Any
from urllib.parse import urlsplit

LARGEST_INT = 2**31 - 1  # of int32, in which the devices compute
SMALLEST_FLOAT, LARGEST_FLOAT = 1e-30, 1e30  # inside the range of float32, with a margin


class OneLineError(Exception):
  """An error whose message needs no traceback.

  A notebook shows the message. If code of the user raised the cause, it also shows the frames of
  that code, without those of this package.
  """

  def _render_traceback_(self) -> list[str]:  # IPython calls it
    cause: BaseException = self
    seen = {id(cause)}
    while (
      cause.__cause__ is not None and id(cause.__cause__) not in seen
    ):  # it may be its own cause
      cause = cause.__cause__
      seen.add(id(cause))
    frames = traceback.extract_tb(cause.__traceback__) if cause is not self else []
    package = os.path.dirname(__file__)
    outside = [frame for frame in frames if not frame.filename.startswith(package)]
    return [*traceback.format_list(outside), f"{type(self).__name__}: {self}"]


class ConfigError(OneLineError, ValueError):
  """Bad input from the user: one line that names the key or file and says what to do."""


class Missing(str):
  """Stands for a value that a recipe leaves to the user. The text says how to get one."""


class RunFailed(OneLineError):
  """A run began and cannot continue: one line that says what failed and what is saved."""


class ConfigStopsRun(RunFailed):
  """A `RunFailed` that the same command would only repeat: another config is needed.

  A run keeps its config, so the message says which key to change in another --workdir.
  """


@dataclasses.dataclass(frozen=True)
class Range:
  """The values that a setting may have.

  Attributes:
    contains: (value) -> whether the value is allowed.
    requirement: The requirement in words, for an error message: "it must be at least 1".
    choices: The allowed names, for a range that is a list of names. Otherwise empty.
  """

  contains: Callable[[Any], bool]
  requirement: str
  choices: tuple[str, ...] = ()


def at_least(low: float, note: str = "", at_most: float = math.inf) -> Range:
  """Values from `low` to `at_most`. `note` is added to the error message, such as "0 is off"."""
  limit = f" and at most {at_most}" if at_most < math.inf else ""
  requirement = _with_note(f"it must be at least {low}{limit}", note)
  return Range(lambda value: low <= value <= at_most, requirement)


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


def one_of(names: Collection[str], note: str = "") -> Range:
  """One of `names`. A name that is added to the collection later is allowed, too."""
  listed = ", ".join(repr(name) for name in names)
  requirement = f"choose one of {listed}" + (f", {note}" if note else "")
  return Range(lambda value: value in names, requirement, tuple(names))


def each_of(names: Collection[str]) -> Range:
  """Several of `names`, or none of them."""
  listed = ", ".join(repr(name) for name in names)
  return Range(lambda values: {*values} <= {*names}, f"choose among {listed}")


def span(requirement: str) -> Range:
  """Either no numbers or two: the first is at least 1, and the second is not less."""
  return Range(lambda pair: not pair or (len(pair) == 2 and 1 <= pair[0] <= pair[1]), requirement)


ANY = Range(lambda value: True, "any value is allowed")


@dataclasses.dataclass(frozen=True)
class Setting:
  """One setting, without its name.

  Attributes:
    default: The value if the user sets none.
    meaning: The effect of the setting, for the documentation.
    range: The values that are allowed.
    before: The value for a config that was saved before this setting existed. It reproduces the
      behaviour of that time. None means the default.
  """

  default: Any
  meaning: str
  range: Range = ANY
  before: Any = None


def setting(default: Any, meaning: str, range: Range = ANY, before: Any = None) -> Any:
  """A dataclass field that carries its `Setting`."""
  one = Setting(default, meaning, range, before)
  return dataclasses.field(default=default, metadata={"setting": one})


@dataclasses.dataclass(frozen=True)
class Settings:
  """The base of classes that declare settings of the algorithm. It declares none.

  Each function takes the class of the settings that it reads, or this class if it reads none.
  `setting` makes the fields. `Algo` in `grpo_jax/algo/settings.py` inherits from all such classes.
  """


def names_of(settings: type[Settings]) -> tuple[str, ...]:
  """The names of the settings of a class, including inherited ones."""
  return tuple(field.name for field in dataclasses.fields(settings))


def check_ranges(config: Any, prefix: str = "") -> None:
  """Raises ConfigError for the first setting of a tree of dataclasses that is out of its range."""
  for field in dataclasses.fields(config):
    key, value = prefix + field.name, getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      check_ranges(value, f"{key}.")
      continue
    declared = field.metadata["setting"].range
    if not declared.contains(value):
      raise ConfigError(f"config key {key} is {shown(value)}: {declared.requirement}")
    for number in value if isinstance(value, tuple) else (value,):
      requirement = _unusable(number)
      if requirement:
        raise ConfigError(f"config key {key} is {shown(value)}: {requirement}")


def _unusable(value: Any) -> str:
  """Returns a requirement that all values must meet and that this one breaks, or ""."""
  if type(value) is int and abs(value) > LARGEST_INT:
    return f"it must be between -{LARGEST_INT} and {LARGEST_INT}"
  if type(value) is float and value and not SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT:
    return f"it must be finite, and its size 0 or between {SMALLEST_FLOAT} and {LARGEST_FLOAT}"
  if type(value) is str and ("\0" in value or not is_text(value)):
    return "it must be text, without NUL and without half of a surrogate pair"
  return ""


def is_text(value: str) -> bool:
  """Whether UTF-8 can encode a string. It cannot encode half of a surrogate pair, as JSON can."""
  try:
    value.encode()
  except UnicodeEncodeError:
    return False
  return True


def address_of(text: str, key: str) -> tuple[str, int]:
  """Parses "HOST:PORT" or "[IPV6]:PORT". Raises ConfigError, whose message names `key`."""
  host, _, port = text.rpartition(":")
  if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
    raise ConfigError(f"{key} is {shown(text)}: it must be HOST:PORT, such as 127.0.0.1:5555")
  return host.removeprefix("[").removesuffix("]"), int(port)


def is_url(text: str) -> bool:
  """Whether a text is http://HOST:PORT or https://HOST:PORT, and nothing more."""
  try:
    split = urlsplit(text)
    return (
      split.scheme in ("http", "https")
      and bool(split.hostname and split.port)
      and text == f"{split.scheme}://{split.netloc}"
      and "@" not in split.netloc
    )
  except ValueError:
    return False


def is_loopback(host: str) -> bool:
  """Whether only this machine can reach the address or name `host`."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"


def path_of(value: Any, name: str) -> Path:
  """Converts the value of a user to a path on this machine. The path need not exist.

  Args:
    value: A text, or a path object such as pathlib.Path. "~" means the home folder.
    name: The name of the value in an error message, such as "flag --out".

  Raises:
    ConfigError: The value is not a path, or no file system accepts the path.
  """
  text = path_text(value, name)
  try:
    path = Path(text).expanduser()
    path.exists()  # only asks whether the file system accepts the path
  except RuntimeError as error:  # ~NAME of an unknown user
    raise ConfigError(f"{name}={text}: {error}") from None
  except OSError as error:  # a name that is too long
    raise ConfigError(f"{name}={text:.200}: {error.strerror}") from None
  return path


def path_text(value: Any, name: str) -> str:
  """The text of a path, also of one in object storage. Arguments and errors are as in `path_of`."""
  try:
    text = os.fspath(value)
  except Exception:  # an object's own __fspath__ may raise anything
    text = None
  if not isinstance(text, str):
    raise ConfigError(f"{name} must be a path: a text or a pathlib.Path, got {shown(value)}")
  if not text:
    raise ConfigError(f"{name} is empty: name a file or a folder")
  if "\0" in text or not is_text(text):
    raise ConfigError(f"{name}={text!r:.200}: a path is UTF-8 without NUL; choose another one")
  return text


def shown(value: Any) -> str:
  """Formats a value for an error message, in one line of at most 200 characters."""
  try:
    return f"{value!r:.200}".replace("\n", " ")  # as in the repr of an array
  except Exception:  # Python writes no int of more than 4,300 digits, and an object may do anything
    return f"a value of type {type(value).__name__} that cannot be printed"


def _with_note(requirement: str, note: str) -> str:
  return f"{requirement}; {note}" if note else requirement
