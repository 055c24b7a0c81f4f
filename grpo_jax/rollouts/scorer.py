"""Calls a run's reward functions for rollouts, and counts what failed."""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
from pathlib import Path
import sys
from typing import Any, NamedTuple

from flax import struct
import numpy as np

from grpo_jax import rewards as rewards_lib
from grpo_jax.algo.advantages import ADVANTAGES
from grpo_jax.data.loader import PromptBatch, prompt_batch
from grpo_jax.data.prompts import Prompts
from grpo_jax.model.huggingface import hub
from grpo_jax.parallel.cores import cores
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.programs.run import Run
from grpo_jax.rewards import dispatch, resolve, resolve_all
from grpo_jax.rewards.dispatch import FIRST_OF_TASK
from grpo_jax.rollouts.reward_model import RewardModel
from grpo_jax.rollouts.rollout import Rollouts, sampled_ids, take
from grpo_jax.rollouts.scoring import DecodeText, steps_on_tokens
from grpo_jax.types import Rewards

_KINDS = {"error": "errors", "timeout": "timeouts", "crash": "crashes"}  # of failures


@dataclasses.dataclass(frozen=True)
class Report:
  """What happened while completions were scored, on all processes. Reports can be added.

  Attributes:
    failed: How many completions have no reward for a reason, by metric.
    logged: The sum and the number of the values that functions gave to log_metric, by name.
  """

  failed: dict[str, int] = dataclasses.field(default_factory=dict)
  logged: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)

  def __add__(self, other: "Report") -> "Report":
    failed, logged = dict(self.failed), dict(self.logged)
    for name, count in other.failed.items():
      failed[name] = failed.get(name, 0) + count
    for name, (total, count) in other.logged.items():
      before, count_before = logged.get(name, (0.0, 0))
      logged[name] = before + total, count_before + count
    return Report(failed, logged)

  def metrics(self) -> dict[str, float]:
    """The counts, and the means of what was logged."""
    means = {name: total / count for name, (total, count) in self.logged.items()}
    return means | {name: float(count) for name, count in self.failed.items()}


class Scored(struct.PyTreeNode):
  """The rewards of P groups.

  Attributes:
    rewards: As numpy arrays, the same on every process.
    extras_PG: object array of dicts: what functions gave to log_extra, by column.
    report: What happened.
  """

  rewards: Rewards
  extras_PG: np.ndarray
  report: Report = struct.field(pytree_node=False, default=Report())


class _Place(NamedTuple):
  """Where the rows of a process lie in a batch of groups, for messages."""

  step: int
  first_prompt: int
  group_size: int


class Weighted(NamedTuple):
  """A reward function of a run.

  Attributes:
    function: The function.
    weight: Its weight in the sum.
    tasks: The tasks that it is for, as an entry of reward.tasks. "" means all.
  """

  function: rewards_lib.Reward
  weight: float = 1.0
  tasks: str = ""


