"""The engine: rows of many requests are decoded together, in a thread of its own.

It owns one `Flight` with N places of one seat. Between two chunks, it takes new weights and seats
rows that wait. After a chunk, it tells the listeners of the rows what these have drawn. Rows that
have ended or that nobody wants any more leave.

A row's tokens depend on its prompt, its settings, its number and the weights alone. The number
decides the random numbers. In float32, the rows beside it change no token.

All places have room for prompts of the same length, so that one program decodes every mix of rows.
A prompt is computed at the shortest of a few lengths that holds it, so a short one costs little.
"""

from collections import deque
from collections.abc import Callable, Sequence
import dataclasses
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax import model
from grpo_jax.programs.flight import Flight, FlightPrograms, NewRows, Prompts
from grpo_jax.programs.sampling import by_row, capacities
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.rows import Chunk, Drawn
from grpo_jax.sampler.seats import Grid
from grpo_jax.sampler.stop import End

# Rounds of a chunk. More of them cost less time of the host. Fewer let readers see tokens sooner,
# rows that wait sit down sooner, and less be drawn after a text that ends a row.
_ROUNDS = 8
# While rows wait, a chunk ends once so large a share of the seats has become free.
_IDLE_SHARE = 0.1
_SHORTEST_PROMPTS = 32  # tokens; no prompt is padded to less
_PROMPT_LENGTHS = 4  # at most so many, each half of the next, because each is compiled
_MOST_ROUNDS = 2**30  # the cache counts its rounds in an int32


class Full(Exception):
  """As many rows wait as may wait."""


class Closed(Exception):
  """The engine takes no rows any more."""


class Part(NamedTuple):
  """What a row drew in a chunk.

  Attributes:
    tokens: With the one that ended the row.
    logprobs: Under softmax(logits / temperature). At temperature 0, of temperature 1.
    version: Of the weights that wrote the tokens.
    finish: "" while the row goes on, "stop" after a stop id or a text that ends it, "length" at
      its limit, and "closed" if the engine ended first.
  """

  tokens: list[int]
  logprobs: list[float]
  version: int
  finish: str


@dataclasses.dataclass(frozen=True)
class Job:
  """A completion to write.

  Attributes:
    prompt: Token ids, at least one and at most `Sizes.prompt_tokens`.
    number: An int32 on which the random numbers depend, and they depend on nothing else.
    settings: Temperature, filters and limits, as numbers. None is off.
    hear: Called in the engine's thread with each part of the completion. It must return at once.
    end: Ends the row at texts, as `sampler.stop.end_at` returns it, or None.
  """

  prompt: tuple[int, ...]
  number: int
  settings: RowSettings
  hear: Callable[[Part], None]
  end: End | None = None


class Row:
  """A job that waits or is decoded. `Engine.submit` returns it, and `Engine.cancel` takes it."""

  def __init__(self, job: Job):
    """It has drawn nothing yet."""
    self.job = job
    self.tokens: list[int] = []
    self.is_cancelled = False


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


