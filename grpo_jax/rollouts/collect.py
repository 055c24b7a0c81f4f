"""Collects a step's batch: prompts, completions and rewards."""

from collections.abc import Callable
import contextlib
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax import learner
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.data import loader
from grpo_jax.data.prompts import Prompts
from grpo_jax.programs.run import Run
from grpo_jax.programs.sampling import temperature_at
from grpo_jax.rollouts.curriculum import PassRateCurriculum
from grpo_jax.rollouts.groups import ScoredGroups, choose, from_arrays, to_arrays
from grpo_jax.rollouts.rollout import (
  Rollouts,
  concatenate,
  hand_on,
  last_turns,
  make_rollout,
  take,
  texts_of,
)
from grpo_jax.rollouts.rollout_metrics import (
  check_metrics,
  completion_rows,
  disjoint,
  rollout_metrics,
  score_metrics,
  turn_metrics,
  with_judgements,
)
from grpo_jax.rollouts.scorer import Report
from grpo_jax.rollouts.scorers import Scorers
from grpo_jax.rollouts.scoring import OVERLONG, groups_that_differ, host_scores, with_overlong
from grpo_jax.rollouts.teacher import Teacher
from grpo_jax.settings import ConfigError, RunFailed
from grpo_jax.timing import Clock
from grpo_jax.types import Batch, Rewards

HostState = dict[str, Any]  # nested dicts of numpy arrays
_MEMORY, _SURPLUS = "curriculum", "surplus"  # keys of the host state
_UNSCORED = "unscored_steps"
_MOST_CUTS, _SHORTEST_CUT = 4, 64  # sizes, and tokens


class StepGroups(NamedTuple):
  """The groups of a step.

  Attributes:
    chosen: P groups, the batch.
    live_P: float32 [P], 0 for groups that only fill up the batch.
    sampled: All groups that were sampled in this step.
    pass_rates_P: float32 [P], the pass rates of the chosen prompts before the step, NaN if they had
      none.
    metrics: Of the draws.
    host: The host state after the step.
    why_unscored: Why no completion that was sampled has a reward. "" if one has.
  """

  chosen: ScoredGroups
  live_P: np.ndarray
  sampled: ScoredGroups
  pass_rates_P: np.ndarray
  metrics: dict[str, float]
  host: HostState
  why_unscored: str = ""


def unscored_steps(host: HostState) -> int:
  """How many steps in a row, up to now, had no completion with a reward and taught nothing."""
  return int(host.get(_UNSCORED, 0))


@dataclasses.dataclass(frozen=True)
class Collected:
  """What a step learns from.

  Attributes:
    batch: On the mesh, without advantages and reference log-probs.
    rewards: On the mesh, with the penalty for length where that is on.
    rows: One object per completion of the batch, for completions/ and for the terminal. None where
      log.completions_every leaves the step out. Empty on the processes that write nothing.
    metrics: Of everything that was sampled, including groups that are not in the batch.
    host: The host state after the step.
    why_unscored: Why the step has no reward to learn from. "" if it has.
  """

  batch: Batch
  rewards: Rewards
  rows: list[dict[str, Any]] | None
  metrics: dict[str, float]
  host: HostState
  why_unscored: str = ""


