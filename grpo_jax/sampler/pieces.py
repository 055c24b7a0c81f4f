"""Which prompts of a flight are not computed yet, or only to a part (sampling.prompt_piece).

Rows in flight wait while prompts are computed. So a long prompt is computed a piece at a time, and
rows draw a chunk of tokens between two pieces. The seats of its place stay free until its last one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from grpo_jax.sampler.seats import NOBODY, Arrival


class BegunPrompt(NamedTuple):
  """A prompt that has a place.

  Attributes:
    place: The place n.
    prompt: The prompt p.
    tokens: How many of its first tokens are computed.
  """

  place: int
  prompt: int
  tokens: int = 0


class Unfinished:
  """The places whose prompts are not complete, oldest first."""

  def __init__(self) -> None:
    self._begun: dict[int, BegunPrompt] = {}  # by place
    self._copies: dict[
      int, Arrival
    ] = {}  # by place: places that get a copy once their source has it

  def __bool__(self) -> bool:
    return bool(self._begun or self._copies)

  @property
  def places(self) -> set[int]:
    """The places at which no row can sit yet."""
    return {*self._begun, *self._copies}

  @property
  def begun(self) -> list[BegunPrompt]:
    """The prompts that must be computed, oldest first."""
    return list(self._begun.values())

  def clear(self) -> None:
    """Forgets all places."""
    self._begun, self._copies = {}, {}

  def add(self, arrivals: Iterable[Arrival], prompt_N: np.ndarray) -> None:
    """Adds prompts that have just got places, and forgets places that have got another prompt.

    Args:
      arrivals: The new prompts. Those of them that are copied follow their source.
      prompt_N: The prompt at each place, or NOBODY.
    """
    for place in self.places:
      if prompt_N[place] != self._prompt_at(place):
        self._begun.pop(place, None)
        self._copies.pop(place, None)
    for arrival in arrivals:
      self._begun.pop(arrival.place, None)
      self._copies.pop(arrival.place, None)
      if arrival.copied_from == NOBODY:
        self._begun[arrival.place] = BegunPrompt(arrival.place, arrival.prompt)
      else:
        self._copies[arrival.place] = arrival
    for place, copied in [*self._copies.items()]:
      if prompt_N[copied.copied_from] != copied.prompt:  # nobody needs the source any more
        del self._copies[place]
        self._begun[place] = BegunPrompt(place, copied.prompt)

  def computed(self, begun: Iterable[BegunPrompt], tokens: Callable[[int], int]) -> None:
    """Records how far prompts are computed. tokens(prompt) is how many tokens a prompt has."""
    for one in begun:
      if one.tokens < tokens(one.prompt):
        self._begun[one.place] = one
      else:
        del self._begun[one.place]

  def take_copies(self) -> list[Arrival]:
    """Removes and returns the copies whose sources are complete, or precede them in the list."""
    ready = []
    for place, copied in [*self._copies.items()]:
      if copied.copied_from not in self.places:
        ready.append(self._copies.pop(place))
    return ready

  def _prompt_at(self, place: int) -> int:
    return self._begun[place].prompt if place in self._begun else self._copies[place].prompt


def together(
  begun: Sequence[BegunPrompt], most: int, is_alike: Callable[[int, int], bool]
) -> list[BegunPrompt]:
  """The prompts of the next call: the oldest, and others that have begun, or not, as it has.

  Args:
    begun: The prompts that must be computed, oldest first.
    most: The most prompts of a call.
    is_alike: Whether one call can compute two prompts from their beginning on.
  """
  oldest = begun[0]
  if oldest.tokens:
    return [one for one in begun if one.tokens][:most]
  new = [one for one in begun if not one.tokens]
  differs = [not is_alike(oldest.prompt, one.prompt) for one in new]
  return new[: differs.index(True) if True in differs else None][:most]
