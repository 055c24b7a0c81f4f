"""The sampler of a run: chooses programs, seats and cache sizes, and completes prompts."""

from collections.abc import Callable, Iterable, Iterator
import functools
from typing import NamedTuple

import jax
import numpy as np
import optax

from grpo_jax import model
from grpo_jax.config import Sampling
from grpo_jax.sampler import seats as seats_lib
from grpo_jax.sampler.filters import values_of
from grpo_jax.sampler.flight import Prompts
from grpo_jax.sampler.guides import Guided
from grpo_jax.sampler.logits import Decoding, RowSettings
from grpo_jax.sampler.programs import FlightPrograms
from grpo_jax.sampler.requests import Finished, GroupRequest, Reply
from grpo_jax.sampler.seats import Grid
from grpo_jax.sampler.stop import End
from grpo_jax.sampler.stream import Feed, Pace, Stream
from grpo_jax.types import Completions, Images, Visual

# sampling.temperature_schedule: (first, last, steps from first to last) -> (step -> temperature).
TEMPERATURES: dict[str, Callable[[float, float, int], optax.Schedule]] = {
  "constant": lambda first, last, steps: optax.constant_schedule(first),
  "linear": optax.linear_schedule,
  "cosine": lambda first, last, steps: optax.cosine_decay_schedule(first, steps, last / first),
}

_LONGEST_CHUNK = 64
_SHARED_STEP = 32  # each length of a shared beginning needs a compiled program
# A call that computes less does not repay the time to compile smaller grids.
_SHRINKS_FROM = 1e10  # floating point operations
_SMALLER, _FEWEST_ROWS = (2, 4, 8, 32), 8  # divisors of a shard's rows, and the smallest quotient


def decoding_of(sampling: Sampling, stop_ids: tuple[int, ...]) -> Decoding:
  """The limits of a config. The model's stop ids come before those of the config."""
  return Decoding(sampling.max_tokens, tuple(dict.fromkeys((*stop_ids, *sampling.stop_ids))))


def settings_of(sampling: Sampling, temperature: float) -> RowSettings:
  """How the rows of a config draw at a temperature. At 0, filters are left out: they do nothing."""
  settings = RowSettings(temperature, min_tokens=sampling.min_tokens or None)
  if not temperature:
    return settings
  return settings.with_filters(values_of(sampling))


class Draws(NamedTuple):
  """How the tokens of a batch are drawn.

  Attributes:
    key: The root of the random numbers.
    settings: Temperature, filters and limits: numbers, or arrays that broadcast to [P, G].
    first_prompt: The number of the first prompt, which the random numbers depend on.
    end: Cuts rows at stop texts (see stop.py). None: no text ends rows.
    reply: Maps rows that have just ended to the tokens with which they resume, for example those of
      an environment. Called between two chunks with all such rows. A row ends if its reply is None
      or leaves no room for another token. None: no row resumes.
    turn_tokens: The most tokens that a row draws before its next reply. 0 means no limit but the
      row's longest completion.
    at_once: The most prompts in flight, rounded up to a multiple of the row shards. 0 means all.
  """

  key: jax.Array
  settings: RowSettings = RowSettings()
  first_prompt: int = 0
  end: End | None = None
  reply: Reply | None = None
  turn_tokens: int = 0
  at_once: int = 0


