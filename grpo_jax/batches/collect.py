"""Collects a step's batch: prompts, completions and rewards."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import numpy as np

from grpo_jax import learner
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.metrics import disjoint
from grpo_jax.batches.groups import ScoredGroups
from grpo_jax.batches.rollout_metrics import (
  check_metrics,
  completion_rows,
  rollout_metrics,
  score_metrics,
  turn_metrics,
  with_judgements,
)
from grpo_jax.batches.scored import Scored
from grpo_jax.batches.source import GroupSource, HostState, Policy, StepGroups
from grpo_jax.data import loader
from grpo_jax.rollouts.rollout import Rollouts, last_turns, make_rollout, texts_of
from grpo_jax.run.run import Run
from grpo_jax.run.seen import with_images
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.scoring.scores import OVERLONG, host_scores, with_overlong
from grpo_jax.scoring.teacher import Teacher
from grpo_jax.settings import ConfigError
from grpo_jax.timing import Clock
from grpo_jax.types import Batch, Completions, Rewards

_UNSCORED = "unscored_steps"
_MOST_CUTS, _SHORTEST_CUT = 4, 64  # sizes, and tokens


def unscored_steps(host: HostState) -> int:
  """How many steps in a row, up to now, had no completion to learn from."""
  return int(host.get(_UNSCORED, 0))


@dataclasses.dataclass(frozen=True)
class Collected:
  """What a step learns from.

  Attributes:
    batch: On the mesh, without advantages and reference log-probs.
    rewards: On the mesh, with the penalty for length where that is on.
    rows: `Scored.rows`.
    metrics: `Scored.metrics`.
    host: The host state after the step.
    why_unscored: `Scored.why_unscored`.
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
    reward_weights: The weights of the reward functions.
  """

  def __init__(self, run: Run, scorers: Scorers, remote: Any = None):
    """Raises ConfigError for reward functions that cannot be used.

    `remote` samples. None means that the run does.
    """
    self._run, self._config, self._score = run, run.config, scorers.training
    algo = run.config.algo
    needs_greedy = ADVANTAGES[algo.advantage].needs_greedy
    self._greedy_rollout = None
    if needs_greedy:
      self._greedy_rollout = make_rollout(
        run, 1, greedy=True, talkers=scorers.talkers, remote=remote
      )
    # Made here, so that its errors come before anything is written.
    self._teacher = Teacher(run) if run.config.reward.teacher else None
    self._groups = GroupSource(run, scorers, remote)
    self.prompts = self._groups.prompts
    self.reward_weights = self._score.weights
    if algo.overlong and OVERLONG in self._score.names:
      raise ConfigError(
        "reward.functions: a function is named overlong, which is the name of the penalty that"
        " algo.overlong adds; rename it, or set that to 0"
      )

  def initial_host_state(self) -> HostState:
    """The host state of a run's first GRPO step."""
    return {"num_tokens": np.int64(0)}

  def __call__(self, params: Any, index: int, host: HostState, clock: Clock) -> Collected:
    """Collects the batch of a GRPO step, which learns from its own policy.

    Args:
      params: The policy, as `Parameters.for_sampling` returns it.
      index: The number of the GRPO step, from 0.
      host: The host state before the step.
      clock: Counts the time of sampling and of rewards.
    """
    collected = self.put(self.begin(Policy(params, index), index, lambda: host, clock)())
    clock.lap("reward")
    return collected

  def begin(
    self, policy: Policy, index: int, before: Callable[[], HostState], clock: Clock
  ) -> Callable[[], Scored]:
    """Samples the batch of a GRPO step, which workers begin to score.

    The arguments are those of `GroupSource.begin`.

    Returns:
      A function that waits for the scores. All processes call it together.
    """
    groups = self._groups.begin(policy, index, before, clock)
    if self._greedy_rollout is None:
      return lambda: self._scored(groups(), None, index, before())
    drawn = groups()
    greedy = self._begin_greedy(policy, drawn.prompts, index, clock)
    return lambda: self._scored(drawn, greedy, index, before())

  def put(self, scored: Scored) -> Collected:
    """Puts a batch onto the mesh. A teacher sees it there."""
    prompts = scored.prompts or self._prompts(scored.indices_P)
    batch, rewards = self._put(scored, prompts)
    if self._teacher is not None:
      batch = batch.replace(teacher_logprobs_PGT=self._teacher(batch))
    return Collected(batch, rewards, scored.rows, scored.metrics, scored.host, scored.why_unscored)

  def _scored(
    self,
    drawn: StepGroups,
    greedy: Callable[[Rewards], Rewards] | None,
    index: int,
    before: HostState,
  ) -> Scored:
    chosen = drawn.chosen
    rewards = self._shaped(chosen.rewards, chosen.rollouts)
    if greedy is not None:
      rewards = greedy(rewards)
    rows = None
    every = self._config.log.completions_every
    if every and (index + 1) % every == 0:
      rows = self._rows(drawn, rewards) if self._run.hosts.is_first else []
    metrics = self._metrics(drawn.sampled)
    if self._config.sampling.temperature_schedule != "constant":
      metrics["sampling/temperature"] = float(drawn.sampled.temperature_P[0])
    metrics["prompts/tokens"] = self._prompt_tokens(drawn)
    new_tokens = metrics["prompts/tokens"] + metrics["completions/tokens"]
    host = drawn.host | {"num_tokens": before["num_tokens"] + new_tokens}
    metrics["num_tokens"] = int(host["num_tokens"])
    # A teacher teaches without rewards, and nobody teaches without tokens.
    why_unscored = "" if self._teacher else drawn.why_unscored
    completions, rollout_PB = chosen.rollouts.completions, None
    if chosen.rollouts.branches is not None:
      branches = chosen.rollouts.branches
      completions, rollout_PB = branches.completions, branches.rollout_PB
    why_unscored = why_unscored or self._why_no_tokens(completions)
    host[_UNSCORED] = np.int64(unscored_steps(drawn.host) + 1 if why_unscored else 0)
    return Scored(
      indices_P=chosen.indices_P,
      temperature_P=chosen.temperature_P,
      version_P=chosen.version_P,
      live_P=drawn.live_P,
      completions=completions,
      rewards=rewards,
      rollout_PB=rollout_PB,
      rows=rows,
      metrics=disjoint(metrics, drawn.metrics),
      host=host,
      why_unscored=why_unscored,
      prompts=drawn.prompts,
    )

  def _why_no_tokens(self, completions: Completions) -> str:
    """Why none of these completions has a token in the loss (`algo.batch.to_batch`). "" if one has.

    Groups whose scores are all equal do not matter here: the next step may have others.
    """
    sampled_PG = np.asarray(completions.sampled_PGT).any(-1)
    ended_PG = np.asarray(completions.stopped_by_PG) >= 0
    if not sampled_PG.any():
      return "the policy wrote no token of the completions"
    if self._config.algo.mask_truncated and not (sampled_PG & ended_PG).any():
      return (
        f"all {sampled_PG.sum()} completions were cut off (sampling.max_tokens is"
        f" {self._config.sampling.max_tokens}), and algo.mask_truncated leaves them out"
      )
    return ""

  def _prompts(self, indices_P: np.ndarray) -> loader.PromptBatch:
    return loader.prompt_batch(self.prompts, indices_P, self._run.hosts)

  def _prompt_tokens(self, drawn: StepGroups) -> int:
    """The tokens of the prompts that were sampled from, once for each of their completions."""
    prompts = drawn.prompts
    if drawn.sampled is not drawn.chosen:
      prompts = self._prompts(drawn.sampled.indices_P)
    return int(prompts.prompt_lengths_P.sum()) * self._config.batch.group_size

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

  def _begin_greedy(
    self, policy: Policy, prompts: loader.PromptBatch, index: int, clock: Clock
  ) -> Callable[[Rewards], Rewards]:
    """Samples each prompt's greedy completion.

    Returns:
      A function that adds their scores to the rewards of GRPO step `index`.
    """
    key = jax.random.fold_in(self._run.key("sample"), index)
    rollouts = self._greedy_rollout(policy.params, prompts, key)
    clock.lap("sample")
    score = self._score.start(rollouts, prompts)

    def add(rewards: Rewards) -> Rewards:
      greedy = self._shaped(score().rewards, rollouts)
      return rewards.replace(greedy_scores_PJ=greedy.scores_PGJ[:, 0])

    return add

  def _put(self, scored: Scored, prompts: loader.PromptBatch) -> tuple[Batch, Rewards]:
    """The batch and its rewards on the mesh.

    Groups that only fill up the batch count as not scored, so that they stay out of every mean.
    """
    live_P, completions, rewards = scored.live_P, scored.completions, scored.rewards
    is_live = live_P[:, None, None] != 0
    rewards = rewards.replace(scores_PGJ=np.where(is_live, rewards.scores_PGJ, np.float32(np.nan)))
    max_tokens = self._config.sampling.max_tokens
    of_prompts, lengths_PG = completions.prompt_experts_PSY, completions.lengths_PG
    # Those of prompts have no completion tokens, and no update reads versions.
    completions = completions.replace(prompt_experts_PSY=None, versions_PGT=None)
    completions, rewards = cut((completions, rewards), lengths_PG, max_tokens)
    completions = completions.replace(prompt_experts_PSY=of_prompts)
    tokens, platform = completions.tokens_PGT.shape[-1], self._run.parameters.model.platform
    slots = learner.slots_of_batch(completions.lengths_PG, tokens, platform)
    completions, rewards, arrays, rollout_PG = self._run.hosts.put(
      (
        completions,
        rewards,
        (prompts.prompts_PS, prompts.prompt_lengths_P, scored.temperature_P, live_P),
        scored.rollout_PB,
      )
    )
    batch = self._run.programs.to_batch(completions, *arrays)
    batch = batch.replace(slots=slots, rollout_PG=rollout_PG)
    return with_images(self._run, batch, prompts), rewards

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
