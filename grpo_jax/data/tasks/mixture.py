"""Several tasks in one data set (data.mixture). The field `task` of an example names its source."""

from collections.abc import Callable, Sequence
import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_jax.data.files.rows import Example, place_of
from grpo_jax.data.tasks import reasoning_gym
from grpo_jax.settings import ConfigError

if TYPE_CHECKING:
  from grpo_jax.config import Data

_SOURCE = re.compile(r"(?:(?P<name>\w+)=)?(?P<task>\w+)(?::(?P<path>.+))?", re.DOTALL)
# The most places of an epoch, each of which is an example. Curriculum keeps 8 bytes for each place.
_MOST_PLACES = 2**27


@dataclasses.dataclass(frozen=True)
class Source:
  """An entry of data.mixture.

  Attributes:
    name: The name of the source, which is the field `task` of its examples.
    task: The name of the task, a key of `tasks.TASKS`.
    path: The value of data.path for this task, or "".
  """

  name: str
  task: str
  path: str


def mixture_of(data: "Data") -> tuple[str, ...]:
  """The entries of data.mixture. With data.task=reasoning_gym, one for each task in data.path.

  Raises:
    ConfigError: data.path of reasoning_gym is empty or cannot be read.
  """
  if data.mixture or data.task != "reasoning_gym":
    return data.mixture
  return reasoning_gym.sources(data.path)


def sources_of(mixture: Sequence[str]) -> list[Source]:
  """Parses the entries of data.mixture, each TASK, TASK:PATH or NAME=TASK:PATH.

  Raises:
    ConfigError: An entry cannot be read, or two have the same name.
  """
  sources = []
  for entry in mixture:
    match = _SOURCE.fullmatch(entry)
    if not match:
      raise ConfigError(f"data.mixture holds {entry!r}: write TASK, TASK:PATH or NAME=TASK:PATH")
    sources.append(Source(match["name"] or match["task"], match["task"], match["path"] or ""))
  names = [source.name for source in sources]
  for name in names:
    if names.count(name) > 1:
      raise ConfigError(f"data.mixture has two sources named {name}: write NAME={name}:PATH")
    for end in ("low", "high"):  # the metrics of an interval
      if f"{name}_{end}" in names:
        raise ConfigError(
          f"data.mixture has the sources {name} and {name}_{end}, whose metrics would have the same"
          " names: rename one, as in NAME=TASK:PATH"
        )
  return sources


def columns_of(name: str, columns: Sequence[str], mixture: Sequence[str]) -> list[str]:
  """Selects the entries of data.columns for a source, and removes the prefix "SOURCE:" from them.

  Args:
    name: The name of the source.
    columns: data.columns. An entry with the prefix "SOURCE:" is for that source alone, and an entry
      without a prefix is for all sources.
    mixture: data.mixture.

  Raises:
    ConfigError: An entry names an unknown source, or defines the field `task` of a mixture.
  """
  names = [source.name for source in sources_of(mixture)]
  entries = []
  for entry in columns:
    # Only before the "=": what follows may be a template with a colon.
    source, colon, field = entry.partition("=")[0].rpartition(":")
    if mixture and field == "task":
      raise ConfigError(
        f"data.columns holds {entry!r}: with data.mixture the field task is the name of the source;"
        " choose another name"
      )
    if colon and source not in names:
      raise ConfigError(
        f"data.columns holds {entry!r}: {source!r} is no source of data.mixture, which has"
        f" {', '.join(names) or 'none'}"
      )
    if not colon or source == name:
      entries.append(entry.removeprefix(source + colon))
  return entries


