"""The rows of an engine on the devices: one `Flight` with N places of one seat.

All places have slots for prompts of the same length, so that one program decodes every mix of rows.
Prompts are computed in batches that are padded to one of a few lengths, so short ones cost little.
If a prompt begins like a known text, only its suffix is computed. Known texts are the prompts at
the places of the flight, and cached texts: prompts of ended rows with the tokens that these drew
(see prefix_cache.py and sampler/prefixes.py).
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
from grpo_jax.sampler.filters import FILTERS
from grpo_jax.sampler.flight import Flight, NewRows, Prompts
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.prefixes import EndedRows, PrefixPrograms, ScoredPrompts, Suffixes
from grpo_jax.sampler.rows import Chunk, Drawn, Extras
from grpo_jax.sampler.sampling import sizes_up_to
from grpo_jax.sampler.seats import IDLE_SHARE, Grid
from grpo_jax.sampler.stream import by_row
from grpo_jax.serving.images import SeenImages
from grpo_jax.serving.prefix_cache import Beginning, PrefixCache

# Rounds of a chunk. More rounds cost less host time. With fewer, clients see tokens sooner, waiting
# rows get seats sooner, and fewer tokens are wasted after a stop text.
_ROUNDS = 8
_MOST_ROUNDS = 2**30  # the cache counts its rounds in an int32
# The most prompts, and padded tokens, of a batch on each shard. A single prompt may have more.
_MOST_PROMPTS, _TOKENS_AT_ONCE = 8, 512
_SUFFIXES = (32, 256)  # padded lengths of suffixes of prompts. Longer ones need several calls
_MOST_SCORES = 2**27  # attention scores of a batch of suffixes, which are all in memory
_LEAST_KNOWN = 8  # tokens: shorter known beginnings are not used
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


@dataclasses.dataclass
class Counts:
  """Statistics of an engine since it was made.

  Attributes:
    prompts: Prompts that were computed.
    copies: Prompts that were copied from another place.
    prompt_tokens: Tokens of the prompts of all rows.
    computed_tokens: Prompt tokens that were computed.
    calls: Calls of programs that compute batches of prompts.
    texts: Texts that are in the prefix cache now.
    drops: Texts that were evicted from the prefix cache.
    tokens: Tokens of completions that were reported to listeners.
    rows: Rows that ended without being cancelled.
    chunks: Chunks that were decoded.
    seconds: The time of all chunks, including the prompts before them.
  """

  prompts: int = 0
  copies: int = 0
  prompt_tokens: int = 0
  computed_tokens: int = 0
  calls: int = 0
  texts: int = 0
  drops: int = 0
  tokens: int = 0
  rows: int = 0
  chunks: int = 0
  seconds: float = 0.0


class NewRow(NamedTuple):
  """A row that takes a seat.

  Attributes:
    prompt: Token ids.
    number: An int32 that determines the row's random numbers.
    settings: Temperature, filters and limits, as numbers. None is off.
    is_scored: Whether to compute the log-probs of the prompt's tokens.
    images: The images of the prompt, or None.
  """

  prompt: tuple[int, ...]
  number: int
  settings: RowSettings
  is_scored: bool = False
  images: SeenImages | None = None

  @property
  def known_as(self) -> tuple[int, ...]:
    """The prompt's tokens for the prefix cache, where tokens of different images differ."""
    return self.images.known_as if self.images else self.prompt


Likely = list[tuple[int, float]]  # the likeliest tokens at one position with their log-probs


class PromptScores(NamedTuple):
  """The log-probs of a prompt's tokens under softmax(logits). The first token has none.

  Attributes:
    logprobs: The log-probs of the other tokens.
    alternatives: The likeliest tokens at the position of each of them.
  """

  logprobs: list[float]
  alternatives: list[Likely]


class Seated(NamedTuple):
  """The rows whose prompts are complete, so that they can draw.

  Attributes:
    computed: place -> how many tokens of the prompt were computed.
    failed: Places whose images the vision tower could not encode.
  """

  computed: dict[int, int]
  failed: set[int]


