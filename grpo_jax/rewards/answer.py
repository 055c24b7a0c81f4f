"""Checks what reward functions return for N completions, and holds the checked rewards."""

from collections.abc import Iterable, Mapping, Sequence, Set
import dataclasses
import json
import math
from typing import Any

import numpy as np

from grpo_jax.foreign import text_of
from grpo_jax.settings import RunFailed, shown

# The largest absolute reward. A variance sums squares over a batch: such sums still fit in float32.
LARGEST = 1e15

# The keys of a row of metrics.jsonl, or of log.console=json, that are not metrics.
_COLUMNS_OF_A_ROW = ("step", "time", "event")

# The steps of one completion, as pairs (number of characters before the end of the step, reward).
Steps = list[tuple[int, float]]


class RewardError(RunFailed):
  """A reward function failed, or returned something that is not a reward."""


class ContractError(RewardError):
  """A reward function did not return a list with one entry for each completion."""


@dataclasses.dataclass(frozen=True)
class NoReward:
  """An entry that a function returns instead of None to say why a completion has no reward.

  Unlike an exception, it never stops a run.

  Attributes:
    reason: The text of the `Failure` of this completion, after the name of the function.
  """

  reason: str


@dataclasses.dataclass(frozen=True)
class Failure:
  """Why a completion has no reward.

  Attributes:
    row: The index of the completion in the call.
    kind: "error" if the function raised an exception or returned an invalid value, "timeout",
      "crash", or "missing" for a `NoReward`.
    text: The reason, as one line that names the function.
  """

  row: int
  kind: str
  text: str


@dataclasses.dataclass(frozen=True)
class Answer:
  """The rewards of N completions by one function, and the values that the function logged.

  Attributes:
    steps: The steps of each completion. A score for the whole completion is a single step that ends
      where the completion ends. For None or NaN the list of steps is empty.
    failures: The completions whose reward is missing because something failed.
    metrics: The arguments of calls of `log_metric`, as pairs (name, value).
    extras: The values that were passed to `log_extra`: by column, one value for each completion.
  """

  steps: list[Steps]
  failures: list[Failure] = dataclasses.field(default_factory=list)
  metrics: list[tuple[str, float]] = dataclasses.field(default_factory=list)
  extras: dict[str, list[Any]] = dataclasses.field(default_factory=dict)


class CallLog:
  """Implements `log_metric` and `log_extra` for a call with `count` completions."""

  def __init__(self, count: int) -> None:
    self._count = count
    self.metrics: list[tuple[str, float]] = []
    self.extras: dict[str, list[Any]] = {}

  def metric(self, name: str, value: float) -> None:
    """Logs a number. The row of metrics has the mean of this metric over the calls of a step.

    Raises:
      ValueError: `name` cannot name a metric, or the row has another column of this name.
    """
    _check_name("log_metric", name)
    if name in _COLUMNS_OF_A_ROW or name.startswith("eval/"):
      raise ValueError(
        f"log_metric({name!r}, ...): rows of metrics have a column of this name; choose another"
      )
    self.metrics.append((name, float(value)))

  def extra(self, column: str, values: Sequence[Any]) -> None:
    """Logs a value for each completion, for the files in completions/.

    Raises:
      ValueError: `column` cannot name a column, or `values` has the wrong length.
    """
    _check_name("log_extra", column)
    values = [_as_json(value) for value in values]
    if len(values) != self._count:
      raise ValueError(
        f"log_extra({column!r}) got {len(values)} values for {self._count} completions"
      )
    self.extras[column] = values


def answer_of(name: str, values: Any, completions: Sequence[str], log: CallLog) -> Answer:
  """Checks what a reward function returned, and converts it to an `Answer`.

  Args:
    name: The name of the function.
    values: The object that it returned.
    completions: The texts that it scored.
    log: The values that it logged.

  Returns:
    The rewards. A completion with an invalid score has no steps and a failure instead.

  Raises:
    ContractError: `values` is not a list with one entry for each completion.
  """
  try:
    # Iterating over these types does not give one score per completion in order.
    if isinstance(values, (str, bytes, Mapping, Set)):
      raise TypeError
    values = list(values)  # its length is checked below
    steps = [_as_steps(value, text) for value, text in zip(values, completions)]
  except Exception:  # the entries are objects of the user, which may raise anything
    raise ContractError(
      f"reward function {name} must return a list of numbers, None or lists of steps"
      f" (end, number), got {text_of(values, repr):.80}"
    ) from None
  if len(values) != len(completions):
    raise ContractError(
      f"reward function {name} returned {len(values)} scores for {len(completions)} completions"
    )
  failures = []
  for row, (value, text) in enumerate(zip(values, completions)):
    problem = _problem(steps[row], text)
    if isinstance(value, NoReward):
      failures.append(Failure(row, "missing", f"reward function {name}: {value.reason}"))
    elif problem:
      failures.append(Failure(row, "error", f"reward function {name} returned {problem}"))
      steps[row] = []
  return Answer(steps, failures, log.metrics, log.extras)


