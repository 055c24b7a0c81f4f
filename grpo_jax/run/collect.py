"""Collects a step's batch: prompts, completions and rewards."""

import dataclasses
from typing import Any

from flax import struct
import jax
import numpy as np

from grpo_jax import learner
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.data import loader
from grpo_jax.run import lengths
from grpo_jax.run.build import Run
from grpo_jax.run.clock import Clock
from grpo_jax.run.rollout import Rollouts, concatenate, take, texts_of
from grpo_jax.run.rollout_metrics import completion_rows, rollout_metrics, score_metrics
from grpo_jax.run.sampling import temperature_at
from grpo_jax.run.scorer import Report
from grpo_jax.run.scoring import OVERLONG, groups_that_differ, host_scores, with_overlong
from grpo_jax.settings import ConfigError
from grpo_jax.types import Batch, Rewards

HostState = dict[str, np.ndarray | np.generic]


class Groups(struct.PyTreeNode):
  """Completions of P prompts and their rewards, on the host.

  Attributes:
    indices_P: int64, which training prompts they are.
    rollouts: The completions.
    rewards: From the reward functions, without the penalty for length.
    extras_PG: object array of dicts: what the functions gave to log_extra.
  """

  indices_P: np.ndarray
  rollouts: Rollouts
  rewards: Rewards
  extras_PG: np.ndarray


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
  numpy arrays that lives from step to step and is saved in checkpoints: counters now, and whatever
  a curriculum has to remember.

  Attributes:
    prompts: The training prompts.
  """

  def __init__(self, run: Run):
    """Raises ConfigError for reward functions that cannot be used."""
    self._run, self._config = run, run.config
    algo = run.config.algo
    self.prompts = run.prompts("train")
    self._rounds = 1 + algo.max_resample_rounds if algo.dynamic_sampling else 1
    self._rollout = run.rollout(run.config.batch.group_size)
    needs_greedy = ADVANTAGES[algo.advantage].needs_greedy
    self._greedy_rollout = run.rollout(1, greedy=True) if needs_greedy else None
    # Made here, so that their errors come before anything is written.
    self._score, self._teacher = run.scorer, run.teacher
    self._score.check_arguments(self.prompts, "reward.functions")
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
    P = self._config.batch.prompts
    sampling = self._config.sampling
    temperature = temperature_at(sampling, index, self._config.steps)
    drawn: list[Groups] = []
    report = Report()
    step = self._config.warm_start.steps + index + 1
    live = 0  # groups whose rewards differ
    while len(drawn) < self._rounds and live < P:
      number = index * self._rounds + len(drawn)
      groups, of_draw = self._draw(params, number, step, temperature, clock)
      drawn.append(groups)
      report += of_draw
      live += int(groups_that_differ(drawn[-1].rewards).sum())
    everything = concatenate(drawn)
    chosen, live_P = everything, np.ones(P, np.float32)
    if self._rounds > 1:
      chosen, live_P = _choose(everything, P)
    prompts = loader.prompt_batch(self.prompts, chosen.indices_P, self._run.hosts)
    rewards = self._shaped(chosen.rewards, chosen.rollouts)
    if self._greedy_rollout is not None:
      rewards = self._with_greedy(rewards, params, prompts, index, clock)
    rows = None
    every = self._config.log.completions_every
    if every and (index + 1) % every == 0:
      rows = self._rows(chosen, rewards) if self._run.hosts.is_first else []
    batch, rewards = self._put(chosen, prompts, rewards, live_P, temperature)
    if self._teacher is not None:
      batch = batch.replace(teacher_logprobs_PGT=self._teacher(batch))
    clock.lap("reward")
    metrics = report.metrics() | self._metrics(everything, live)
    if sampling.temperature_schedule != "constant":
      metrics["sampling/temperature"] = temperature
    host = host | {"num_tokens": host["num_tokens"] + metrics["completions/tokens"]}
    metrics["num_tokens"] = int(host["num_tokens"])
    return Collected(batch, rewards, rows, metrics, host)

  @property
  def _names(self) -> list[str]:
    """The names of the scores in `Rewards`."""
    penalty = [OVERLONG] if self._config.algo.overlong else []
    return [*self._score.names, *penalty]

  def _rows(self, groups: Groups, rewards: Rewards) -> list[dict[str, Any]]:
    """One object per completion, with the texts of all processes."""
    completions = groups.rollouts.completions
    return completion_rows(
      Rollouts(completions, texts_of(completions, self._run.tokenizer.decode)),
      self.prompts.make(groups.indices_P),
      host_scores(groups.rewards),
      rewards.scores_PGJ,
      self._names,
      groups.extras_PG,
    )

  def _draw(
    self, params: Any, number: int, step: int, temperature: float, clock: Clock
  ) -> tuple[Groups, Report]:
    """Draw `number` of the run, from 0: a batch of prompts, completed and scored."""
    P = self._config.batch.prompts
    indices_P = loader.step_indices(self._config.seed, number, P, len(self.prompts))
    prompts = loader.prompt_batch(self.prompts, indices_P, self._run.hosts)
    key = jax.random.fold_in(self._run.key("sample"), number)
    rollouts = self._rollout(params, prompts, key, temperature)
    clock.lap("sample")
    scored = self._score(rollouts, prompts, step)
    clock.lap("reward")
    return Groups(indices_P, rollouts, scored.rewards, scored.extras_PG), scored.report

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
    self,
    groups: Groups,
    prompts: loader.PromptBatch,
    rewards: Rewards,
    live_P: np.ndarray,
    temperature: float,
  ) -> tuple[Batch, Rewards]:
    """The batch and its rewards on the mesh.

    Groups that only fill up the batch count as not scored, so that they stay out of every mean.
    """
    is_live = live_P[:, None, None] != 0
    rewards = rewards.replace(scores_PGJ=np.where(is_live, rewards.scores_PGJ, np.float32(np.nan)))
    temperature_P = np.full(len(live_P), temperature, np.float32)
    completions = groups.rollouts.completions
    max_tokens = self._config.sampling.max_tokens
    completions, rewards = lengths.cut((completions, rewards), completions.lengths_PG, max_tokens)
    tokens, platform = completions.tokens_PGT.shape[-1], self._run.parameters.model.platform
    slots = learner.slots_of_batch(completions.lengths_PG, tokens, platform)
    completions, rewards, arrays = self._run.hosts.put(
      (
        completions,
        rewards,
        (prompts.prompts_PS, prompts.prompt_lengths_P, temperature_P, live_P),
      )
    )
    return self._run.programs.to_batch(completions, *arrays).replace(slots=slots), rewards

  def _metrics(self, everything: Groups, live: int) -> dict[str, float]:
    completions = everything.rollouts.completions
    metrics = rollout_metrics(completions, everything.rewards, self._score.names)
    if self._config.algo.overlong:
      shaped = self._shaped(everything.rewards, everything.rollouts)
      metrics |= score_metrics(shaped, self._names)
    if self._rounds > 1:
      P, groups = self._config.batch.prompts, len(everything.indices_P)
      metrics |= {
        "dynamic_sampling/rounds": groups / P,
        "dynamic_sampling/kept": min(live, P),
        "dynamic_sampling/dropped": groups - live,  # all rewards equal
        "dynamic_sampling/discarded": max(0, live - P),  # more than the batch holds
      }
    return metrics


def _choose(everything: Groups, count: int) -> tuple[Groups, np.ndarray]:
  """The first `count` groups whose rewards differ.

  Where there are fewer, other groups fill their places.

  Returns:
    The groups, and float32 [count]: 1 for those whose rewards differ, 0 for the others.
  """
  differ = groups_that_differ(everything.rewards)
  live = np.flatnonzero(differ)[:count]
  others = np.flatnonzero(~differ)[: count - len(live)]
  chosen = take(everything, np.concatenate([live, others]))
  return chosen, (np.arange(count) < len(live)).astype(np.float32)