class Collector:
  """Samples and scores a step's batch.

  It is a pure function of the policy, the step's index and the host state. Host state is a dict of
  numpy arrays that lives from step to step and is saved in checkpoints: counters, and what
  `GroupSource` remembers.

  Attributes:
    prompts: The training prompts.
  """

  def __init__(self, run: Run, scorers: Scorers):
    """Raises ConfigError for reward functions that cannot be used."""
    self._run, self._config, self._score = run, run.config, scorers.training
    algo = run.config.algo
    needs_greedy = ADVANTAGES[algo.advantage].needs_greedy
    self._greedy_rollout = None
    if needs_greedy:
      self._greedy_rollout = make_rollout(run, 1, greedy=True, talkers=scorers.talkers)
    # Made here, so that its errors come before anything is written.
    self._teacher = Teacher(run) if run.config.reward.teacher else None
    self._groups = GroupSource(run, scorers)
    self.prompts = self._groups.prompts
    if algo.overlong and OVERLONG in self._score.names:
      raise ConfigError(
        "reward.functions: a function is named overlong, which is the name of the penalty that"
        " algo.overlong adds; rename it, or set that to 0"
      )

  def initial_host_state(self) -> HostState:
    """The host state of a run's first GRPO step."""
    return {"num_tokens": np.int64(0)}

  def __call__(self, params: Any, index: int, host: HostState, clock: Clock) -> Collected:
    """Collects the batch of a GRPO step.

    Args:
      params: The policy, as `Parameters.for_sampling` returns it.
      index: The number of the GRPO step, from 0.
      host: The host state before the step.
      clock: Counts the time of sampling and of rewards.
    """
    drawn = self._groups(params, index, host, clock)
    chosen = drawn.chosen
    prompts = loader.prompt_batch(self.prompts, chosen.indices_P, self._run.hosts)
    rewards = self._shaped(chosen.rewards, chosen.rollouts)
    if self._greedy_rollout is not None:
      rewards = self._with_greedy(rewards, params, prompts, index, clock)
    rows = None
    every = self._config.log.completions_every
    if every and (index + 1) % every == 0:
      rows = self._rows(drawn, rewards) if self._run.hosts.is_first else []
    batch, rewards = self._put(drawn, prompts, rewards)
    if self._teacher is not None:
      batch = batch.replace(teacher_logprobs_PGT=self._teacher(batch))
    clock.lap("reward")
    metrics = self._metrics(drawn.sampled)
    if self._config.sampling.temperature_schedule != "constant":
      metrics["sampling/temperature"] = float(drawn.sampled.temperature_P[0])
    metrics["prompts/tokens"] = self._prompt_tokens(drawn, prompts)
    new_tokens = metrics["prompts/tokens"] + metrics["completions/tokens"]
    host = drawn.host | {"num_tokens": host["num_tokens"] + new_tokens}
    metrics["num_tokens"] = int(host["num_tokens"])
    # A teacher teaches without rewards.
    why_unscored = "" if self._teacher else drawn.why_unscored
    host[_UNSCORED] = np.int64(unscored_steps(drawn.host) + 1 if why_unscored else 0)
    metrics = disjoint(metrics, drawn.metrics)
    return Collected(batch, rewards, rows, metrics, host, why_unscored)

  def _prompt_tokens(self, drawn: StepGroups, chosen: loader.PromptBatch) -> int:
    """The tokens of the prompts that were sampled from, once for each of their completions."""
    if drawn.sampled is not drawn.chosen:
      chosen = loader.prompt_batch(self.prompts, drawn.sampled.indices_P, self._run.hosts)
    return int(chosen.prompt_lengths_P.sum()) * self._config.batch.group_size

  @property
  def _names(self) -> list[str]:
    """The names of the scores in `Rewards`."""
    penalty = [OVERLONG] if self._config.algo.overlong else []
    return [*self._score.names, *penalty]

  def _rows(self, drawn: StepGroups, rewards: Rewards) -> list[dict[str, Any]]:
    """One object per completion, with the texts of all processes."""
    groups = drawn.chosen
    rollouts, decode = groups.rollouts, self._run.tokenizer.decode
    texts_PG = texts_of(rollouts.completions, decode)
    if rollouts.turns_PG is not None:
      texts_PG = last_turns(rollouts.turns_PG, otherwise_PG=texts_PG)
    rows = completion_rows(
      rollouts.replace(texts_PG=texts_PG),
      self.prompts.make(groups.indices_P),
      host_scores(groups.rewards),
      rewards.scores_PGJ,
      self._names,
      groups.extras_PG,
    )
    rows = with_judgements(rows, drawn.pass_rates_P, groups.checks_PG)
    versions = groups.version_P.repeat(self._config.batch.group_size).tolist()
    return [row | {"version": version} for row, version in zip(rows, versions, strict=True)]

  def _shaped(self, rewards: Rewards, rollouts: Rollouts) -> Rewards:
    """The rewards with the penalty for length where that is on."""
    fraction = self._config.algo.overlong
    if not fraction:
      return rewards
    max_tokens = self._config.sampling.max_tokens
    return with_overlong(rewards, rollouts.completions, max_tokens, fraction)

  def _with_greedy(
    self, rewards: Rewards, params: Any, prompts: loader.PromptBatch, index: int, clock: Clock
  ) -> Rewards:
    """Adds the score of each prompt's greedy completion to the rewards of GRPO step `index`."""
    key = jax.random.fold_in(self._run.key("sample"), index)
    rollouts = self._greedy_rollout(params, prompts, key)
    clock.lap("sample")
    greedy = self._shaped(self._score(rollouts, prompts).rewards, rollouts)
    return rewards.replace(greedy_scores_PJ=greedy.scores_PGJ[:, 0])

  def _put(
    self, drawn: StepGroups, prompts: loader.PromptBatch, rewards: Rewards
  ) -> tuple[Batch, Rewards]:
    """The batch and its rewards on the mesh.

    Groups that only fill up the batch count as not scored, so that they stay out of every mean.
    """
    groups, live_P = drawn.chosen, drawn.live_P
    is_live = live_P[:, None, None] != 0
    rewards = rewards.replace(scores_PGJ=np.where(is_live, rewards.scores_PGJ, np.float32(np.nan)))
    completions, rollout_PB = groups.rollouts.completions, None
    if groups.rollouts.branches is not None:
      branches = groups.rollouts.branches
      completions, rollout_PB = branches.completions, branches.rollout_PB
    max_tokens = self._config.sampling.max_tokens
    of_prompts, lengths_PG = completions.prompt_experts_PSY, completions.lengths_PG
    completions = completions.replace(prompt_experts_PSY=None)  # these have no completion tokens
    completions, rewards = cut((completions, rewards), lengths_PG, max_tokens)
    completions = completions.replace(prompt_experts_PSY=of_prompts)
    tokens, platform = completions.tokens_PGT.shape[-1], self._run.parameters.model.platform
    slots = learner.slots_of_batch(completions.lengths_PG, tokens, platform)
    completions, rewards, arrays, rollout_PG = self._run.hosts.put(
      (
        completions,
        rewards,
        (prompts.prompts_PS, prompts.prompt_lengths_P, groups.temperature_P, live_P),
        rollout_PB,
      )
    )
    batch = self._run.programs.to_batch(completions, *arrays)
    batch = batch.replace(slots=slots, rollout_PG=rollout_PG)
    return self._run.with_images(batch, prompts), rewards

  def _metrics(self, sampled: ScoredGroups) -> dict[str, float]:
    completions = sampled.rollouts.completions
    metrics = rollout_metrics(completions, sampled.rewards, self._score.names)
    metrics |= check_metrics(host_scores(sampled.rewards), sampled.checks_PG)
    if sampled.rollouts.turns_PG is not None:
      metrics |= turn_metrics(sampled.rollouts.turns_PG)
    if self._config.algo.overlong:
      shaped = self._shaped(sampled.rewards, sampled.rollouts)
      metrics |= score_metrics(shaped, self._names)
    return metrics


