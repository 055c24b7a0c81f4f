"""The compiled programs that run the model on prompts and on rows in flight."""

import dataclasses
import functools
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import model
from grpo_jax.compiling import Jitted
from grpo_jax.sampler.flight import (
  Flight,
  NewRows,
  Prompts,
  Resumed,
  constrain_flight,
  constrain_rows,
  everywhere,
  flight_shardings,
  on_each_shard,
  shard_grid,
)
from grpo_jax.sampler.logits import Decoding, RowSettings, draws_per_token
from grpo_jax.sampler.rows import (
  Chunk,
  Drawn,
  Extras,
  Rows,
  decode_chunk,
  draw_first,
  row_uniforms,
)
from grpo_jax.sampler.seats import Grid
from grpo_jax.types import Images, Visual

MOST_PATCHES = 2**16  # patches of images that a device encodes at the same time
# A device that computes this many tokens reads no weights for longer than it computes.
_ENOUGH_TOKENS = 2048
MOST_COPIED = 2**16  # tokens of prompts that a shard copies from their places, in a call
_MOST_SCORES = 2**26  # attention scores up to which a shared beginning is computed once


class KeptExperts(struct.PyTreeNode):
  """The experts that routers chose in the rounds of a chunk, for models with `keeps_experts`.

  Attributes:
    round: int32 scalar, the column that the next round writes.
    experts_RNY: Column n has the experts of each row's previous token, which round n read.
  """

  round: jax.Array
  experts_RNY: jax.Array

  def with_round(self, experts_R1Y: jax.Array) -> "KeptExperts":
    """A copy with the experts of another round."""
    start = (0, self.round, 0)
    kept_RNY = jax.lax.dynamic_update_slice(self.experts_RNY, experts_R1Y, start)
    return KeptExperts(self.round + 1, kept_RNY)


class Prefilled(NamedTuple):
  """The results of the forward pass over n prompts.

  Attributes:
    prefix: The keys and values, or states, of the prompts in all layers.
    last_nD: The features of each prompt's last token.
    next_n: int32, the position of the first token after each prompt, or None (see `Flight.next_N`).
    experts_nSY: The experts of each prompt token. None without `keeps_experts`.
    hidden_nTD: The features of the tokens after the shared beginning.
  """

  prefix: model.Prefix
  last_nD: jax.Array
  next_n: jax.Array | None
  experts_nSY: jax.Array | None
  hidden_nTD: jax.Array


class Pieces(NamedTuple):
  """The next tokens of n prompts that are computed in pieces.

  The n pieces are split over the mesh like the places, and the place of each is in its shard.

  Attributes:
    tokens_nU: int32, the tokens, right-padded.
    lengths_n: int32, how many tokens each piece has. At least 1.
    known_n: int32, how many tokens of the prompt are at its place already.
    places_n: int32, the place of each prompt. Pieces with N or more are dropped.
  """

  tokens_nU: np.ndarray
  lengths_n: np.ndarray
  known_n: np.ndarray
  places_n: np.ndarray


class _Continued(NamedTuple):
  """The results of the forward pass over tokens that continue n prompts.

  Attributes:
    cache: The cache of the n beginnings, with the tokens as the one row of each.
    last_nD: The features of the last tokens.
    experts_nUY: The experts of each token. None without `keeps_experts`.
  """

  cache: model.Cache
  last_nD: jax.Array
  experts_nUY: jax.Array | None


def most_rewound(columns: int) -> int:
  """`Cache.rewind` for chunks of `columns` columns: by how many slots a row may be rolled.

  A paused row is rolled before each chunk, so at most one chunk has written slots after the row's
  tokens. A chunk has `columns` - 1 rounds, each of which writes a slot. The row keeps the token of
  the first round, or has no slots yet because its first token was drawn without a round. In each of
  the other rounds, the row was paused or drew a token that it drops.
  """
  return max(0, columns - 2)