def places_of(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
  """The number of places of each source in an epoch. A place is one example.

  An epoch has every row at least once. The rows of a source repeat if its weight demands more
  places than it has rows: sizes (100, 10) with weights (1, 1) give [100, 100].

  Args:
    sizes: The number of rows of each source.
    weights: The share of each source, up to a common factor. Empty: every row has one place.

  Raises:
    ConfigError: The weights differ so much that an epoch would be too long.
  """
  if not weights:
    return list(sizes)
  # The least factor of the weights that gives each source at least as many places as rows.
  factor = max(size / weight for size, weight in zip(sizes, weights, strict=True))
  length = sum(weight * factor for weight in weights)
  if length > max(_MOST_PLACES, 2 * sum(sizes)):  # large data may always be doubled
    raise ConfigError(
      f"config key data.weights is {tuple(weights)}: an epoch has every row at least once, so it"
      f" would have {length:.3g} prompts for {sum(sizes):,} rows; bring the weights closer together"
      ", or leave out the source that is hardly ever drawn"
    )
  return [max(size, round(weight * factor)) for size, weight in zip(sizes, weights)]


class Mixture(Sequence[Example]):
  """The examples of several sources. A field that a source lacks is None."""

  def __init__(
    self,
    parts: dict[str, Sequence[Example]],
    places: Sequence[int],
    in_turn: bool = False,
  ) -> None:
    """Assigns the places of the mixture to the sources.

    Args:
      parts: The examples of each source, keyed by its name.
      places: How many places of the mixture each source has.
      in_turn: Whether the sources alternate, so that the first examples come from all sources. Else
        one source follows the other.
    """
    self._names, self._parts, self._places = list(parts), list(parts.values()), list(places)
    self._fields = dict.fromkeys(name for part in self._parts for name in part[0])
    self._begins = np.cumsum([0, *places])
    self._order = None
    if in_turn:  # first place 0 of every source, then place 1 of every source, and so on
      rank = np.concatenate([np.arange(count) for count in places])
      self._order = np.argsort(rank, kind="stable")

  @property
  def parts(self) -> list[Sequence[Example]]:
    """The examples of each source."""
    return self._parts

  def __len__(self) -> int:
    return int(self._begins[-1])

  def __getitem__(self, index: Any) -> Any:
    if isinstance(index, slice):
      return [self[i] for i in range(*index.indices(len(self)))]
    if not -len(self) <= index < len(self):
      raise IndexError(f"there are {len(self)} examples, no number {index}")
    source, place = self._find(index % len(self))
    part = self._parts[source]
    example = part[place % len(part)]
    return {**self._fields, **example, "task": self._names[source]}

  def where(self, index: int) -> str:
    """The source of an example, the file of its row and the place in the file, for messages."""
    source, place = self._find(index)
    part = self._parts[source]
    return f"{self._names[source]}: {place_of(part, place % len(part))}"

  @property
  def names(self) -> list[str]:
    """The names of the sources."""
    return self._names

  def name_of(self, index: int) -> str:
    """The name of the source that example `index` comes from. This does not read the example."""
    return self._names[self._find(index)[0]]

  def part_of(self, index: int) -> Sequence[Example]:
    """The examples of the source that example `index` comes from."""
    return self._parts[self._find(index)[0]]

  def stand_in(self, index: int, word: int) -> int:
    """An index of the same source as `index`, chosen by the random number `word`."""
    source, _ = self._find(index)
    place = int(self._begins[source]) + word % self._places[source]
    return place if self._order is None else int(np.flatnonzero(self._order == place)[0])

  def each_row_once(self) -> "Mixture":
    """A mixture of the same sources without weights: one place for each row."""
    return Mixture(dict(zip(self._names, self._parts)), [*map(len, self._parts)])

  def shares(self) -> dict[str, tuple[int, float]]:
    """(number of rows, fraction of an epoch's places) of each source, keyed by its name."""
    return {
      name: (len(part), places / len(self))
      for name, part, places in zip(self._names, self._parts, self._places)
    }

  def _find(self, index: int) -> tuple[int, int]:
    """(number of the source, place in that source) of the example `index`."""
    place = index if self._order is None else int(self._order[index])
    source = int(np.searchsorted(self._begins, place, side="right")) - 1
    return source, place - int(self._begins[source])


def mix(
  mixture: Sequence[str],
  weights: Sequence[float],
  open_source: Callable[[Source], tuple[Sequence[Example], Sequence[Example]]],
) -> tuple[Mixture, Mixture]:
  """Mixes the training examples and the test examples of the sources of data.mixture.

  Args:
    mixture: The entries of data.mixture.
    weights: data.weights, which apply to training only.
    open_source: Called with a source, returns its (training examples, test examples).

  Returns:
    (training examples, test examples)

  Raises:
    ConfigError: The entries or the weights are invalid.
  """
  sources = sources_of(mixture)
  if weights and (
    len(weights) != len(sources) or not all(0 < weight < math.inf for weight in weights)
  ):
    raise ConfigError(
      f"config key data.weights is {tuple(weights)}: it must hold one number above 0 for each of"
      f" data.mixture = {tuple(mixture)}, or nothing"
    )
  opened = {source.name: open_source(source) for source in sources}
  train = {name: examples for name, (examples, _) in opened.items()}
  test = {name: examples for name, (_, examples) in opened.items()}
  return (
    Mixture(train, places_of([len(part) for part in train.values()], weights)),
    Mixture(test, [len(part) for part in test.values()], in_turn=True),
  )
