"""A flight on the devices with its cached texts, and the calls of programs that change both.

Programs are compiled for few shapes: a batch of prompts has one prompt or the most prompts on each
row shard, and a prompt is padded to one of a few lengths. decoder.py decides what is computed.
"""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import functools
import sys
import traceback
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from grpo_jax import model
from grpo_jax.sampler.flight import Flight, NewRows, Prompts
from grpo_jax.sampler.logits import Decoding
from grpo_jax.sampler.prefixes import EndedRows, PrefixPrograms, ScoredPrompts, Suffixes
from grpo_jax.sampler.programs import MOST_COPIED
from grpo_jax.sampler.rows import Chunk, Drawn, Extras
from grpo_jax.sampler.sampling import sizes_up_to
from grpo_jax.sampler.seats import IDLE_SHARE, Grid
from grpo_jax.serving.images import SeenImages
from grpo_jax.serving.prefix_cache import Beginning

# Rounds of a chunk. More rounds cost less host time. With fewer, clients see tokens sooner, waiting
# rows get seats sooner, and fewer tokens are wasted after a stop text.
_ROUNDS = 8
_MOST_ROUNDS = 2**30  # the cache counts its rounds in an int32
# The most prompts, and padded tokens, of a batch on each shard. A single prompt may have more.
_MOST_PROMPTS, _TOKENS_AT_ONCE = 8, 512
_SUFFIXES = (32, 256)  # padded lengths of suffixes of prompts. Longer ones need several calls
_MOST_SCORES = 2**27  # attention scores of a batch of suffixes, where all are in memory
MOST_ALTERNATIVES = 20  # as with OpenAI. Programs return so many, and rows use the first of them

T = TypeVar("T")


class Sizes(NamedTuple):
  """The limits of an engine.

  Attributes:
    rows: N, the most rows that are decoded together. A multiple of the mesh's row shards.
    prompt_tokens: S, the longest prompt.
    waiting: The most rows that wait.
    texts: The most texts in the prefix cache, a multiple of the mesh's row shards. 0 turns the
      cache off: every prompt is computed whole.
  """

  rows: int
  prompt_tokens: int
  waiting: int
  texts: int = 0


class PlacedPrompt(NamedTuple):
  """A prompt, or the first tokens of one, that a call computes for a place.

  Attributes:
    place: The place that gets it. Past the last place, the result is dropped.
    tokens: Token ids.
    beginning: The entry of the prefix cache that has the first of these tokens, and how many. With
      0, all are computed.
  """

  place: int
  tokens: tuple[int, ...]
  beginning: Beginning = Beginning(0, 0)