class Scorer:
  """Scores rollouts with a run's reward functions. All processes call it together.

  A function gets the completions of whole groups, but only those of its own process.

  Attributes:
    names: The names under which the J functions report.
    weights: The weight of each function.
  """

  def __init__(
    self,
    functions: Sequence[Weighted],
    hosts: Hosts,
    decode_text: DecodeText,
    caller: rewards_lib.Caller,
    needs_steps: bool = False,
  ):
    """Takes the functions.

    Args:
      functions: The reward functions.
      hosts: The processes that score.
      decode_text: Makes a text from token ids.
      caller: What calls the functions.
      needs_steps: Whether the advantage reads the rewards of steps, placed on tokens.
    """
    self._functions = [one.function for one in functions]
    self.names = [rewards_lib.name_of(function) for function in self._functions]
    self.weights = tuple(one.weight for one in functions)
    self._hosts = hosts
    self._decode_text = decode_text
    self._caller = caller
    self._needs_steps = needs_steps
    self._tasks = [one.tasks for one in functions]

  def check_arguments(self, prompts: Prompts, key: str) -> None:
    """Raises ConfigError unless the functions that `key` names can be called for these prompts."""
    first = prompt_batch(prompts, np.zeros(1, int))
    columns = ["completions", "completion_ids", *first.columns]
    for function, name in zip(self._functions, self.names):
      rewards_lib.check_arguments(function, name, key, columns)

  def __call__(self, rollouts: Rollouts, prompts: PromptBatch, step: int = 0) -> Scored:
    """The scores of rollouts. Each process scores its own prompts."""
    return self.start(rollouts, prompts, step)()

  def start(self, rollouts: Rollouts, prompts: PromptBatch, step: int = 0) -> Callable[[], Scored]:
    """Lets the workers begin.

    Returns:
      A function that waits for them, calls the functions that no worker calls, and returns the
      scores. All processes call it together.
    """
    own = take(rollouts, prompts.own)
    columns = completion_columns(own, prompts)
    place = _Place(step, prompts.own.start, own.texts_PG.shape[1])
    functions = list(zip(self._functions, self._tasks, strict=True))
    answer = dispatch.start_for_tasks(self._caller, functions, columns, step, place.group_size)

    def finish() -> Scored:
      answers = {}
      # The workers compute meanwhile, so what they compute comes last.
      for function in sorted(self._functions, key=self._caller.uses_workers):
        answers[rewards_lib.name_of(function)] = self._hosts.on_each(lambda f=function: answer(f))
      return self._scored(own, {name: answers[name] for name in self.names}, place)

    return finish

  def _scored(
    self, own: Rollouts, answers: Mapping[str, rewards_lib.Answer], place: _Place
  ) -> Scored:
    """The scores of all processes, from the answers for the rows of this one."""
    scores = self._hosts.on_each(lambda: rewards_lib.scores_of(answers, self.weights))
    P, G = own.texts_PG.shape
    scores_PGJ = np.stack(list(scores.values()), -1).reshape(P, G, -1)
    on_tokens = None, None
    if self._needs_steps:
      steps = [answer.steps for answer in answers.values()]
      on_tokens = steps_on_tokens(own, steps, self.weights, self._decode_text)
    scores_PGJ, (rewards_PGT, ends_PGT) = self._hosts.join_rows((scores_PGJ, on_tokens))
    rewards = Rewards(
      scores_PGJ=scores_PGJ,
      weights=self.weights,
      step_rewards_PGT=rewards_PGT,
      step_ends_PGT=ends_PGT,
    )
    return Scored(rewards, self._extras(answers, P, G), self._report(answers, place))

  def _extras(self, answers: Mapping[str, rewards_lib.Answer], P: int, G: int) -> np.ndarray:
    """What log_extra got, of all processes."""
    rows: list[dict[str, Any]] = [{} for _ in range(P * G)]
    for answer in answers.values():
      for column, values in answer.extras.items():
        for row, value in zip(rows, values, strict=True):
          row[column] = value
    has_some = self._hosts.any_process(any(answer.extras for answer in answers.values()))
    if has_some:
      rows = [json.loads(line) for line in self._hosts.join_lines([*map(json.dumps, rows)])]
    else:
      rows = [{} for _ in range(int(self._hosts.join_rows(np.ones(P * G, np.int32)).sum()))]
    extras_N = np.empty(len(rows), object)
    extras_N[:] = rows
    return extras_N.reshape(-1, G)

  def _report(self, answers: Mapping[str, rewards_lib.Answer], place: _Place) -> Report:
    """Counts failures, of all processes, and says the first one of each function on stderr."""
    counts: dict[str, int] = {}
    logged: dict[str, tuple[float, int]] = {}
    for function, (name, answer) in zip(self._functions, answers.items(), strict=True):
      kinds = list(_KINDS) if self._caller.uses_workers(function) else []
      kinds += [] if self._caller.stops_on_error or kinds else ["error"]
      for kind in kinds:
        failed = sum(failure.kind == kind for failure in answer.failures)
        counts[f"rewards/{name}/{_KINDS[kind]}"] = failed
      if answer.failures:
        print(_warning(name, answer, place), file=sys.stderr, flush=True)
      for metric, value in answer.metrics:
        total, count = logged.get(metric, (0.0, 0))
        logged[metric] = total + value, count + 1
    reports = [
      Report(*json.loads(line)) for line in self._hosts.join_lines([json.dumps([counts, logged])])
    ]
    return sum(reports, Report())


