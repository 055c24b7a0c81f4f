"""Groups drawn by sampler processes, as the rest of the run asks for them."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from grpo_jax.asynchronous.learner import RemoteSampler
from grpo_jax.sampler.requests import Finished, News, Request
from grpo_jax.sampler.sampling import Draws
from grpo_jax.sampler.stream import Feed


class RemoteGroups:
  """A `GroupSampler` that lets processes draw groups which are submitted together."""

  def __init__(self, hub: RemoteSampler, feed: Feed, members: int, keeps_experts: bool):
    """Draws nothing yet.

    Args:
      hub: What the processes have joined.
      feed: The weights, and their version.
      members: G.
      keeps_experts: Whether completions have the experts of each token.
    """
    self._hub, self._feed = hub, feed
    self._members, self._keeps_experts = members, keeps_experts
    self._waiting: list[Request] = []
    self._drawn: list[Request] = []  # by the processes
    self._arriving: Iterator[Finished] | None = None
    self._left = 0

  @property
  def draws(self) -> bool:
    return bool(self._waiting or self._left)

  def submit(self, requests: Sequence[Request]) -> None:
    self._waiting += requests

  def go_on(self, number: int, member: int, tokens: Sequence[int] | None) -> None:
    raise NotImplementedError("no row of a sampler process pauses")

  def cancel(self) -> None:
    if self._arriving is not None:
      self._arriving.close()  # type: ignore[attr-defined]
    self._waiting, self._arriving, self._left = [], None, 0

  def advance(self) -> News:
    if not self._left:
      if not self._waiting:
        return News()
      self._begin()
    finished = next(self._arriving)
    self._left -= len(finished.prompts)
    numbers = [self._drawn[place].number for place in finished.prompts]
    return News(finished=[Finished(numbers, finished.completions)])

  def _begin(self) -> None:
    """Lets the processes draw the groups that can be asked for in one call."""
    first = self._waiting[0]
    own = [
      request
      for step, request in enumerate(self._waiting)
      if request.prompts is first.prompts
      and (request.key == first.key).all()
      and request.first_row == first.first_row + step * self._members
    ]
    self._waiting, self._drawn, self._left = self._waiting[len(own) :], own, len(own)
    params, _ = self._feed()
    places = np.array([request.place for request in own])
    prompts = jax.tree.map(lambda x: np.asarray(x)[places], first.prompts)
    key = jax.random.wrap_key_data(first.key)
    draws = Draws(key, first.settings, first_prompt=first.first_row // self._members)
    given = prompts.tokens_nS, prompts.lengths_n, self._members, draws, prompts.images
    self._arriving = self._hub(params, *given, keeps_experts=self._keeps_experts)
