"""Computes the prompts of a flight, whole or in pieces (sampling.prompt_piece).

Rows in flight wait while prompts are computed. So a long prompt is computed a piece at a time, and
rows draw a chunk of tokens between two pieces. The seats of its place stay free until its last one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax import model
from grpo_jax.sampler.flight import Flight, Prompts
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.programs import FlightPrograms, Pieces
from grpo_jax.sampler.requests import GroupRequest
from grpo_jax.sampler.seats import NOBODY, Arrival, Seats


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
    # By place: those that get a copy once their source has the prompt.
    self._copies: dict[int, Arrival] = {}

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
  new: Sequence[BegunPrompt], most: int, is_alike: Callable[[int, int], bool]
) -> list[BegunPrompt]:
  """The new prompts that the next call computes: the oldest, and those after it that are alike.

  Args:
    new: The prompts of which nothing is computed, oldest first.
    most: The most prompts of a call.
    is_alike: Whether one call can compute two prompts from their beginning on.
  """
  differs = [not is_alike(new[0].prompt, one.prompt) for one in new]
  return list(new[: differs.index(True) if True in differs else None])[:most]


def first_tokens(prompts: Prompts, count: int) -> Prompts:
  """The first `count` tokens of each prompt without images. Shorter ones stay whole."""
  return prompts.replace(
    tokens_nS=prompts.tokens_nS[:, :count],
    lengths_n=np.minimum(prompts.lengths_n, count),
    shared=0 if prompts.shared >= count else prompts.shared,
  )


class ArrivingPrompts:
  """The prompts that have places in a flight, and the calls that compute them.

  The first prompts are computed by the program that makes the cache, and later ones in batches. A
  prompt that another place already has is copied.
  """

  def __init__(
    self,
    programs: FlightPrograms,
    requests: Mapping[int, GroupRequest],
    keep_experts: Callable[[int, int, np.ndarray], None],
    at_once: int,
    piece: int,
  ):
    """Starts without prompts.

    Args:
      programs: The compiled programs.
      requests: The request of each prompt p. The caller changes it as groups come and go.
      keep_experts: keep_experts(p, first, experts_UY) stores the experts of tokens of prompt p, of
        which the first has the number `first`. It is called only for models with `keeps_experts`.
      at_once: How many queued prompts are computed together.
      piece: The most tokens of a prompt that are computed in one call while rows draw. 0 computes
        whole prompts.
    """
    self._programs, self._requests, self._keep_experts = programs, requests, keep_experts
    self._at_once, self._piece = at_once, piece
    self._unfinished = Unfinished()

  @property
  def closed(self) -> set[int]:
    """The places at which no row can sit yet."""
    return self._unfinished.places

  def clear(self) -> None:
    """Forgets all places."""
    self._unfinished.clear()

  def begin(
    self,
    arrivals: Sequence[Arrival],
    seats: Seats,
    slots: int,
    params: model.Params,
    settings: RowSettings,
  ) -> tuple[Flight, list[Arrival]]:
    """Makes the flight with the first of the new prompts, including the copies of these prompts.

    Args:
      arrivals: The new prompts.
      seats: The places and seats of the flight, where the new prompts have their places.
      slots: The slots of the cache, for each row.
      params: The weights.
      settings: Arrays [R] with the dtypes and filters of later rows.

    Returns:
      The flight, and the new prompts that it has not got.
    """
    new = [BegunPrompt(one.place, one.prompt) for one in arrivals if one.copied_from == NOBODY]
    first = together(new, len(new), self._are_of_same_set)
    n = -(-len(first) // seats.shards) * seats.shards
    xs = [first[i % len(first)].prompt for i in range(n)]  # repeats some, to fill all shards
    of_places, index_N = seats.prompt_N.tolist(), None  # None: place n has the prompt of index n
    if xs != of_places:  # places of other prompts get prompt 0 until theirs is computed or copied
      index_N = np.array([xs.index(x) if x in xs else 0 for x in of_places])
    prompts = self._prompts_of(xs)
    flight, experts = self._programs.begin(seats.grid, slots, params, prompts, index_N, settings)
    self._keep_experts_of(xs, experts)
    return flight, [arrival for arrival in arrivals if arrival.prompt not in xs]

  def add(self, arrivals: Iterable[Arrival], prompt_N: np.ndarray) -> None:
    """Adds prompts that have just got places, as `Unfinished.add`."""
    self._unfinished.add(arrivals, prompt_N)

  def compute(self, flight: Flight, params: model.Params, draws: bool) -> Flight:
    """Computes the prompts that were added. In pieces, it stops once a row can draw.

    Args:
      flight: The flight.
      params: The weights.
      draws: Whether a row can already draw. In pieces, it then waits for one call alone.
    """
    while begun := self._unfinished.begun:
      flight = self._compute_some(flight, begun, params, draws)
      if self._piece and (draws or len(self._unfinished.begun) < len(begun)):
        break
    if copies := self._unfinished.take_copies():
      from_N = np.arange(flight.grid.places)
      for arrival in copies:  # from_N of the source, because it may itself be an earlier copy
        from_N[arrival.place] = from_N[arrival.copied_from]
      flight = self._programs.copy(flight, from_N)
    return flight

  def _compute_some(
    self, flight: Flight, begun: Sequence[BegunPrompt], params: model.Params, draws: bool
  ) -> Flight:
    """Computes the oldest unfinished prompts, or the next piece of each, in one call."""
    if begun[0].tokens:
      rest = [one for one in begun if one.tokens]
      flight, computed = self._continue_prompts(flight, rest, params)
    else:
      new = [one for one in begun if not one.tokens]
      chosen = together(new, self._at_once, self._are_of_same_set)
      flight, computed = self._start_prompts(flight, chosen, params, bool(self._piece) and draws)
    self._unfinished.computed(computed, self._prompt_tokens)
    return flight

  def _start_prompts(
    self, flight: Flight, chosen: Sequence[BegunPrompt], params: model.Params, in_pieces: bool
  ) -> tuple[Flight, list[BegunPrompt]]:
    """Computes at most `at_once` prompts, or first pieces. Also returns how far they are."""
    xs = [chosen[i % len(chosen)].prompt for i in range(self._at_once)]  # repeats some
    # Past the last place: repetitions are dropped.
    places = np.full(self._at_once, flight.grid.places)
    places[: len(chosen)] = [one.place for one in chosen]
    prompts, piece = self._prompts_of(xs), self._piece
    if in_pieces and prompts.images is None and prompts.tokens_nS.shape[1] > piece:
      prompts = first_tokens(prompts, piece)
    flight, experts = self._programs.arrive(flight, params, prompts, places)
    self._keep_experts_of(xs, experts)
    lengths = prompts.lengths_n[: len(chosen)].tolist()
    return flight, [one._replace(tokens=n) for one, n in zip(chosen, lengths, strict=True)]

  def _continue_prompts(
    self, flight: Flight, rest: Sequence[BegunPrompt], params: model.Params
  ) -> tuple[Flight, list[BegunPrompt]]:
    """Computes the next pieces of as many prompts as a call can. Also returns how far they are.

    Those of a shard of the mesh are computed there, the oldest first.
    """
    piece, slots, shards = self._piece, flight.cache.prefix.slots, self._programs.row_shards
    n = self._programs.pieces_at_once(piece, slots, self._at_once)
    pieces = Pieces(
      tokens_nU=np.zeros((n, piece), np.int32),
      lengths_n=np.ones(n, np.int32),
      known_n=np.ones(n, np.int32),
      places_n=np.full(n, flight.grid.places, np.int32),  # past the last place: dropped
    )
    computed = dict[int, BegunPrompt]()  # by index in the arrays
    places_of_shard = flight.grid.places // shards
    free = [[*range(shard * n // shards, (shard + 1) * n // shards)] for shard in range(shards)]
    for place, x, known in rest:
      indices = free[place // places_of_shard]
      if not indices:
        continue
      i = indices.pop(0)
      prompts, index = self._requests[x].prompts, self._requests[x].place
      end = min(known + piece, self._prompt_tokens(x))
      pieces.tokens_nU[i, : end - known] = prompts.tokens_nS[index, known:end]
      pieces.lengths_n[i], pieces.known_n[i], pieces.places_n[i] = end - known, known, place
      computed[i] = BegunPrompt(place, x, end)
    flight, experts = self._programs.continue_prompts(flight, params, pieces)
    if experts is not None:
      experts_nUY = jax.device_get(experts)
      for i, one in computed.items():
        first, count = int(pieces.known_n[i]), int(pieces.lengths_n[i])
        self._keep_experts(one.prompt, first, experts_nUY[i, :count])
    return flight, [*computed.values()]

  def _keep_experts_of(self, xs: Sequence[int], experts: jax.Array | None) -> None:
    """Stores the experts [n, S, Y] of the first prompt tokens, if they are not None."""
    if experts is not None:
      for x, experts_SY in zip(xs, jax.device_get(experts), strict=True):
        self._keep_experts(x, 0, experts_SY)

  def _prompt_tokens(self, x: int) -> int:
    """How many tokens prompt x has."""
    return int(self._requests[x].prompts.lengths_n[self._requests[x].place])

  def _are_of_same_set(self, x: int, y: int) -> bool:
    """Whether one call can compute two prompts, because they share one `Prompts`."""
    return self._requests[x].prompts is self._requests[y].prompts

  def _prompts_of(self, xs: Sequence[int]) -> Prompts:
    """Prompts whose requests share one `Prompts`. No copy if these are all of it."""
    prompts = self._requests[xs[0]].prompts
    places = np.array([self._requests[x].place for x in xs])
    if np.array_equal(places, np.arange(len(prompts.lengths_n))):
      return prompts
    return jax.tree.map(lambda x: x[places], prompts)
