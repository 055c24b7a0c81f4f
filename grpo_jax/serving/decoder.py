"""The rows of an engine on the devices: one `Flight` with N places of one seat.

All places have room for prompts of the same length, so that one program decodes every mix of rows.
A prompt is computed at the shortest of a few lengths that holds it, so a short one costs little.
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax import model
from grpo_jax.sampler.flight import Flight, NewRows, Prompts
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.programs import FlightPrograms
from grpo_jax.sampler.rows import Chunk, Drawn
from grpo_jax.sampler.sampling import sizes_up_to
from grpo_jax.sampler.seats import IDLE_SHARE, Grid
from grpo_jax.sampler.stream import by_row

# Rounds of a chunk. More of them cost less time of the host. Fewer let readers see tokens sooner,
# rows that wait sit down sooner, and less be drawn after a text that ends a row.
_ROUNDS = 8
_MOST_ROUNDS = 2**30  # the cache counts its rounds in an int32


class Sizes(NamedTuple):
  """The limits of an engine.

  Attributes:
    rows: N, the most rows that are decoded together. A multiple of the mesh's row shards.
    prompt_tokens: S, the longest prompt.
    waiting: The most rows that wait.
  """

  rows: int
  prompt_tokens: int
  waiting: int


@dataclasses.dataclass
class Counts:
  """What an engine has done since it was made.

  Attributes:
    prompts: Prompts that were computed.
    copies: Prompts that were copied from a place that had them.
    tokens: Tokens that listeners heard of.
    rows: Rows that ended by themselves.
    chunks: Chunks that were decoded.
    seconds: How long they took, with the prompts before them.
  """

  prompts: int = 0
  copies: int = 0
  tokens: int = 0
  rows: int = 0
  chunks: int = 0
  seconds: float = 0.0


class NewRow(NamedTuple):
  """A row that takes a seat.

  Attributes:
    prompt: Token ids.
    number: An int32 on which its random numbers depend.
    settings: Temperature, filters and limits, as numbers. None is off.
  """

  prompt: tuple[int, ...]
  number: int
  settings: RowSettings


class Decoder:
  """The rows on the devices, and the programs that decode them. One thread calls it."""

  def __init__(
    self, config: model.ModelConfig, decoding: Decoding, sizes: Sizes, counts: Counts
  ) -> None:
    """Compiles nothing yet. It adds to `counts`. The rest are those of the engine."""
    self._programs = FlightPrograms(config, decoding, min(decoding.max_tokens, _ROUNDS + 1))
    self._shards, self._rows, self._counts = config.row_shards, sizes.rows, counts
    self._lengths = sizes_up_to(sizes.prompt_tokens)
    self._slots = sizes_up_to(decoding.max_tokens, model.slots_step(config))
    key = np.asarray(jax.random.key_data(jax.random.key(0)))  # rows differ by their number
    self._flight: Flight | None = None
    self._prompts: list[tuple[int, ...] | None] = [None] * self._rows  # at each place
    self._from_N = np.arange(self._rows)  # which prompts are still to be copied
    self._rounds = 0  # since the cache counted from 0
    self._new = NewRows(
      is_new_R=np.zeros(self._rows, bool),
      key_R2=np.tile(key, (self._rows, 1)),
      number_R=np.zeros(self._rows, np.int32),
      settings=jax.tree.map(np.array, by_row(_whole(RowSettings(), decoding), 1, self._rows)),
    )
    self._decoding = decoding

  def compile(self, params: model.Params) -> None:
    """Compiles every program, by calling each with free seats."""
    grid, smallest, longest = Grid(self._rows, 1), self._slots[0], self._lengths[-1]
    first = self._some((0,), longest), np.zeros(self._rows, int), self._new.settings
    self._flight, _ = self._programs.begin(grid, smallest, params, *first)
    nobody_R = np.zeros(self._rows, bool)
    for slots in self._slots:
      if slots > smallest:
        self._flight = self._programs.grow(self._flight, slots)
        self._programs.grow(self._flight, smallest)  # the way back
      self._decode(params, nobody_R, Chunk(np.int32(0), np.int32(0)))
    for length in self._lengths:
      self._arrive((0,) * length, self._rows, params)
    self._copy()

  def forget_prompts(self) -> None:
    """No place's prompt is used for another row, because other weights have computed it."""
    self._prompts = [None] * self._rows

  def seat(self, rows: dict[int, NewRow], params: model.Params) -> None:
    """Rows take free places.

    Where a place of the same shard has the prompt of a row already, it is copied from there.
    """
    self._new.is_new_R[:] = False
    for place, row in rows.items():
      self._new.is_new_R[place] = True
      self._new.number_R[place] = row.number
      settings = _whole(row.settings, self._decoding)
      for all_R, own in zip(*map(jax.tree.leaves, (self._new.settings, settings))):
        all_R[place] = own
      source = self._place_of(row.prompt, place)
      if source is None:
        if place in self._from_N[self._from_N != np.arange(self._rows)]:
          self._copy()  # before the prompt that others want is overwritten
        self._from_N[place] = place
        self._arrive(row.prompt, place, params)
        self._counts.prompts += 1
      else:
        self._from_N[place] = self._from_N[source]
        self._counts.copies += 1
      self._prompts[place] = row.prompt
    if (self._from_N != np.arange(self._rows)).any():
      self._copy()

  def chunk(
    self, params: model.Params, taken_R: np.ndarray, longest: int, leaves_early: bool
  ) -> tuple[Drawn, np.ndarray]:
    """Decodes a chunk.

    Args:
      params: The parameters.
      taken_R: bool, which seats have rows.
      longest: The most tokens that one of them has drawn.
      leaves_early: Whether the chunk ends once some rows have.

    Returns:
      What the rows drew and which of them go on, as numpy arrays.
    """
    # The token that was drawn last has no slot yet. A new row draws its first without a round.
    written = max(longest - 1, 0)
    slots = next((size for size in self._slots if size >= written + _ROUNDS), self._slots[-1])
    if longest:  # only new rows may have a smaller cache than the rows before them
      slots = max(slots, self._flight.cache.slots)
    if slots != self._flight.cache.slots or self._rounds > _MOST_ROUNDS:
      self._flight = self._programs.grow(self._flight, slots)
      self._rounds = 0
    rounds = min(self._programs.columns - 1, slots - written)
    ended = int(IDLE_SHARE * self._rows) if leaves_early else self._rows
    self._rounds += rounds
    return self._decode(params, taken_R, Chunk(np.int32(rounds), np.int32(ended)))

  def _decode(
    self, params: model.Params, taken_R: np.ndarray, chunk: Chunk
  ) -> tuple[Drawn, np.ndarray]:
    self._flight, *seen = self._programs.chunk(params, self._flight, self._new, taken_R, chunk)
    return jax.device_get(seen)

  def _place_of(self, prompt: tuple[int, ...], near: int) -> int | None:
    """A place of the shard of `near` that has this prompt, or None."""
    each = self._rows // self._shards
    first = near // each * each
    own = range(first, first + each)
    return next((place for place in own if self._prompts[place] == prompt), None)

  def _arrive(self, prompt: tuple[int, ...], place: int, params: model.Params) -> None:
    """Computes a prompt for a place."""
    length = next(length for length in self._lengths if length >= len(prompt))
    places = np.full(self._shards, self._rows)
    places[0] = place
    some = self._some(prompt, length)
    self._flight, _ = self._programs.arrive(self._flight, params, some, places)

  def _copy(self) -> None:
    self._flight = self._programs.copy(self._flight, self._from_N)
    self._from_N = np.arange(self._rows)

  def _some(self, prompt: tuple[int, ...], length: int) -> Prompts:
    """A prompt, once for each shard of the mesh, because each computes as many."""
    tokens_nS = np.zeros((self._shards, length), np.int32)
    tokens_nS[:, : len(prompt)] = prompt
    return Prompts(tokens_nS, np.full(self._shards, len(prompt), np.int32))


def _whole(settings: RowSettings, decoding: Decoding) -> RowSettings:
  """The settings with a number for each that is off, so that one program decodes all rows."""
  off = RowSettings(1.0, 0, 1.0, 0.0, 0, decoding.max_tokens)
  given = {name: x for name, x in dataclasses.asdict(settings).items() if x is not None}
  return off.replace(**given)
