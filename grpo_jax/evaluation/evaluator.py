"""Held-out accuracy of a policy: greedy, mean@k, unbiased pass@k and maj@k, with 95% intervals."""

from collections.abc import Sequence
import dataclasses
import functools
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.config import Eval
from grpo_jax.data.loader import PromptBatch, prompt_batch
from grpo_jax.data.tasks.exams import Entry, entries_of
from grpo_jax.data.tasks.mixture import mixture_of
from grpo_jax.evaluation import estimators
from grpo_jax.pending import Pending, there
from grpo_jax.progress import doing
from grpo_jax.rollouts.complete import Completer, Remote, make_rollout
from grpo_jax.rollouts.rollout import Rollouts
from grpo_jax.run.run import Run
from grpo_jax.scoring.scorer import Scores
from grpo_jax.scoring.scorers import Scorers


@dataclasses.dataclass(frozen=True)
class Outcomes:
  """The results of G completions of each of N problems.

  Attributes:
    right_NG: bool, whether each completion is right.
    lengths_NG: int32, how many tokens the policy sampled.
    cut_off_NG: bool, whether a token limit cut the completion off.
    majority_N: float32, the chance that a majority vote over the completions is right. NaN if the
      reward function does not report which answer it reads.
  """

  right_NG: np.ndarray
  lengths_NG: np.ndarray
  cut_off_NG: np.ndarray
  majority_N: np.ndarray


class _Given(NamedTuple):
  """The arguments of an evaluation: the policy, the root of its random numbers, and the step."""

  params: Any
  key: jax.Array
  step: int


