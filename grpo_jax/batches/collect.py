"""Collects the batch of a step: prompts, completions and rewards."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.algo.metrics import disjoint
from grpo_jax.batches.curriculum import PassRateCurriculum
from grpo_jax.batches.flow import DrawnGroups, Flow, VersionedParams
from grpo_jax.batches.groups import ScoredGroups, choose
from grpo_jax.batches.own_metrics import OWN_METRICS, own_metrics
from grpo_jax.batches.rollout_metrics import (
  check_metrics,
  completion_rows,
  rollout_metrics,
  score_metrics,
  source_metrics,
  turn_metrics,
  with_judgements,
)
from grpo_jax.batches.scored import Scored
from grpo_jax.data import loader
from grpo_jax.pending import Pending, there
from grpo_jax.progress import doing
from grpo_jax.rollouts.complete import Remote, make_rollout
from grpo_jax.rollouts.rollout import Rollouts, last_turns, texts_of
from grpo_jax.run.run import Run
from grpo_jax.run.seen import with_images
from grpo_jax.scoring.scorers import Scorers
from grpo_jax.scoring.scores import (
  OVERLONG,
  check_not_negative,
  groups_that_differ,
  host_scores,
  with_overlong,
)
from grpo_jax.scoring.teacher import Teacher
from grpo_jax.settings import ConfigError
from grpo_jax.timing import Clock
from grpo_jax.types import Batch, Completions, Rewards

HostState = dict[str, Any]  # nested dicts of numpy arrays
# Keys of the host state: the curriculum's memory, the number of the next group, groups that an
# earlier version of grpo_jax kept, and the results of `unscored_steps`.
_MEMORY, _NEXT, _SURPLUS = "curriculum", "next_group", "surplus"
_UNSCORED, _WHY = "unscored_steps", "why_unscored"
_MOST_CUTS, _SHORTEST_CUT = 4, 64  # the number of lengths in `cut_lengths`, and the least length


def unscored_steps(host: HostState) -> tuple[int, str]:
  """How many of the latest steps in a row had nothing to learn from, and why the last had none."""
  why = bytes(host[_WHY]).decode() if _WHY in host else ""
  return int(host.get(_UNSCORED, 0)), why


def with_unscored(host: HostState, before: HostState, why: str) -> HostState:
  """Adds the count of consecutive steps with nothing to learn from to a step's host state.

  Args:
    host: The state after the step, without the count.
    before: The state before the step.
    why: Why the step had nothing to learn from. "" if it had something.
  """
  rest = {name: value for name, value in host.items() if name not in (_UNSCORED, _WHY)}
  if not why:
    return rest | {_UNSCORED: np.int64(0)}
  count, _ = unscored_steps(before)
  return rest | {_UNSCORED: np.int64(count + 1), _WHY: np.frombuffer(why.encode(), np.uint8)}


@dataclasses.dataclass(frozen=True)
class Collected:
  """The batch that a step learns from, with its rewards, metrics and rows for the log.

  Attributes:
    batch: The batch on the mesh, without advantages and reference log-probs.
    rewards: The rewards on the mesh, including the penalty for length if it is on.
    rows: One dict per completion of the batch, as in `Scored`.
    metrics: The metrics of all sampled groups, including those that are not in the batch.
    host: The host state after the step.
    why_unscored: Why the step has nothing to learn from. "" if it has.
  """

  batch: Batch
  rewards: Rewards
  rows: list[dict[str, Any]] | None
  metrics: dict[str, float]
  host: HostState
  why_unscored: str = ""


class Collector:
  """Draws groups and forms the batches of a run from them, step by step.

  A batch is a pure function of the policies that draw it, the step's index and the host state
  before it. The host state is a dict of numpy arrays that each step updates and checkpoints save:
  counters, and the memory of the curriculum.

  Attributes:
    prompts: The training prompts.
    reward_weights: The weights of the reward functions.
    flow: Opens, plays and scores the groups.
  """

  def __init__(self, run: Run, scorers: Scorers, remote: Remote | None = None):
    """Makes the teacher, the flow of groups and the curriculum. Draws nothing yet.

    Args:
      run: The run whose prompts are drawn.
      scorers: The reward functions of training, and the models that talk to the policy.
      remote: Makes a sampler that draws in other processes. None means that the run samples itself.

    Raises:
      ConfigError: A reward function cannot be called for the prompts, or has the penalty's name.
    """
    self._run, self._config, self._score = run, run.config, scorers.training
    algo = run.config.algo
    needs_greedy = ADVANTAGES[algo.advantage].needs_greedy
    # Some advantages use the prompt's greedy completion, which a second rollout draws.
    self._greedy_rollout = None
    if needs_greedy:
      self._greedy_rollout = make_rollout(
        run, 1, greedy=True, talkers=scorers.talkers, remote=remote
      )
    # Made here, so that it raises errors before the run writes files.
    self._teacher = Teacher(run) if run.config.reward.teacher else None
    self.flow = Flow(run, scorers, remote)
    self.prompts = self.flow.prompts
    self._curriculum = PassRateCurriculum(run.config.curriculum, run.config.seed, len(self.prompts))
    self.reward_weights = self._score.weights
    self._hosts: dict[int, Pending[HostState]] = {}  # step -> the host state after it
    self._positions: dict[int, Any] = {}  # step -> the curriculum's position after its last draw
    if algo.overlong and OVERLONG in self._score.names:
      raise ConfigError(
        "reward.functions: a function is named overlong, which is the name of the penalty that"
        " algo.overlong adds; rename it, or set that to 0"
      )

  def initial_host_state(self) -> HostState:
    """The host state before a run's first GRPO step."""
    return {"num_tokens": np.int64(0)}

  def __call__(self, params: Any, index: int, host: HostState, clock: Clock) -> Collected:
    """Collects the batch of an on-policy GRPO step, whose current policy draws all groups.

    Args:
      params: The policy, as `Parameters.for_sampling` returns it.
      index: The number of the GRPO step, from 0.
      host: The host state before the step.
      clock: Measures the time of sampling and of rewards.
    """
    # Drops groups that were opened before this call, because other policies drew them.
    self.restart(index, host)
    pending = self.draw(VersionedParams(params, index), clock)
    with doing("scoring"):
      collected = self.put_on_mesh(pending.result())
    clock.lap("reward")
    return collected

  def restart(self, index: int, host: HostState) -> None:
    """Drops all groups and continues with a GRPO step, for example when a run resumes.

    Args:
      index: The number of the step, from 0.
      host: The host state before the step.
    """
    P, algo = self._config.batch.prompts, self._config.algo
    first_group = index * P
    if algo.dynamic_sampling:
      # Steps draw different numbers of groups, so the host state counts them. In an earlier version
      # of grpo_jax, all steps drew equally many, and its checkpoints have no count.
      first_group = int(host.get(_NEXT, first_group * (1 + algo.max_resample_rounds)))
    self.flow.restart(index, first_group)
    self._hosts = {index - 1: there(host)}
    self._positions = {}  # so the next draw continues from the position in `host`

  def skip(self, scored: Scored) -> None:
    """Skips the next step, because a checkpoint already has its batch, `scored`."""
    step = self.flow.step
    first = int(scored.host.get(_NEXT, self.flow.first + self._config.batch.prompts))
    self.flow.restart(step + 1, first)
    self._hosts[step] = there(scored.host)

  def draw(self, policy: VersionedParams, clock: Clock) -> Pending[Scored]:
    """Draws the batch of the next GRPO step, which workers start to score.

    Args:
      policy: The policy that draws the batch.
      clock: Measures the time of sampling and of rewards.
    """
    step, before, batch = self.flow.step, self.flow.ended, self._config.batch
    with doing("sampling", batch.prompts * batch.group_size, "completions") as work:
      while not self.flow.is_drawn:
        self.advance(policy, step)
        work.reach(self.flow.ended - before)
    clock.lap("sample")
    return self.take(policy, clock)

  def advance(self, policy: VersionedParams, until: int, limit: int | None = None) -> bool:
    """Opens groups and draws tokens for a short while.

    Args:
      policy: The weights that draw the tokens of this call.
      until: The last GRPO step for which groups may be opened.
      limit: Groups with this number and later ones are not opened. None sets no limit.

    Returns:
      Whether any sampling used the weights of `policy`.
    """
    if self._config.curriculum.chooses and self._config.algo.dynamic_sampling:
      until = self.flow.step  # the choice depends on all draws of earlier steps
    return self.flow.advance(policy, until, self._choose_prompts, limit)

  def take(self, policy: VersionedParams, clock: Clock) -> Pending[Scored]:
    """Forms the batch of the next GRPO step, whose groups are all drawn. Scores may arrive later.

    Args:
      policy: Draws greedy completions if the advantage needs them.
      clock: Measures the time of greedy completions and rewards.
    """
    index = self.flow.step
    drawn, before = self.flow.take(), self._hosts[index - 1]
    idle = self.flow.seats_idle()  # not in `scored`: when that runs, later rows may have been drawn
    add_greedy: Callable[[Rewards], Rewards] | None = None
    if self._greedy_rollout is not None:
      # This waits for scores: with dynamic sampling, they decide which prompts are learned from.
      prompts = self._groups_to_learn(drawn.result()).prompts
      add_greedy = self._begin_greedy(policy, prompts, index, clock)

    def scored() -> Scored:
      clock.restart()  # the time until scores are asked for is not spent on them
      groups = drawn.result()
      clock.lap("reward")
      formed = self._scored_batch(
        self._groups_to_learn(groups), groups, index, before.result(), add_greedy
      )
      seats = {} if np.isnan(idle) else {"rollout/seats_idle": idle}
      return dataclasses.replace(formed, metrics=formed.metrics | seats)

    pending = Pending(scored, drawn.futures)
    self._hosts[index] = pending.then(lambda scored: scored.host)
    # The curriculum reads the host states of this many steps back.
    for step in [step for step in self._hosts if step < index - self._curriculum_lag]:
      del self._hosts[step]
    return pending

  def forget(self, index: int) -> None:
    """Frees the batch of a learned step. Only the host state after the step remains."""
    if index in self._hosts:
      self._hosts[index].result()

  @property
  def _curriculum_lag(self) -> int:
    """A curriculum chooses the prompts of step k by the scores of steps up to k minus this."""
    return 1 + self._config.rollout.max_staleness

  def _choose_prompts(self, count: int, step: int) -> np.ndarray:
    """Lets the curriculum choose prompts for a GRPO step. Returns their indices, int64 [count].

    Pass rates are those after step `step - _curriculum_lag`, or after a resume perhaps the oldest
    kept ones. The position in the shuffled order continues from the newest draw for a step up to
    `step`, or if there is none since `restart`, from the newest host state.
    """
    oldest = min(self._hosts)
    memory = self._curriculum_memory(self._hosts[max(step - self._curriculum_lag, oldest)].result())
    latest = max((earlier for earlier in self._positions if earlier <= step), default=None)
    if latest is None:
      newest = self._curriculum_memory(self._hosts[max(self._hosts)].result())
      memory |= {"position": newest["position"]}
    else:
      memory |= {"position": self._positions[latest]}
    indices_P, after = self._curriculum.draw(memory, step, count)
    self._positions[step] = after["position"]
    return indices_P

  def _curriculum_memory(self, host: HostState) -> dict[str, Any]:
    """Reads the curriculum's memory. Fields that an earlier version did not save are initial."""
    memory = {**self._curriculum.initial(), **host.get(_MEMORY, {})}
    self._curriculum.check(memory)
    return memory

  def put_on_mesh(self, scored: Scored) -> Collected:
    """Puts a batch on the mesh, where the teacher, if there is one, computes its log-probs."""
    prompts = scored.prompts or self._prompts(scored.indices_P)
    batch, rewards = self._arrays_on_mesh(scored, prompts)
    if self._teacher is not None:
      batch = batch.replace(teacher_logprobs_PGT=self._teacher(batch))
    return Collected(batch, rewards, scored.rows, scored.metrics, scored.host, scored.why_unscored)

  def _groups_to_learn(self, drawn: DrawnGroups) -> "_LearnedGroups":
    """Chooses the P groups that a step learns from among the groups that were drawn for it."""
    P, chosen = self._config.batch.prompts, drawn.groups
    live_P, prompts = np.ones(P, np.float32), drawn.prompts
    if self._config.algo.dynamic_sampling:
      chosen, live_P = choose(drawn.groups, P)
      if not np.array_equal(chosen.indices_P, drawn.groups.indices_P):
        prompts = None
    return _LearnedGroups(chosen, live_P, prompts or self._prompts(chosen.indices_P))

  def _scored_batch(
    self,
    choice: "_LearnedGroups",
    drawn: DrawnGroups,
    index: int,
    before: HostState,
    add_greedy: Callable[[Rewards], Rewards] | None,
  ) -> Scored:
    """Forms the scored batch of a step, with metrics and the host state after the step.

    Args:
      choice: The groups that the step learns from.
      drawn: All groups that were drawn for the step. Metrics and the curriculum use all of them.
      index: The number of the step, from 0.
      before: The host state before the step.
      add_greedy: Called with rewards, returns them with the scores of greedy completions. None if
        the advantage does not need them.
    """
    chosen, sampled = choice.groups, drawn.groups
    rewards = self._with_length_penalty(chosen.rewards, chosen.rollouts)
    if ADVANTAGES[self._config.algo.advantage].refuses_negative:
      check_not_negative(rewards)
    if add_greedy is not None:
      rewards = add_greedy(rewards)

    scores_PG, memory_before = host_scores(sampled.rewards), self._curriculum_memory(before)
    memory = {**self._curriculum.learn(memory_before, index, sampled.indices_P, scores_PG)}
    if index in self._positions:  # the curriculum chose prompts for this step
      memory |= {"position": self._positions[index]}

    rows = None
    every = self._config.log.completions_every
    if every and (index + 1) % every == 0:
      # The rows have the pass rates before the step.
      rates_P = memory_before["pass_rate"][chosen.indices_P]
      rows = self._rows_for_log(chosen, rewards, rates_P) if self._run.hosts.is_first else []

    metrics = self._batch_metrics(sampled)
    if self._config.sampling.temperature_schedule != "constant":
      metrics["sampling/temperature"] = float(sampled.temperature_P[0])  # of the first group
    metrics["prompts/tokens"] = self._prompt_tokens(choice, sampled)
    new_tokens = metrics["prompts/tokens"] + metrics["completions/tokens"]
    host = {**before, _MEMORY: memory, "num_tokens": before["num_tokens"] + new_tokens}
    host.pop(_SURPLUS, None)  # from an earlier version of grpo_jax
    metrics["num_tokens"] = int(host["num_tokens"])
    metrics = disjoint(metrics, drawn.report.metrics(), self._curriculum.metrics(memory))
    if self._config.algo.dynamic_sampling:
      host[_NEXT] = np.int64(drawn.after)
      metrics = disjoint(metrics, _dynamic_metrics(sampled, choice.live_P))

    completions, rollout_PB = _learned_rows(chosen.rollouts)
    # With a teacher, the step learns even without rewards. Without tokens, it never learns.
    is_unscored = np.isnan(scores_PG).all() and not self._teacher
    why_unscored = "; ".join(drawn.report.unscored.values()) if is_unscored else ""
    why_unscored = why_unscored or self._why_no_tokens(completions)
    return Scored(
      indices_P=chosen.indices_P,
      temperature_P=chosen.temperature_P,
      version_P=chosen.version_P,
      live_P=choice.live_P,
      completions=completions,
      rewards=rewards,
      rollout_PB=rollout_PB,
      rows=rows,
      metrics=metrics,
      host=host,
      why_unscored=why_unscored,
      prompts=choice.prompts,
      asked=chosen.rollouts.asked,
    )

  def _why_no_tokens(self, completions: Completions) -> str:
    """Why no completion has a token in the loss (`algo.batch.to_batch`). "" if one has.

    Groups with equal scores teach nothing either. They do not count here, because the scores of
    the next step may differ.
    """
    sampled_PG = np.asarray(completions.sampled_PGT).any(-1)
    ended_PG = np.asarray(completions.stopped_by_PG) >= 0  # -1: cut off
    if not sampled_PG.any():  # for example because the texts of tools fill all completions
      return "the policy wrote no token of the completions"
    if self._config.algo.mask_truncated and not (sampled_PG & ended_PG).any():
      return (
        f"all {sampled_PG.sum()} completions were cut off (sampling.max_tokens is"
        f" {self._config.sampling.max_tokens}), and algo.mask_truncated leaves them out"
      )
    return ""

  def _prompts(self, indices_P: np.ndarray) -> loader.PromptBatch:
    return loader.prompt_batch(self.prompts, indices_P, self._run.hosts)

  def _prompt_tokens(self, choice: "_LearnedGroups", sampled: ScoredGroups) -> int:
    """The number of prompt tokens of all sampled completions. Each completion counts its prompt."""
    if sampled.rollouts.asked is not None:
      return int(sampled.rollouts.asked.lengths_P.sum()) * self._config.batch.group_size
    prompts = choice.prompts
    if sampled is not choice.groups:
      prompts = self._prompts(sampled.indices_P)
    return int(prompts.prompt_lengths_P.sum()) * self._config.batch.group_size

  @property
  def _score_names(self) -> list[str]:
    """The names of the scores in `Rewards`, including the penalty for length if it is on."""
    penalty = [OVERLONG] if self._config.algo.overlong else []
    return [*self._score.names, *penalty]

  def _rows_for_log(
    self, groups: ScoredGroups, rewards: Rewards, rates_P: np.ndarray
  ) -> list[dict[str, Any]]:
    """One dict per completion for completions/. `rates_P` are the pass rates before the step."""
    rollouts, decode = groups.rollouts, self._run.tokenizer.decode
    prompts = self.prompts.make(groups.indices_P)
    if rollouts.asked is not None:  # a harness may have changed the prompts
      prompts = [
        dataclasses.replace(prompt, text=decode(ids), ids=ids) if ids != prompt.ids else prompt
        for prompt, ids in zip(prompts, rollouts.asked.ids, strict=True)
      ]
    rows = completion_rows(
      self._with_all_texts(rollouts),
      prompts,
      host_scores(groups.rewards),
      rewards.scores_PGJ,
      self._score_names,
      groups.extras_PG,
    )
    rows = with_judgements(rows, rates_P, groups.checks_PG)
    versions = groups.version_P.repeat(self._config.batch.group_size).tolist()
    return [row | {"version": version} for row, version in zip(rows, versions, strict=True)]

  def _with_length_penalty(self, rewards: Rewards, rollouts: Rollouts) -> Rewards:
    """Adds the penalty for length to the rewards if it is on."""
    fraction = self._config.algo.overlong
    if not fraction:
      return rewards
    max_tokens = self._config.sampling.max_tokens
    return with_overlong(rewards, rollouts.completions, max_tokens, fraction)

  def _begin_greedy(
    self, policy: VersionedParams, prompts: loader.PromptBatch, index: int, clock: Clock
  ) -> Callable[[Rewards], Rewards]:
    """Samples the greedy completion of each prompt for GRPO step `index`, and starts to score it.

    Returns:
      A function that waits for the scores and adds them to the rewards of the batch.
    """
    key = jax.random.fold_in(self._run.key("sample"), index)  # greedy rows do not use it
    rollouts = self._greedy_rollout(policy.params, prompts, key)
    clock.lap("sample")
    scores = self._score.start(rollouts, prompts)

    def add(rewards: Rewards) -> Rewards:
      greedy = self._with_length_penalty(scores.result().rewards, rollouts)
      return rewards.replace(greedy_scores_PJ=greedy.scores_PGJ[:, 0])  # G is 1

    return add

  def _arrays_on_mesh(self, scored: Scored, prompts: loader.PromptBatch) -> tuple[Batch, Rewards]:
    """Puts the batch and its rewards on the mesh.

    Groups that only fill the batch get no scores (NaN), so that every mean ignores them.
    """
    live_P, completions, rewards = scored.live_P, scored.completions, scored.rewards
    prompts_PS, prompt_lengths_P = prompts.prompts_PS, prompts.prompt_lengths_P
    if scored.asked is not None:  # a harness may have changed the prompts
      width = prompts_PS.shape[1]
      prompts_PS, prompt_lengths_P = scored.asked.prompts_PS, scored.asked.lengths_P
      if prompt_lengths_P.max() <= width:  # drop padding, which would cost as much as tokens
        prompts_PS = prompts_PS[:, :width]
    is_live = live_P[:, None, None] != 0
    rewards = rewards.replace(scores_PGJ=np.where(is_live, rewards.scores_PGJ, np.float32(np.nan)))
    max_tokens = self._config.sampling.max_tokens
    prompt_experts_PSY, lengths_PG = completions.prompt_experts_PSY, completions.lengths_PG
    # Not cut: the experts of prompts have no axis T, but Y may equal T. No update reads versions.
    completions = completions.replace(prompt_experts_PSY=None, versions_PGT=None)
    completions, rewards = cut((completions, rewards), lengths_PG, max_tokens)
    completions = completions.replace(prompt_experts_PSY=prompt_experts_PSY)
    completions, rewards, arrays, rollout_PG = self._run.hosts.put(
      (
        completions,
        rewards,
        (prompts_PS, prompt_lengths_P, scored.temperature_P, live_P),
        scored.rollout_PB,
      )
    )
    batch = self._run.programs.to_batch(completions, *arrays)
    batch = batch.replace(rollout_PG=rollout_PG)
    return with_images(self._run, batch, prompts), rewards

  def _batch_metrics(self, sampled: ScoredGroups) -> dict[str, float]:
    """The metrics of all sampled groups, including those that a user registered."""
    completions = sampled.rollouts.completions
    metrics = rollout_metrics(completions, sampled.rewards, self._score.names)
    source_P = self.prompts.sources_of(sampled.indices_P)
    metrics |= source_metrics(sampled.rewards, source_P, self.prompts.sources)
    metrics |= check_metrics(host_scores(sampled.rewards), sampled.checks_PG)
    if sampled.rollouts.turns_PG is not None:
      metrics |= turn_metrics(sampled.rollouts.turns_PG)
    if self._config.algo.overlong:
      shaped = self._with_length_penalty(sampled.rewards, sampled.rollouts)
      metrics |= score_metrics(shaped, self._score_names)
    if not OWN_METRICS:
      return metrics
    rollouts = self._with_all_texts(sampled.rollouts)
    return disjoint(metrics, own_metrics(rollouts, host_scores(sampled.rewards)))

  def _with_all_texts(self, rollouts: Rollouts) -> Rollouts:
    """The rollouts with the texts of all rows, not only of the rows that this process scores."""
    texts_PG = texts_of(rollouts.completions, self._run.tokenizer.decode)
    if rollouts.turns_PG is not None:
      texts_PG = last_turns(rollouts.turns_PG, otherwise_PG=texts_PG)
    return rollouts.replace(texts_PG=texts_PG)


