"""Draws the groups of a step: which prompts, how often, and what their completions are worth."""

from collections.abc import Callable
import contextlib
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.algo.metrics import disjoint
from grpo_jax.batches.curriculum import PassRateCurriculum
from grpo_jax.batches.groups import ScoredGroups, choose, from_arrays, to_arrays
from grpo_jax.data import loader
from grpo_jax.data.prompts import Prompts
from grpo_jax.rollouts.rollout import Rollouts, concatenate, hand_on, make_rollout, take
from grpo_jax.run.run import Run
from grpo_jax.run.seen import encoded_first
from grpo_jax.sampler.sampling import temperature_at
from grpo_jax.scoring.scorer import Report
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.scoring.scores import groups_that_differ, host_scores
from grpo_jax.settings import RunFailed
from grpo_jax.timing import Clock

HostState = dict[str, Any]  # nested dicts of numpy arrays
_MEMORY, _SURPLUS = "curriculum", "surplus"  # keys of the host state


class Policy(NamedTuple):
  """What draws a batch.

  Attributes:
    params: All parameters, as `Parameters.for_sampling` returns them, or a `Feed` of them.
    version: How many GRPO steps had changed them, or the first ones.
  """

  params: Any
  version: int


class StepGroups(NamedTuple):
  """The groups of a step.

  Attributes:
    chosen: P groups, the batch.
    prompts: Theirs.
    live_P: float32 [P], 0 for groups that only fill up the batch.
    sampled: All groups that were sampled in this step.
    pass_rates_P: float32 [P], the pass rates of the chosen prompts before the step, NaN if they had
      none.
    metrics: Of the draws.
    host: The host state after the step.
    why_unscored: Why no completion that was sampled has a reward. "" if one has.
  """

  chosen: ScoredGroups
  prompts: loader.PromptBatch
  live_P: np.ndarray
  sampled: ScoredGroups
  pass_rates_P: np.ndarray
  metrics: dict[str, float]
  host: HostState
  why_unscored: str = ""


_Scores = Callable[[], tuple[ScoredGroups, Report]]


class _Begun(NamedTuple):
  """A draw whose scores may come later.

  Attributes:
    prompts: Its prompts.
    finish: Waits for the scores.
  """

  prompts: loader.PromptBatch
  finish: _Scores


class Drawn(NamedTuple):
  """Some groups that are not scored yet.

  Attributes:
    indices_P: int64, which training prompts they are.
    temperature: What they were sampled at.
    version: Of the policy that sampled them.
    rollouts: The completions.
  """

  indices_P: np.ndarray
  temperature: float
  version: int
  rollouts: Rollouts