def _warning(name: str, answer: rewards_lib.Answer, place: _Place) -> str:
  """A line that names the first completion without a reward, and why it has none."""
  first = answer.failures[0]
  p, g = divmod(first.row, place.group_size)
  kinds = collections.Counter(failure.kind for failure in answer.failures)
  counted = ", ".join(f"{_KINDS[kind]}: {count}" for kind, count in sorted(kinds.items()))
  return (
    f"warning: step {place.step}: {len(answer.failures)} of {len(answer.steps)} completions have no"
    f" reward of {name} ({counted}). The first is completion {g} of prompt"
    f" {place.first_prompt + p}: {first.text}"
  )


class Scorers:
  """The reward functions of a run, for training and for evaluation, and what calls them.

  Attributes:
    remarks: What a user should know of the functions.
  """

  def __init__(self, run: Run):
    """Makes what calls them. All processes make theirs together."""
    self._run, self._config = run, run.config
    reward = run.config.reward
    count = cores(run.hosts) if reward.workers < 0 else reward.workers
    pool = rewards_lib.Pool(count, reward.timeout, reward.memory) if count else None
    self._caller = rewards_lib.Caller(pool, stops_on_error=reward.on_error == "stop")
    self.remarks: tuple[str, ...] = ()

  @functools.cached_property
  def training(self) -> Scorer:
    """The functions of training. Raises ConfigError for functions that cannot be used."""
    reward = self._config.reward
    found = resolve_all(reward.functions, self._reward_model, is_reward_model)
    tasks = reward.tasks or [""] * len(found)
    functions = [Weighted(*one) for one in zip(found, reward.weights, tasks, strict=True)]
    needs_steps = ADVANTAGES[self._config.algo.advantage].needs_steps
    return self._scorer(reward.functions, functions, needs_steps)

  @functools.cached_property
  def evaluation(self) -> Scorer:
    """What decides in evaluation: one function, or those of reward.tasks for their tasks."""
    name = self._config.eval.function
    if name == FIRST_OF_TASK:
      return self.training
    return self._scorer([name], [Weighted(resolve(name, "eval.function", is_reward_model))])

  def close(self) -> None:
    """Ends the workers that call reward functions."""
    self._caller.close()

  def _scorer(
    self, names: Sequence[str], functions: Sequence[Weighted], needs_steps: bool = False
  ) -> Scorer:
    run, by_name = self._run, dict(zip(names, [one.function for one in functions]))
    self.remarks += run.hosts.on_each(lambda: self._caller.add(by_name))
    return Scorer(functions, run.hosts, run.tokenizer.decode, self._caller, needs_steps)

  def _reward_model(self, path: str) -> RewardModel:
    reward, hosts = self._config.reward, self._run.hosts
    hosts.check_rows({"reward.batch": reward.batch})
    dtype = reward.dtype or self._config.model.dtype
    scorer = RewardModel(path, dataclasses.replace(reward, dtype=dtype), hosts)
    if self._config.data.chat:
      scorer.check_conversations()
    return scorer


def is_reward_model(name: str) -> bool:
  """Whether a reward's name is that of a model: on huggingface.co, or of a folder here."""
  folder = Path(name).expanduser()
  return hub.is_name(name) or (folder / "config.json").is_file()


def completion_columns(rollouts: Rollouts, prompts: PromptBatch) -> dict[str, list]:
  """What reward functions are called with: a value for each of the completions.

  Args:
    rollouts: The completions of the prompts that this process scores.
    prompts: The batch, whose columns hold these prompts.
  """
  P, G = rollouts.texts_PG.shape
  columns = {
    name: [value for value in values for _ in range(G)] for name, values in prompts.columns.items()
  }
  columns["completions"] = list(rollouts.texts_PG.ravel())
  columns["completion_ids"] = [
    sampled_ids(rollouts.completions, p, g) for p in range(P) for g in range(G)
  ]
  return columns
