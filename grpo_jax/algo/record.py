"""What the records of all axes share: worked examples, settings, and errors about settings.

A variant of the algorithm is one record: a function, the settings that it reads, its properties and
its worked examples. Each axis has one dict of records, such as `ADVANTAGES`. The rest of the
package looks a record up by its name and never compares names.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from grpo_jax.settings import ConfigError, Setting, Settings

SettingsByName = Mapping[str, Setting]


@dataclasses.dataclass(frozen=True)
class Example:
  """A worked example in plain numbers. A test runs every example of every record.

  Attributes:
    inputs: Names and values of the inputs. tests/variants_test.py says which an axis has.
    expected: Names and values of the outputs, worked out by hand or taken from a paper.
    settings: The settings that differ from the defaults.
  """

  inputs: Mapping[str, Any]
  expected: Mapping[str, Any]
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def require(holds: bool, algo: Settings, name: str, why: str) -> None:
  """Raises ConfigError about the setting `name` of `algo` unless `holds`."""
  if not holds:
    raise ConfigError(f"config key algo.{name} is {getattr(algo, name)!r}: {why}")
