"""Which tokens lie where: the prompts at the places of a flight, and texts that are kept beside it.

It is a table of the host and knows no device. Numbers below `places` are those of places, and the
texts are counted on after them.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

_NONE = -1  # no token


class Beginning(NamedTuple):
  """The beginning of a prompt that is known.

  Attributes:
    number: Who has it.
    tokens: How many of the prompt's tokens these are. All of them: the same prompt lies there.
  """

  number: int
  tokens: int


class PrefixCache:
  """The table.

  Attributes:
    drops: Texts that had to make room for others.
  """

  def __init__(self, places: int, texts: int, slots: int) -> None:
    """Knows nothing yet.

    Args:
      places: How many places the flight has.
      texts: The most that are kept.
      slots: The most tokens of a prompt and of a text.
    """
    self.drops = 0
    self._places = places
    self._tokens_NS = np.full((places + texts, slots + 1), _NONE, np.int32)
    self._lengths_N = np.zeros(places + texts, np.int32)  # 0: nothing
    self._used_N = np.zeros(places + texts, np.int64)  # when
    self._now = 0

  @property
  def texts(self) -> int:
    """How many are kept."""
    return int((self._lengths_N[self._places :] > 0).sum())

  def put(self, number: int, tokens: tuple[int, ...]) -> None:
    """Number `number` has these tokens now."""
    self._tokens_NS[number] = _NONE
    self._tokens_NS[number, : len(tokens)] = tokens
    self._lengths_N[number] = len(tokens)
    self._use(number)

  def forget(self, numbers: Collection[int] | None = None) -> None:
    """These numbers have nothing that may be used. None: no number has."""
    which = slice(None) if numbers is None else [*numbers]
    self._tokens_NS[which], self._lengths_N[which] = _NONE, 0

  def prompt(self, place: int) -> tuple[int, ...]:
    """The tokens at a place. None are there if they may not be used."""
    return tuple(self._tokens_NS[place, : self._lengths_N[place]].tolist())

  def same(self, prompt: tuple[int, ...], places: range) -> int | None:
    """One of these places that has this prompt, or None."""
    own = slice(places.start, places.stop)
    padded_S = self._padded(prompt)
    found = np.flatnonzero((self._tokens_NS[own] == padded_S).all(1))
    return places.start + int(found[0]) if len(found) else None

  def longest(
    self, prompt: tuple[int, ...], whole_from: int, among: Collection[int], least: int
  ) -> Beginning:
    """Who has the longest beginning of a prompt, with at least one token left to compute.

    Args:
      prompt: Token ids.
      whole_from: All tokens of a longer text are used or none, because layers have forgotten the
        first ones or all but the last state.
      among: Numbers that count only if they have `least` more tokens than all others, or all.
      least: A beginning of fewer tokens is none.

    Returns:
      The longest beginning. Its tokens are 0 if there is none.
    """
    differs_NS = self._tokens_NS != self._padded(prompt)
    same_N = np.where(differs_NS.any(1), differs_NS.argmax(1), len(prompt))
    used_N, is_equal_N = np.minimum(same_N, len(prompt) - 1), ~differs_NS.any(1)
    fits_N = (self._lengths_N <= whole_from) | (used_N == self._lengths_N)
    used_N = np.where(fits_N & (used_N >= least), used_N, 0)
    later = [*among]
    of_later_N = np.zeros_like(used_N)
    of_later_N[later] = np.where(is_equal_N, len(prompt), used_N)[later]
    used_N[later] = 0
    number = int(used_N.argmax())
    if later and (of_later_N.max() == len(prompt) or of_later_N.max() >= used_N[number] + least):
      number = int(of_later_N.argmax())
      return Beginning(number, int(of_later_N[number]))
    if used_N[number]:
      self._use(number)
    return Beginning(number, int(used_N[number]))

  def room(self, tokens: tuple[int, ...]) -> int | None:
    """The number for a new text, or None where there is no room for any.

    A text that these tokens go on from gives its own. Otherwise it is a free one, or that of the
    text that was used longest ago.
    """
    lengths_N, first = self._lengths_N[self._places :], self._places
    if not len(lengths_N):
      return None
    tokens_NS, padded_S = self._tokens_NS[first:], self._padded(tokens)
    begins_N = (lengths_N > 0) & ((tokens_NS == padded_S) | (tokens_NS == _NONE)).all(1)
    if begins_N.any():
      return first + int(begins_N.argmax())
    if not lengths_N.all():
      return first + int(lengths_N.argmin())
    self.drops += 1
    return first + int(self._used_N[first:].argmin())

  def _use(self, number: int) -> None:
    self._now += 1
    self._used_N[number] = self._now

  def _padded(self, tokens: tuple[int, ...]) -> np.ndarray:
    """The tokens as a row of the table."""
    padded_S = np.full(self._tokens_NS.shape[1], _NONE, np.int32)
    padded_S[: len(tokens)] = tokens
    return padded_S