class _Begun(NamedTuple):
  """A prompt of which a place has the first tokens. The others are computed between chunks.

  Attributes:
    prompt: The tokens of the whole prompt.
    tokens: How many first tokens the place has.
    copied: How many of them were copied from a known beginning.
  """

  prompt: tuple[int, ...]
  tokens: int
  copied: int


class EndedRow(NamedTuple):
  """An ended row that may be added to the prefix cache before the next chunk.

  Attributes:
    tokens: The tokens of the completion.
    is_cut: Whether the row drew further tokens, which were cut off after a stop text.
  """

  tokens: list[int]
  is_cut: bool


class Decoder:
  """The rows on the devices, and the programs that decode them. Call it from one thread.

  Attributes:
    filters: The filters that rows may use: those that were registered when the decoder was made.
  """

  def __init__(
    self, config: model.ModelConfig, decoding: Decoding, sizes: Sizes, counts: Counts
  ) -> None:
    """Compiles nothing yet. The arguments are those of `Engine`, whose `counts` it updates."""
    self._programs = PrefixPrograms(config, decoding, min(decoding.max_tokens, _ROUNDS + 1))
    self._shards, self._rows, self._counts = config.row_shards, sizes.rows, counts
    self._lengths = sizes_up_to(sizes.prompt_tokens)
    self._suffixes = _suffixes(config, sizes)
    # The tokens of a piece of a long prompt, and of the first one. 0: prompts are computed whole.
    self._piece = _SUFFIXES[-1] if _SUFFIXES[-1] in self._suffixes else 0
    self._first_piece = _holding(self._lengths, self._piece)
    self._slots = sizes_up_to(decoding.max_tokens, model.slots_step(config))
    key = np.asarray(jax.random.key_data(jax.random.key(0)))  # rows differ by their numbers
    self._flight: Flight | None = None
    self._texts: model.Prefix | None = None  # cached texts
    self._known = PrefixCache(sizes.rows, sizes.texts, sizes.prompt_tokens)
    self._sizes, self._config, self._decoding = sizes, config, decoding
    self.filters = dict(FILTERS)
    self._rounds = 0  # since the cache counted from 0
    self._images: dict[int, SeenImages] = {}  # of the rows that are being seated, by place
    # By place, oldest first: prompts that are computed in pieces, and prompts that wait, for one of
    # them that begins alike, or because there are as many as a call takes.
    self._begun: dict[int, _Begun] = {}
    self._waiting: dict[int, tuple[int, ...]] = {}
    # ([(place, prompt)], their scores on the devices) of calls since the last `take_scores`
    self._scores: list[tuple[list[tuple[int, tuple[int, ...]]], ScoredPrompts]] = []
    self._new = NewRows(
      is_new_R=np.zeros(self._rows, bool),
      key_R2=np.tile(key, (self._rows, 1)),
      number_R=np.zeros(self._rows, np.int32),
      settings=jax.tree.map(np.array, by_row(self._whole(RowSettings()), 1, self._rows)),
    )

  def compile(self, params: model.Params) -> None:
    """Compiles every program by calling it without rows."""
    grid, smallest, longest = Grid(self._rows, 1), self._slots[0], self._lengths[-1]
    first = self._padded([(0,)] * self._shards, longest)
    seats = np.zeros(self._rows, int), self._new.settings  # all places get the first prompt
    self._flight, _ = self._programs.begin(grid, smallest, params, first, *seats)
    self._texts = self._programs.no_texts(self._flight, self._sizes.texts)
    nobody_R = np.zeros(self._rows, bool)
    for slots in self._slots:
      if slots > smallest:
        self._flight = self._programs.grow(self._flight, slots)
        self._programs.grow(self._flight, smallest)  # a later chunk may shrink the cache
      self._decode(params, nobody_R, Chunk(np.int32(0), np.int32(0)))
      self._keep([])
    # Batches have one prompt or the most prompts on each shard (see `_count`).
    for length in self._lengths:
      for count in {1, self._at_once(length) * self._shards}:
        self._arrive([(self._rows, (0,))] * count, length, params)
    nothing = self._rows, (0, 0), Beginning(0, 1)  # its place is past the last, so it is dropped
    for length, most in self._suffixes.items():
      for count in {1, most * self._shards}:
        self._go_on([nothing] * count, length, params)
    self._copy(np.arange(self._rows))
    self._counts.calls = 0  # the calls above computed no request

  def forget_prompts(self) -> None:
    """Forgets all prompts and cached texts, because old weights computed them."""
    self._known.forget()
    self._counts.texts = 0
    # Prompts of which only the first tokens are computed begin again.
    self._waiting |= {place: begun.prompt for place, begun in self._begun.items()}
    self._begun.clear()

  def drop(self, place: int) -> None:
    """Drops the prompt of a row that was cancelled before its prompt was complete."""
    self._waiting.pop(place, None)
    if self._begun.pop(place, None):
      self._known.forget([place])

  def keep(self, ended: dict[int, EndedRow]) -> None:
    """Adds the texts of rows that ended in the last chunk to the prefix cache.

    The text of a row is its prompt with the tokens that it drew. Rows whose prompts were computed
    by old weights are skipped.

    Args:
      ended: The rows by place.
    """
    is_int8, most = bool(self._config.cache_dtype), self._sizes.prompt_tokens
    kept: dict[int, tuple[int, int, int]] = {}  # the text's number -> an entry for `_keep`
    for place, row in ended.items():
      prompt = self._known.prompt(place)
      # The token that was drawn last has no keys yet. Prompts cannot use keys in int8.
      cached = 0 if is_int8 else min(len(row.tokens) - 1, most - len(prompt))
      text = (*prompt, *row.tokens[:cached])
      # A recurrent state includes all tokens that the row drew. The slots of a window are a ring,
      # in which the last drawn tokens overwrite the first. So a text that leaves out drawn tokens
      # cannot be cached, however short it is.
      has_states = not self._whole_from
      is_shortened = cached < len(row.tokens) - 1 and (has_states or any(self._config.windows))
      lacks_tokens = is_shortened or (row.is_cut and has_states)
      # `forget_prompts` has emptied the prompt if old weights computed it.
      if not prompt or (lacks_tokens and not is_int8):
        continue
      number = self._known.room(text)
      if number is None:  # the cache is turned off
        return
      self._known.put(number, text)
      kept[number] = place, cached, number - self._rows
    rows = [*kept.values()]
    for start in range(0, len(rows), _MOST_PROMPTS):
      self._keep(rows[start : start + _MOST_PROMPTS])
    self._counts.texts, self._counts.drops = self._known.texts, self._known.drops

  def seat(self, rows: dict[int, NewRow], params: model.Params, in_pieces: bool = False) -> Seated:
    """Sets the settings of new rows, and copies or computes their prompts.

    A prompt that another place of the shard has is copied. A prompt that begins like another new
    one is computed after it, and reuses the common beginning.

    Args:
      rows: The rows, by the free places that they get.
      params: The parameters.
      in_pieces: Whether other rows draw. Then only the first piece of a long prompt is computed
        now, and another piece in each of the next calls, so that these rows do not wait for long.

    Returns:
      The rows that can draw now. Some may be of earlier calls.
    """
    self._new.is_new_R[:] = False
    for place, row in rows.items():
      self._new.number_R[place] = row.number
      settings_R = jax.tree.leaves(self._new.settings)
      settings_of_row = jax.tree.leaves(self._whole(row.settings))
      for setting_R, setting in zip(settings_R, settings_of_row, strict=True):
        setting_R[place] = setting
    self._counts.prompt_tokens += sum(len(row.prompt) for row in rows.values())
    seated = Seated({}, set())
    # Scores need every token of a prompt, so these prompts are computed whole.
    scored = {p: row.prompt for p, row in rows.items() if row.is_scored}
    self._score(scored, seated.computed, params)
    self._images = {p: row.images for p, row in rows.items() if row.images}
    if self._begun:
      self._compute_pieces(seated.computed, params)
    missing = self._waiting | {p: row.known_as for p, row in rows.items() if not row.is_scored}
    self._waiting = {}
    while missing:  # those that wait for a common beginning, from the second time on
      unknown = self._copy_known(missing, seated.computed)
      missing = self._compute(unknown, seated, params, in_pieces)
    self._images = {}
    self._new.is_new_R[[*seated.computed]] = True
    self._counts.computed_tokens += sum(seated.computed.values())
    return seated

  def _score(
    self, prompts: dict[int, tuple[int, ...]], computed: dict[int, int], params: model.Params
  ) -> None:
    """Computes whole prompts {place: tokens}, and log-probs of their tokens for `take_scores`."""
    for place, prompt in prompts.items():
      self._known.put(place, prompt)
      computed[place] = len(prompt)
    self._counts.prompts += len(prompts)
    for length, batch in self._by_length([*prompts.items()]):
      self._arrive(batch, length, params, is_scored=True)

  def take_scores(self, counts: Mapping[int, int]) -> dict[int, PromptScores]:
    """Returns the scores of the prompts that were seated last, by place.

    Args:
      counts: place -> how many of the likeliest tokens to return for each token.
    """
    found: dict[int, PromptScores] = {}
    for prompts, scores in self._scores:
      logprobs_nS, *alternatives = jax.device_get(dataclasses.astuple(scores))
      for number, (place, prompt) in enumerate(prompts):
        rest = len(prompt) - 1
        pairs = zip(*(x[number, :rest, : counts[place]] for x in alternatives), strict=True)
        likely = [likely_tokens(*pair) for pair in pairs]
        found[place] = PromptScores(logprobs_nS[number, :rest].tolist(), likely)
    self._scores.clear()
    return found

  def chunk(
    self,
    params: model.Params,
    taken_R: np.ndarray,
    longest: int,
    leaves_early: bool,
    extras: Extras | None = None,
  ) -> tuple[Drawn, jax.Array]:
    """Starts to decode a chunk.

    Args:
      params: The parameters.
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
      self._flight = self._programs.grow(self._flight, slots)
      self._rounds = 0
    rounds = min(self._programs.columns - 1, slots - written)
    ended = int(IDLE_SHARE * self._rows) if leaves_early else self._rows
    if extras is not None and extras.allowed_RW is not None:
      rounds = 0 if self._new.is_new_R.any() else min(rounds, 1)
    self._rounds += rounds
    return self._decode(params, taken_R, Chunk(np.int32(rounds), np.int32(ended)), extras)

  def _decode(
    self,
    params: model.Params,
    taken_R: np.ndarray,
    chunk: Chunk,
    extras: Extras | None = None,
  ) -> tuple[Drawn, jax.Array]:
    arguments: tuple[Any, ...] = params, self._flight, self._new, taken_R, chunk
    if extras is not None:  # a separate program, compiled at its first use
      arguments = *arguments, extras
    self._flight, *results = self._programs.chunk(*arguments)
    return results

  @property
  def vocabulary(self) -> int:
    """V, the number of logits."""
    return self._programs.vocabulary

  @property
  def alternatives(self) -> int:
    """How many alternatives a program returns, for rows that request any."""
    return min(MOST_ALTERNATIVES, self.vocabulary)

  @functools.cached_property
  def _whole_from(self) -> int:
    """A text of more tokens is only usable whole, because layers no longer store all tokens."""
    prefix = self._flight.cache.prefix
    slots = [keys.shape[3] for keys in prefix.keys.values()]
    return 0 if prefix.states else min(slots)

  def _copy_known(
    self, missing: dict[int, tuple[int, ...]], computed: dict[int, int]
  ) -> dict[int, tuple[int, ...]]:
    """Copies prompts {place: tokens} that other places of the shard have. Returns the others.

    Adds place -> 0 to `computed` for those that it copies.
    """
    from_N, per_shard = np.arange(self._rows), self._rows // self._shards
    copied = dict[int, tuple[int, ...]]()
    others = dict[int, tuple[int, ...]]()
    for place, prompt in missing.items():
      first = place // per_shard * per_shard
      source = self._known.same(prompt, range(first, first + per_shard))
      if source in self._begun:  # it has only the first tokens of this prompt
        source = None
      (others if source is None else copied)[place] = prompt
      from_N[place] = place if source is None else source
    if (from_N != np.arange(self._rows)).any():
      self._copy(from_N)
    self._known.forget(others)  # the old prompts at their places will be overwritten
    for place, prompt in copied.items():
      self._known.put(place, prompt)
    computed |= dict.fromkeys(copied, 0)
    self._counts.copies += len(copied)
    return others

  def _compute(
    self,
    missing: dict[int, tuple[int, ...]],
    seated: Seated,
    params: model.Params,
    in_pieces: bool,
  ) -> dict[int, tuple[int, ...]]:
    """Computes the prompts {place: tokens} of `missing`, or the first pieces of long ones.

    Adds the rows that can draw to `seated`, and the others to `_begun` and `_waiting`.

    Returns:
      The prompts that wait, because they begin like one that is computed now.
    """
    whole: list[tuple[int, tuple[int, ...]]] = []
    continued: list[tuple[int, tuple[int, ...], Beginning]] = []  # prompts with a known beginning
    now, later, seeing = list[int](), {}, list[int]()  # `seeing`: places with images
    may_begin = self._at_once(self._first_piece) * self._shards
    for place, prompt in missing.items():
      least = self._least(len(prompt))
      if place in self._images:  # a suffix can have no images
        least = max(least, self._images[place].end)
      among = [*now, *self._begun]
      beginning = self._known.longest(prompt, self._whole_from, among, least)
      if beginning.tokens and beginning.number in now:
        later[place] = prompt
        continue
      if beginning.tokens and beginning.number in self._begun:
        begun = self._begun[beginning.number]
        if self._is_long(place, len(prompt), 0) and len(begun.prompt) - begun.tokens < len(prompt):
          self._waiting[place] = prompt
          continue
        # This prompt is computed sooner than the other one, of which it uses what is there.
        there = min(beginning.tokens, begun.tokens) if begun.tokens <= self._whole_from else 0
        beginning = Beginning(beginning.number, there if there >= least else 0)
      end = len(prompt)
      if in_pieces and self._is_long(place, len(prompt), beginning.tokens):
        # One call begins long prompts, and one goes on with all that are begun.
        is_full = len(self._begun) == self._suffixes[self._piece] * self._shards
        if is_full or (not beginning.tokens and not may_begin):
          self._waiting[place] = prompt
          continue
        may_begin -= not beginning.tokens
        end = beginning.tokens + (self._piece if beginning.tokens else self._first_piece)
        self._begun[place] = _Begun(prompt, end, beginning.tokens)
      self._known.put(place, prompt)
      if end == len(prompt):
        now.append(place)
        seated.computed[place] = len(prompt) - beginning.tokens
      if beginning.tokens:
        continued.append((place, prompt[:end], beginning))
      elif place in self._images:
        seeing.append(place)
      else:
        whole.append((place, prompt[:end]))
    self._counts.prompts += len(whole) + len(continued) + len(seeing)
    for place in seeing:
      if not self._see(place, params):
        self._known.forget([place])
        del seated.computed[place]
        seated.failed.add(place)
    for length, batch in self._by_length(whole):
      self._arrive(batch, length, params)
    self._compute_parts(continued, params)
    return later

  def _is_long(self, place: int, tokens: int, known: int) -> bool:
    """Whether a prompt of so many tokens, of which some are known, is more than one piece."""
    most = known + (self._piece if known else self._first_piece)
    return bool(self._piece) and tokens > most and place not in self._images

  def _compute_pieces(self, computed: dict[int, int], params: model.Params) -> None:
    """Computes the next pieces of all prompts in `_begun`, in one call.

    Adds place -> tokens to `computed` for the prompts that are complete now.
    """
    parts = list[tuple[int, tuple[int, ...], Beginning]]()
    for place, begun in [*self._begun.items()]:
      end = begun.tokens + self._piece
      parts.append((place, begun.prompt[:end], Beginning(place, begun.tokens)))
      self._begun[place] = begun._replace(tokens=end)
      if end >= len(begun.prompt):
        del self._begun[place]
        computed[place] = len(begun.prompt) - begun.copied
    self._go_on(parts, self._piece, params)

  def _see(self, place: int, params: model.Params) -> bool:
    """Computes a whole prompt with images. The tower encodes one picture at a time to save memory.

    Args:
      place: The place that gets the prompt.
      params: The weights.

    Returns:
      False if the tower fails, for example for lack of memory. Then the flight is unchanged.
    """
    images, shards = self._images[place], self._shards
    length = _holding(self._lengths, len(images.ids))
    try:
      # `see` returns 0 for prompt tokens that do not belong to the picture, so a sum joins them.
      features = sum(
        self._programs.see(params, *picture, images.tokens_of(number))
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
    padded = self._padded([images.ids] * shards, length).replace(images=visual)
    places = np.array(_filled([place], shards, self._rows))
    self._put_prompts(self._programs.arrive(self._flight.prompts_only, params, padded, places)[0])
    return True

  def _compute_parts(
    self, parts: list[tuple[int, tuple[int, ...], Beginning]], params: model.Params
  ) -> None:
    """Computes suffixes of (place, prompt, its known beginning). Long ones take several calls."""
    while parts:
      by_length: dict[int, list[tuple[int, tuple[int, ...], Beginning]]] = {}
      left, longest = [], max(self._suffixes)
      for place, prompt, beginning in parts:
        end = beginning.tokens + longest
        if end < len(prompt):  # the next call continues what this one puts into the place
          left.append((place, prompt, Beginning(place, end)))
        rest = min(longest, len(prompt) - beginning.tokens)
        length = _holding(self._suffixes, rest)
        by_length.setdefault(length, []).append((place, prompt[:end], beginning))
      for length, suffixes in by_length.items():
        for batch in _split(suffixes, self._suffixes[length] * self._shards):
          self._go_on(batch, length, params)
      parts = left

  def _least(self, tokens: int) -> int:
    """How many tokens of a prompt of `tokens` tokens must be known for the prefix cache to pay.

    The suffix must fit in a call or be at most half of the prompt. Otherwise the whole prompt is
    computed faster.
    """
    if not self._suffixes:
      return tokens + 1
    return max(_LEAST_KNOWN, min(tokens - max(self._suffixes), -(-tokens // 2)))

  def _by_length(
    self, prompts: list[tuple[int, tuple[int, ...]]]
  ) -> Iterator[tuple[int, list[tuple[int, tuple[int, ...]]]]]:
    """Splits (place, prompt) entries into batches. Yields (padded length, batch)."""
    by_length: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for place, prompt in prompts:
      by_length.setdefault(_holding(self._lengths, len(prompt)), []).append((place, prompt))
    for length, entries in by_length.items():
      for batch in _split(entries, self._at_once(length) * self._shards):
        yield length, batch

  def _at_once(self, length: int) -> int:
    """The most prompts of a padded length that a call computes on each shard of the mesh."""
    return max(1, min(_MOST_PROMPTS, self._rows // self._shards, _TOKENS_AT_ONCE // length))

  def _arrive(
    self,
    prompts: list[tuple[int, tuple[int, ...]]],
    length: int,
    params: model.Params,
    is_scored: bool = False,
  ) -> None:
    """Computes a batch of whole prompts. Entries (place, prompt) with a place >= N are dropped."""
    count = self._count(len(prompts), self._at_once(length))
    places = np.array(_filled([place for place, _ in prompts], count, self._rows))
    padded = self._padded(_filled([prompt for _, prompt in prompts], count, (0,)), length)
    if is_scored:  # compiled when a request first asks for it
      arrive, alternatives = self._programs.arrive_scored, self.alternatives
      changed, scores = arrive(self._flight.prompts_only, params, padded, places, alternatives)
      self._scores.append((prompts, scores))
    else:
      changed, _ = self._programs.arrive(self._flight.prompts_only, params, padded, places)
    self._put_prompts(changed)

  def _go_on(
    self, parts: list[tuple[int, tuple[int, ...], Beginning]], length: int, params: model.Params
  ) -> None:
    """Computes a batch of suffixes: (place, prompt, its known beginning), padded to `length`."""
    count = self._count(len(parts), self._suffixes[length])
    nothing = self._rows, (0, 0), Beginning(0, 1)  # padding: its place is past the last
    places, prompts, beginnings = zip(*_filled(parts, count, nothing), strict=True)
    numbers, known = np.array(beginnings, np.int32).T
    rest = [prompt[begun:] for prompt, begun in zip(prompts, known, strict=True)]
    tokens, lengths = dataclasses.astuple(self._padded(rest, length))[:2]
    shifts = [images.shift if images else 0 for images in map(self._images.get, places)]
    suffixes = Suffixes(
      tokens, lengths, numbers, known, np.array(places), np.array(shifts, np.int32)
    )
    flight = self._flight.prompts_only
    self._put_prompts(self._programs.go_on(flight, self._texts, params, suffixes))

  def _put_prompts(self, changed: Flight) -> None:
    """Takes the result of a call that computed prompts for `Flight.prompts_only`."""
    self._flight = self._flight.with_prompts(changed)
    self._counts.calls += 1

  def _count(self, needed: int, most: int) -> int:
    """The size of a batch: one prompt or `most` prompts per shard, as programs are compiled for."""
    return self._shards * (1 if needed <= self._shards else most)

  def _keep(self, rows: list[tuple[int, int, int]]) -> None:
    """Adds texts to the cache. Entries are (row, how many tokens it drew, index of the text)."""
    if self._sizes.texts:
      filled = _filled(rows, _MOST_PROMPTS, (0, 0, self._sizes.texts))
      ended = EndedRows(*np.array(filled, np.int32).T)
      self._texts = self._programs.keep(self._flight, self._texts, ended)

  def _copy(self, from_N: np.ndarray) -> None:
    self._flight = self._flight.with_prompts(self._programs.copy(self._flight.prompts_only, from_N))

  def _whole(self, settings: RowSettings) -> RowSettings:
    """Replaces None by the number that means off, so that one program decodes all rows."""
    off = RowSettings(1.0, min_tokens=0, max_tokens=self._decoding.max_tokens)
    values = {name: one.off for name, one in self.filters.items()} | settings.filter_values
    given = {name: x for name, x in vars(settings).items() if x is not None}
    return off.replace(**given).with_filters(values)

  def _padded(self, prompts: list[tuple[int, ...]], length: int) -> Prompts:
    tokens_nS = np.zeros((len(prompts), length), np.int32)
    for tokens_S, prompt in zip(tokens_nS, prompts, strict=True):
      tokens_S[: len(prompt)] = prompt
    return Prompts(tokens_nS, np.array([*map(len, prompts)], np.int32))


def likely_tokens(tokens_A: np.ndarray, logprobs_A: np.ndarray) -> Likely:
  """Pairs tokens with their log-probs."""
  return [*zip(tokens_A.tolist(), logprobs_A.tolist(), strict=True)]


def _suffixes(config: model.ModelConfig, sizes: Sizes) -> dict[int, int]:
  """Maps the padded lengths of suffixes to how many of them a shard computes in a call."""
  if not sizes.texts:
    return {}
  S, found = sizes.prompt_tokens, dict[int, int]()
  for length in [length for length in _SUFFIXES if length <= S] or [S]:
    most = _MOST_SCORES // (config.num_heads * length * (S + length))
    at_once = min(_MOST_PROMPTS, sizes.rows // config.row_shards, _TOKENS_AT_ONCE // length, most)
    if at_once or not found:  # there is at least one length
      found[length] = max(1, at_once)
  return found


def _holding(sizes: Iterable[int], tokens: int) -> int:
  """The first of ascending sizes that is at least `tokens`."""
  return next(size for size in sizes if size >= tokens)


def _split(x: list[T], most: int) -> list[list[T]]:
  """Splits a list into lists of at most `most` entries."""
  return [x[start : start + most] for start in range(0, len(x), most)]


def _filled(x: list[T], count: int, by: T) -> list[T]:
  """Pads a list with `by` to `count` entries."""
  return x + [by] * (count - len(x))
