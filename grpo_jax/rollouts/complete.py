"""Completes prompts with a policy, for training, evaluation and `sample`.

To sample somewhere else, let `make_rollout` return the `whole_batches` of another callable (params,
prompts, key, temperature) -> Rollouts.
"""

from collections.abc import Callable, Iterator
import functools
from typing import Any, Protocol

import jax
import numpy as np

from grpo_jax.data.loader import PromptBatch
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.rollouts.player import (
  BatchPlayer,
  GroupPlayer,
  Opened,
  Played,
  PolicyPlayer,
  WholeBatch,
)
from grpo_jax.rollouts.rollout import Rollouts, concatenate, images_of, last_turns, take, texts_of
from grpo_jax.rollouts.talk import Talkers
from grpo_jax.run.run import Run
from grpo_jax.sampler.flight import Prompts
from grpo_jax.sampler.logits import RowSettings
from grpo_jax.sampler.requests import GroupSampler
from grpo_jax.sampler.sampling import Draws, Sampler, settings_of, whole
from grpo_jax.sampler.stop import end_at
from grpo_jax.sampler.stream import Feed

# (feed, group_size, keeps_experts) -> a sampler in other processes.
Remote = Callable[[Feed, int, bool], GroupSampler]


class Plays(Protocol):
  """A program that calls the policy by itself, such as `rollouts.traced.Harness`."""

  def rollout(self, group_size: int, greedy: bool) -> WholeBatch:
    """Returns a function that completes each prompt of a batch `group_size` times."""


class Completer:
  """A way to complete prompts. All processes of a run call it together."""

  def __init__(
    self,
    player: Callable[..., GroupPlayer],
    decode_text: Callable[[list[int]], str],
    at_once: int = 0,
  ):
    """Stores the functions.

    Args:
      player: Makes the player for `Completer.player`, from the same arguments.
      decode_text: Decodes token ids to a text.
      at_once: The limit of prompts in flight. 0 means no limit.
    """
    self._player, self._decode_text, self._at_once = player, decode_text, at_once

  def player(self, feed: Feed, prompts: int, *, changes: bool = False) -> GroupPlayer:
    """Makes a player for groups that are submitted over time.

    Args:
      feed: Returns the weights of the next chunk, as `Parameters.for_sampling` returns them, and
        their version.
      prompts: How many groups should be in flight together.
      changes: Whether weights change while rows are in flight, in an endless stream of groups.
    """
    return self._player(feed, prompts, changes=changes)

  def parts(
    self,
    params: Any,
    prompts: PromptBatch,
    key: jax.Array,
    temperature: float = 1.0,
    on_ended: Callable[[int], None] = lambda ended: None,
  ) -> Iterator[Played]:
    """Completes each prompt of a batch, and yields each group when it has ended.

    Args:
      params: The policy, as `Parameters.for_sampling` returns it.
      prompts: P prompts. Their groups have the numbers 0 to P - 1.
      key: The root of the random numbers.
      temperature: The temperature of all prompts. Greedy rollouts ignore it.
      on_ended: Called repeatedly with the number of completions that have ended.
    """
    left = len(prompts.prompt_lengths_P)
    # The weights do not change, so their version is always 0.
    player = self.player(lambda: (params, 0), min(self._at_once or left, left))
    player.submit(
      [
        Opened(number=p, prompts=prompts, place=p, key=key, row=p, temperature=temperature)
        for p in range(left)
      ]
    )
    while left:
      groups = player.advance()
      on_ended(player.ended)
      for played in groups:
        left -= len(played.numbers)
        yield played

  def __call__(
    self, params: Any, prompts: PromptBatch, key: jax.Array, temperature: float = 1.0
  ) -> Rollouts:
    """Completes each prompt of a batch, and waits for all.

    Args:
      params: The policy, as `Parameters.for_sampling` returns it.
      prompts: P prompts.
      key: The root of the random numbers.
      temperature: The temperature of all prompts. Greedy rollouts ignore it.

    Returns:
      The rollouts in the order of the prompts, with texts for the prompts that this process scores.
    """
    parts = [*self.parts(params, prompts, key, temperature)]
    # Groups come in the order in which they end. Their numbers are the indices of their prompts.
    order = np.argsort([number for part in parts for number in part.numbers])
    rollouts = take(concatenate([part.rollouts for part in parts]), order)
    if rollouts.turns_PG is None:
      texts_PG = texts_of(rollouts.completions, self._decode_text, prompts.own)
    else:  # a conversation is scored by the policy's last turn, not by all of its tokens
      texts_PG = last_turns(rollouts.turns_PG, prompts.own)
    return rollouts.replace(texts_PG=texts_PG)