class Sampler:
  """Completes prompts.

  A prompt is computed once for its group. Completion [p, g] is drawn with
  fold_in(key, (first_prompt + p) * G + g), so it depends neither on the other prompts nor on the
  number of rows that are decoded together.

  Attributes:
    programs: The compiled programs.
  """

  def __init__(
    self,
    config: model.ModelConfig,
    decoding: Decoding,
    weights: int = 0,
    rows: int | Callable[[int, int], int] = 0,
    guide: Callable[[], Guided] | None = None,
    prompt_piece: int = 0,
  ):
    """Makes a sampler.

    Args:
      config: The model, in the dtype of sampling.
      decoding: Stop ids and the longest completion.
      weights: How many parameters the model has. Few make smaller grids not worth compiling.
      rows: The most rows in flight, or (prompts, members) -> this number. 0 means all.
      guide: Makes the `Guided` of a new row, which restricts its tokens. None: no restrictions.
      prompt_piece: The most tokens of a prompt that are computed while rows wait. 0 means all.
    """
    self._config, self._weights, self._guide = config, weights, guide
    self._prompt_piece = prompt_piece
    # A function, which estimates memory, is called once for each (prompts, members).
    self._rows = functools.cache(rows) if callable(rows) else lambda *call: rows
    self.programs = FlightPrograms(config, decoding, longest_chunk(decoding.max_tokens))

  def pace(self, prompts: int, members: int, in_order: bool = False) -> Pace:
    """Chooses grids and cache sizes for `prompts` groups in flight.

    Args:
      prompts: How many groups should fit, a multiple of the mesh's row shards.
      members: G, the completions of each group.
      in_order: Whether free seats go to the oldest groups first, for an endless stream of groups
        (rollout.weights=in_flight). It costs a copy of the prompt for each row, which
        `run.memory.sampler_bytes` counts.
    """
    shards, tokens = self._config.row_shards, self.programs.decoding.max_tokens
    grid = seats_lib.first_grid(prompts, members, self._rows(prompts, members), shards)
    if in_order:  # with one seat per place, each free seat can go to the oldest group
      grid = Grid(grid.rows, 1)
    smaller: list[Grid] = []
    if 2.0 * self._weights * grid.rows * tokens >= _SHRINKS_FROM:  # a weight costs 2 per token
      sizes = [grid.rows // shards // share for share in _SMALLER]
      # With one seat per place, it does not matter to which prompts the last rows belong.
      smaller = [Grid(size * shards, 1) for size in sizes if size >= _FEWEST_ROWS]
    groups = grid.places // members if in_order else grid.places  # that are in flight at once
    # Later prompts are computed in batches of this size. Free places wait for a whole batch, or a
    # smaller one is padded, so the size is small. The eighth is a guess, not measured.
    prompts_at_once = max(1, groups // shards // 8) * shards
    slots = tuple(sizes_up_to(tokens, model.slots_step(self._config)))
    if self._config.slot_shards > 1:  # to grow would move slots between devices
      slots = slots[-1:]
    piece = self._prompt_piece
    return Pace(grid, tuple(smaller), slots, prompts_at_once, shards, in_order, piece)

  def stream(
    self,
    feed: Feed,
    prompts: int,
    members: int,
    end: End | None = None,
    *,
    keeps_versions: bool = False,
    in_order: bool = False,
  ) -> Stream:
    """Makes a stream, to which groups are submitted at any time.

    Args:
      feed: Returns the weights for each chunk.
      prompts: How many groups should fit, a multiple of the mesh's row shards.
      members: G, the completions of each group.
      end: Cuts rows at stop texts, or None.
      keeps_versions: Whether completions record the version of the weights that drew each token.
      in_order: Whether free seats go to the oldest groups first, for an endless stream of groups.
    """
    pace = self.pace(prompts, members, in_order)
    return Stream(self.programs, feed, pace, members, end, keeps_versions, self._guide)

  def prompts(
    self,
    prompts_PS: np.ndarray,
    prompt_lengths_P: np.ndarray,
    images: Images | Visual | None = None,
  ) -> Prompts:
    """Makes a batch of prompts for requests, and finds the tokens that all prompts share.

    Args:
      prompts_PS: int32, right-padded.
      prompt_lengths_P: int32, how many tokens each prompt has.
      images: The images of the prompts, as numpy arrays, or encoded on the mesh, or None.
    """
    tokens_PS, lengths_P = np.asarray(prompts_PS), np.asarray(prompt_lengths_P)
    shared = 0
    # A shared beginning is computed as a single row, which a mesh cannot split over its row shards.
    # The model refuses pictures after cached tokens if tokens of a picture see its later ones.
    if self._config.on_one_device and not (images and self._config.vision.both_ways):
      shared = shared_tokens(tokens_PS, lengths_P, images)
    return Prompts(tokens_PS, lengths_P, shared, images)

  def __call__(
    self,
    params: model.Params | Feed,
    prompts_PS: np.ndarray,
    prompt_lengths_P: np.ndarray,
    members: int,
    draws: Draws,
    images: Images | Visual | None = None,
  ) -> Iterator[Finished]:
    """Completes each prompt `members` times.

    Args:
      params: All parameters, as `Parameters.for_sampling` returns them, or a `Feed`, which returns
        the parameters for each chunk.
      prompts_PS: int32, right-padded. P is a multiple of the mesh's row shards.
      prompt_lengths_P: int32, how many tokens each prompt has.
      members: G, the completions of each prompt.
      draws: How to draw: keys, temperatures, filters and when rows end.
      images: The images of the prompts, as numpy arrays, or encoded on the mesh, or None.

    Yields:
      Groups as they finish. Each prompt occurs once, as its index in `prompts_PS`.
    """
    feed = params if callable(params) else lambda: (params, 0)  # version 0, which is not recorded
    P = len(prompts_PS)
    shards = self._config.row_shards
    at_once = -(-min(draws.at_once or P, P) // shards) * shards
    keeps_versions = callable(params)
    stream = self.stream(feed, at_once, members, draws.end, keeps_versions=keeps_versions)
    prompts = self.prompts(prompts_PS, prompt_lengths_P, images)
    stream.submit(requests_of(prompts, members, draws))
    left = P
    while left:
      news = stream.advance()
      if news.paused:
        replies = draws.reply(list(news.paused))
        for row, tokens in zip(news.paused, replies, strict=True):
          stream.go_on(row.prompt, row.member, tokens)
      for finished in news.finished:
        left -= len(finished.prompts)
        yield finished


def requests_of(prompts: Prompts, members: int, draws: Draws) -> list[GroupRequest]:
  """Makes a request for each prompt, numbered from 0, with `members` completions each."""
  P, key = len(prompts.lengths_n), np.asarray(jax.random.key_data(draws.key))
  shape = (P, members)
  settings = jax.tree.map(lambda x: np.broadcast_to(np.asarray(x), shape), draws.settings)
  return [
    GroupRequest(
      number=p,
      prompts=prompts,
      place=p,
      key=key,
      first_row=(draws.first_prompt + p) * members,
      settings=jax.tree.map(lambda x: x[p], settings),  # noqa: B023  tree.map calls it right here
      turn_tokens=draws.turn_tokens,
      pauses=draws.reply is not None,
    )
    for p in range(P)
  ]


def shared_tokens(
  prompts_PS: np.ndarray, lengths_P: np.ndarray, images: Images | Visual | None = None
) -> int:
  """Returns the length of the beginning that all prompts share, rounded down to `_SHARED_STEP`.

  The beginning ends before the first image, and before the last token of the shortest prompt, so
  that each prompt has a token left to compute. A single prompt shares nothing.
  """
  if len(prompts_PS) < 2:
    return 0
  differs_S = (prompts_PS != prompts_PS[:1]).any(0)
  if images is not None:  # different images have the same placeholder tokens
    differs_S |= np.asarray(images.is_seen_PS).any(0)
  same = int(differs_S.argmax()) if differs_S.any() else len(differs_S)
  return min(same, int(lengths_P.min()) - 1) // _SHARED_STEP * _SHARED_STEP


def whole(parts: Iterable[Finished]) -> Completions:
  """Joins the completions of all groups, in the order of their numbers."""
  collected = list(parts)
  order = np.argsort(np.concatenate([part.prompts for part in collected]))
  completions = [part.completions for part in collected]
  return jax.tree.map(lambda *arrays: np.concatenate(arrays)[order], *completions)


def longest_chunk(max_tokens: int) -> int:
  """The columns of a chunk: the most tokens that a row draws before the host looks at it."""
  return min(max_tokens, _LONGEST_CHUNK)


def sizes_up_to(longest: int, step: int = 1) -> list[int]:
  """Returns the sizes, in tokens, through which a buffer grows to `longest`: at most four.

  Each size is about twice the previous one. Programs are compiled for each. Sizes are rounded up to
  multiples of `step`, and are at least 32 unless `longest` is smaller.
  """
  sizes = [longest]
  while len(sizes) < 4 and sizes[-1] > 32:
    sizes.append(max(32, -(-sizes[-1] // 2)))
  return sorted({-(-size // step) * step for size in sizes})


def temperature_at(sampling: Sampling, index: int, steps: int) -> float:
  """The sampling temperature of GRPO step `index`, from 0, in a run of `steps` GRPO steps."""
  make_schedule = TEMPERATURES[sampling.temperature_schedule]
  schedule = make_schedule(sampling.temperature, sampling.temperature_end, max(1, steps - 1))
  return float(schedule(index))
