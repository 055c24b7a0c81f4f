"""Implements `GroupSampler` with sampler processes."""

from collections.abc import Sequence
import itertools
import math

import jax
import numpy as np

from grpo_jax.asynchronous.learner import RemoteSampler
from grpo_jax.asynchronous.parts import RemoteCall
from grpo_jax.sampler.requests import Finished, GroupRequest, News
from grpo_jax.sampler.sampling import Draws
from grpo_jax.sampler.stream import Feed

_MOMENT = 0.02  # the most seconds to wait in `advance` while rows may need replies


class RemoteGroups:
  """A `GroupSampler` whose groups are drawn by sampler processes, one call after another."""

  def __init__(self, hub: RemoteSampler, feed: Feed, members: int, keeps_experts: bool):
    """Starts without groups.

    Args:
      hub: The server that the processes join.
      feed: Returns the weights and their version.
      members: G, the size of a group.
      keeps_experts: Whether completions include the experts of each token.
    """
    self._hub, self._feed = hub, feed
    self._members, self._keeps_experts = members, keeps_experts
    self._waiting: list[GroupRequest] = []
    self._drawn: list[GroupRequest] = []  # the groups of the current call
    self._drawing: RemoteCall | None = None

  @property
  def draws(self) -> bool:
    return bool(self._waiting or self._left)

  @property
  def _left(self) -> int:
    """How many groups of the current call have not arrived."""
    return self._drawing.left if self._drawing is not None else 0

  def submit(self, requests: Sequence[GroupRequest]) -> None:
    self._waiting += requests

  def go_on(self, number: int, member: int, tokens: Sequence[int] | None) -> None:
    place = next(p for p, request in enumerate(self._drawn) if request.number == number)
    self._drawing.reply(place, member, tokens)

  def cancel(self) -> None:
    if self._drawing is not None:
      self._drawing.close()
    self._waiting, self._drawing = [], None

  def advance(self) -> News:
    if not self._left:
      if not self._waiting:
        return News()
      self._begin()
    has_replies = self._drawn[0].pauses
    arrived = self._drawing.next(_MOMENT if has_replies else math.inf)
    if arrived is None:
      return News()
    if isinstance(arrived, Finished):
      numbers = [self._drawn[place].number for place in arrived.prompts]
      return News(finished=[Finished(numbers, arrived.completions)])
    return News([row._replace(prompt=self._drawn[row.prompt].number) for row in arrived])

  def _begin(self) -> None:
    """Starts a call with the first waiting group and those after it that the call can draw.

    A call has one batch of prompts, one key, and groups with consecutive row numbers.
    """
    first = self._waiting[0]

    def fits(indexed: tuple[int, GroupRequest]) -> bool:
      index, request = indexed
      is_alike = request.prompts is first.prompts and (request.key == first.key).all()
      return is_alike and request.first_row == first.first_row + index * self._members

    chosen = [request for _, request in itertools.takewhile(fits, enumerate(self._waiting))]
    self._waiting, self._drawn = self._waiting[len(chosen) :], chosen
    params, _ = self._feed()
    places = np.array([request.place for request in chosen])
    prompts = jax.tree.map(lambda x: np.asarray(x)[places], first.prompts)
    key = jax.random.wrap_key_data(first.key)
    draws = Draws(
      key,
      first.settings,
      first_prompt=first.first_row // self._members,
      turn_tokens=first.turn_tokens,
    )
    arguments = prompts.tokens_nS, prompts.lengths_n, self._members, draws, prompts.images
    self._drawing = self._hub.begin(
      params, *arguments, keeps_experts=self._keeps_experts, pauses=first.pauses
    )