def make_rollout(
  run: Run,
  group_size: int,
  greedy: bool = False,
  max_tokens: int | None = None,
  at_once: int = 0,
  talkers: Talkers | Plays | None = None,
  *,
  keeps_experts: bool = False,
  remote: Remote | None = None,
) -> Completer:
  """Makes a `Completer` that completes each prompt `group_size` times.

  Args:
    run: The run.
    group_size: G.
    greedy: Whether to sample greedily.
    max_tokens: The token limit of a completion. None means sampling.max_tokens.
    at_once: The limit of prompts in flight. 0 means no limit.
    talkers: Tools and environments that answer the policy, or a harness, or None.
    keeps_experts: Whether completions record the experts that each token was routed to.
    remote: Makes a sampler in other processes. None samples in this one.
  """
  sampling, decode = run.config.sampling, run.tokenizer.decode
  if talkers is not None and not isinstance(talkers, Talkers):  # a harness
    return whole_batches(talkers.rollout(group_size, greedy), decode)
  end = end_at(sampling.stop, decode) if sampling.stop else None

  def settings_at(temperature: float) -> RowSettings:
    return settings_of(sampling, 0.0 if greedy else temperature)

  if remote is None:
    sampler = run.programs.sampler(max_tokens, keeps_experts)
    # Each process samples its own rows. `check_apart` refuses tools and environments there.
    if run.parameters.sampling.is_apart and jax.process_count() > 1:
      draws = functools.partial(Draws, end=end, at_once=at_once // jax.process_count())
      own = OwnRows(sampler, group_size, draws, settings_at, run.hosts, decode)
      return whole_batches(own, decode)

  def prompts_of(batch: PromptBatch) -> Prompts:
    images = images_of(batch)
    if remote is not None:  # `sampler` is only set if this process samples
      return Prompts(batch.prompts_PS, batch.prompt_lengths_P, images=images)
    return sampler.prompts(batch.prompts_PS, batch.prompt_lengths_P, images)

  def player(feed: Feed, prompts: int, *, changes: bool) -> GroupPlayer:
    if (
      remote is not None
    ):  # it cuts at stop texts by itself, and training has no other `max_tokens`
      draws = remote(feed, group_size, keeps_experts)
    else:
      # If weights change, tokens of a row have several versions, and groups follow without end.
      options = dict(keeps_versions=changes, in_order=changes)
      draws = sampler.stream(feed, prompts, group_size, end, **options)
    shared = group_size, decode, run.hosts
    return PolicyPlayer(draws, prompts_of, settings_at, *shared, talkers=talkers)

  return Completer(player, decode, at_once)


def whole_batches(complete: WholeBatch, decode_text: Callable[[list[int]], str]) -> Completer:
  """Makes a `Completer` from a function that can complete only whole batches."""

  def player(feed: Feed, prompts: int, *, changes: bool) -> GroupPlayer:
    del prompts, changes
    return BatchPlayer(complete, feed)

  return Completer(player, decode_text)


class OwnRows:
  """Samples this process's rows on its own devices, and then exchanges rows with other processes.

  Completes only whole batches, so that all processes exchange rows at the same time.
  """

  def __init__(
    self,
    sampler: Sampler,
    members: int,
    draws: Callable[..., Draws],
    settings_at: Callable[[float], RowSettings],
    hosts: Hosts,
    decode_text: Callable[[list[int]], str],
  ):
    """Stores the arguments.

    Args:
      sampler: The sampler on the devices of this process.
      members: G, the number of rows per group.
      draws: Makes `Draws` from (key, settings, first_prompt).
      settings_at: Returns the sampling settings of rows at a temperature.
      hosts: The processes of the run.
      decode_text: Decodes token ids to a text.
    """
    self._sampler, self._members, self._draws = sampler, members, draws
    self._settings_at, self._hosts, self._decode_text = settings_at, hosts, decode_text

  def __call__(
    self, params: Any, prompts: PromptBatch, key: jax.Array, temperature: float
  ) -> Rollouts:
    """Completes all P prompts, of which this process samples `Hosts.own_rows`."""
    assert prompts.images is None  # check_apart refuses images
    own = self._hosts.own_rows(len(prompts.prompt_lengths_P))
    draws = self._draws(key, self._settings_at(temperature), own.start)
    own_prompts = prompts.prompts_PS[own], prompts.prompt_lengths_P[own]
    drawn = whole(self._sampler(params, *own_prompts, self._members, draws))
    completions = self._hosts.join_rows(drawn)
    return Rollouts(completions, texts_of(completions, self._decode_text, prompts.own))