class FlightPrograms:
  """The programs of a sampler. Each is compiled for every grid and cache size that occurs.

  Attributes:
    decoding: Stop ids and the longest completion.
    columns: The most tokens that a row draws in one chunk.
  """

  def __init__(self, config: model.ModelConfig, decoding: Decoding, columns: int):
    """Compiles nothing yet. `config` is the model in the sampling dtype."""
    sharding = None if config.on_one_device else config.rows
    self.decoding = dataclasses.replace(decoding, sharding=sharding)
    self.columns, self._config = columns, config

  @property
  def vocabulary(self) -> int:
    """V, the number of logits."""
    return self._config.vocab_size

  @functools.cached_property
  def begin(self) -> Jitted:
    """(grid, slots, params, Prompts, prompt_N, RowSettings) -> (Flight, experts): starts a flight.

    prompt_N is the index of each place's prompt. None means that prompt n belongs to place n. The
    settings are arrays [R] with the dtypes and filters of later rows. Their values are not read.
    The experts [n, S, Y] of the prompt tokens are None without `keeps_experts`.
    """
    return Jitted(self._begin, static_argnums=(0, 1))

  @functools.cached_property
  def arrive(self) -> Jitted:
    """(flight, params, Prompts, places_n) -> (Flight, experts): computes prompts for n places.

    A prompt whose place is N or more is dropped. The prompts may be padded to fewer tokens than the
    flight has slots for. The experts are as in `begin`.
    """
    return Jitted(self._arrive, donate_argnums=0)

  @functools.cached_property
  def continue_prompts(self) -> Jitted:
    """(flight, params, Pieces) -> (Flight, experts): computes the next pieces of prompts.

    The experts are as in `begin`, for the tokens of the pieces.
    """
    return Jitted(self._continue_prompts, donate_argnums=0)

  @functools.cached_property
  def copy(self) -> Any:
    """(flight, from_N) -> Flight: place n gets the prompt of place from_N[n] in the same shard.

    Places from which others are copied stay as they are.
    """
    return jax.jit(self._copy, donate_argnums=0)

  @functools.cached_property
  def move(self) -> Any:
    """(flight, rows_NQ, places_N) -> Flight: moves rows and prompts into another grid [N, Q].

    rows_NQ is the old seat of each new seat's row, and places_N the old place of each prompt.
    """
    return jax.jit(self._move)

  @functools.cached_property
  def resume(self) -> Any:
    """(flight, Resumed) -> Flight: prepares paused rows to resume."""
    return jax.jit(self._resume, donate_argnums=0)

  @functools.cached_property
  def grow(self) -> Any:
    """(flight, slots) -> Flight whose cache has `slots` slots for the tokens of each row."""
    return jax.jit(self._grow, static_argnums=1)

  @functools.cached_property
  def chunk(self) -> Jitted:
    """(params, flight, NewRows, goes_on_R, Chunk, extras=None) -> (Flight, Drawn, goes_on_R).

    Decodes a chunk. goes_on_R is True for rows that draw and, in the result, for those that have
    not ended. It is False for free seats and paused rows. Drawn and goes_on_R are replicated.
    """

    def key(params: Any, flight: Flight, *rest: Any, **options: Any) -> tuple[Grid, int]:
      return flight.grid, flight.cache.slots  # each pair needs a program of its own

    return Jitted(self._chunk, key, donate_argnums=1)

  @property
  def row_shards(self) -> int:
    """The number of parts into which the mesh splits places and rows."""
    return self._config.row_shards

  def pieces_at_once(self, piece: int, prompt_slots: int, most: int) -> int:
    """How many prompts a call of `continue_prompts` computes, a multiple of the row shards.

    Args:
      piece: Tokens of a piece.
      prompt_slots: S, the length that prompts are padded to.
      most: The most prompts, a multiple of the row shards.
    """
    shards = self._config.row_shards
    at_once = min(_ENOUGH_TOKENS // piece, MOST_COPIED // prompt_slots)
    if model.after_prompts(self._config.split_along_slots) is None:
      # After known tokens, attention holds all scores in memory.
      scores = self._config.num_heads * piece * (prompt_slots + piece)
      at_once = min(at_once, _MOST_SCORES // scores)
    return shards * max(1, min(most // shards, at_once))

  def abstract(
    self, grid: Grid, slots: int, params: Any, prompt_slots: int, settings: RowSettings
  ) -> Flight:
    """The shapes, dtypes and shardings of a Flight without arrays, to compile programs for it.

    Args:
      grid: The places and seats.
      slots: The cache slots of each row.
      params: Shapes of all parameters.
      prompt_slots: S, the length that prompts are padded to.
      settings: Shapes of the rows' settings.
    """
    prompts = Prompts(
      jax.ShapeDtypeStruct((grid.places, prompt_slots), jnp.int32),
      jax.ShapeDtypeStruct((grid.places,), jnp.int32),
    )
    begin = functools.partial(self._begin, grid, slots)
    flight, _ = jax.eval_shape(begin, params, prompts, None, settings)
    if self._config.rows is None:
      return flight
    return jax.tree.map(
      lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
      flight,
      flight_shardings(self._config, flight),
    )

  def no_experts(self, *shape: int) -> np.ndarray | None:
    """An array [*shape, Y] of -1 for tokens of unknown experts. None without `keeps_experts`."""
    config = self._config
    if not config.keeps_experts:
      return None
    return np.full((*shape, config.experts_in_all), -1, config.experts_dtype)

  def _prefill(self, params: Any, prompts: Prompts, slots: int) -> Prefilled:
    """Computes prompts for a flight whose places have `slots` slots for prompt tokens."""
    (n, S), shared = prompts.tokens_nS.shape, prompts.shared
    config = self._shaped(slots)
    visual = self._encode(params, prompts.images)
    # After a cached beginning, attention may hold all scores in memory. They must not be too many.
    if n * config.num_heads * (S - shared) * S > _MOST_SCORES and not model.after_prompts(config):
      shared = 0
    positions_nT = jnp.broadcast_to(jnp.arange(shared, S), (n, S - shared))
    tokens_nT, cache, shared_experts = prompts.tokens_nS[:, shared:], None, None
    split = config.split_along_slots
    if split.context > 1:  # devices share the tokens: prompts have no shared beginning on a mesh
      config = split
      # In a ring, each device has two pieces of equal length.
      more = -S % (2 * config.context)
      tokens_nT, positions_nT = (jnp.pad(x, ((0, 0), (0, more))) for x in (tokens_nT, positions_nT))
    if shared:  # one row computes the beginning, and all n prompts continue it
      config = dataclasses.replace(config, cache_dtype="")  # prompts are never rounded
      beginning = prompts.tokens_nS[:1, :shared], jnp.arange(shared)[None]  # tokens, positions
      _, cache, shared_experts = model.routed_features(params, config, *beginning)
      prefix = model.as_prefix(cache, jnp.full(1, shared))
      cache = model.empty_cache(config, prefix, n, S - shared)
    counts_n = prompts.lengths_n - shared
    visual_rest = visual and visual.after(shared)
    hidden_nTD, cache, experts = model.routed_features(
      params, config, tokens_nT, positions_nT, cache, counts_n, visual=visual_rest
    )
    if shared_experts is not None:
      shared_experts = jnp.broadcast_to(shared_experts, (n, *shared_experts.shape[1:]))
      experts = jnp.concatenate([shared_experts, experts], 1)
    if config.context > 1:  # each device adds what it has, which is 0 on all but one
      is_last_nT = jnp.arange(hidden_nTD.shape[1]) == (counts_n - 1)[:, None]
      last_nD = jnp.where(is_last_nT[..., None], hidden_nTD, 0).sum(1)
      experts = None if experts is None else experts[:, :S]
    else:
      last_n11 = (counts_n - 1)[:, None, None]
      last_nD = jnp.take_along_axis(hidden_nTD, last_n11, axis=1)[:, 0]
    # With a shared beginning, each row of the cache has only the tokens after it.
    as_prefix = model.rows_as_prefix if shared else model.as_prefix
    next_n = None
    if self._config.has_axes:  # an image's tokens may take fewer positions than their number
      next_n = jnp.asarray(prompts.lengths_n if visual is None else visual.next_P)
    prefix = model.within_windows(config, as_prefix(cache, prompts.lengths_n), slots)
    return Prefilled(prefix, last_nD, next_n, everywhere(self._config, experts), hidden_nTD)

  def _encode(self, params: Any, images: Images | Visual | None) -> Visual | None:
    """Encodes the images of prompts, if any. Each device encodes the images of its prompts."""
    if images is None:
      return None
    if isinstance(images, Visual):  # encoded earlier
      return jax.tree.map(functools.partial(constrain_rows, self._config), images)
    n, I, N, _ = images.patches_PINC.shape
    # The tower encodes the prompts in batches of equal size, so that its activations fit in memory.
    # The size is the largest with at most MOST_PATCHES patches, or one prompt, on each device.
    on_device = n // self._config.row_shards
    most = max(1, MOST_PATCHES // (I * N))
    sizes = [size for size in range(1, on_device + 1) if on_device % size == 0 and size <= most]
    batches = on_device // max(sizes)

    def split(x: Any) -> jax.Array:
      """[n, ...] -> [batches, n / batches, ...]. Each device has an equal share of every batch."""
      x = constrain_rows(self._config, jnp.asarray(x))
      return x.reshape(-1, batches, *x.shape[1:]).swapaxes(0, 1)

    def join(x: jax.Array) -> jax.Array:  # the inverse of `split`
      return constrain_rows(self._config, x.swapaxes(0, 1).reshape(n, *x.shape[2:]))

    encode = functools.partial(model.encode, params, self._config)
    return jax.tree.map(join, jax.lax.map(encode, jax.tree.map(split, images)))

  def _begin(
    self,
    grid: Grid,
    slots: int,
    params: Any,
    prompts: Prompts,
    prompt_N: jax.Array | None,
    settings: RowSettings,
  ) -> tuple[Flight, jax.Array | None]:
    """Makes a flight with prompts and free seats (see `begin`). `chunk` sets the arrays of rows."""
    made = self._prefill(params, prompts, prompts.tokens_nS.shape[1])
    prefix, last_nD, next_n = made.prefix, made.last_nD, made.next_n
    if prompt_N is not None:
      prefix, last_nD = model.take_prompts(prefix, prompt_N), last_nD[prompt_N]
      next_n = jax.tree.map(lambda x: x[prompt_N], next_n)  # None stays None
    R, T, levels = grid.rows, self.decoding.max_tokens, draws_per_token(self._config.vocab_size)
    rows = Rows(
      token_R=jnp.zeros(R, jnp.int32),
      drawn_R=jnp.zeros(R, jnp.int32),
      goes_on_R=jnp.zeros(R, bool),
      settings=settings,
      uniforms_RTU=jnp.zeros((R, T, levels)),
      idle_R=jnp.zeros(R, jnp.int32),
      given_RT=jnp.full((R, T), -1, jnp.int32),
    )
    shaped = self._shaped(prompts.tokens_nS.shape[1])
    rewind = most_rewound(self.columns)
    cache = model.empty_cache(shaped, prefix, grid.seats, slots, rewind)
    return constrain_flight(self._config, Flight(cache, last_nD, rows, next_n)), made.experts_nSY

  def _arrive(
    self, flight: Flight, params: Any, prompts: Prompts, places_n: jax.Array
  ) -> tuple[Flight, jax.Array | None]:
    made = self._prefill(params, prompts, flight.cache.prefix.slots)
    return self._seated(flight, made, places_n), made.experts_nSY

  def _seated(self, flight: Flight, made: Prefilled, places_n: jax.Array) -> Flight:
    """Puts computed prompts into n places of a flight. Those with a place >= N are dropped."""
    next_N = flight.next_N
    prefix = model.put_prompts(flight.cache.prefix, places_n, made.prefix)
    last_ND = flight.last_ND.at[places_n].set(made.last_nD, mode="drop")
    if next_N is not None:
      next_N = next_N.at[places_n].set(made.next_n, mode="drop")
    cache = flight.cache.replace(prefix=prefix)
    return constrain_flight(
      self._config, flight.replace(cache=cache, last_ND=last_ND, next_N=next_N)
    )

  def _continue_prompts(
    self, flight: Flight, params: Any, pieces: Pieces
  ) -> tuple[Flight, jax.Array | None]:
    """Computes pieces after what their places have, and adds them there (see the property)."""
    config = self._config
    arrays = (constrain_rows(config, jnp.asarray(x)) for x in pieces)
    tokens_nU, lengths_n, known_n, places_n = arrays
    # Within a shard, places are numbered from 0.
    N = flight.grid.places // config.row_shards
    is_dropped_n, place_n = places_n >= flight.grid.places, places_n % N

    def take(flight: Flight, place_n: jax.Array) -> Flight:
      prefix = model.take_prompts(flight.cache.prefix, place_n, one_by_one=True)
      return flight.replace(cache=flight.cache.replace(prefix=prefix))

    def add(
      of_pieces: Flight, place_n: jax.Array, is_dropped_n: jax.Array, lengths_n: jax.Array
    ) -> Flight:
      """The flight with the tokens of the pieces, which are its rows here."""
      place_n = jnp.where(is_dropped_n, N, place_n)
      prefix = model.add_to_prompts(of_pieces.cache, place_n, lengths_n)
      return of_pieces.replace(cache=of_pieces.cache.replace(prefix=prefix))

    prompts = flight.prompts_only
    taken = on_each_shard(config, take, prompts, place_n).cache.prefix.replace(lengths_P=known_n)
    made = self._after(taken, params, tokens_nU, lengths_n, known_n)
    if config.slot_shards > 1:  # the slots of a piece may lie on several devices
      whole = model.rows_as_prompts(made.cache, lengths_n, made.cache.slots - lengths_n)
      prefix = model.put_prompts(flight.cache.prefix, places_n, whole)
    else:
      of_pieces = prompts.replace(cache=made.cache.replace(prefix=flight.cache.prefix))
      prefix = on_each_shard(config, add, of_pieces, place_n, is_dropped_n, lengths_n).cache.prefix
    next_N = flight.next_N
    if next_N is not None:
      next_N = next_N.at[places_n].set(known_n + lengths_n, mode="drop")
    flight = flight.replace(
      cache=flight.cache.replace(prefix=prefix),
      last_ND=flight.last_ND.at[places_n].set(made.last_nD, mode="drop"),
      next_N=next_N,
    )
    return constrain_flight(config, flight), made.experts_nUY

  def _after(
    self,
    beginnings: model.Prefix,
    params: Any,
    tokens_nU: jax.Array,
    lengths_n: jax.Array,
    first_n: jax.Array,
  ) -> _Continued:
    """Computes tokens after the beginnings of n prompts. `first_n` are the first positions."""
    # Keys and values of prompts are never rounded to `cache_dtype`.
    config = dataclasses.replace(self._shaped(beginnings.slots), cache_dtype="").split_along_slots
    given = tokens_nU.shape[1]
    if config.context > 1:  # devices that share the tokens have equally many
      tokens_nU = jnp.pad(tokens_nU, ((0, 0), (0, -given % config.context)))
    U = tokens_nU.shape[1]
    cache = model.empty_cache(config, beginnings, 1, U)  # the one row of each beginning
    positions_nU = first_n[:, None] + jnp.arange(U)
    hidden_nUD, cache, experts = model.routed_features(
      params, config, tokens_nU, positions_nU, cache, lengths_n
    )
    last_nD = jnp.take_along_axis(hidden_nUD, (lengths_n - 1)[:, None, None], axis=1)[:, 0]
    if experts is not None and config.context > 1:
      experts = experts[:, :given]
    return _Continued(cache, last_nD, everywhere(self._config, experts))

  def _copy(self, flight: Flight, from_N: jax.Array) -> Flight:
    def copy(flight: Flight, from_N: jax.Array) -> Flight:
      prefix = model.copy_prompts(flight.cache.prefix, from_N)
      cache, last_ND = flight.cache.replace(prefix=prefix), flight.last_ND[from_N]
      next_N = jax.tree.map(lambda x: x[from_N], flight.next_N)
      return flight.replace(cache=cache, last_ND=last_ND, next_N=next_N)

    return on_each_shard(
      self._config, copy, flight, from_N % shard_grid(self._config, flight).places
    )

  def _move(self, flight: Flight, rows_NQ: jax.Array, places_N: jax.Array) -> Flight:
    def move(flight: Flight, rows_NQ: jax.Array, places_N: jax.Array) -> Flight:
      return Flight(
        cache=model.take_rows(self._config, flight.cache, rows_NQ, places_N),
        last_ND=flight.last_ND[places_N],
        rows=jax.tree.map(lambda x: x[rows_NQ.reshape(-1)], flight.rows),
        next_N=jax.tree.map(lambda x: x[places_N], flight.next_N),
      )

    # Rows never leave their shard, and `move` sees the rows and places of one shard alone.
    shard = shard_grid(self._config, flight)
    return on_each_shard(self._config, move, flight, rows_NQ % shard.rows, places_N % shard.places)

  def _resume(self, flight: Flight, resumed: Resumed) -> Flight:
    """Rolls the cache of all paused rows, and stores the tokens of replies that have come.

    While rows pause, it runs before each chunk, also for rows without a reply: layers with a window
    keep only as many slots as one chunk can write after a row's tokens. A row keeps its first
    `kept_R` tokens, and drops those that it drew after a stop text. Which rows then draw is an
    argument of `_chunk`.
    """

    def resume(flight: Flight, *arrays: jax.Array) -> Flight:
      rows, (is_resumed_R, kept_R, token_R, given_RT, limit_R) = flight.rows, arrays
      # All rows write into the same slot, and the cache expects a row's tokens in the slots written
      # last. So the row's tokens move over the slots that were written after them: by rounds in
      # which the row was idle, and by tokens that it drops.
      by_R = jnp.where(is_resumed_R, rows.idle_R + rows.drawn_R - kept_R, 0)
      cache = model.roll_rows(flight.cache, by_R.reshape(flight.grid), self._config.slot_shards)
      settings = rows.settings
      if settings.max_tokens is not None:  # otherwise every row ends at T
        most_R = jnp.where(is_resumed_R, limit_R, settings.max_tokens)
        settings = settings.replace(max_tokens=most_R)
      rows = rows.replace(
        settings=settings,
        token_R=jnp.where(is_resumed_R, token_R, rows.token_R),
        drawn_R=jnp.where(is_resumed_R, kept_R, rows.drawn_R),
        idle_R=jnp.where(is_resumed_R, 0, rows.idle_R),
        given_RT=jnp.where(is_resumed_R[:, None], given_RT, rows.given_RT),
      )
      return flight.replace(cache=cache, rows=rows)

    return on_each_shard(self._config, resume, flight, *resumed)

  def _grow(self, flight: Flight, slots: int) -> Flight:
    cache = model.with_slots(self._config, flight.cache, slots)
    return constrain_flight(self._config, flight.replace(cache=cache))

  def _chunk(
    self,
    params: Any,
    flight: Flight,
    new: NewRows,
    goes_on_R: jax.Array,
    chunk: Chunk,
    extras: Extras | None = None,
  ) -> tuple[Flight, Drawn, jax.Array]:
    """Draws the first tokens of new rows, then a token of each row in each round (see `chunk`)."""
    cache, rows, (N, Q) = flight.cache, flight.rows, flight.grid
    config = self._shaped(cache.prefix.slots)
    T, V = self.decoding.max_tokens, config.vocab_size
    new = jax.tree.map(lambda x: constrain_rows(self._config, jnp.asarray(x)), new)
    is_new_R = new.is_new_R

    def with_new(uniforms_RTU: jax.Array) -> jax.Array:  # only called if there are new rows
      keys_R = jax.random.wrap_key_data(new.key_R2)
      new_RTU = row_uniforms(keys_R, new.number_R, T, V)
      return jnp.where(is_new_R[:, None, None], new_RTU, uniforms_RTU)

    uniforms_RTU = jax.lax.cond(is_new_R.any(), with_new, lambda x: x, rows.uniforms_RTU)
    rows = Rows(
      token_R=rows.token_R,
      drawn_R=jnp.where(is_new_R, 0, rows.drawn_R),
      goes_on_R=constrain_rows(self._config, goes_on_R),
      settings=jax.tree.map(
        lambda new_R, old_R: jnp.where(is_new_R, new_R, old_R), new.settings, rows.settings
      ),
      uniforms_RTU=uniforms_RTU,
      idle_R=jnp.where(is_new_R, 0, rows.idle_R),
      given_RT=jnp.where(is_new_R[:, None], -1, rows.given_RT),
      extras=jax.tree.map(lambda x: constrain_rows(self._config, jnp.asarray(x)), extras),
    )
    next_N = cache.prefix.lengths_P if flight.next_N is None else flight.next_N
    next_R = jnp.repeat(next_N, Q)  # the position of each row's first token

    def step(carry: tuple[model.Cache, KeptExperts | None], rows: Rows) -> Any:
      cache, kept = carry
      # The last drawn token is the input of this step. The cache has those before it.
      cached_R = jnp.maximum(rows.drawn_R - 1, 0)  # a free seat may have drawn nothing
      cache = cache.replace(lengths_PG=cached_R.reshape(N, Q))
      token_R1, positions_R1 = rows.token_R[:, None], (next_R + cached_R)[:, None]
      counts_R = rows.goes_on_R.astype(jnp.int32)  # other rows add no token to a state
      hidden_R1D, cache, experts = model.routed_features(
        params, config, token_R1, positions_R1, cache, counts_R
      )
      logits_R1V = model.unembed(params, config, hidden_R1D)
      return logits_R1V[:, 0], (cache, kept and kept.with_round(experts))

    def first_logits() -> jax.Array:
      return jnp.repeat(model.unembed(params, config, flight.last_ND), Q, axis=0)

    cache = model.begin_rows(cache, is_new_R.reshape(N, Q))
    rows, drawn = draw_first(rows, first_logits, self.decoding, self.columns)
    carry = cache, self._nothing_kept(rows)
    (cache, kept), rows, drawn = decode_chunk(step, carry, rows, drawn, self.decoding, chunk)
    if kept is not None:
      drawn = drawn.replace(experts_RNY=kept.experts_RNY)
    for_host = everywhere(self._config, (drawn, rows.goes_on_R))
    # Extras hold for one chunk only.
    flight = Flight(cache, flight.last_ND, rows.replace(extras=None), flight.next_N)
    return constrain_flight(self._config, flight), *for_host

  def _nothing_kept(self, rows: Rows) -> "KeptExperts | None":
    """`KeptExperts` before the first round of a chunk. None without `keeps_experts`."""
    config = self._config
    if not config.keeps_experts:
      return None
    shape = (len(rows.token_R), self.columns, config.experts_in_all)
    return KeptExperts(
      jnp.int32(1), constrain_rows(self._config, jnp.zeros(shape, config.experts_dtype))
    )

  def _shaped(self, prompt_slots: int) -> model.ModelConfig:
    """The model config for sequences of `prompt_slots` prompt tokens and T completion tokens."""
    length = prompt_slots + self.decoding.max_tokens
    return dataclasses.replace(self._config, length=length)
