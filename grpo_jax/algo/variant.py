"""The base of the records of all axes: worked examples, settings, and errors about settings.

An axis is a choice of the algorithm, such as the advantage or the surrogate. A variant on an axis
is one record: a function, the settings that it reads, its properties and its worked examples. Each
axis has one dict of records, such as `ADVANTAGES`. The rest of the package looks a record up by its
name and never compares names.
"""

from collections import Counter
from collections.abc import Mapping
import dataclasses
from inspect import get_annotations
from typing import Any, Generic, TypeVar, cast

from grpo_jax.settings import ConfigError, Settings

S = TypeVar("S", bound=Settings)


@dataclasses.dataclass(frozen=True)
class Example:
  """A worked example in plain numbers. A test runs every example of every record.

  Attributes:
    inputs: Names and values of the inputs. tests/variants_test.py lists the inputs of each axis.
    expected: Names and values of the outputs, worked out by hand or taken from a paper.
    settings: The settings that differ from the defaults.
  """

  inputs: Mapping[str, Any]
  expected: Mapping[str, Any]
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(Generic[S]):
  """The fields of all records whose functions read settings.

  Attributes:
    settings: The class of the settings that the functions read, `Settings` if they read none. The
      class of the axis, such as `SurrogateSettings`, inherits from it.
    examples: The worked examples.
  """

  settings: type[S]
  examples: tuple[Example, ...]


AnyRecord = TypeVar("AnyRecord", bound=Record[Any])


class Records(dict[str, AnyRecord]):
  """The records of an axis by name, whatever their settings.

  In a plain dict, mypy would take `Any` for the settings of a record that is added, and would not
  compare the class that the record names with the one that its functions take.
  """

  def __setitem__(self, name: str, record: Record[S]) -> None:
    super().__setitem__(name, cast(AnyRecord, record))


def check_settings(of_axis: type[Settings], records: Mapping[str, Record[Any]]) -> None:
  """Raises TypeError if `of_axis` lacks a record's settings, or inherits a name twice."""
  for name, record in records.items():
    if not issubclass(of_axis, record.settings):
      missing = f"{record.settings.__module__}.{record.settings.__name__}"
      raise TypeError(f"{name} reads {missing}: put it in front of the bases of {of_axis.__name__}")
  declared = Counter(name for base in of_axis.__mro__ for name in get_annotations(base))
  for name, count in declared.items():
    if count > 1:
      raise TypeError(f"the setting {name} of {of_axis.__name__} is declared by {count} classes")


def require(holds: bool, algo: Settings, name: str, why: str) -> None:
  """Raises ConfigError about the setting `name` of `algo` unless `holds`."""
  if not holds:
    raise ConfigError(f"config key algo.{name} is {getattr(algo, name)!r}: {why}")
