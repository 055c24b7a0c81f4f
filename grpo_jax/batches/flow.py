"""Opens, plays and scores the groups of a run, in the order of their numbers.

The prompt and the random numbers of group n are functions of the seed and n. Step k learns from the
groups kP to kP + P - 1. With dynamic sampling, a step draws the groups after those of the previous
step, at most (1 + algo.max_resample_rounds) P, and learns from the first P whose rewards differ.
"""

from collections.abc import Callable
import contextlib
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.batches.groups import ScoredGroups
from grpo_jax.data import loader
from grpo_jax.data.prompts import PromptSet
from grpo_jax.pending import SOON, Pending, wait_for_all
from grpo_jax.rollouts.complete import Remote, make_rollout
from grpo_jax.rollouts.player import Opened, Played
from grpo_jax.rollouts.rollout import concatenate, take
from grpo_jax.run.run import Run
from grpo_jax.run.seen import encoded_first
from grpo_jax.sampler.sampling import temperature_at
from grpo_jax.sampler.stream import SeatRounds
from grpo_jax.scoring.scorer import Report
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.scoring.scores import groups_that_differ
from grpo_jax.settings import RunFailed

# (how many prompts, the step that will probably learn from them) -> indices of prompts, int64.
Choose = Callable[[int, int], np.ndarray]


class VersionedParams(NamedTuple):
  """The weights that draw.

  Attributes:
    params: All parameters, as `Parameters.for_sampling` or a remote sampler's `weights` returns.
    version: How many GRPO steps had changed the parameters.
  """

  params: Any
  version: int


class DrawnGroups(NamedTuple):
  """All groups that were drawn for a step.

  Attributes:
    groups: The groups in the order of their numbers.
    prompts: The prompts of the groups if these were opened together, else None.
    report: The report on the scoring of the groups.
    after: The number of the first group after those of this step.
  """

  groups: ScoredGroups
  prompts: loader.PromptBatch | None
  report: Report
  after: int


class _Lot(NamedTuple):
  """Groups that ended together and are scored together, in the order of `numbers`."""

  numbers: list[int]
  scored: Pending[tuple[ScoredGroups, Report]]


