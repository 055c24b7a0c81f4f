"""Programs of a prefix cache: a prompt that begins like an earlier text is computed only after it.

A cached text is a prompt with the tokens that a row drew after it. All cached texts are in one
`Prefix`, which is separate from the rows in flight.
"""

import functools
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import model
from grpo_jax.compiling import Jitted
from grpo_jax.sampler.flight import Flight, Prompts, constrain_flight, everywhere
from grpo_jax.sampler.logits import likeliest
from grpo_jax.sampler.programs import FlightPrograms, Prefilled
from grpo_jax.types import Images

_MOST_LOGITS = 2**25  # logits of prompt tokens in memory at the same time


class Suffixes(NamedTuple):
  """The suffixes of n prompts whose beginnings were computed earlier.

  Attributes:
    tokens_nU: int32, the tokens after the known beginning, right-padded.
    lengths_n: int32, how many tokens each suffix has. At least 1.
    from_n: int32, the source of the beginning: place n of the flight, or N + t for cached text t.
    known_n: int32, how many tokens the beginning has.
    places_n: int32, the place that gets the whole prompt. Prompts with N or more are dropped.
    shift_n: int32, the position of a suffix token minus its index in the prompt. It is not 0 after
      images whose tokens have positions in several axes.
  """

  tokens_nU: np.ndarray
  lengths_n: np.ndarray
  from_n: np.ndarray
  known_n: np.ndarray
  places_n: np.ndarray
  shift_n: np.ndarray


class EndedRows(NamedTuple):
  """Ended rows that become cached texts: their prompts with the tokens that they drew.

  Attributes:
    rows_n: int32, the seats of the rows.
    own_n: int32, how many drawn tokens are cached. Less than all, because the last drawn token has
      no keys yet.
    texts_n: int32, the slot in which each text is cached. Texts past the last slot are dropped.
  """

  rows_n: np.ndarray
  own_n: np.ndarray
  texts_n: np.ndarray


class ScoredPrompts(struct.PyTreeNode):
  """The log-probs of the tokens of n prompts, under softmax(logits).

  Attributes:
    logprobs_nS: float32. Entry s is the log-prob of token s + 1 given tokens 0 to s. Entries at the
      last token and at padding are meaningless.
    alternatives_nSA: int32, entry s has the A likeliest tokens for index s + 1, likeliest first.
    alternative_logprobs_nSA: float32, the log-probs of these.
  """

  logprobs_nS: jax.Array
  alternatives_nSA: jax.Array
  alternative_logprobs_nSA: jax.Array