class DeviceFlight:
  """One `Flight` with N places of one seat, and its cached texts.

  Attributes:
    calls: How many calls have computed batches of prompts.
    programs: The programs.
    piece: Tokens of a piece of a long prompt that is computed in pieces, except for its first one.
      0 if the prefix cache is off or its suffixes are shorter: then prompts are computed whole.
    first_piece: Tokens of the first piece, which a program for whole prompts computes.
  """

  def __init__(self, config: model.ModelConfig, decoding: Decoding, sizes: Sizes) -> None:
    """Compiles nothing yet. The arguments are those of `Engine`."""
    self.calls = 0
    self.programs = PrefixPrograms(config, decoding, min(decoding.max_tokens, _ROUNDS + 1))
    self._shards, self._rows, self._texts_kept = config.row_shards, sizes.rows, sizes.texts
    self._lengths = sizes_up_to(sizes.prompt_tokens)
    self._suffixes = _suffixes(config, sizes)
    self._slots = sizes_up_to(decoding.max_tokens, model.slots_step(config))
    self.piece = _SUFFIXES[-1] if _SUFFIXES[-1] in self._suffixes else 0
    self.first_piece = _first_holding(self._lengths, self.piece)
    self._flight: Flight | None = None
    self._texts: model.Prefix | None = None  # cached texts
    self._rounds = 0  # since the cache counted from 0

  def compile(self, params: model.Params, new: NewRows) -> None:
    """Compiles every program by calling it without rows. The settings are those of `new`."""
    grid, smallest, longest = Grid(self._rows, 1), self._slots[0], self._lengths[-1]
    first = _padded([(0,)] * self._shards, longest)
    seats = np.zeros(self._rows, int), new.settings  # all places get the first prompt
    self._flight, _ = self.programs.begin(grid, smallest, params, first, *seats)
    self._texts = self.programs.no_texts(self._flight, self._texts_kept)
    nobody_R = np.zeros(self._rows, bool)
    for slots in self._slots:
      if slots > smallest:
        self._flight = self.programs.grow(self._flight, slots)
        self.programs.grow(self._flight, smallest)  # a later chunk may shrink the cache
      self._decode(params, new, nobody_R, Chunk(np.int32(0), np.int32(0)))
      self._keep_batch([])
    # Batches have one prompt or the most prompts on each shard (see `_batch_size`).
    nothing = PlacedPrompt(self._rows, (0, 0), Beginning(0, 1))
    for length in self._lengths:
      for count in {1, self._at_once(length) * self._shards}:
        self._arrive([nothing._replace(tokens=(0,))] * count, length, params)
    for length, most in self._suffixes.items():
      for count in {1, most * self._shards}:
        self._go_on([nothing] * count, length, params)
    self.copy({})
    self.calls = 0  # the calls above computed no request

  @functools.cached_property
  def whole_from(self) -> int:
    """A text of more tokens is only usable whole, because layers no longer store all tokens."""
    prefix = self._flight.cache.prefix
    slots = [keys.shape[3] for keys in prefix.keys.values()]
    return 0 if prefix.states else min(slots)

  @property
  def longest_suffix(self) -> int:
    """The most tokens that a call computes after a known beginning. 0: none, the cache is off."""
    return max(self._suffixes, default=0)

  @property
  def pieces_at_once(self) -> int:
    """How many prompts one call can compute another piece of."""
    return self._suffixes[self.piece] * self._shards

  @property
  def first_pieces_at_once(self) -> int:
    """How many prompts one call can compute the first piece of."""
    return self._at_once(self.first_piece) * self._shards

  @property
  def alternatives(self) -> int:
    """How many alternatives a program returns, for rows that request any."""
    return min(MOST_ALTERNATIVES, self.programs.vocabulary)

  def chunk(
    self,
    params: model.Params,
    new: NewRows,
    taken_R: np.ndarray,
    longest: int,
    leaves_early: bool,
    extras: Extras | None = None,
  ) -> tuple[Drawn, jax.Array]:
    """Gives the rows' cache as many slots as a chunk needs, and starts to decode the chunk.

    Args:
      params: The parameters.
      new: The rows that are new in this chunk, and the settings of all rows.
      taken_R: bool, True for seats with a row that draws.
      longest: The most tokens that a row in flight has drawn.
      leaves_early: Whether the chunk ends once some rows have ended, because others wait.
      extras: Further options of the draw. `allowed_RW` only holds for the next token. So with it,
        the chunk draws one token of each new row or, if there are none, of each row.

    Returns:
      The drawn tokens, and bool [R] which rows go on. The devices may still be computing both.
    """
    # The token that was drawn last has no slot yet. A new row draws its first without a round.
    written = max(longest - 1, 0)
    slots = next((size for size in self._slots if size >= written + _ROUNDS), self._slots[-1])
    if longest:  # the cache shrinks only if all rows are new
      slots = max(slots, self._flight.cache.slots)
    # `grow` also lets the cache count its rounds from 0 again, so it is called before the int32
    # overflows, even if the cache keeps its size.
    if slots != self._flight.cache.slots or self._rounds > _MOST_ROUNDS:
      self._flight = self.programs.grow(self._flight, slots)
      self._rounds = 0
    rounds = min(self.programs.columns - 1, slots - written)
    ended = int(IDLE_SHARE * self._rows) if leaves_early else self._rows
    if extras is not None and extras.allowed_RW is not None:
      rounds = 0 if new.is_new_R.any() else min(rounds, 1)
    self._rounds += rounds
    return self._decode(params, new, taken_R, Chunk(np.int32(rounds), np.int32(ended)), extras)

  def _decode(
    self,
    params: model.Params,
    new: NewRows,
    taken_R: np.ndarray,
    chunk: Chunk,
    extras: Extras | None = None,
  ) -> tuple[Drawn, jax.Array]:
    arguments: tuple[Any, ...] = params, self._flight, new, taken_R, chunk
    if extras is not None:  # a separate program, compiled at its first use
      arguments = *arguments, extras
    self._flight, *results = self.programs.chunk(*arguments)
    return results

  def compute(self, prompts: list[PlacedPrompt], params: model.Params) -> None:
    """Computes whole prompts, in batches of similar lengths."""
    for length, batch in self._by_length(prompts):
      self._arrive(batch, length, params)

  def compute_scored(
    self, prompts: list[PlacedPrompt], params: model.Params
  ) -> list[tuple[list[PlacedPrompt], ScoredPrompts]]:
    """Computes whole prompts and the log-probs of their tokens. Returns both by batch."""
    return [
      (batch, self._arrive(batch, length, params, is_scored=True))
      for length, batch in self._by_length(prompts)
    ]

  def compute_pieces(self, prompts: list[PlacedPrompt], params: model.Params) -> None:
    """Computes the last tokens of prompts, at most `piece` of each, in one call."""
    self._go_on(prompts, self.piece, params)

  def compute_suffixes(
    self, prompts: list[PlacedPrompt], params: model.Params, images: Mapping[int, SeenImages]
  ) -> None:
    """Computes what comes after known beginnings. Long suffixes take several calls.

    Args:
      prompts: The prompts. Each has a known beginning.
      params: The parameters.
      images: The images of prompts by place. All are in the known beginnings.
    """
    while prompts:
      by_length: dict[int, list[PlacedPrompt]] = {}
      unfinished = list[PlacedPrompt]()
      for place, tokens, beginning in prompts:
        end = beginning.tokens + self.longest_suffix
        if end < len(tokens):  # the next call continues what this one puts into the place
          unfinished.append(PlacedPrompt(place, tokens, Beginning(place, end)))
        suffix = min(self.longest_suffix, len(tokens) - beginning.tokens)
        length = _first_holding(self._suffixes, suffix)
        by_length.setdefault(length, []).append(PlacedPrompt(place, tokens[:end], beginning))
      for length, entries in by_length.items():
        for batch in _split(entries, self._suffixes[length] * self._shards):
          self._go_on(batch, length, params, images)
      prompts = unfinished

  def see(self, place: int, images: SeenImages, params: model.Params) -> bool:
    """Computes a whole prompt with images. The tower encodes one picture at a time to save memory.

    Args:
      place: The place that gets the prompt.
      images: The prompt and its images.
      params: The parameters.

    Returns:
      False if the tower fails, for example for lack of memory. Then the flight is unchanged.
    """
    length = _first_holding(self._lengths, len(images.ids))
    try:
      # `see` returns 0 for prompt tokens that do not belong to the picture, so a sum joins them.
      features = sum(
        self.programs.see(params, *picture, images.tokens_of(number))
        for number, picture in enumerate(images.pictures)
      )
      # [shards, K, S, D]. Devices compute asynchronously, so errors of the tower are raised here.
      features = jax.block_until_ready(features[:, :, :length])
    except Exception:
      traceback.print_exc(file=sys.stderr)
      return False
    visual = images.visual(features)
    # Each row shard computes a copy of the prompt. The place of all but the first copy is past the
    # last one, so that they are dropped.
    padded = _padded([images.ids] * self._shards, length).replace(images=visual)
    places = np.array(_filled([place], self._shards, self._rows))
    self._put_prompts(self.programs.arrive(self._flight.prompts_only, params, padded, places)[0])
    return True

  def keep(self, rows: list[tuple[int, int, int]]) -> None:
    """Adds texts to the cache. Entries are (row, how many tokens it drew, index of the text)."""
    for batch in _split(rows, _MOST_PROMPTS):
      self._keep_batch(batch)

  def _keep_batch(self, rows: list[tuple[int, int, int]]) -> None:
    if self._texts_kept:
      filled = _filled(rows, _MOST_PROMPTS, (0, 0, self._texts_kept))
      ended = EndedRows(*np.array(filled, np.int32).T)
      self._texts = self.programs.keep(self._flight, self._texts, ended)

  def copy(self, sources: Mapping[int, int]) -> None:
    """Gives places the prompts of other places {place: source}, which stay as they are."""
    from_N = np.arange(self._rows)
    from_N[[*sources]] = [*sources.values()]
    self._flight = self._flight.with_prompts(self.programs.copy(self._flight.prompts_only, from_N))

  def _by_length(self, prompts: list[PlacedPrompt]) -> Iterator[tuple[int, list[PlacedPrompt]]]:
    """Splits prompts into batches. Yields (padded length, batch)."""
    by_length: dict[int, list[PlacedPrompt]] = {}
    for prompt in prompts:
      length = _first_holding(self._lengths, len(prompt.tokens))
      by_length.setdefault(length, []).append(prompt)
    for length, entries in by_length.items():
      for batch in _split(entries, self._at_once(length) * self._shards):
        yield length, batch

  def _at_once(self, length: int) -> int:
    """The most prompts of a padded length that a call computes on each shard of the mesh."""
    return max(1, min(_MOST_PROMPTS, self._rows // self._shards, _TOKENS_AT_ONCE // length))

  def _arrive(
    self, prompts: list[PlacedPrompt], length: int, params: model.Params, is_scored: bool = False
  ) -> ScoredPrompts | None:
    """Computes a batch of whole prompts, padded to `length`. Returns scores if `is_scored`."""
    count = self._batch_size(len(prompts), self._at_once(length))
    places = np.array(_filled([prompt.place for prompt in prompts], count, self._rows))
    padded = _padded(_filled([prompt.tokens for prompt in prompts], count, (0,)), length)
    arguments = self._flight.prompts_only, params, padded, places
    if is_scored:  # compiled when a request first asks for it
      changed, scores = self.programs.arrive_scored(*arguments, self.alternatives)
    else:
      (changed, _), scores = self.programs.arrive(*arguments), None
    self._put_prompts(changed)
    return scores

  def _go_on(
    self,
    prompts: list[PlacedPrompt],
    length: int,
    params: model.Params,
    images: Mapping[int, SeenImages] | None = None,
  ) -> None:
    """Computes a batch of suffixes, which are padded to `length`."""
    count = self._batch_size(len(prompts), self._suffixes[length])
    # The place of padding is past the last one.
    nothing = PlacedPrompt(self._rows, (0, 0), Beginning(0, 1))
    places, tokens, beginnings = zip(*_filled(prompts, count, nothing), strict=True)
    numbers, known = np.array(beginnings, np.int32).T
    suffixes = [prompt[begun:] for prompt, begun in zip(tokens, known, strict=True)]
    padded, lengths = dataclasses.astuple(_padded(suffixes, length))[:2]
    images = images or {}
    shifts = [images[place].shift if place in images else 0 for place in places]
    arguments = padded, lengths, numbers, known, np.array(places), np.array(shifts, np.int32)
    flight = self._flight.prompts_only
    changed, _ = self.programs.go_on(flight, self._texts, params, Suffixes(*arguments))
    self._put_prompts(changed)

  def _put_prompts(self, changed: Flight) -> None:
    """Takes the result of a call that computed prompts for `Flight.prompts_only`."""
    self._flight = self._flight.with_prompts(changed)
    self.calls += 1

  def _batch_size(self, needed: int, most: int) -> int:
    """Rounds up to one prompt or `most` prompts per shard, as programs are compiled for."""
    return self._shards * (1 if needed <= self._shards else most)


def _suffixes(config: model.ModelConfig, sizes: Sizes) -> dict[int, int]:
  """Maps the padded lengths of suffixes to how many of them a shard computes in a call."""
  if not sizes.texts:
    return {}
  S, found = sizes.prompt_tokens, dict[int, int]()
  for length in [length for length in _SUFFIXES if length <= S] or [S]:
    most = max(1, MOST_COPIED // S)
    if model.after_prompts(config) is None:
      most = min(most, _MOST_SCORES // (config.num_heads * length * (S + length)))
    at_once = min(_MOST_PROMPTS, sizes.rows // config.row_shards, _TOKENS_AT_ONCE // length, most)
    if at_once or not found:  # there is at least one length
      found[length] = max(1, at_once)
  return found


def _padded(prompts: list[tuple[int, ...]], length: int) -> Prompts:
  tokens_nS = np.zeros((len(prompts), length), np.int32)
  for tokens_S, prompt in zip(tokens_nS, prompts, strict=True):
    tokens_S[: len(prompt)] = prompt
  return Prompts(tokens_nS, np.array([*map(len, prompts)], np.int32))


def _first_holding(sizes: Iterable[int], tokens: int) -> int:
  """The first of ascending sizes that is at least `tokens`."""
  return next(size for size in sizes if size >= tokens)


def _split(x: list[T], most: int) -> list[list[T]]:
  """Splits a list into lists of at most `most` entries."""
  return [x[start : start + most] for start in range(0, len(x), most)]


def _filled(x: list[T], count: int, by: T) -> list[T]:
  """Pads a list with `by` to `count` entries."""
  return x + [by] * (count - len(x))