class Flow:
  """Opens groups, plays them (draws completions, with tools and environments), and scores them.

  Attributes:
    prompts: The training prompts.
    step: The next step whose groups `take` returns.
    first: The number of the first group of this step.
    next: The number of the next group to open.
  """

  def __init__(self, run: Run, scorers: Scorers, remote: Remote | None = None):
    """Opens no groups yet. `remote` makes a sampler in other processes. None samples in this one.

    Raises:
      ConfigError: A reward function cannot be called for the training prompts.
    """
    self._run, self._config, self._score = run, run.config, scorers.training
    self.prompts: PromptSet = run.prompts("train")
    self._score.check_arguments(self.prompts, "reward.functions")
    # Checks what training samples, for metrics only.
    self._check = scorers.evaluation if run.config.eval.check_training else None
    if self._check is not None:
      self._check.check_arguments(self.prompts, "eval.function")
    self._rollout = make_rollout(
      run,
      run.config.batch.group_size,
      talkers=scorers.talkers,
      keeps_experts=run.config.learner.router_replay,
      remote=remote,
    )
    config = run.config
    changes = config.rollout.weights == "in_flight"  # then weights change while rows are drawn
    self._policy, self._is_used = VersionedParams(None, 0), False
    self._player = self._rollout.player(
      self._policy_that_draws, config.batch.prompts, changes=changes
    )
    self._seat_rounds = SeatRounds()
    self.restart(0, 0)

  def _policy_that_draws(self) -> VersionedParams:
    """Returns the policy of the current `advance` to the player, and notes that it was used."""
    self._is_used = True
    return self._policy

  def restart(self, step: int, first: int) -> None:
    """Makes `step` the next step and `first` the number of its first group. Drops open groups."""
    self.step, self.first, self.next = step, first, first
    self._playing: dict[int, Opened] = {}  # opened groups that no step has taken, by number
    self._lots: list[_Lot] = []  # lots with groups that no step has taken
    # With dynamic sampling: whether the rewards of a scored group differ, by the group's number.
    self._differ: dict[int, bool] = {}
    self._player.cancel()

  @property
  def ended(self) -> int:
    """How many completions have ended since the flow was made."""
    return self._player.ended

  @property
  def is_drawn(self) -> bool:
    """Whether all groups of the next step have ended and, with dynamic sampling, have scores."""
    return self._end_of_step() is not None

  def advance(
    self, policy: VersionedParams, until: int, choose: Choose, limit: int | None = None
  ) -> bool:
    """Opens groups for the steps up to `until`, and plays all open groups for a short while.

    Args:
      policy: The weights that draw the tokens of this call.
      until: The last step for which groups may be opened.
      choose: Chooses the prompts of newly opened groups. Used only with a curriculum.
      limit: Opens groups with lower numbers, and those that complete a batch of P with them. None
        sets no limit.

    Returns:
      Whether any sampling used the weights of `policy`.
    """
    self._policy, self._is_used = policy, False  # `_policy_that_draws` sets `_is_used`
    count = self._count_to_open(until)
    if limit is not None:
      count = min(count, limit - self.next)
    self._open_groups(count, until, choose)
    for played in self._player.advance():
      self._begin_scores(played)
    # Drops the reference to the weights, so that a copy of them can be freed.
    self._policy = VersionedParams(None, policy.version)
    # Only with dynamic sampling do rewards decide which groups a step takes.
    if self._config.algo.dynamic_sampling and self._lots:
      self._see_whose_rewards_differ()
    return self._is_used

  def take(self) -> Pending[DrawnGroups]:
    """Takes the groups of the next step, which have all ended. Scores may still be computed.

    Then moves `step` and `first` on to the step after it.
    """
    end = self._end_of_step()
    of_step = range(self.first, end)
    # A lot may have groups of several steps, so `indices` are those of this step's groups.
    lots = [lot for lot in self._lots if any(n in of_step for n in lot.numbers)]
    indices = [[index for index, n in enumerate(lot.numbers) if n in of_step] for lot in lots]
    numbers = [n for lot in lots for n in lot.numbers if n in of_step]
    self._lots = [lot for lot in self._lots if any(n >= end for n in lot.numbers)]
    opened = [self._playing.pop(number) for number in sorted(numbers)]
    self.step, self.first = self.step + 1, end
    # If the groups were opened together, their prompts are already in one batch.
    P = len(opened[0].prompts.prompt_lengths_P)
    are_a_batch = P == len(opened) and all(group.prompts is opened[0].prompts for group in opened)
    prompts = opened[0].prompts if are_a_batch else None

    def drawn() -> DrawnGroups:
      scored = [lot.scored.result() for lot in lots]
      groups = concatenate([take(lot_groups, at) for (lot_groups, _), at in zip(scored, indices)])
      # The report of a lot is counted in the step of the lot's first group.
      reports = [report for (_, report), at in zip(scored, indices) if 0 in at]
      groups = take(groups, np.argsort(numbers))  # lots are in the order in which they ended
      return DrawnGroups(groups, prompts, sum(reports, Report()), end)

    return Pending(drawn, [future for lot in lots for future in lot.scored.futures])

  def seats_idle(self) -> float:
    """The share of the seats' rounds since the last call that drew no token. NaN if unknown."""
    now = getattr(getattr(self._player, "sampler", None), "seat_rounds", SeatRounds())
    before, self._seat_rounds = self._seat_rounds, now
    return SeatRounds(now.used - before.used, now.all - before.all).idle

  @property
  def is_idle(self) -> bool:
    """Whether no group is being played."""
    scored = {number for lot in self._lots for number in lot.numbers}
    return not self._playing.keys() - scored

  def _end_of_step(self) -> int | None:
    """The number after the last group of the next step. None while groups or scores are missing."""
    P = self._config.batch.prompts
    if not self._config.algo.dynamic_sampling:
      ended = {number for lot in self._lots for number in lot.numbers}
      return self.first + P if ended.issuperset(range(self.first, self.first + P)) else None
    end = self._least_end(self.first)
    return end if self._differ.keys() >= set(range(self.first, end)) else None

  @property
  def _most_groups_of_step(self) -> int:
    """The most groups that a step with dynamic sampling draws."""
    return (1 + self._config.algo.max_resample_rounds) * self._config.batch.prompts

  def _count_to_open(self, until: int) -> int:
    """How many groups can be opened so that none falls into a step after `until`."""
    if not self._config.algo.dynamic_sampling:
      return self.first + self._config.batch.prompts * (until + 1 - self.step) - self.next
    end = self.first
    for _ in range(self.step, until + 1):
      end = self._least_end(end)
    return end - self.next

  def _least_end(self, start: int) -> int:
    """The number after the last group of the step that begins with group `start`.

    Groups whose scores are not known yet count as if their rewards differed.
    """
    found = 0
    for number in range(start, start + self._most_groups_of_step):
      found += self._differ.get(number, True)
      if found == self._config.batch.prompts:
        return number + 1
    return start + self._most_groups_of_step

  def _open_groups(self, count: int, until: int, choose: Choose) -> None:
    """Opens `count` groups in batches of P. Without dynamic sampling, rounds up to whole batches.

    For `until` and `choose` see `advance`.
    """
    P, config = self._config.batch.prompts, self._config
    while count > 0:
      size = min(count, P) if config.algo.dynamic_sampling else P
      numbers = np.arange(self.next, self.next + size)
      # The step that will probably learn from these groups. `step_of` may be too high, because
      # dynamic sampling can draw more than P groups for a step.
      step = min(until, self.step_of(self.next))
      if config.curriculum.chooses:
        indices_P = choose(size, step)
      else:
        indices_P = loader.indices_at(config.seed, numbers, len(self.prompts))
      prompts = loader.prompt_batch(self.prompts, indices_P, self._run.hosts)
      # For a part of a batch, encoding would be wasted: an update reuses visual tokens only if it
      # learns from all groups of a batch as it was opened.
      if size == P:
        prompts = encoded_first(self._run, prompts)
      self._decode_images_ahead(self.next + size)
      temperature = temperature_at(config.sampling, step, config.steps)
      # Keys and rows depend on `number` alone, so that a group's draws do not depend on `size`.
      opened = [
        Opened(
          number=number,
          prompts=prompts,
          place=place,
          key=jax.random.fold_in(self._run.key("sample"), number // P),
          row=number % P,
          temperature=temperature,
          version=self._policy.version,
          example=int(indices_P[place]),
        )
        for place, number in enumerate(numbers.tolist())
      ]
      self._playing |= {group.number: group for group in opened}
      self._player.submit(opened)
      self.next, count = self.next + size, count - size

  def step_of(self, number: int) -> int:
    """The step that will learn from a group, if no step needs more than P groups."""
    return self.step + (number - self.first) // self._config.batch.prompts

  def _decode_images_ahead(self, first: int) -> None:
    """Starts to decode the images of the P groups from `first` on, before they are opened."""
    if self.prompts.images is None or self._config.curriculum.chooses:
      return
    P = self._config.batch.prompts
    numbers = np.arange(first, first + P)[self._run.hosts.own_rows(P)]
    with contextlib.suppress(RunFailed):  # raised again when the groups are opened
      self.prompts.begin(loader.indices_at(self._config.seed, numbers, len(self.prompts)))

  def _begin_scores(self, played: Played) -> None:
    """Starts to score groups that have ended together, and adds them as a lot."""
    opened = [self._playing[number] for number in played.numbers]
    step = self._config.warm_start.steps + self.step_of(min(played.numbers)) + 1  # as in the logs
    indices_P = np.array([group.example for group in opened])
    prompts = opened[0].prompts  # used again if the groups are all those of one opened batch
    are_in_order = [group.place for group in opened] == list(range(len(prompts.prompt_lengths_P)))
    if not are_in_order or any(group.prompts is not prompts for group in opened):
      prompts = loader.prompt_batch(self.prompts, indices_P, self._run.hosts)
    rollouts = played.rollouts
    scores = self._score.start(rollouts, prompts, step)
    checks = None if self._check is None else self._check.start(rollouts, prompts, step)

    def scored() -> tuple[ScoredGroups, Report]:
      """Waits for the scores and the checks of these groups, and puts them together."""
      found = scores.result()
      checks_PG = np.full(found.extras_PG.shape, np.nan, np.float32)
      # A check only measures how many completions are right (eval.check_training). It has one
      # function, which gives 1 for a right answer.
      if checks is not None:
        checks_PG = (checks.result().rewards.scores_PGJ[..., 0] == 1).astype(np.float32)
      groups = ScoredGroups(
        indices_P=indices_P,
        temperature_P=np.array([group.temperature for group in opened], np.float32),
        version_P=np.array([group.version for group in opened]),
        rollouts=rollouts,
        rewards=found.rewards,
        extras_PG=found.extras_PG,
        checks_PG=checks_PG,
      )
      return groups, found.report

    futures = [*scores.futures, *(checks.futures if checks is not None else ())]
    self._lots.append(_Lot(list(played.numbers), Pending(scored, futures)))

  def _see_whose_rewards_differ(self) -> None:
    """Records for scored groups whether their rewards differ.

    It waits for all scores if no group is being played, because nothing else is left to do. It also
    waits if unfinished rows outlast an update, because otherwise the time at which scores arrive
    would decide which groups are opened before the update, and so which weights draw them. In other
    cases, it waits for a moment.
    """
    hosts = self._run.hosts
    # A lot is recorded as a whole. All processes have the same lots.
    waiting = [lot for lot in self._lots if lot.numbers[0] not in self._differ]
    waits = self.is_idle or self._config.keeps_flight
    if not waits:
      wait_for_all([lot.scored for lot in waiting], SOON)
    for lot in waiting:
      if waits or not hosts.any_process(not lot.scored.is_ready):
        groups, _ = lot.scored.result()
        self._differ |= dict(zip(lot.numbers, groups_that_differ(groups.rewards).tolist()))
