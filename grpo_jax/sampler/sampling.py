"""The sampler of a run: which programs, how many seats, and whole batches of prompts."""

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

# sampling.temperature_schedule: (first, last, how many steps later) -> the temperature of a step.
TEMPERATURES: dict[str, Callable[[float, float, int], optax.Schedule]] = {
  "constant": lambda first, last, steps: optax.constant_schedule(first),
  "linear": optax.linear_schedule,
  "cosine": lambda first, last, steps: optax.cosine_decay_schedule(first, steps, last / first),
}

_LONGEST_CHUNK = 64
_SHARED_STEP = 32  # each other length is compiled
# A call that computes less does not repay the time to compile smaller grids.
_SHRINKS_FROM = 1e10  # floating point operations
_SMALLER, _FEWEST_ROWS = (2, 4, 8, 32), 8  # shares of a shard's rows, and the fewest of them


def decoding_of(sampling: Sampling, stop_ids: tuple[int, ...]) -> Decoding:
  """The limits of a config, with the model's own stop ids before the config's."""
  return Decoding(sampling.max_tokens, tuple(dict.fromkeys((*stop_ids, *sampling.stop_ids))))


def settings_of(sampling: Sampling, temperature: float) -> RowSettings:
  """How the rows of a config draw at a temperature. At 0, filters change nothing."""
  settings = RowSettings(temperature, min_tokens=sampling.min_tokens or None)
  if not temperature:
    return settings
  return settings.with_filters(values_of(sampling))


class Draws(NamedTuple):
  """How the tokens of a batch are drawn.

  Attributes:
    key: The root of the random numbers.
    settings: Temperature, filters and limits: numbers, or arrays that broadcast to [P, G].
    first_prompt: The number of the first prompt.
    end: Finds how many tokens a row keeps where a text ends it. None: no text ends rows.
    reply: Says how rows that have ended go on: with the tokens of an environment, for example. It
      is asked between two chunks, for all rows at once that have just ended. A row whose reply
      leaves no room for another token has ended. None means that none goes on.
    turn_tokens: The most tokens that a row draws before it is asked for its reply. 0 means as many
      as the row may have.
    at_once: The most prompts in flight, a multiple of the mesh's row shards. 0 means all.
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
    programs: The compiled programs that draw rows.
  """

  def __init__(
    self,
    config: model.ModelConfig,
    decoding: Decoding,
    weights: int = 0,
    rows: int | Callable[[int, int], int] = 0,
    guide: Callable[[], Guided] | None = None,
  ):
    """Makes a sampler.

    Args:
      config: The model, in the dtype of sampling.
      decoding: Stop ids and the longest completion.
      weights: How many parameters the model has. It says when it pays to move rows together.
      rows: The most rows in flight, or (prompts, members) -> those of such a call. 0 means all.
      guide: Makes what says which tokens a new row may draw. None: all of them.
    """
    self._config, self._weights, self._guide = config, weights, guide
    self._rows = functools.cache(rows) if callable(rows) else lambda *call: rows
    self.programs = FlightPrograms(config, decoding, longest_chunk(decoding.max_tokens))

  def pace(self, prompts: int, members: int, in_order: bool = False) -> Pace:
    """How `members` completions of so many prompts at once are decoded.

    Args:
      prompts: A multiple of the mesh's row shards.
      members: G.
      in_order: Whether free seats go to the oldest groups first, because others will follow.
    """
    shards, tokens = self._config.row_shards, self.programs.decoding.max_tokens
    grid = seats_lib.first_grid(prompts, members, self._rows(prompts, members), shards)
    if in_order:
      grid = Grid(grid.rows, 1)
    smaller: list[Grid] = []
    if 2.0 * self._weights * grid.rows * tokens >= _SHRINKS_FROM:
      sizes = [grid.rows // shards // share for share in _SMALLER]
      smaller = [Grid(size * shards, 1) for size in sizes if size >= _FEWEST_ROWS]
    at_once = grid.places // members if in_order else grid.places
    prompts_at_once = max(1, at_once // shards // 8) * shards
    sizes_of_cache = sizes_up_to(tokens, model.slots_step(self._config))
    slots = tuple(sizes_of_cache)
    return Pace(grid, tuple(smaller), slots, prompts_at_once, shards, in_order)

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
    """Samples groups that come and go.

    Args:
      feed: The weights of each chunk.
      prompts: How many groups should fit at once, a multiple of the mesh's row shards.
      members: G, of each group.
      end: Ends rows at texts, or None.
      keeps_versions: Whether completions have the version of the weights of each token.
      in_order: Whether free seats go to the oldest groups first, because others will follow.
    """
    pace = self.pace(prompts, members, in_order)
    return Stream(self.programs, feed, pace, members, end, keeps_versions, self._guide)

  def prompts(
    self,
    prompts_PS: np.ndarray,
    prompt_lengths_P: np.ndarray,
    images: Images | Visual | None = None,
  ) -> Prompts:
    """Prompts for requests.

    Args:
      prompts_PS: int32, right-padded.
      prompt_lengths_P: int32, their tokens.
      images: The images of the prompts, as numpy arrays, or encoded on the mesh, or None.
    """
    tokens_PS, lengths_P = np.asarray(prompts_PS), np.asarray(prompt_lengths_P)
    shared = 0
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
      params: All parameters, as `Parameters.for_sampling` returns them, or what gives those of each
        chunk.
      prompts_PS: int32, right-padded. P is a multiple of the mesh's row shards.
      prompt_lengths_P: int32, their tokens.
      members: G.
      draws: How to draw: keys, temperatures, filters and when rows end.
      images: The images of the prompts, as numpy arrays, or encoded on the mesh, or None.

    Yields:
      Groups as they finish, each prompt once.
    """
    feed = params if callable(params) else lambda: (params, 0)
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
  """One request for each prompt, numbered from 0."""
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
      settings=jax.tree.map(lambda x: x[p], settings),  # noqa: B023  it is called at once
      turn_tokens=draws.turn_tokens,
      pauses=draws.reply is not None,
    )
    for p in range(P)
  ]


def shared_tokens(
  prompts_PS: np.ndarray, lengths_P: np.ndarray, images: Images | Visual | None = None
) -> int:
  """How many tokens all prompts have in common at their start, in steps of `_SHARED_STEP`.

  Each prompt has at least one token after them. A single prompt shares nothing. Tokens of images
  are equal where the images are not.
  """
  if len(prompts_PS) < 2:
    return 0
  differs_S = (prompts_PS != prompts_PS[:1]).any(0)
  if images is not None:
    differs_S |= np.asarray(images.is_seen_PS).any(0)
  same = int(differs_S.argmax()) if differs_S.any() else len(differs_S)
  return min(same, int(lengths_P.min()) - 1) // _SHARED_STEP * _SHARED_STEP


def whole(parts: Iterable[Finished]) -> Completions:
  """The completions of all prompts of a call, in their order."""
  collected = list(parts)
  order = np.argsort(np.concatenate([part.prompts for part in collected]))
  trees = [part.completions for part in collected]
  return jax.tree.map(lambda *arrays: np.concatenate(arrays)[order], *trees)


def longest_chunk(max_tokens: int) -> int:
  """The columns of a chunk: the most tokens that a row draws before the host looks at it."""
  return min(max_tokens, _LONGEST_CHUNK)


def sizes_up_to(longest: int, step: int = 1) -> list[int]:
  """The sizes, in tokens, that programs are compiled for on the way to `longest`.

  There are at most four. Each is double the one before. None is below 32 unless `longest` is. Each
  is a multiple of `step`, and the last holds at least `longest`.
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
