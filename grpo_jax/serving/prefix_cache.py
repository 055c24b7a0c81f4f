"""The host's table of the prefix cache: the tokens of prompts in flight and of cached texts.

The keys and values are on the devices (see sampler/prefixes.py). Entries are numbered: with N
places, entry n < N is the prompt at place n of the flight, and entry N + t is cached text t.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

_NONE = -1  # padding


class Beginning(NamedTuple):
  """A known beginning of a prompt.

  Attributes:
    number: The entry that has it.
    tokens: How many tokens of the prompt it covers. All of them if the entry is the same prompt.
  """

  number: int
  tokens: int


class PrefixCache:
  """The table of entries.

  Attributes:
    drops: How many texts were evicted.
  """

  def __init__(self, places: int, texts: int, slots: int) -> None:
    """Starts empty.

    Args:
      places: N, how many places the flight has.
      texts: The most texts that are cached.
      slots: The most tokens of a prompt or text.
    """
    self.drops = 0
    self._places = places
    self._tokens_NS = np.full((places + texts, slots + 1), _NONE, np.int32)
    self._lengths_N = np.zeros(places + texts, np.int32)  # 0: the entry is empty
    self._used_N = np.zeros(places + texts, np.int64)  # `_now` at the last use
    self._now = 0

  @property
  def texts(self) -> int:
    """How many texts are cached."""
    return int((self._lengths_N[self._places :] > 0).sum())

  def put(self, number: int, tokens: tuple[int, ...]) -> None:
    """Overwrites entry `number`."""
    self._tokens_NS[number] = _NONE
    self._tokens_NS[number, : len(tokens)] = tokens
    self._lengths_N[number] = len(tokens)
    self._use(number)

  def forget(self, numbers: Collection[int] | None = None) -> None:
    """Empties these entries, or all if `numbers` is None."""
    which = slice(None) if numbers is None else [*numbers]
    self._tokens_NS[which], self._lengths_N[which] = _NONE, 0

  def prompt(self, place: int) -> tuple[int, ...]:
    """The tokens of the prompt at a place. Empty if the entry is."""
    return tuple(self._tokens_NS[place, : self._lengths_N[place]].tolist())

  def same(self, prompt: tuple[int, ...], places: range) -> int | None:
    """Finds a place among `places` that has exactly this prompt, or None."""
    searched = slice(places.start, places.stop)
    padded_S = self._padded(prompt)
    found = np.flatnonzero((self._tokens_NS[searched] == padded_S).all(1))
    return places.start + int(found[0]) if len(found) else None

  def longest(
    self, prompt: tuple[int, ...], whole_from: int, among: Collection[int], least: int
  ) -> Beginning:
    """Finds the entry that shares the longest beginning with a prompt.

    At least one token of the prompt must be left to compute. Only an equal prompt in `among` counts
    with all its tokens, because it is copied once it is complete.

    Args:
      prompt: Token ids.
      whole_from: Entries of more tokens are used whole or not at all, because layers store only
        their last tokens or state.
      among: Entries that are being computed now, so that using them means waiting. They win only
        if they are the same prompt, or share at least `least` more tokens than all other entries.
      least: Shorter beginnings are ignored.

    Returns:
      The longest beginning. `tokens` is 0 if there is none.
    """
    differs_NS = self._tokens_NS != self._padded(prompt)
    same_N = np.where(differs_NS.any(1), differs_NS.argmax(1), len(prompt))
    # Of an equal prompt, too, the last token is computed again: it yields the first logits.
    used_N, is_equal_N = np.minimum(same_N, len(prompt) - 1), ~differs_NS.any(1)
    fits_N = (self._lengths_N <= whole_from) | (used_N == self._lengths_N)
    used_N = np.where(fits_N & (used_N >= least), used_N, 0)
    # From here on, `pending_N` counts tokens of entries in `among`, and `used_N` of the others.
    pending, pending_N = [*among], np.zeros_like(used_N)
    pending_N[pending] = np.where(is_equal_N, len(prompt), used_N)[pending]
    used_N[pending] = 0
    number, most_pending = int(used_N.argmax()), int(pending_N.max())
    if pending and (most_pending == len(prompt) or most_pending >= used_N[number] + least):
      return Beginning(int(pending_N.argmax()), most_pending)
    if used_N[number]:
      self._use(number)
    return Beginning(number, int(used_N[number]))

  def room(self, tokens: tuple[int, ...]) -> int | None:
    """Chooses the entry for a new text. None if the cache holds no texts.

    It is the entry of a text that the new one continues, else a free one, else the one whose last
    use is longest ago.
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
    """Pads tokens to a row of the table."""
    padded_S = np.full(self._tokens_NS.shape[1], _NONE, np.int32)
    padded_S[: len(tokens)] = tokens
    return padded_S
