"""Collects a step's batch: prompts, completions and rewards."""

import dataclasses
from typing import Any

import jax
import numpy as np

from grpo_jax import learner
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.data import loader
from grpo_jax.run import lengths
from grpo_jax.run.build import Run
from grpo_jax.run.clock import Clock
from grpo_jax.run.draws import Drawn, Draws, HostState
from grpo_jax.run.groups import Groups
from grpo_jax.run.rollout import Rollouts, texts_of
from grpo_jax.run.rollout_metrics import (
  check_metrics,
  completion_rows,
  rollout_metrics,
  score_metrics,
  with_judgements,
)
from grpo_jax.run.scoring import OVERLONG, host_scores, with_overlong
from grpo_jax.settings import ConfigError
from grpo_jax.types import Batch, Rewards


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
  """

  batch: Batch
  rewards: Rewards
  rows: list[dict[str, Any]] | None
  metrics: dict[str, float]
  host: HostState


class Collector:
  """Samples and scores a step's batch.

  It is a pure function of the policy, the step's index and the host state. Host state is a dict of
  numpy arrays that lives from step to step and is saved in checkpoints: counters, and what `Draws`
  remembers.

  Attributes:
    prompts: The training prompts.
  """

  def __init__(self, run: Run):
    """Raises ConfigError for reward functions that cannot be used."""
    self._run, self._config = run, run.config
    algo = run.config.algo
    needs_greedy = ADVANTAGES[algo.advantage].needs_greedy
    self._greedy_rollout = run.rollout(1, greedy=True) if needs_greedy else None
    # Made here, so that their errors come before anything is written.
    self._score, self._teacher = run.scorer, run.teacher
    self._draws = Draws(run)
    self.prompts = self._draws.prompts
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
    drawn = self._draws(params, index, host, clock)
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
    metrics = self._metrics(drawn.sampled) | drawn.metrics
    if self._config.sampling.temperature_schedule != "constant":
      metrics["sampling/temperature"] = float(drawn.sampled.temperature_P[0])
    host = drawn.host | {"num_tokens": host["num_tokens"] + metrics["completions/tokens"]}
    metrics["num_tokens"] = int(host["num_tokens"])
    return Collected(batch, rewards, rows, metrics, host)

  @property
  def _names(self) -> list[str]:
    """The names of the scores in `Rewards`."""
    penalty = [OVERLONG] if self._config.algo.overlong else []
    return [*self._score.names, *penalty]

  def _rows(self, drawn: Drawn, rewards: Rewards) -> list[dict[str, Any]]:
    """One object per completion, with the texts of all processes."""
    groups = drawn.chosen
    completions = groups.rollouts.completions
    rows = completion_rows(
      Rollouts(completions, texts_of(completions, self._run.tokenizer.decode)),
      self.prompts.make(groups.indices_P),
      host_scores(groups.rewards),
      rewards.scores_PGJ,
      self._names,
      groups.extras_PG,
    )
    return with_judgements(rows, drawn.pass_rates_P, groups.checks_PG)

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
    self, drawn: Drawn, prompts: loader.PromptBatch, rewards: Rewards
  ) -> tuple[Batch, Rewards]:
    """The batch and its rewards on the mesh.

    Groups that only fill up the batch count as not scored, so that they stay out of every mean.
    """
    groups, live_P = drawn.chosen, drawn.live_P
    is_live = live_P[:, None, None] != 0
    rewards = rewards.replace(scores_PGJ=np.where(is_live, rewards.scores_PGJ, np.float32(np.nan)))
    completions = groups.rollouts.completions
    max_tokens = self._config.sampling.max_tokens
    completions, rewards = lengths.cut((completions, rewards), completions.lengths_PG, max_tokens)
    tokens, platform = completions.tokens_PGT.shape[-1], self._run.parameters.model.platform
    slots = learner.slots_of_batch(completions.lengths_PG, tokens, platform)
    completions, rewards, arrays = self._run.hosts.put(
      (
        completions,
        rewards,
        (prompts.prompts_PS, prompts.prompt_lengths_P, groups.temperature_P, live_P),
      )
    )
    return self._run.programs.to_batch(completions, *arrays).replace(slots=slots), rewards

  def _metrics(self, sampled: Groups) -> dict[str, float]:
    completions = sampled.rollouts.completions
    metrics = rollout_metrics(completions, sampled.rewards, self._score.names)
    metrics |= check_metrics(host_scores(sampled.rewards), sampled.checks_PG)
    if self._config.algo.overlong:
      shaped = self._shaped(sampled.rewards, sampled.rollouts)
      metrics |= score_metrics(shaped, self._names)
    return metrics