class GroupSource:
  """Draws the groups of each step. With dynamic sampling, until enough groups differ.

  Attributes:
    prompts: The training prompts.
  """

  def __init__(self, run: Run, scorers: Scorers):
    """Raises ConfigError for reward functions that cannot be used."""
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
    )
    self._curriculum = PassRateCurriculum(run.config.curriculum, run.config.seed, len(self.prompts))

  def __call__(self, params: Any, index: int, host: HostState, clock: Clock) -> StepGroups:
    """Draws the groups of GRPO step `index`.

    Args:
      params: The policy, as `Parameters.for_sampling` returns it.
      index: The number of the GRPO step, from 0.
      host: The host state before the step.
      clock: Counts the time of sampling and of rewards.
    """
    P = self._config.batch.prompts
    # A run of an earlier version may lack what the curriculum remembers now.
    before = memory = self._curriculum.initial() | host.get(_MEMORY, {})
    self._curriculum.check(before)
    kept = self._kept(host)
    report, drawn = Report(), list[ScoredGroups]()
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
    metrics = disjoint(report.metrics(), self._curriculum.metrics(memory))
    if self._rounds > 1:
      metrics = disjoint(metrics, self._resampling(len(drawn), live, from_before))
      host |= self._keep(surplus)
    pass_rates_P = before["pass_rate"][chosen.indices_P]
    is_unscored = np.isnan(host_scores(sampled.rewards)).all()
    why = "; ".join(report.unscored.values()) if is_unscored else ""
    return StepGroups(chosen, live_P, sampled, pass_rates_P, metrics, host, why)

  def _complete(
    self, params: Any, indices_P: np.ndarray, when: tuple[int, int], clock: Clock
  ) -> tuple[ScoredGroups, Report]:
    """Completes and scores prompts. `when` is the GRPO step and the draw of the run, from 0.

    Workers score groups that are complete while the others are sampled.
    """
    index, number = when
    temperature = temperature_at(self._config.sampling, index, self._config.steps)
    key = jax.random.fold_in(self._run.key("sample"), number)
    prompts = loader.prompt_batch(self.prompts, indices_P, self._run.hosts)
    self._look_ahead(number + 1)
    numbers: list[int] = []
    begun: list[Callable[[], tuple[ScoredGroups, Report]]] = []

    def start(some: list[int], rollouts: Rollouts) -> None:
      part = prompts
      if len(some) < len(indices_P):
        part = loader.prompt_batch(self.prompts, indices_P[some], self._run.hosts)
      begun.append(self._start_scores(indices_P[some], temperature, rollouts, part, index))
      numbers.extend(some)

    hand_on(self._rollout, params, prompts, key, temperature, start)
    clock.lap("sample")
    groups, reports = zip(*(finish() for finish in begun))
    clock.lap("reward")
    return take(concatenate(groups), np.argsort(numbers)), sum(reports, Report())

  def _look_ahead(self, number: int) -> None:
    """Images of the next draw are decoded while this one is computed."""
    if self.prompts.images is None or self._config.curriculum.chooses:
      return
    P, seed = self._config.batch.prompts, self._config.seed
    indices_P = loader.step_indices(seed, number, P, len(self.prompts))
    with contextlib.suppress(RunFailed):  # that draw says it
      self.prompts.begin(indices_P[self._run.hosts.own_rows(P)])

  def _start_scores(
    self,
    indices_P: np.ndarray,
    temperature: float,
    rollouts: Rollouts,
    prompts: loader.PromptBatch,
    index: int,
  ) -> Callable[[], tuple[ScoredGroups, Report]]:
    """Lets the workers begin with some completions of GRPO step `index`.

    Returns:
      A function that waits for their scores. All processes call it together.
    """
    step = self._config.warm_start.steps + index + 1
    scores = self._score.start(rollouts, prompts, step)
    checks = None if self._check is None else self._check.start(rollouts, prompts, step)

    def finish() -> tuple[ScoredGroups, Report]:
      scored = scores()
      checks_PG = np.full(scored.extras_PG.shape, np.nan, np.float32)
      if checks is not None:
        checks_PG = (checks().rewards.scores_PGJ[..., 0] == 1).astype(np.float32)
      groups = ScoredGroups(
        indices_P=indices_P,
        temperature_P=np.full(len(indices_P), temperature, np.float32),
        version_P=np.full(len(indices_P), index),
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


def cut_lengths(max_tokens: int) -> list[int]:
  """The lengths to which completions are cut, ascending. Each is about double the one before.

  They are at most four, because the programs of a step are compiled for each of them.
  """
  sizes = [max_tokens]
  while len(sizes) < _MOST_CUTS and sizes[-1] // 2 >= _SHORTEST_CUT:
    sizes.append(-(-sizes[-1] // 2))
  return sizes[::-1]


def cut(tree: Any, lengths_PG: np.ndarray, max_tokens: int) -> Any:
  """Arrays [P, G, T] and [P, G, T, Y] of a tree, cut to a size that holds every completion.

  Args:
    tree: Arrays of the host. Those with another number of dimensions stay as they are.
    lengths_PG: How many tokens each completion has.
    max_tokens: T.
  """
  longest = max(1, int(lengths_PG.max()))
  size = next(size for size in cut_lengths(max_tokens) if size >= longest)

  def cut_array(x: Any) -> Any:
    has_tokens = np.ndim(x) in (3, 4) and x.shape[2] == max_tokens
    return x[:, :, :size] if has_tokens else x

  return jax.tree.map(cut_array, tree)
