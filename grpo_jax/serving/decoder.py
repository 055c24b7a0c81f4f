"""Which prompts an engine computes for its rows, and how. device_flight.py calls the programs.

All places have slots for prompts of the same length, so that one program decodes every mix of rows.
If a prompt begins like a known text, only its suffix is computed. Known texts are the prompts at
the places of the flight, and cached texts: prompts of ended rows with the tokens that these drew
(see prefix_cache.py and sampler/prefixes.py). While other rows draw, long prompts are computed in
pieces, between chunks.
"""

from collections.abc import Mapping
import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax import model
from grpo_jax.sampler.filters import FILTERS
from grpo_jax.sampler.flight import NewRows
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.prefixes import ScoredPrompts
from grpo_jax.sampler.rows import Drawn, Extras
from grpo_jax.sampler.stream import by_row
from grpo_jax.serving.device_flight import DeviceFlight, PlacedPrompt, Sizes
from grpo_jax.serving.images import SeenImages
from grpo_jax.serving.prefix_cache import Beginning, PrefixCache

_LEAST_KNOWN = 8  # tokens: shorter known beginnings are not used


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


class _Plan(NamedTuple):
  """The calls that `Decoder._plan` chose for new prompts.

  Attributes:
    whole: Prompts, and first pieces, without a known beginning.
    continued: Prompts, and first pieces, with a known beginning.
    seeing: Places whose prompts have images that must be encoded.
    later: place -> a prompt that begins like one that is computed now. It is planned again after
      these calls, so that it can use their results.
  """

  whole: list[PlacedPrompt]
  continued: list[PlacedPrompt]
  seeing: list[int]
  later: dict[int, tuple[int, ...]]


class EndedRow(NamedTuple):
  """An ended row that may be added to the prefix cache before the next chunk.

  Attributes:
    tokens: The tokens of the completion.
    is_cut: Whether the row drew further tokens, which were cut off after a stop text.
  """

  tokens: list[int]
  is_cut: bool