class Evaluator:
  """Evaluates policies: `evaluator(params, step) -> metrics`. Compiles its programs only once.

  Attributes:
    name: The name of the exam. "" for the test split of the data.
    prompts: The test problems whose prompts are not too long.
    config: The section `eval` of the config.
    max_tokens: The token limit of a completion.
  """

  def __init__(
    self, run: Run, scorers: Scorers, exam: Entry | None = None, remote: Remote | None = None
  ):
    """Prepares the evaluation of the test split of the run's data, or of an exam.

    Args:
      run: The run.
      scorers: The run's reward functions.
      exam: The exam. None means the test split.
      remote: Makes a sampler in other processes. None means that the run samples.

    Raises:
      ConfigError: The evaluation is impossible with this config.
    """
    key = "eval.function"  # the config key that errors name
    if exam is None:
      self.name, self.prompts = "", run.prompts("test")
      self._score = scorers.evaluation
    else:
      self.name, key = exam.name, f"eval.tasks: {exam.name}"
      run, self.prompts = run.with_exam(exam)
      self._score = scorers.deciding(run.config.eval.function, key)
    self._run, self.config = run, run.config.eval
    self.max_tokens = run.config.sampling.max_tokens
    run.hosts.check_rows({"eval.batch": self.config.batch})
    self._score.check_arguments(self.prompts, key)
    self._tasks: list[str] = []  # the task of each problem. Empty if rewards do not depend on it.
    if "task" in self.prompts.fields and (mixture_of(run.config.data) or run.config.reward.tasks):
      self._tasks = [str(self.prompts.example(i)["task"]) for i in range(len(self.prompts))]
    samples, at_once = self.config.samples, self.config.batch
    # Where no task is recorded, it is "", which only functions for all tasks score.
    self._has_votes = samples > 0 and self._score.has_votes({*self._tasks} or {""})
    if samples and not self._has_votes and run.hosts.is_first:
      print(
        f"{key}: maj@{samples} is left out, because {', '.join(self._score.names)} does not"
        " say which answer it reads: give it the mark answer_of (docs/rewards.md)",
        file=sys.stderr,
        flush=True,
      )
    # The tools and environments that answer the policy. Exams have none.
    talkers = scorers.talkers if run.environments else None
    make = functools.partial(make_rollout, run, at_once=at_once, talkers=talkers, remote=remote)
    self._greedy = make(1, greedy=True)
    self._sampled = make(samples) if samples else None
    self._is_compiled = False

  def __call__(self, params: Any, step: int) -> dict[str, float]:
    """Returns the metrics of a policy, named eval/METRIC, or eval/EXAM/METRIC for an exam.

    Args:
      params: The policy, as `Parameters.for_sampling` returns it.
      step: The number of the step. It seeds the draws.
    """
    key = jax.random.fold_in(self._run.key("evaluate"), step)
    given = _Given(params, key, step)
    greedy = self._outcomes(self._greedy, 1, given)
    metrics = accuracies(greedy.right_NG[:, 0], self._tasks)
    metrics["eval/mean_length"] = float(greedy.lengths_NG.mean())
    metrics["eval/clipped_ratio"] = float(greedy.cut_off_NG.mean())
    if self._sampled is not None:
      draws = self._outcomes(self._sampled, self.config.samples, given)
      metrics |= sample_metrics(draws, self.config.samples, self._tasks)
    self._is_compiled = True
    return {of_exam(self.name, name): value for name, value in metrics.items()}

  def _outcomes(self, rollout: Completer, samples: int, given: _Given) -> Outcomes:
    """Completes every problem `samples` times. Workers score finished problems meanwhile.

    The mesh needs a multiple of its row shards, so the first problems may come twice: with 5
    problems and 4 shards, `indices` is 0 1 2 3 4 0 1 2. The copies are dropped at the end.
    """
    total, shards = len(self.prompts), self._run.hosts.row_shards
    indices = np.arange(-(-total // shards) * shards) % total
    # The places in `indices` of the problems in `pending`, in the order in which problems end.
    numbers, pending = list[int](), list[Pending[Outcomes]]()
    prompts = prompt_batch(self.prompts, indices, self._run.hosts)
    arguments = given.params, prompts, given.key, self.config.temperature
    unit = "problems" if samples == 1 else "draws"
    what = f"evaluating {self.name}".strip()
    with doing(what, samples * total, unit, is_routine=self._is_compiled) as work:
      for ended_numbers, rollouts in rollout.parts(*arguments, on_ended=work.reach):
        batch = prompt_batch(self.prompts, indices[ended_numbers], self._run.hosts)
        pending.append(self._start(rollouts, batch, given.step))
        numbers.extend(ended_numbers)
      outcomes = [dataclasses.astuple(one.result()) for one in pending]
    # Back into the order of the problems, without the copies, which have the last numbers.
    order = np.argsort(numbers)[:total]
    return Outcomes(*(np.concatenate(arrays)[order] for arrays in zip(*outcomes)))

  def _start(self, rollouts: Rollouts, prompts: PromptBatch, step: int) -> Pending[Outcomes]:
    """Lets the workers score some problems, and vote if each has several completions."""
    scores = self._score.start(rollouts, prompts, step)
    votes: Pending[np.ndarray | None] = there(None)
    if self._has_votes and rollouts.texts_PG.shape[1] > 1:
      votes = self._score.start_votes(rollouts, prompts, step)
    return Pending(
      lambda: self._outcomes_of(rollouts, prompts, scores.result(), votes.result()),
      [*scores.futures, *votes.futures],
    )

  def _outcomes_of(
    self, rollouts: Rollouts, prompts: PromptBatch, scores: Scores, votes_PGJ: np.ndarray | None
  ) -> Outcomes:
    """Builds the outcomes of the problems of all processes.

    `scores` cover all of these, `votes_PGJ` only the problems `prompts.own` of this process. So
    each process computes the majorities of its problems, and `join_rows` collects them.
    """
    scores_PGJ = scores.rewards.scores_PGJ
    right_PG = first_scores(scores_PGJ) == 1
    right_here = right_PG[prompts.own]
    majority_here = right_here.mean(1, dtype=np.float32)  # for groups of one completion
    if votes_PGJ is not None:
      votes = first_scores(scores_PGJ[prompts.own], votes_PGJ)
      majority_here = majority_right(votes, right_here)
    if not self._has_votes:  # NaN leaves maj@k out of the metrics
      majority_here = np.full_like(majority_here, np.nan)
    return Outcomes(
      right_NG=right_PG,
      lengths_NG=rollouts.completions.sampled_PGT.sum(-1, dtype=np.int32),
      cut_off_NG=rollouts.completions.stopped_by_PG < 0,
      majority_N=self._run.hosts.join_rows(majority_here),
    )


def accuracies(right_N: np.ndarray, tasks: Sequence[str]) -> dict[str, float]:
  """Returns the share of right answers with its interval: eval/accuracy and eval/accuracy/TASK.

  Args:
    right_N: bool, whether the answer to each problem is right.
    tasks: The task of each problem. Empty adds no metrics of tasks.
  """
  metrics = named("accuracy", estimators.proportion(int(right_N.sum()), len(right_N)))
  for task in dict.fromkeys(tasks):
    of_task = right_N[np.array(tasks) == task]
    metrics |= named(f"accuracy/{task}", estimators.proportion(int(of_task.sum()), len(of_task)))
  return metrics


def first_scores(scores_PGJ: np.ndarray, values_PGJ: np.ndarray | None = None) -> np.ndarray:
  """Selects, for each completion, the value of the first function that scored it, [P, G].

  Args:
    scores_PGJ: The scores. NaN where function j did not score the completion.
    values_PGJ: The values to select from. None selects scores: NaN where no function scored.
  """
  values_PGJ = scores_PGJ if values_PGJ is None else values_PGJ
  first_PG1 = np.argmax(~np.isnan(scores_PGJ), axis=-1, keepdims=True)
  return np.take_along_axis(values_PGJ, first_PG1, axis=-1)[..., 0]


def majority_right(votes_PG: np.ndarray, right_PG: np.ndarray) -> np.ndarray:
  """Returns the chance that a majority vote over G completions is right, float32 [P].

  Args:
    votes_PG: Numbers, equal within a problem where the answers are equal. NaN is no vote.
    right_PG: bool, whether each completion is right.
  """
  chances = [
    estimators.majority([None if np.isnan(vote) else float(vote) for vote in votes], right)
    for votes, right in zip(votes_PG, right_PG)
  ]
  return np.array(chances, np.float32)


def sample_metrics(draws: Outcomes, samples: int, tasks: Sequence[str] = ()) -> dict[str, float]:
  """Returns mean@k, pass@k for k and smaller powers of two, and maj@k if votes are known.

  Args:
    draws: The outcomes, with k completions per problem.
    samples: k.
    tasks: The task of each problem, for mean@k/TASK and maj@k/TASK. Empty adds no such metrics.
  """
  right_N = draws.right_NG.sum(1)
  metrics = _means(f"mean@{samples}", draws.right_NG.mean(1), tasks)
  # Not for k = 1: pass@1 is mean@k.
  powers = [2**i for i in range(1, samples.bit_length()) if 2**i < samples]
  last = [samples] if samples > 1 else []
  for k in powers + last:
    passed_N = estimators.unbiased_pass_at_k(right_N, samples, k)
    metrics |= named(f"pass@{k}", estimators.mean(passed_N))
  if np.isnan(draws.majority_N).any():
    return metrics
  return metrics | _means(f"maj@{samples}", draws.majority_N.astype(float), tasks)


def _means(name: str, values_N: np.ndarray, tasks: Sequence[str]) -> dict[str, float]:
  """Returns the mean over all problems as eval/NAME, and over each task's as eval/NAME/TASK."""
  metrics = named(name, estimators.mean(values_N))
  for task in dict.fromkeys(tasks):
    metrics |= named(f"{name}/{task}", estimators.mean(values_N[np.array(tasks) == task]))
  return metrics


def named(name: str, estimate: estimators.Estimate) -> dict[str, float]:
  """Returns an estimate as the metrics eval/NAME, eval/NAME_low and eval/NAME_high."""
  value, low, high = estimate
  return {f"eval/{name}": value, f"eval/{name}_low": low, f"eval/{name}_high": high}


def of_exam(exam: str, name: str) -> str:
  """Returns a metric's name for an exam: eval/EXAM/accuracy for eval/accuracy. "" is no exam."""
  return name.replace("eval/", f"eval/{exam}/", 1) if exam else name


class Evaluators:
  """The evaluations of a run: its test split, and the exams of eval.tasks.

  Attributes:
    parts: The evaluators, the test split first.
  """

  def __init__(
    self, run: Run, scorers: Scorers, only_exams: bool = False, remote: Remote | None = None
  ):
    """Prepares the evaluations.

    Args:
      run: The run.
      scorers: The run's reward functions.
      only_exams: Whether to skip the test split. It is also skipped if there are exams and the data
        has no test split.
      remote: Makes a sampler in other processes. None means that the run samples.

    Raises:
      ConfigError: An evaluation is impossible with this config.
    """
    entries = entries_of(run.config.eval.tasks)
    has_test = not only_exams and (not entries or len(run.task.test) > 0)
    self.parts = [Evaluator(run, scorers, None, remote)] if has_test else []
    self.parts += [Evaluator(run, scorers, entry, remote) for entry in entries]

  def __call__(self, params: Any, step: int) -> dict[str, float]:
    """Runs all evaluations and returns their metrics. The arguments are those of `Evaluator`."""
    metrics: dict[str, float] = {}
    for evaluate in self.parts:
      metrics |= evaluate(params, step)
    return metrics


def table(metrics: dict[str, float], config: Eval, max_tokens: int, exam: str = "") -> list[str]:
  """Formats an evaluation's metrics as lines of text. `exam` names an exam, "" the test split."""
  measured = [name for name in metrics if f"{name}_low" in metrics]  # those with an interval
  width = max(14, *(len(name) + 1 for name in measured))  # 14: eval/accuracy and a space
  greedy, draws = list[str](), list[str]()
  for name in measured:  # accuracies, also of tasks, are of the greedy completions
    low, high = metrics[f"{name}_low"], metrics[f"{name}_high"]
    line = f"  {name:{width}}{metrics[name]:7.1%}   95% interval {low:6.1%} to {high:6.1%}"
    (greedy if name.startswith(of_exam(exam, "eval/accuracy")) else draws).append(line)
  length, cut_off = (
    metrics[of_exam(exam, name)] for name in ("eval/mean_length", "eval/clipped_ratio")
  )
  lines = [
    f"greedy: {length:.1f} tokens on average, {cut_off:.1%} cut off at {max_tokens}",
    *greedy,
  ]
  if config.samples:
    lines.append(f"{config.samples} draws of each at temperature {config.temperature:g}:")
  return lines + draws