class PrefixPrograms(FlightPrograms):
  """The programs of a flight whose places have one seat each, and of its prefix cache."""

  @functools.cached_property
  def no_texts(self) -> Any:
    """(flight, texts) -> an empty `Prefix` with slots for `texts` cached texts."""
    return jax.jit(self._no_texts, static_argnums=1)

  @functools.cached_property
  def see(self) -> Any:
    """(params, patches_NC, places_N2, seen_S) -> [n, K, S, D]: encodes one picture for n prompts.

    seen_S is the number of the visual token at each prompt token, or -1, where the features are 0.
    Encoding is a separate program, because it depends on the picture's size alone, and `arrive` on
    the length of prompts. n is the number of row shards, because each needs a copy.
    """
    return jax.jit(self._see)

  @functools.cached_property
  def arrive_scored(self) -> Any:
    """(flight, params, Prompts, places_n, A) -> (Flight, ScoredPrompts): `arrive` with scores."""
    return jax.jit(self._arrive_scored, donate_argnums=0, static_argnums=4)

  @functools.cached_property
  def go_on(self) -> Jitted:
    """(flight, cached texts, params, Suffixes) -> (Flight, experts): computes suffixes of prompts.

    The cached texts, a `Prefix`, are None if every beginning lies in a place of the flight. The
    experts [n, U, Y] of the suffixes are None without `keeps_experts`. No mesh splits the slots.
    """
    return Jitted(self._go_on, donate_argnums=0)

  @functools.cached_property
  def keep(self) -> Any:
    """(flight, cached texts, EndedRows) -> Prefix: adds the texts of ended rows to the cache."""
    return jax.jit(self._keep, donate_argnums=1)

  def _no_texts(self, flight: Flight, texts: int) -> model.Prefix:
    def empty(x: jax.Array) -> jax.Array:
      return jnp.zeros((x.shape[0], texts, *x.shape[2:]), x.dtype)

    prefix = flight.cache.prefix
    keys, values, states = jax.tree.map(empty, (prefix.keys, prefix.values, prefix.states))
    lengths_P = jnp.zeros(texts, jnp.int32)
    cached = prefix.replace(keys=keys, values=values, states=states, lengths_P=lengths_P)
    return self._as_prompts_lie(flight, cached)

  def _see(
    self, params: Any, patches_NC: jax.Array, places_N2: jax.Array, seen_S: jax.Array
  ) -> jax.Array:
    seen_S2 = jnp.stack([jnp.minimum(seen_S, 0), seen_S], -1)  # picture 0 is the only one
    image = Images(patches_NC[None, None], places_N2[None, None], seen_S2[None])
    shards = self._config.row_shards
    visual = self._encode(params, jax.tree.map(lambda x: jnp.repeat(x, shards, 0), image))
    # Prompt tokens without a visual token take the features of token 0, which are then masked.
    index_P1S1 = jnp.maximum(visual.seen_PS, 0)[:, None, :, None]
    features_PKSD = jnp.take_along_axis(visual.features_PKND, index_P1S1, axis=2)
    return jnp.where(visual.is_seen_PS[:, None, :, None], features_PKSD, 0)

  def _arrive_scored(
    self, flight: Flight, params: Any, prompts: Prompts, places_n: jax.Array, count: int
  ) -> tuple[Flight, ScoredPrompts]:
    made = self._prefill(params, prompts, flight.cache.prefix.slots)
    scores = everywhere(self._config, self._scores(params, made, prompts, count))
    return self._seated(flight, made, places_n), scores

  def _scores(self, params: Any, made: Prefilled, prompts: Prompts, count: int) -> ScoredPrompts:
    """Computes log-probs of prompts, a few token positions at a time: all logits need much memory.

    The endpoint sets no `Prompts.shared`, so `made` has the features of all S tokens. `count` is A,
    the number of alternatives to each token.
    """
    n, S = prompts.tokens_nS.shape
    temperature_n = jnp.ones(n)

    def of_position(hidden_and_next: tuple[jax.Array, jax.Array]) -> ScoredPrompts:
      hidden_nD, next_token_n = hidden_and_next
      logits_nV = model.unembed(params, self._config, hidden_nD)
      next_logit_n = jnp.take_along_axis(logits_nV, next_token_n[:, None], axis=1)[:, 0]
      logprob_n = next_logit_n - jax.nn.logsumexp(logits_nV, axis=-1)
      return ScoredPrompts(logprob_n, *likeliest(logits_nV, temperature_n, count))

    hidden_SnD = made.hidden_nTD.swapaxes(0, 1)
    next_token_Sn = jnp.roll(prompts.tokens_nS, -1, axis=1).T  # the last position wraps around
    at_once = max(1, min(S, _MOST_LOGITS // (n * self._config.vocab_size)))
    by_position = jax.lax.map(of_position, (hidden_SnD, next_token_Sn), batch_size=at_once)
    return jax.tree.map(lambda x: x.swapaxes(0, 1), by_position)

  def _go_on(
    self, flight: Flight, cached: model.Prefix | None, params: Any, suffixes: Suffixes
  ) -> tuple[Flight, jax.Array | None]:
    """Computes suffixes after their known beginnings, and puts the whole prompts into places."""
    tokens_nU, lengths_n, from_n, known_n, places_n, shift_n = map(jnp.asarray, suffixes)
    of_flight = flight.cache.prefix
    # Indices out of range are clamped: `_either` takes no beginning from there.
    N = flight.grid.places
    of_places = model.take_prompts(of_flight, jnp.minimum(from_n, N - 1))
    beginnings = of_places.replace(lengths_P=known_n)
    if cached is not None:
      of_texts = model.take_prompts(cached, jnp.maximum(from_n - N, 0))
      beginnings = _either(from_n >= N, of_texts.replace(lengths_P=known_n), beginnings)
    made = self._after(beginnings, params, tokens_nU, lengths_n, known_n + shift_n)
    padding_n = made.cache.slots - lengths_n  # slots that were written after a suffix
    prompts = model.rows_as_prompts(made.cache, lengths_n, padding_n)
    next_N = flight.next_N
    if next_N is not None:
      next_N = next_N.at[places_n].set(known_n + shift_n + lengths_n, mode="drop")
    flight = flight.replace(
      cache=flight.cache.replace(prefix=model.put_prompts(of_flight, places_n, prompts)),
      last_ND=flight.last_ND.at[places_n].set(made.last_nD, mode="drop"),
      next_N=next_N,
    )
    return constrain_flight(self._config, flight), made.experts_nUY

  def _keep(self, flight: Flight, cached: model.Prefix, ended: EndedRows) -> model.Prefix:
    rows_n, own_n, texts_n = map(jnp.asarray, ended)
    if self._config.cache_dtype:  # the rows' tokens are rounded, so only the prompts are cached
      texts = model.take_prompts(flight.cache.prefix, rows_n)  # each place has one seat
    else:
      cache = model.take_rows(self._config, flight.cache, rows_n[:, None], rows_n)
      # How many slots were written after the last token that is cached.
      passes_n = flight.rows.idle_R[rows_n] + flight.rows.drawn_R[rows_n] - 1 - own_n
      texts = model.rows_as_prompts(cache, own_n, passes_n)
    return self._as_prompts_lie(flight, model.put_prompts(cached, texts_n, texts))

  def _as_prompts_lie(self, flight: Flight, cached: model.Prefix) -> model.Prefix:
    """Gives cached texts the shardings that the flight's prompts have."""
    flight = flight.replace(cache=flight.cache.replace(prefix=cached))
    return constrain_flight(self._config, flight).cache.prefix


def _either(is_first_n: jax.Array, first: model.Prefix, second: model.Prefix) -> model.Prefix:
  """For each of n prompts, the one of `first` or of `second`. Both have the same lengths."""

  def choose(x: jax.Array, y: jax.Array) -> jax.Array:
    if x.ndim == 1:  # the lengths
      return x
    is_first = is_first_n.reshape(-1, *[1] * (x.ndim - 2))  # of keys, values or states [L, n, ...]
    return jnp.where(is_first, x, y)

  return jax.tree.map(choose, first, second)