class Decoder:
  """The rows of an engine, on the host and on the devices. Call it from one thread.

  Attributes:
    filters: The filters that rows may use: those that were registered when the decoder was made.
  """

  def __init__(
    self, config: model.ModelConfig, decoding: Decoding, sizes: Sizes, counts: Counts
  ) -> None:
    """Compiles nothing yet. The arguments are those of `Engine`, whose `counts` it updates."""
    self._device = DeviceFlight(config, decoding, sizes)
    self._shards, self._rows, self._counts = config.row_shards, sizes.rows, counts
    self._known = PrefixCache(sizes.rows, sizes.texts, sizes.prompt_tokens)
    self._prompt_tokens, self._config, self._decoding = sizes.prompt_tokens, config, decoding
    self.filters = dict(FILTERS)
    self._images: dict[int, SeenImages] = {}  # of the rows that are being seated, by place
    # By place, oldest first: prompts that are computed in pieces, and prompts that wait, for one of
    # them that begins alike, or because there are as many as a call takes.
    self._begun: dict[int, _Begun] = {}
    self._waiting: dict[int, tuple[int, ...]] = {}
    # The scored prompts of calls since the last `take_scores`, with their scores on the devices.
    self._scores: list[tuple[list[PlacedPrompt], ScoredPrompts]] = []
    key = np.asarray(jax.random.key_data(jax.random.key(0)))  # rows differ by their numbers
    self._new = NewRows(
      is_new_R=np.zeros(self._rows, bool),
      key_R2=np.tile(key, (self._rows, 1)),
      number_R=np.zeros(self._rows, np.int32),
      settings=jax.tree.map(np.array, by_row(self._whole(RowSettings()), 1, self._rows)),
    )

  def compile(self, params: model.Params) -> None:
    """Compiles every program."""
    self._device.compile(params, self._new)

  @property
  def vocabulary(self) -> int:
    """V, the number of logits."""
    return self._device.programs.vocabulary

  @property
  def alternatives(self) -> int:
    """How many alternatives a program returns, for rows that request any."""
    return self._device.alternatives

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
    is_int8, most = bool(self._config.cache_dtype), self._prompt_tokens
    kept: dict[int, tuple[int, int, int]] = {}  # the text's number -> an entry for the device
    for place, row in ended.items():
      prompt = self._known.prompt(place)
      # The token that was drawn last has no keys yet. Prompts cannot use keys in int8.
      cached = 0 if is_int8 else min(len(row.tokens) - 1, most - len(prompt))
      text = (*prompt, *row.tokens[:cached])
      # A recurrent state includes all tokens that the row drew. The slots of a window are a ring,
      # in which the last drawn tokens overwrite the first. So a text that leaves out drawn tokens
      # cannot be cached, however short it is.
      has_states = not self._device.whole_from
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
    self._device.keep([*kept.values()])
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
    scored = [PlacedPrompt(p, row.prompt) for p, row in rows.items() if row.is_scored]
    self._score(scored, seated.computed, params)
    self._images = {p: row.images for p, row in rows.items() if row.images}
    if self._begun:
      self._compute_pieces(seated.computed, params)
    missing = self._waiting | {p: row.known_as for p, row in rows.items() if not row.is_scored}
    self._waiting = {}
    while missing:  # those that wait for a common beginning, from the second time on
      unknown = self._copy_known(missing, seated.computed)
      plan = self._plan(unknown, seated.computed, in_pieces)
      self._compute(plan, seated, params)
      missing = plan.later
    self._images = {}
    self._new.is_new_R[[*seated.computed]] = True
    self._counts.computed_tokens += sum(seated.computed.values())
    self._counts.calls = self._device.calls
    return seated

  def _score(
    self, prompts: list[PlacedPrompt], computed: dict[int, int], params: model.Params
  ) -> None:
    """Computes whole prompts, and log-probs of their tokens for `take_scores`."""
    for place, tokens, _ in prompts:
      self._known.put(place, tokens)
      computed[place] = len(tokens)
    self._counts.prompts += len(prompts)
    self._scores += self._device.compute_scored(prompts, params)

  def take_scores(self, counts: Mapping[int, int]) -> dict[int, PromptScores]:
    """Returns the scores of the prompts that were seated last, by place.

    Args:
      counts: place -> how many of the likeliest tokens to return for each token.
    """
    found: dict[int, PromptScores] = {}
    for prompts, scores in self._scores:
      logprobs_nS, *alternatives = jax.device_get(dataclasses.astuple(scores))
      for number, (place, tokens, _) in enumerate(prompts):
        rest = len(tokens) - 1
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
    """Starts to decode a chunk with the rows that were seated. See `DeviceFlight.chunk`."""
    return self._device.chunk(params, self._new, taken_R, longest, leaves_early, extras)

  def _copy_known(
    self, missing: dict[int, tuple[int, ...]], computed: dict[int, int]
  ) -> dict[int, tuple[int, ...]]:
    """Copies prompts {place: tokens} that other places of the shard have. Returns the others.

    Adds place -> 0 to `computed` for those that it copies.
    """
    per_shard, sources = self._rows // self._shards, dict[int, int]()
    for place, prompt in missing.items():
      first = place // per_shard * per_shard
      source = self._known.same(prompt, range(first, first + per_shard))
      if source is not None and source not in self._begun:  # which have only their first tokens
        sources[place] = source
    for copies in copies_in_order(sources):
      self._device.copy(copies)
    copied = [place for place in missing if place in sources]
    others = {place: prompt for place, prompt in missing.items() if place not in sources}
    self._known.forget(others)  # the old prompts at their places will be overwritten
    for place in copied:
      self._known.put(place, missing[place])
    computed |= dict.fromkeys(copied, 0)
    self._counts.copies += len(copied)
    return others

  def _plan(
    self, missing: dict[int, tuple[int, ...]], computed: dict[int, int], in_pieces: bool
  ) -> _Plan:
    """Decides how the prompts {place: tokens} of `missing` are computed.

    Adds to `computed` the prompts that are complete after the planned calls, with how many tokens
    these compute. Adds prompts of which only a first piece is planned to `_begun`, and prompts for
    which there is no room in these calls, or which wait for a begun one, to `_waiting`.
    """
    plan, device = _Plan([], [], [], {}), self._device
    now = list[int]()  # places whose prompts are complete after the planned calls
    may_begin = device.first_pieces_at_once
    for place, prompt in missing.items():
      least = self._least(place, len(prompt))
      among = [*now, *self._begun]
      beginning = self._known.longest(prompt, device.whole_from, among, least)
      if beginning.tokens and beginning.number in now:
        plan.later[place] = prompt
        continue
      if beginning.tokens and beginning.number in self._begun:
        begun = self._begun[beginning.number]
        if self._is_long(place, len(prompt), 0) and len(begun.prompt) - begun.tokens < len(prompt):
          self._waiting[place] = prompt
          continue
        # This prompt is computed sooner than the other one, of which it uses what is there.
        there = min(beginning.tokens, begun.tokens) if begun.tokens <= device.whole_from else 0
        beginning = Beginning(beginning.number, there if there >= least else 0)
      end = len(prompt)
      if in_pieces and self._is_long(place, len(prompt), beginning.tokens):
        # One call begins long prompts, and one goes on with all that are begun.
        is_full = len(self._begun) == device.pieces_at_once
        if is_full or (not beginning.tokens and not may_begin):
          self._waiting[place] = prompt
          continue
        may_begin -= not beginning.tokens
        end = beginning.tokens + (device.piece if beginning.tokens else device.first_piece)
        self._begun[place] = _Begun(prompt, end, beginning.tokens)
      self._known.put(place, prompt)
      if end == len(prompt):
        now.append(place)
        computed[place] = len(prompt) - beginning.tokens
      if beginning.tokens:
        plan.continued.append(PlacedPrompt(place, prompt[:end], beginning))
      elif place in self._images:
        plan.seeing.append(place)
      else:
        plan.whole.append(PlacedPrompt(place, prompt[:end]))
    return plan

  def _least(self, place: int, tokens: int) -> int:
    """How many first tokens of a prompt of `tokens` tokens must be known for the cache to pay."""
    longest = self._device.longest_suffix
    if not longest:  # the cache is off, and no prompt can have so many
      return tokens + 1
    # The suffix must fit in a call or be at most half of the prompt. Otherwise the whole prompt is
    # computed faster. Also, a suffix can have no images.
    least = max(_LEAST_KNOWN, min(tokens - longest, -(-tokens // 2)))
    return max(least, self._images[place].end) if place in self._images else least

  def _is_long(self, place: int, tokens: int, known: int) -> bool:
    """Whether a prompt of so many tokens, of which some are known, is more than one piece."""
    most = known + (self._device.piece if known else self._device.first_piece)
    return bool(self._device.piece) and tokens > most and place not in self._images

  def _compute(self, plan: _Plan, seated: Seated, params: model.Params) -> None:
    """Makes the calls of a plan. A prompt whose images fail moves to `seated.failed`."""
    self._counts.prompts += len(plan.whole) + len(plan.continued) + len(plan.seeing)
    for place in plan.seeing:
      if not self._device.see(place, self._images[place], params):
        self._known.forget([place])
        del seated.computed[place]
        seated.failed.add(place)
    self._device.compute(plan.whole, params)
    self._device.compute_suffixes(plan.continued, params, self._images)

  def _compute_pieces(self, computed: dict[int, int], params: model.Params) -> None:
    """Computes the next pieces of all prompts in `_begun`, in one call.

    Adds place -> tokens to `computed` for the prompts that are complete now.
    """
    pieces = list[PlacedPrompt]()
    for place, begun in [*self._begun.items()]:
      end = begun.tokens + self._device.piece
      pieces.append(PlacedPrompt(place, begun.prompt[:end], Beginning(place, begun.tokens)))
      self._begun[place] = begun._replace(tokens=end)
      if end >= len(begun.prompt):
        del self._begun[place]
        computed[place] = len(begun.prompt) - begun.copied
    self._device.compute_pieces(pieces, params)

  def _whole(self, settings: RowSettings) -> RowSettings:
    """Replaces None by the number that means off, so that one program decodes all rows."""
    off = RowSettings(1.0, min_tokens=0, max_tokens=self._decoding.max_tokens)
    values = {name: one.off for name, one in self.filters.items()} | settings.filter_values
    given = {name: x for name, x in vars(settings).items() if x is not None}
    return off.replace(**given).with_filters(values)


def copies_in_order(sources: dict[int, int]) -> list[dict[int, int]]:
  """Orders copies {place: source} in calls, none of which overwrites a source of its own or later.

  Where places would wait for each other in a circle, one copy is removed from `sources`. Its prompt
  must then be computed.
  """
  left = {place: source for place, source in sources.items() if place != source}
  calls = list[dict[int, int]]()
  while left:
    needed = set(left.values())
    ready = {place: source for place, source in left.items() if place not in needed}
    if ready:
      calls.append(ready)
    else:
      ready = dict([left.popitem()])
      del sources[next(iter(ready))]
    left = {place: source for place, source in left.items() if place not in ready}
  return calls


def likely_tokens(tokens_A: np.ndarray, logprobs_A: np.ndarray) -> Likely:
  """Pairs tokens with their log-probs."""
  return [*zip(tokens_A.tolist(), logprobs_A.tolist(), strict=True)]
