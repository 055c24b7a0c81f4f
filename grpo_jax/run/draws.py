"""Draws the groups of a step: chooses prompts, completes them and scores the completions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.data import loader
from grpo_jax.data.prompts import Prompts
from grpo_jax.run.build import Run
from grpo_jax.run.clock import Clock
from grpo_jax.run.curriculum import Curriculum
from grpo_jax.run.groups import Groups, choose, from_arrays, to_arrays
from grpo_jax.run.rollout import Rollouts, concatenate, take
from grpo_jax.run.sampling import temperature_at
from grpo_jax.run.scorer import Report
from grpo_jax.run.scoring import groups_that_differ, host_scores

HostState = dict[str, Any]  # nested dicts of numpy arrays
_MEMORY, _SURPLUS = "curriculum", "surplus"  # keys of the host state


class Drawn(NamedTuple):
  """The groups of a step.

  Attributes:
    chosen: P groups, the batch.
    live_P: float32 [P], 0 for groups that only fill up the batch.
    sampled: All groups that were sampled in this step.
    pass_rates_P: float32 [P], the pass rates of the chosen prompts before the step, NaN if they had
      none.
    metrics: Of the draws.
    host: The host state after the step.
  """

  chosen: Groups
  live_P: np.ndarray
  sampled: Groups
  pass_rates_P: np.ndarray
  metrics: dict[str, float]
  host: HostState


class Draws:
  """Draws the groups of each step. With dynamic sampling, until enough groups differ.

  Attributes:
    prompts: The training prompts.
  """

  def __init__(self, run: Run):
    """Raises ConfigError for reward functions that cannot be used."""
    self._run, self._config, self._score = run, run.config, run.scorer
    self.prompts: Prompts = run.prompts("train")
    self._score.check_arguments(self.prompts, "reward.functions")
    self._check = run.eval_scorer() if run.config.eval.check_training else None
    if self._check is not None:
      self._check.check_arguments(self.prompts, "eval.function")
    algo = run.config.algo
    self._rounds = 1 + algo.max_resample_rounds if algo.dynamic_sampling else 1
    self._rollout = run.rollout(run.config.batch.group_size)
    self._curriculum = Curriculum(run.config.curriculum, run.config.seed, len(self.prompts))

  def __call__(self, params: Any, index: int, host: HostState, clock: Clock) -> Drawn:
    """Draws the groups of GRPO step `index`.

    Args:
      params: The policy, as `Parameters.for_sampling` returns it.
      index: The number of the GRPO step, from 0.
      host: The host state before the step.
      clock: Counts the time of sampling and of rewards.
    """
    P = self._config.batch.prompts
    before = memory = host.get(_MEMORY, self._curriculum.initial())
    self._curriculum.check(before)
    kept = self._kept(host)
    report, drawn = Report(), list[Groups]()
    live = from_before = len(kept[0].indices_P) if kept else 0  # groups whose rewards differ
    while len(drawn) < self._rounds and live < P:
      number = index * self._rounds + len(drawn)
      if self._config.curriculum.chooses:
        indices_P, memory = self._curriculum.draw(memory, index, P)
      else:
        indices_P = loader.step_indices(self._config.seed, number, P, len(self.prompts))
      groups, of_draw = self._complete(params, indices_P, (index, number), clock)
      scores_PG = host_scores(groups.rewards)
      memory = self._curriculum.learn(memory, index, indices_P, scores_PG)
      drawn.append(groups)
      report += of_draw
      live += int(groups_that_differ(groups.rewards).sum())
    sampled = concatenate(drawn)
    chosen, live_P, surplus = sampled, np.ones(P, np.float32), take(sampled, slice(0))
    if self._rounds > 1:
      chosen, live_P, surplus = choose(concatenate([*kept, *drawn]), P)
    host = {**host, _MEMORY: memory}
    metrics = report.metrics() | self._curriculum.metrics(memory)
    if self._rounds > 1:
      metrics |= self._resampling(len(drawn), live, from_before)
      host |= self._keep(surplus)
    pass_rates_P = before["pass_rate"][chosen.indices_P]
    return Drawn(chosen, live_P, sampled, pass_rates_P, metrics, host)

  def _complete(
    self, params: Any, indices_P: np.ndarray, when: tuple[int, int], clock: Clock
  ) -> tuple[Groups, Report]:
    """Completes and scores prompts. `when` is the GRPO step and the draw of the run, from 0.

    Workers score the completions of a part while the next part is sampled.
    """
    index, number = when
    temperature = temperature_at(self._config.sampling, index, self._config.steps)
    key = jax.random.fold_in(self._run.key("sample"), number)
    size = self._config.batch.prompts // self._config.sampling.parts
    begun: list[Callable[[], tuple[Groups, Report]]] = []
    for first in range(0, len(indices_P), size):
      part_P = indices_P[first : first + size]
      prompts = loader.prompt_batch(self.prompts, part_P, self._run.hosts)
      rollouts = self._rollout(params, prompts, key, temperature, first)
      begun.append(self._start_scores(part_P, temperature, rollouts, prompts, index))
    clock.lap("sample")
    groups, reports = zip(*(finish() for finish in begun))
    clock.lap("reward")
    return concatenate(groups), sum(reports, Report())

  def _start_scores(
    self,
    indices_P: np.ndarray,
    temperature: float,
    rollouts: Rollouts,
    prompts: loader.PromptBatch,
    index: int,
  ) -> Callable[[], tuple[Groups, Report]]:
    """Lets the workers begin with some completions of GRPO step `index`.

    Returns:
      A function that waits for their scores. All processes call it together.
    """
    step = self._config.warm_start.steps + index + 1
    scores = self._score.start(rollouts, prompts, step)
    checks = None if self._check is None else self._check.start(rollouts, prompts, step)

    def finish() -> tuple[Groups, Report]:
      scored = scores()
      checks_PG = np.full(scored.extras_PG.shape, np.nan, np.float32)
      if checks is not None:
        checks_PG = (checks().rewards.scores_PGJ[..., 0] == 1).astype(np.float32)
      groups = Groups(
        indices_P=indices_P,
        temperature_P=np.full(len(indices_P), temperature, np.float32),
        rollouts=rollouts,
        rewards=scored.rewards,
        extras_PG=scored.extras_PG,
        checks_PG=checks_PG,
      )
      return groups, scored.report

    return finish

  def _kept(self, host: HostState) -> list[Groups]:
    """The surplus of the step before, if there is one."""
    arrays = host.get(_SURPLUS)
    return [from_arrays(arrays, self._score.weights)] if arrays else []

  def _keep(self, surplus: Groups) -> HostState:
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