class Engine:
  """Decodes rows. Every method may be called from any thread.

  Attributes:
    sizes: Its limits.
    max_tokens: T, the longest completion.
    counts: What it has done.
    failure: The error that ended it, or None.
  """

  def __init__(
    self,
    config: model.ModelConfig,
    decoding: Decoding,
    sizes: Sizes,
    params: model.Params,
    version: int = 0,
  ):
    """Compiles nothing yet.

    Args:
      config: The model, in the dtype of sampling.
      decoding: Stop ids and the longest completion.
      sizes: The limits.
      params: All parameters, as `Parameters.for_sampling` returns them.
      version: What to call these weights.
    """
    self.sizes, self.max_tokens, self.counts = sizes, decoding.max_tokens, Counts()
    self.failure: BaseException | None = None
    self._decoder = _Decoder(config, decoding, sizes, self.counts)
    self._params, self._version = params, version
    self._changed = threading.Condition()
    self._next_weights: tuple[model.Params, int] | None = None
    self._waiting: deque[Row] = deque()
    self._seats: list[Row | None] = [None] * sizes.rows
    self._is_closed = False
    self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

  def start(self) -> None:
    """Compiles every program, then takes rows. Returns when the programs are compiled."""
    self._decoder.compile(self._params)
    self._thread.start()

  @property
  def version(self) -> int:
    """The version of the weights that write the next tokens."""
    return self._version

  @property
  def waiting(self) -> int:
    """How many rows wait."""
    return len(self._waiting)

  @property
  def in_flight(self) -> int:
    """How many rows are being decoded."""
    return sum(row is not None for row in self._seats)

  @property
  def is_open(self) -> bool:
    """Whether it takes rows."""
    return self._thread.is_alive() and not self._is_closed

  def submit(self, jobs: Sequence[Job]) -> list[Row]:
    """Lets jobs wait for seats, in their order.

    Raises:
      Full: Not all of them may wait. None does.
      Closed: The engine was closed, or it failed.
    """
    with self._changed:
      if not self.is_open:
        raise Closed
      if len(self._waiting) + len(jobs) > self.sizes.waiting:
        raise Full
      rows = [Row(job) for job in jobs]
      self._waiting.extend(rows)
      self._changed.notify_all()
    return rows

  def cancel(self, rows: Sequence[Row]) -> None:
    """Drops rows that nobody wants any more. Those that have ended stay as they are.

    A row that is decoded leaves its seat after a chunk.
    """
    with self._changed:
      for row in rows:
        row.is_cancelled = True
      self._waiting = deque(row for row in self._waiting if not row.is_cancelled)
      self._changed.notify_all()

  def set_weights(self, params: model.Params, version: int) -> None:
    """Replaces the weights between two chunks, and returns when that is done.

    Rows in flight go on. Their prompts and earlier tokens keep the keys and values that the old
    weights computed.

    Args:
      params: As those that the engine was made with.
      version: What to call them.

    Raises:
      ValueError: They have other shapes.
      Closed: The engine was closed, or it failed.
    """
    if _shapes(params) != _shapes(self._params):
      raise ValueError("the new weights have other shapes than those of the engine")
    with self._changed:
      self._next_weights = params, version
      self._changed.notify_all()
      while self._next_weights is not None:
        if not self.is_open:
          raise Closed
        self._changed.wait(0.1)

  def close(self) -> None:
    """Ends all rows, and the thread. Their listeners hear "closed"."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()
    if self._thread.is_alive():
      self._thread.join()

  def _run(self) -> None:
    try:
      while self._between_chunks():
        self._chunk()
    except BaseException as error:  # whatever it is, the rows end and their listeners hear of it
      self.failure = error
    with self._changed:
      self._is_closed = True
      left = [row for row in self._seats if row is not None] + [*self._waiting]
      self._waiting.clear()
      self._changed.notify_all()
    for row in left:
      self._tell(row, Part([], [], self._version, "closed"))

  def _between_chunks(self) -> bool:
    """Waits until there is something to decode. Returns False once the engine was closed."""
    with self._changed:
      while True:
        if self._is_closed:
          return False
        if self._next_weights is not None:
          (self._params, self._version), self._next_weights = self._next_weights, None
          self._decoder.forget_prompts()
          self._changed.notify_all()
        if self._waiting or self.in_flight:
          return True
        self._changed.wait()

  def _chunk(self) -> None:
    """Seats the rows that wait, decodes a chunk, and tells the listeners."""
    start = time.monotonic()
    with self._changed:
      free = [place for place, row in enumerate(self._seats) if row is None]
      new = {place: self._waiting.popleft() for place, _ in zip(free, [*self._waiting])}
      for place, row in new.items():
        self._seats[place] = row
      leaves_early = bool(self._waiting)
    self._decoder.seat({place: row.job for place, row in new.items()}, self._params)
    longest = max(len(row.tokens) for row in self._seats if row is not None)
    taken_R = np.array([row is not None for row in self._seats])
    drawn, goes_on_R = self._decoder.chunk(self._params, taken_R, longest, leaves_early)
    for place, row in enumerate(self._seats):
      if row is not None and not self._hand_on(row, place, drawn, bool(goes_on_R[place])):
        self._seats[place] = None
    self.counts.chunks += 1
    self.counts.seconds += time.monotonic() - start

  def _hand_on(self, row: Row, place: int, drawn: Drawn, goes_on: bool) -> bool:
    """Tells a row's listener what it drew. Returns whether the row goes on."""
    columns = np.flatnonzero(drawn.is_drawn_RN[place])
    seen = len(row.tokens)
    row.tokens += drawn.tokens_RN[place, columns].tolist()
    logprobs = drawn.logprobs_RN[place, columns].tolist()
    finish = "" if goes_on else "stop" if drawn.stopped_by_R[place] >= 0 else "length"
    kept = row.job.end(row.tokens, seen) if row.job.end and len(columns) else None
    if kept is not None:
      del row.tokens[kept:], logprobs[kept - seen :]
      finish = "stop"
    self.counts.tokens += len(row.tokens) - seen
    self.counts.rows += bool(finish)
    return self._tell(row, Part(row.tokens[seen:], logprobs, self._version, finish)) and not finish

  def _tell(self, row: Row, part: Part) -> bool:
    """Whether a row is still wanted. Its listener may be gone, as after its server has ended."""
    if row.is_cancelled:
      return False
    try:
      row.job.hear(part)
    except RuntimeError:  # its event loop is closed
      return False
    return True