def no_answer(count: int, kind: str, text: str) -> Answer:
  """The answer for `count` completions that all failed for the reason `text`."""
  return Answer([[] for _ in range(count)], [Failure(row, kind, text) for row in range(count)])


def joined(count: int, parts: Iterable[tuple[Sequence[int], Answer]]) -> Answer:
  """Combines answers for subsets of `count` completions into one answer for all of them.

  Args:
    count: The number of completions.
    parts: Pairs (rows, answer): entry i of the answer is for completion rows[i]. Rows that no pair
      covers have no steps, and None in the extras.
  """
  whole = Answer([[] for _ in range(count)])
  for rows, part in parts:
    for row, steps in zip(rows, part.steps, strict=True):
      whole.steps[row] = steps
    whole.failures.extend(dataclasses.replace(one, row=rows[one.row]) for one in part.failures)
    whole.metrics.extend(part.metrics)
    for column, values in part.extras.items():
      column_values = whole.extras.setdefault(column, [None] * count)
      for row, value in zip(rows, values, strict=True):
        column_values[row] = value
  whole.failures.sort(key=lambda one: one.row)  # messages describe the first one
  return whole


def scores_of(answers: Mapping[str, Answer], weights: Sequence[float]) -> dict[str, np.ndarray]:
  """Computes the score of each of N completions by each reward function.

  Args:
    answers: The answer of each function, by the name of the function.
    weights: The weights of the functions, in the order of `answers`.

  Returns:
    Scores by function name, float32 [N]: the mean reward of a completion's steps, NaN for a
    completion without steps.

  Raises:
    RewardError: The weighted sum of a completion's scores is beyond `LARGEST`.
  """
  scores = {
    name: np.array([_mean_reward(steps) for steps in answer.steps], np.float32)
    for name, answer in answers.items()
  }
  # A missing score, NaN, adds nothing to the sum.
  sums_N = np.asarray(weights) @ np.nan_to_num(np.array([*scores.values()], np.float64))
  largest = np.abs(sums_N).max(initial=0)
  if largest > LARGEST:
    raise RewardError(
      f"the weighted sum of the rewards is {largest:.3g}: beyond {LARGEST:g}, float32 cannot hold"
      " the variance of a group; lower reward.weights or divide the scores"
    )
  return scores


def _check_name(function: str, name: Any) -> None:
  if not isinstance(name, str) or not name.strip() or not name.isprintable():
    raise ValueError(
      f"{function}({shown(name)}, ...): a name is text of printable characters, and not empty"
    )


def _problem(steps: Steps, text: str) -> str:
  """Why the steps of a completion cannot be used, or "" if they can."""
  if not all(abs(reward) <= LARGEST for _, reward in steps):
    return (
      f"a score that is not finite or beyond {LARGEST:g}, whose square float32 cannot hold, for the"
      f" completion {text!r:.40}"
    )
  if not all(0 < end <= max(1, len(text)) for end, _ in steps):
    return f"a step that ends outside its completion of {len(text)} characters: {steps!r:.80}"
  return ""


def _as_steps(value: Any, text: str) -> Steps:
  """Converts the entry that a function returned for `text` to steps: none for None or NaN.

  Raises:
    Exception: `value` is not a valid entry.
  """
  if value is None or isinstance(value, NoReward):
    return []
  if isinstance(value, (str, bytes)):  # else float("1") would be accepted as a score
    raise TypeError
  if isinstance(value, (list, tuple)):
    return [(int(end), float(reward)) for end, reward in value]
  if math.isnan(float(value)):
    return []
  # An empty completion still has the token that ended it, so its step ends at 1 and not at 0.
  return [(max(1, len(text)), float(value))]


def _as_json(value: Any) -> Any:
  """Converts a value for JSON: NaN and infinity to None, and what JSON cannot hold to its repr."""
  if isinstance(value, np.generic):
    value = value.item()
  if isinstance(value, float) and not math.isfinite(value):
    return None
  try:
    json.dumps(value, allow_nan=False)
  except (TypeError, ValueError, RecursionError):
    return text_of(value, repr)
  return value


def _mean_reward(steps: Steps) -> float:
  return sum(reward for _, reward in steps) / len(steps) if steps else math.nan