class _LearnedGroups(NamedTuple):
  """The groups that a step learns from.

  Attributes:
    groups: P groups.
    live_P: float32, 0 for groups that only fill the batch, else 1.
    prompts: The prompts of the groups.
  """

  groups: ScoredGroups
  live_P: np.ndarray
  prompts: loader.PromptBatch


def _learned_rows(rollouts: Rollouts) -> tuple[Completions, np.ndarray | None]:
  """The rows that an update learns from, and with branches the rollout of each row, else None.

  A program that calls the policy may split a rollout into several branches. The update then learns
  from the branches instead of the rollout.
  """
  branches = rollouts.branches
  if branches is None:
    return rollouts.completions, None
  return branches.completions, branches.rollout_PB


def _dynamic_metrics(sampled: ScoredGroups, live_P: np.ndarray) -> dict[str, float]:
  differ = groups_that_differ(sampled.rewards)
  return {
    "dynamic_sampling/drawn": len(differ),
    "dynamic_sampling/kept": int(live_P.sum()),
    "dynamic_sampling/dropped": int((~differ).sum()),  # all rewards equal
  }


def cut_lengths(max_tokens: int) -> list[int]:
  """The lengths to which completions are cut, ascending. Each is about double the previous one.

  There are at most four, because the programs of a step are compiled for each length.
  """
  sizes = [max_tokens]
  while len(sizes) < _MOST_CUTS and sizes[-1] // 2 >= _SHORTEST_CUT:
    sizes.append(-(-sizes[-1] // 2))
  return sizes[::-1]


def cut(tree: Any, lengths_PG: np.ndarray, max_tokens: int) -> Any:
  """Cuts the axis T of arrays [P, G, T] and [P, G, T, Y] to a length that holds every completion.

  It is the shortest one of `cut_lengths`.

  Args:
    tree: Arrays on the host. Arrays of other shapes stay unchanged.
    lengths_PG: How many tokens each completion has.
    max_tokens: T, the padded length.
  """
  longest = max(1, int(lengths_PG.max()))
  size = next(size for size in cut_lengths(max_tokens) if size >= longest)

  def cut_array(x: Any) -> Any:
    has_tokens = np.ndim(x) in (3, 4) and x.shape[2] == max_tokens
    return x[:, :, :size] if has_tokens else x

  return jax.tree.map(cut_array, tree)