class _Decoder:
  """The rows on the devices, and the programs that decode them."""

  def __init__(
    self, config: model.ModelConfig, decoding: Decoding, sizes: Sizes, counts: Counts
  ) -> None:
    self._programs = FlightPrograms(config, decoding, min(decoding.max_tokens, _ROUNDS + 1))
    self._shards, self._rows, self._counts = config.row_shards, sizes.rows, counts
    self._lengths = prompt_lengths(sizes.prompt_tokens)
    self._slots = capacities(decoding.max_tokens, model.slots_step(config))
    self._key = jax.random.key(0)  # what differs between rows is their number
    self._flight: Flight | None = None
    self._prompts: list[tuple[int, ...] | None] = [None] * self._rows  # at each place
    self._from_N = np.arange(self._rows)  # which prompts are still to be copied
    self._rounds = 0  # since the cache counted from 0
    self._new = NewRows(
      is_new_R=np.zeros(self._rows, bool),
      number_R=np.zeros(self._rows, np.int32),
      settings=jax.tree.map(np.array, by_row(_whole(RowSettings(), decoding), 1, self._rows)),
    )
    self._decoding = decoding

  def compile(self, params: model.Params) -> None:
    """Compiles every program, by calling each with free seats."""
    grid, smallest, longest = Grid(self._rows, 1), self._slots[0], self._lengths[-1]
    first = self._some((0,), longest), np.zeros(self._rows, int), self._new.settings
    self._flight = self._programs.begin(grid, smallest, params, *first)
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

  def seat(self, jobs: dict[int, Job], params: model.Params) -> None:
    """Rows take free places.

    Where a place of the same shard has the prompt of a row already, it is copied from there.
    """
    self._new.is_new_R[:] = False
    for place, job in jobs.items():
      self._new.is_new_R[place] = True
      self._new.number_R[place] = job.number
      settings = _whole(job.settings, self._decoding)
      for all_R, own in zip(*map(jax.tree.leaves, (self._new.settings, settings))):
        all_R[place] = own
      source = self._place_of(job.prompt, place)
      if source is None:
        if place in self._from_N[self._from_N != np.arange(self._rows)]:
          self._copy()  # before the prompt that others want is overwritten
        self._from_N[place] = place
        self._arrive(job.prompt, place, params)
        self._counts.prompts += 1
      else:
        self._from_N[place] = self._from_N[source]
        self._counts.copies += 1
      self._prompts[place] = job.prompt
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
    ended = int(_IDLE_SHARE * self._rows) if leaves_early else self._rows
    self._rounds += rounds
    return self._decode(params, taken_R, Chunk(np.int32(rounds), np.int32(ended)))

  def _decode(
    self, params: model.Params, taken_R: np.ndarray, chunk: Chunk
  ) -> tuple[Drawn, np.ndarray]:
    self._flight, *seen = self._programs.chunk(
      params, self._flight, self._key, self._new, taken_R, chunk
    )
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
    self._flight = self._programs.arrive(self._flight, params, self._some(prompt, length), places)

  def _copy(self) -> None:
    self._flight = self._programs.copy(self._flight, self._from_N)
    self._from_N = np.arange(self._rows)

  def _some(self, prompt: tuple[int, ...], length: int) -> Prompts:
    """A prompt, once for each shard of the mesh, because each computes as many."""
    tokens_nS = np.zeros((self._shards, length), np.int32)
    tokens_nS[:, : len(prompt)] = prompt
    return Prompts(tokens_nS, np.full(self._shards, len(prompt), np.int32))


def prompt_lengths(longest: int) -> list[int]:
  """The lengths that prompts are padded to, ascending. The last is `longest`, in tokens."""
  lengths = [longest]
  while len(lengths) < _PROMPT_LENGTHS and lengths[-1] > _SHORTEST_PROMPTS:
    lengths.append(max(_SHORTEST_PROMPTS, -(-lengths[-1] // 2)))
  return lengths[::-1]


def _whole(settings: RowSettings, decoding: Decoding) -> RowSettings:
  """The settings with a number for each that is off, so that one program decodes all rows."""
  off = RowSettings(1.0, 0, 1.0, 0.0, 0, decoding.max_tokens)
  given = {name: x for name, x in dataclasses.asdict(settings).items() if x is not None}
  return off.replace(**given)


def _shapes(params: model.Params) -> Any:
  leaves, tree = jax.tree.flatten(params)
  return tree, [(leaf.shape, leaf.dtype) for leaf in leaves]
