"""The programs of a prefix cache: prompts that begin as others did are computed from there on.

What is kept are texts: prompts, with the tokens that rows wrote after them. They lie in a `Prefix`
of their own beside the rows in flight.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import model
from grpo_jax.sampler.flight import Flight, Prompts, constrain_flight, everywhere
from grpo_jax.sampler.logits import likeliest
from grpo_jax.sampler.programs import FlightPrograms, Prefilled
from grpo_jax.types import Images

_MOST_LOGITS = 2**25  # of the tokens of prompts, at once


class Suffixes(NamedTuple):
  """The ends of n prompts whose beginnings are known.

  Attributes:
    tokens_nU: int32, the tokens after the beginning, right-padded.
    lengths_n: int32, how many they are. At least 1.
    from_n: int32, who has the beginning: a place of the flight or, counted on after these, a text
      that is kept.
    known_n: int32, the tokens of the beginning.
    places_n: int32, which place gets the prompt. One past the last is left out.
    shift_n: int32, the position of a token of the end minus its number. It is not 0 where images
      before it have positions of their own.
  """

  tokens_nU: np.ndarray
  lengths_n: np.ndarray
  from_n: np.ndarray
  known_n: np.ndarray
  places_n: np.ndarray
  shift_n: np.ndarray


class EndedRows(NamedTuple):
  """Rows whose prompts and own tokens are kept.

  Attributes:
    rows_n: int32.
    own_n: int32, how many of their own tokens are kept: fewer than they have drawn, because the
      token that was drawn last has no keys yet.
    texts_n: int32, the number of the text that each becomes. One past the last is left out.
  """

  rows_n: np.ndarray
  own_n: np.ndarray
  texts_n: np.ndarray


class ScoredPrompts(struct.PyTreeNode):
  """The log-probs of the tokens of n prompts, under softmax(logits).

  Attributes:
    logprobs_nS: float32. Place s has that of token s + 1, given those up to s. The place of the
      last token and padding have numbers without a meaning.
    alternatives_nSA: int32, the likeliest tokens in the place of token s + 1, the likeliest first.
    alternative_logprobs_nSA: float32, their log-probs.
  """

  logprobs_nS: jax.Array
  alternatives_nSA: jax.Array
  alternative_logprobs_nSA: jax.Array


class PrefixPrograms(FlightPrograms):
  """The programs of a flight whose places have one seat each, and those of its prefix cache."""

  @functools.cached_property
  def no_texts(self) -> Any:
    """(flight, texts) -> a `Prefix` with room for so many texts."""
    return jax.jit(self._no_texts, static_argnums=1)

  @functools.cached_property
  def see(self) -> Any:
    """(params, patches_NC, places_N2, seen_S) -> [n, K, S, D], the visual tokens of a picture.

    They lie at the tokens of n prompts that see them: `seen_S` is the number of a visual token, or
    -1. Elsewhere there is 0. So this is compiled for sizes of pictures alone, and `arrive` for
    lengths of prompts. Each of the mesh's row shards has one of the n.
    """
    return jax.jit(self._see)

  @functools.cached_property
  def arrive_scored(self) -> Any:
    """(flight, params, Prompts, places_n, A) -> (Flight, ScoredPrompts): `arrive` with scores."""
    return jax.jit(self._arrive_scored, donate_argnums=0, static_argnums=4)

  @functools.cached_property
  def go_on(self) -> Any:
    """(flight, kept, params, Suffixes) -> Flight: computes the ends of prompts."""
    return jax.jit(self._go_on, donate_argnums=0)

  @functools.cached_property
  def keep(self) -> Any:
    """(flight, kept, EndedRows) -> the texts that are kept, with those of these rows."""
    return jax.jit(self._keep, donate_argnums=1)

  def _no_texts(self, flight: Flight, texts: int) -> model.Prefix:
    def room(x: jax.Array) -> jax.Array:
      return jnp.zeros((x.shape[0], texts, *x.shape[2:]), x.dtype)

    prefix = flight.cache.prefix
    keys, values, states = jax.tree.map(room, (prefix.keys, prefix.values, prefix.states))
    lengths_P = jnp.zeros(texts, jnp.int32)
    kept = prefix.replace(keys=keys, values=values, states=states, lengths_P=lengths_P)
    return self._as_prompts_lie(flight, kept)

  def _see(
    self, params: Any, patches_NC: jax.Array, places_N2: jax.Array, seen_S: jax.Array
  ) -> jax.Array:
    seen_S2 = jnp.stack([jnp.minimum(seen_S, 0), seen_S], -1)  # of the first and only picture
    one = Images(patches_NC[None, None], places_N2[None, None], seen_S2[None])
    shards = self._config.row_shards
    visual = self._encode(params, jax.tree.map(lambda x: jnp.repeat(x, shards, 0), one))
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
    """The log-probs of prompts, a few places at a time: all their logits would not fit the memory.

    `count` is the number of alternatives in each place.
    """
    n, S = prompts.tokens_nS.shape
    temperature_n = jnp.ones(n)

    def of_place(hidden_and_next: tuple[jax.Array, jax.Array]) -> ScoredPrompts:
      hidden_nD, next_token_n = hidden_and_next
      logits_nV = model.unembed(params, self._config, hidden_nD)
      next_logit_n = jnp.take_along_axis(logits_nV, next_token_n[:, None], axis=1)[:, 0]
      logprob_n = next_logit_n - jax.nn.logsumexp(logits_nV, axis=-1)
      return ScoredPrompts(logprob_n, *likeliest(logits_nV, temperature_n, count))

    hidden_SnD = made.hidden_nTD.swapaxes(0, 1)
    next_token_Sn = jnp.roll(prompts.tokens_nS, -1, axis=1).T
    at_once = max(1, min(S, _MOST_LOGITS // (n * self._config.vocab_size)))
    by_place = jax.lax.map(of_place, (hidden_SnD, next_token_Sn), batch_size=at_once)
    return jax.tree.map(lambda x: x.swapaxes(0, 1), by_place)

  def _go_on(self, flight: Flight, kept: model.Prefix, params: Any, suffixes: Suffixes) -> Flight:
    """Computes the ends of prompts after their known beginnings, and puts them in their places."""
    tokens_nU, lengths_n, from_n, known_n, places_n, shift_n = map(jnp.asarray, suffixes)
    (n, U), known = tokens_nU.shape, flight.cache.prefix
    config = dataclasses.replace(self._shaped(known.slots), cache_dtype="")
    N, is_kept_n = flight.grid.places, from_n >= flight.grid.places

    def either(of_place: jax.Array, of_text: jax.Array) -> jax.Array:
      is_text = is_kept_n.reshape(n, *[1] * (of_place.ndim - 2))
      return jnp.where(is_text, of_text, of_place)

    of_places = model.take_prompts(known, jnp.minimum(from_n, N - 1)).replace(lengths_P=known_n)
    of_texts = model.take_prompts(kept, jnp.maximum(from_n - N, 0)).replace(lengths_P=known_n)
    beginnings = jax.tree.map(lambda x, y: x if x.ndim == 1 else either(x, y), of_places, of_texts)
    cache = model.empty_cache(config, beginnings, 1, U)
    positions_nU = (known_n + shift_n)[:, None] + jnp.arange(U)
    hidden_nUD, cache, _ = model.routed_features(
      params, config, tokens_nU, positions_nU, cache, lengths_n
    )
    prompts = model.rows_as_prompts(cache, lengths_n, U - lengths_n)
    last_nD = jnp.take_along_axis(hidden_nUD, (lengths_n - 1)[:, None, None], axis=1)[:, 0]
    next_N = flight.next_N
    if next_N is not None:
      next_N = next_N.at[places_n].set(known_n + shift_n + lengths_n, mode="drop")
    flight = flight.replace(
      cache=flight.cache.replace(prefix=model.put_prompts(known, places_n, prompts)),
      last_ND=flight.last_ND.at[places_n].set(last_nD, mode="drop"),
      next_N=next_N,
    )
    return constrain_flight(self._config, flight)

  def _keep(self, flight: Flight, kept: model.Prefix, ended: EndedRows) -> model.Prefix:
    rows_n, own_n, texts_n = map(jnp.asarray, ended)
    if self._config.cache_dtype:  # own tokens are rounded: only the prompts are kept
      texts = model.take_prompts(flight.cache.prefix, rows_n)
    else:
      cache = model.take_rows(self._config, flight.cache, rows_n[:, None], rows_n)
      # Passes since the last token that is kept was written.
      passes_n = flight.rows.idle_R[rows_n] + flight.rows.drawn_R[rows_n] - 1 - own_n
      texts = model.rows_as_prompts(cache, own_n, passes_n)
    return self._as_prompts_lie(flight, model.put_prompts(kept, texts_n, texts))

  def _as_prompts_lie(self, flight: Flight, kept: model.Prefix) -> model.Prefix:
    """Texts placed on the mesh as the prompts of the flight are."""
    flight = flight.replace(cache=flight.cache.replace(prefix=kept))
    return constrain_flight(self._config, flight).cache.prefix