class GroupSource:
  """Draws the groups of each step. With dynamic sampling, until enough groups differ.

  Attributes:
    prompts: The training prompts.
  """

  def __init__(self, run: Run, scorers: Scorers, remote: Any = None):
    """Raises ConfigError for reward functions that cannot be used.

    `remote` samples. None means that the run does.
    """
    self._run, self._config, self._score = run, run.config, scorers.training
    self.prompts: Prompts = run.prompts("train")
    self._score.check_arguments(self.prompts, "reward.functions")
    self._check = scorers.evaluation if run.config.eval.check_training else None
    if self._check is not None:
      self._check.check_arguments(self.prompts, "eval.function")
    algo = run.config.algo
    self._rounds = 1 + algo.max_resample_rounds if algo.dynamic_sampling else 1
    self._rollout = make_rollout(
      run,
      run.config.batch.group_size,
      talkers=scorers.talkers,
      keeps_experts=run.config.learner.router_replay,
      remote=remote,
    )
    self._curriculum = PassRateCurriculum(run.config.curriculum, run.config.seed, len(self.prompts))

  @property
  def chooses_by_scores(self) -> bool:
    """Whether a draw depends on the scores of the draws before it."""
    return self._rounds > 1 or self._config.curriculum.chooses

  def begin(
    self, policy: Policy, index: int, before: Callable[[], HostState], clock: Clock
  ) -> Callable[[], StepGroups]:
    """Samples the groups of GRPO step `index`, which workers begin to score.

    Where draws depend on scores, all is done when this returns.

    Args:
      policy: What draws them.
      index: The number of the GRPO step, from 0.
      before: Returns the host state before the step. It may wait for the scores of the step before.
      clock: Counts the time of sampling and of rewards.

    Returns:
      A function that waits for the scores. All processes call it together.
    """
    if self.chooses_by_scores:
      groups = self._groups(policy, index, before(), clock)
      return lambda: groups
    indices_P = self._next_indices(index)
    first = self._begin(policy, indices_P, (index, index), clock)
    return lambda: self._groups(None, index, before(), clock, first)

  def _next_indices(self, number: int) -> np.ndarray:
    """The prompts of a draw of the run, where no curriculum chooses them."""
    return loader.step_indices(
      self._config.seed, number, self._config.batch.prompts, len(self.prompts)
    )

  def _groups(
    self,
    policy: Policy | None,
    index: int,
    host: HostState,
    clock: Clock,
    first: _Begun | None = None,
  ) -> StepGroups:
    """The groups of GRPO step `index`. `first` is its first draw, if it has begun.

    Without a policy, there is no other draw.
    """
    P = self._config.batch.prompts
    # A run of an earlier version may lack what the curriculum remembers now.
    before = memory = self._curriculum.initial() | host.get(_MEMORY, {})
    self._curriculum.check(before)
    kept = self._kept(host)
    report, drawn = Report(), list[ScoredGroups]()
    live = from_before = len(kept[0].indices_P) if kept else 0  # groups whose rewards differ
    while len(drawn) < self._rounds and live < P:
      if first is not None:
        begun = first
      else:
        number = index * self._rounds + len(drawn)
        indices_P = self._next_indices(number)
        if self._config.curriculum.chooses:
          indices_P, memory = self._curriculum.draw(memory, index, P)
        begun = self._begin(policy, indices_P, (index, number), clock)
      groups, of_draw = begun.finish()
      scores_PG = host_scores(groups.rewards)
      memory = self._curriculum.learn(memory, index, groups.indices_P, scores_PG)
      drawn.append(groups)
      report += of_draw
      live += int(groups_that_differ(groups.rewards).sum())
    sampled = concatenate(drawn)
    chosen, live_P, surplus = sampled, np.ones(P, np.float32), take(sampled, slice(0))
    if self._rounds > 1:
      chosen, live_P, surplus = choose(concatenate([*kept, *drawn]), P)
    prompts = begun.prompts
    if not np.array_equal(chosen.indices_P, groups.indices_P):
      prompts = loader.prompt_batch(self.prompts, chosen.indices_P, self._run.hosts)
    host = {**host, _MEMORY: memory}
    metrics = disjoint(report.metrics(), self._curriculum.metrics(memory))
    if self._rounds > 1:
      metrics = disjoint(metrics, self._resampling(len(drawn), live, from_before))
      host |= self._keep(surplus)
    pass_rates_P = before["pass_rate"][chosen.indices_P]
    is_unscored = np.isnan(host_scores(sampled.rewards)).all()
    why = "; ".join(report.unscored.values()) if is_unscored else ""
    return StepGroups(chosen, prompts, live_P, sampled, pass_rates_P, metrics, host, why)

  def _begin(
    self, policy: Policy, indices_P: np.ndarray, when: tuple[int, int], clock: Clock
  ) -> _Begun:
    """Completes prompts. `when` is the GRPO step and the draw of the run, from 0.

    Workers score groups that are complete while the others are sampled.

    Returns:
      The draw, which waits for the scores of all.
    """
    index, number = when
    temperature = temperature_at(self._config.sampling, index, self._config.steps)
    key = jax.random.fold_in(self._run.key("sample"), number)
    prompts = loader.prompt_batch(self.prompts, indices_P, self._run.hosts)
    prompts = encoded_first(self._run, prompts)
    self._look_ahead(number + 1)
    numbers: list[int] = []
    begun: list[_Scores] = []

    def start(some: list[int], rollouts: Rollouts) -> None:
      part = prompts
      if len(some) < len(indices_P):
        part = loader.prompt_batch(self.prompts, indices_P[some], self._run.hosts)
      drawn = Drawn(indices_P[some], temperature, policy.version, rollouts)
      begun.append(self._start_scores(drawn, part, index))
      numbers.extend(some)

    hand_on(self._rollout, policy.params, prompts, key, temperature, start)
    clock.lap("sample")

    def finish() -> tuple[ScoredGroups, Report]:
      clock.restart()
      groups, reports = zip(*(finish() for finish in begun))
      clock.lap("reward")
      return take(concatenate(groups), np.argsort(numbers)), sum(reports, Report())

    return _Begun(prompts, finish)

  def _look_ahead(self, number: int) -> None:
    """Images of the next draw are decoded while this one is computed."""
    if self.prompts.images is None or self._config.curriculum.chooses:
      return
    own = self._run.hosts.own_rows(self._config.batch.prompts)
    with contextlib.suppress(RunFailed):  # that draw says it
      self.prompts.begin(self._next_indices(number)[own])

  def _start_scores(self, drawn: Drawn, prompts: loader.PromptBatch, index: int) -> _Scores:
    """Lets the workers begin with some completions of GRPO step `index`.

    Returns:
      A function that waits for their scores. All processes call it together.
    """
    step = self._config.warm_start.steps + index + 1
    count, rollouts = len(drawn.indices_P), drawn.rollouts
    scores = self._score.start(rollouts, prompts, step)
    checks = None if self._check is None else self._check.start(rollouts, prompts, step)

    def finish() -> tuple[ScoredGroups, Report]:
      scored = scores()
      checks_PG = np.full(scored.extras_PG.shape, np.nan, np.float32)
      if checks is not None:
        checks_PG = (checks().rewards.scores_PGJ[..., 0] == 1).astype(np.float32)
      groups = ScoredGroups(
        indices_P=drawn.indices_P,
        temperature_P=np.full(count, drawn.temperature, np.float32),
        version_P=np.full(count, drawn.version),
        rollouts=rollouts,
        rewards=scored.rewards,
        extras_PG=scored.extras_PG,
        checks_PG=checks_PG,
      )
      return groups, scored.report

    return finish

  def _kept(self, host: HostState) -> list[ScoredGroups]:
    """The surplus of the step before, if there is one."""
    arrays = host.get(_SURPLUS)
    has_turns = self._config.environment.has_turns
    return [from_arrays(arrays, self._score.weights, has_turns)] if arrays else []

  def _keep(self, surplus: ScoredGroups) -> HostState:
    """The part of the host state that holds the surplus for the next step.

    Fewer than a batch are kept. So the next step samples, too, and no group is older than a step.
    """
    if not self._config.algo.keep_surplus:
      return {}
    surplus = take(surplus, slice(self._config.batch.prompts - 1))
    return {_SURPLUS: to_arrays(surplus) if len(surplus.indices_P) else {}}

  def _resampling(self, rounds: int, live: int, from_before: int) -> dict[str, float]:
    """Metrics of dynamic sampling, from the number of groups whose rewards differ."""
    P = self._config.batch.prompts
    metrics: dict[str, float] = {
      "dynamic_sampling/rounds": rounds,
      "dynamic_sampling/kept": min(live, P),
      "dynamic_sampling/dropped": rounds * P - (live - from_before),  # all rewards equal
      "dynamic_sampling/discarded": max(0, live - P),  # more than the batch holds
    }
    if self._config.algo.keep_surplus:
      carried = min(metrics.pop("dynamic_sampling/discarded"), P - 1)
      metrics |= {
        "dynamic_sampling/from_before": from_before,
        "dynamic_sampling/carried": carried,
        "dynamic_sampling/discarded": max(0, live - P) - carried,
      }
    return metrics
