"""Calls a run's reward functions for rollouts, and counts failures."""

import collections
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import json
import sys
from typing import Any, NamedTuple

from flax import struct
import numpy as np

from grpo_jax import rewards as rewards_lib
from grpo_jax.algo.metrics import disjoint
from grpo_jax.data.loader import PromptBatch, prompt_batch
from grpo_jax.data.prompts import PromptSet
from grpo_jax.environments.methods import PickledEnvironment
from grpo_jax.parallel.hosts import Hosts
from grpo_jax.pending import Pending, together
from grpo_jax.progress import doing
from grpo_jax.rewards import conversation, dispatch
from grpo_jax.rewards.marks import has_mark
from grpo_jax.rewards.votes import has_votes
from grpo_jax.rollouts.rollout import Rollouts, sampled_ids, take
from grpo_jax.scoring.scores import DecodeText, steps_on_tokens
from grpo_jax.settings import ConfigError, RunFailed, shown
from grpo_jax.types import Rewards

_KINDS = {"error": "errors", "timeout": "timeouts", "crash": "crashes"}  # failures with a metric
_MOST_ROWS_TRIED = 2048  # rows of the data among which to find rows that a function can use
_MOST_LOOKED_AT = 256  # rows to check for types if they are not in memory (they may have images)
_MOST_NAMED = 3  # rows in a warning
_MOST_COMPARED, _MOST_TRIALS = 16, 4  # candidate rows for trial calls of a function; trial calls


@dataclasses.dataclass(frozen=True)
class Report:
  """The failures and logged values of scoring, on all processes. Reports can be added.

  Attributes:
    failed: By metric, how many completions have no reward because of one kind of failure.
    logged: By name, (sum, count) of the values that functions passed to log_metric.
    unscored: By function, why it scored no completion at all on some process.
  """

  failed: dict[str, int] = dataclasses.field(default_factory=dict)
  logged: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)
  unscored: dict[str, str] = dataclasses.field(default_factory=dict)

  def __add__(self, other: "Report") -> "Report":
    failed, logged = dict(self.failed), dict(self.logged)
    for name, count in other.failed.items():
      failed[name] = failed.get(name, 0) + count
    for name, (total, count) in other.logged.items():
      before, count_before = logged.get(name, (0.0, 0))
      logged[name] = before + total, count_before + count
    return Report(failed, logged, other.unscored | self.unscored)

  def metrics(self) -> dict[str, float]:
    """Returns the counts of failures, and the means of the logged values."""
    means = {name: total / count for name, (total, count) in self.logged.items()}
    return disjoint(means, {name: float(count) for name, count in self.failed.items()})


class Scores(struct.PyTreeNode):
  """The rewards of P groups.

  Attributes:
    rewards: The rewards as numpy arrays, the same on every process.
    extras_PG: object array of dicts: the values that functions passed to log_extra, by column.
    report: The failures and logged values.
  """

  rewards: Rewards
  extras_PG: np.ndarray
  report: Report = struct.field(pytree_node=False, default=Report())


class _Place(NamedTuple):
  """Identifies the rows of a process in warnings: step, first prompt in the batch, G, columns."""

  step: int
  first_prompt: int
  group_size: int
  columns: Mapping[str, Sequence[Any]]


class Weighted(NamedTuple):
  """A reward function of a run.

  Attributes:
    function: The function.
    weight: The weight of the function in the sum.
    tasks: The entry of reward.tasks: the tasks that the function scores. "" means all.
  """

  function: rewards_lib.Reward
  weight: float = 1.0
  tasks: str = ""


class Scorer:
  """Scores rollouts with a run's reward functions. All processes call it together.

  A function gets the completions of whole groups, but only the groups of its process.

  Attributes:
    names: The names of the J functions in metrics.
    weights: The weight of each function.
    gets_more: Whether a harness or environment may add columns that are not known before.
  """

  def __init__(
    self,
    functions: Sequence[Weighted],
    hosts: Hosts,
    decode_text: DecodeText,
    caller: rewards_lib.Caller,
    needs_steps: bool = False,
  ):
    """Stores the functions.

    Args:
      functions: The reward functions.
      hosts: The processes of the run.
      decode_text: Decodes token ids to a text.
      caller: Calls the functions.
      needs_steps: Whether the advantage reads `Rewards.step_rewards_PGT`, the rewards of parts of a
        completion.
    """
    self._functions = [one.function for one in functions]
    self.names = [rewards_lib.name_of(function) for function in self._functions]
    self.weights = tuple(one.weight for one in functions)
    self._hosts = hosts
    self._decode_text = decode_text
    self._caller = caller
    self._needs_steps, self.gets_more = needs_steps, False
    self._tasks = [one.tasks for one in functions]

  def check_arguments(self, prompts: PromptSet, key: str) -> None:
    """Checks the functions on these prompts, and prints warnings to stderr.

    Also finds out whether a user's function expects texts or messages.

    Args:
      prompts: The prompts whose completions the functions will score.
      key: The config key that names the functions.

    Raises:
      ConfigError: A function cannot be called for these prompts.
    """
    first = prompt_batch(prompts, np.zeros(1, int))
    if any(self._tasks) and "task" not in first.columns:
      raise ConfigError(
        f"config key reward.tasks is {tuple(self._tasks)}: the examples have no field task; use"
        " data.mixture, or name the column that says which function scores a row:"
        " data.columns=('task=COLUMN',)"
      )
    if any(self._tasks) and key == "reward.functions":
      # Only for training: test problems may lack a task, and the warning would come twice.
      left = dispatch.check_names(self._tasks, prompts.tasks())
      if left and self._hosts.is_first:
        print(
          f"warning: reward.tasks names no function for the tasks {', '.join(left):.400}: their"
          " completions get no reward of reward.functions",
          file=sys.stderr,
          flush=True,
        )
    columns = ["completions", "completion_ids", *first.columns]
    columns += ["turns", "turn_rewards"] if prompts.has_turns else []
    for function, name in zip(self._functions, self.names):
      available = columns + self._more(function)
      rewards_lib.check_arguments(function, name, key, available, optional=prompts.fields)
      if check := getattr(function, "check_rows", None):
        try_rows = functools.partial(check, f"{key}: {name}", function)
        self._hosts.on_first(functools.partial(_try_rows, try_rows, prompts))
    self._hosts.on_first(lambda: self._tell_unreadable(prompts, key))
    if "messages" in first.columns:  # otherwise all functions get texts
      self._see_what_they_read(prompts, key)

  def _see_what_they_read(self, prompts: PromptSet, key: str) -> None:
    """Finds out by trial calls which functions of the user expect messages, and prints it."""
    for function, name, entry in zip(self._functions, self.names, self._tasks, strict=True):
      more = {column: [None, None] for column in self._more(function)}  # a trial has two rows
      trials = (more | columns for columns in _trials(prompts, dispatch.tasks_in(entry)))
      see = functools.partial(self._caller.see_what_it_reads, function, trials)
      if problem := self._hosts.on_each(see):
        print(
          f"warning: {key}: whether {name} reads messages is not known, so it gets texts. A first"
          f" call with made-up messages did not end: {problem}. Set {name}.conversational to True"
          " or False in its file",
          file=sys.stderr,
          flush=True,
        )
    names: dict[bool, list[str]] = {True: [], False: []}  # by whether they get messages
    for function, name in zip(self._functions, self.names, strict=True):
      if conversation.is_of_user(function):
        names[self._caller.reads_messages(function)].append(name)
    if self._hosts.is_first and any(names.values()):
      messages, texts = (", ".join(listed) or "none" for listed in names.values())
      print(
        f"{key}: your functions that get messages: {messages}; that get texts: {texts}",
        file=sys.stderr,
        flush=True,
      )

  def _more(self, function: rewards_lib.Reward) -> list[str]:
    """Returns the columns that a function needs and that a harness may add, or []."""
    return rewards_lib.needed_by(function) if self.gets_more else []

  def _tell_unreadable(self, prompts: PromptSet, key: str) -> None:
    """Warns of rows that built-in functions cannot score, because a column is missing or wrong."""
    # Functions that read the same share a warning. The key is (entry of reward.tasks, *items of the
    # columns and types that they read), and the value has their names.
    groups: dict[tuple[Any, ...], list[str]] = {}
    for function, name, entry in zip(self._functions, self.names, self._tasks, strict=True):
      if not conversation.is_of_user(function) and hasattr(function, "reads"):
        groups.setdefault((entry, *function.reads.items()), []).append(name)
    if not groups:
      return
    all_of_them = prompts.is_in_memory
    picked = range(len(prompts)) if all_of_them else sorted(_some_places(prompts)[:_MOST_LOOKED_AT])
    rows = [*prompts.given(picked)]  # pairs (name of a row in messages, example)
    which = ("" if all_of_them else " that were looked at") + (
      ", whose completions count as wrong" if key == "eval.function" else ""
    )
    for (entry, *items), names in groups.items():
      kinds = dict(items)
      to_score = _rows_of_tasks(rows, kinds, dispatch.tasks_in(entry))
      problems = [f"{place} {why}" for place, row in to_score if (why := _unreadable(kinds, row))]
      if problems:
        named = "; ".join(problems[:_MOST_NAMED])
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        of_all = f"{len(problems)} of {len(to_score)}"
        print(
          f"warning: {key}: no reward of {', '.join(names)} for {of_all} rows"
          f"{which}: {named}{more}",
          file=sys.stderr,
          flush=True,
        )

  def __call__(self, rollouts: Rollouts, prompts: PromptBatch, step: int = 0) -> Scores:
    """Scores rollouts. Each process calls the functions for its own prompts."""
    return self.start(rollouts, prompts, step).result()

  def start(self, rollouts: Rollouts, prompts: PromptBatch, step: int = 0) -> Pending[Scores]:
    """Starts scoring in the workers.

    Returns:
      Pending scores. `result` calls the functions that run in this process, and exchanges the
      scores, so all processes must call it together.
    """
    own_rollouts = take(rollouts, prompts.own)  # those of this process's prompts
    columns = completion_columns(own_rollouts, prompts)
    place = _Place(step, prompts.own.start, own_rollouts.texts_PG.shape[1], columns)
    functions = list(zip(self._functions, self._tasks, strict=True))
    pending = dispatch.start_for_tasks(self._caller, functions, columns, step, place.group_size)

    def finish() -> Scores:
      answers = {}
      # First call the functions that run in this process, because the workers compute meanwhile.
      order = sorted(zip(self._functions, self.names, pending), key=self._comes_last)
      for _, name, answer in order:
        answers[name] = self._hosts.on_each(answer.result)
      return self._scored(own_rollouts, {name: answers[name] for name in self.names}, place)

    return Pending(finish, together(pending).futures)

  def has_votes(self, tasks: Collection[str]) -> bool:
    """Returns whether the first function of each of these tasks can vote: it reports answers."""
    firsts = (self._first_for(task) for task in tasks)
    return all(function is not None and has_votes(function) for function in firsts)

  def _first_for(self, task: str) -> rewards_lib.Reward | None:
    """Returns the first function that scores a task, or None."""
    pairs = zip(self._functions, map(dispatch.tasks_in, self._tasks), strict=True)
    return next((function for function, tasks in pairs if not tasks or task in tasks), None)

  def start_votes(
    self, rollouts: Rollouts, prompts: PromptBatch, step: int = 0
  ) -> Pending[np.ndarray]:
    """Starts to find out which completions of a prompt have equal answers.

    Returns:
      Pending votes, float64 [P, G, J], for the prompts of this process. Two completions of a prompt
      have the same number for function j if it reads equal answers in them. NaN means no answer.
      All processes must call `result` together.
    """
    own_rollouts = take(rollouts, prompts.own)  # those of this process's prompts
    columns = completion_columns(own_rollouts, prompts)
    voters = [j for j, function in enumerate(self._functions) if has_votes(function)]
    functions = [(self._functions[j], self._tasks[j]) for j in voters]
    P, G = own_rollouts.texts_PG.shape
    pending = dispatch.start_for_tasks(self._caller, functions, columns, step, G, votes=True)

    def finish() -> np.ndarray:
      votes_PGJ = np.full((P, G, len(self._functions)), np.nan)
      for j, answer in zip(voters, pending, strict=True):
        voted = self._hosts.on_each(answer.result)
        if voted.failures:
          print(f"warning: no vote of maj@k: {voted.failures[0].text}", file=sys.stderr, flush=True)
        # A vote comes as a score: as the reward of the completion's only step.
        votes = [steps[0][1] if steps else np.nan for steps in voted.steps]
        votes_PGJ[..., j] = np.reshape(votes, (P, G))
      return votes_PGJ

    return Pending(finish, together(pending).futures)

  def _comes_last(self, started: tuple[rewards_lib.Reward, str, Any]) -> bool:
    """Returns whether workers call a function. It is the key by which `start` sorts."""
    return self._caller.uses_workers(started[0])

  def _scored(
    self, own: Rollouts, answers: Mapping[str, rewards_lib.Answer], place: _Place
  ) -> Scores:
    """Builds the scores of all processes from the functions' answers for this process's rows."""
    scores = self._hosts.on_each(lambda: rewards_lib.scores_of(answers, self.weights))
    P, G = own.texts_PG.shape
    scores_PGJ = np.stack(list(scores.values()), -1).reshape(P, G, -1)
    step_rewards = None, None  # (rewards, ends), both float32 [P, G, T], if they are needed
    if self._needs_steps:
      by_turn = [has_mark(function, "by_turn") for function in self._functions]
      steps = [answer.steps for answer in answers.values()]
      step_rewards = steps_on_tokens(own, steps, by_turn, self.weights, self._decode_text)
    scores_PGJ, (rewards_PGT, ends_PGT) = self._hosts.join_rows((scores_PGJ, step_rewards))
    rewards = Rewards(
      scores_PGJ=scores_PGJ,
      weights=self.weights,
      step_rewards_PGT=rewards_PGT,
      step_ends_PGT=ends_PGT,
    )
    return Scores(rewards, self._extras(answers, P, G), self._report(answers, place))

  def _extras(self, answers: Mapping[str, rewards_lib.Answer], P: int, G: int) -> np.ndarray:
    """Gathers the values that functions passed to log_extra, from all processes, [P, G] dicts."""
    rows: list[dict[str, Any]] = [{} for _ in range(P * G)]
    for answer in answers.values():
      for column, values in answer.extras.items():
        for row, value in zip(rows, values, strict=True):
          row[column] = value
    has_some = self._hosts.any_process(any(answer.extras for answer in answers.values()))
    if has_some:
      rows = [json.loads(line) for line in self._hosts.join_lines([*map(json.dumps, rows)])]
    else:  # nothing was logged: exchange only the number of rows
      rows = [{} for _ in range(int(self._hosts.join_rows(np.ones(P * G, np.int32)).sum()))]
    extras_N = np.empty(len(rows), object)
    extras_N[:] = rows
    return extras_N.reshape(-1, G)

  def _report(self, answers: Mapping[str, rewards_lib.Answer], place: _Place) -> Report:
    """Counts failures of all processes. Prints each function's first failure to stderr."""
    counts: dict[str, int] = {}
    logged: dict[str, tuple[float, int]] = {}
    unscored: dict[str, str] = {}
    for i, (function, (name, answer)) in enumerate(zip(self._functions, answers.items())):
      # The failures that may be counted, so that the metric is there at 0, too. In this process a
      # function has no time limit and a crash ends the run, as an error does if `stops_on_error`.
      if self._caller.uses_workers(function):
        kinds = list(_KINDS)
      else:
        kinds = [] if self._caller.stops_on_error else ["error"]
      for kind in kinds:
        failed = sum(failure.kind == kind for failure in answer.failures)
        counts[f"rewards/{name}/{_KINDS[kind]}"] = failed
      if answer.failures:
        print(_warning(name, answer, place), file=sys.stderr, flush=True)
      if not any(answer.steps):  # no completion has a score
        unscored[name] = _why_unscored(name, answer, self._tasks[i], place)
      for metric, value in answer.metrics:
        total, count = logged.get(metric, (0.0, 0))
        logged[metric] = total + value, count + 1
    reports = [
      Report(*json.loads(line))
      for line in self._hosts.join_lines([json.dumps([counts, logged, unscored])])
    ]
    return sum(reports, Report())


def _try_rows(
  try_rows: Callable[[Iterator[tuple[str, Mapping[str, Any]]]], str], prompts: PromptSet
) -> None:
  """Passes (name, fields) of some rows to `try_rows`, and prints the warning that it returns."""
  examples = ((index, prompts.example(index)) for index in _some_places(prompts))
  rows = ((example.get("place") or f"prompt {index}", example) for index, example in examples)
  with doing("trying reward functions on some rows"):
    warning = try_rows(rows)
  if warning:
    print(f"warning: {warning}", file=sys.stderr, flush=True)


def _why_unscored(name: str, answer: rewards_lib.Answer, entry: str, place: _Place) -> str:
  """Returns why a function scored no completion. `entry` is its entry in reward.tasks."""
  if answer.failures:
    return answer.failures[0].text
  found = sorted({str(task) for task in place.columns.get("task", ())})
  if dispatch.tasks_in(entry) and not set(found) & set(dispatch.tasks_in(entry)):
    return (
      f"reward function {name} is for {entry} alone (reward.tasks), and the prompts are of"
      f" {', '.join(found)}"
    )
  golds = place.columns.get("answer", ())
  shown_gold = f" (the first answer in the data is {golds[0]!r:.60})" if len(golds) else ""
  return f"reward function {name} returned no score for any completion{shown_gold}"


def _warning(name: str, answer: rewards_lib.Answer, place: _Place) -> str:
  """Makes a warning that counts failures, and describes the first completion without a reward."""
  first = answer.failures[0]
  p, g = divmod(first.row, place.group_size)
  kinds = collections.Counter(failure.kind for failure in answer.failures)
  counted = ", ".join(f"{_KINDS.get(kind, kind)}: {count}" for kind, count in sorted(kinds.items()))
  return (
    f"warning: step {place.step}: {len(answer.failures)} of {len(answer.steps)} completions have no"
    f" reward of {name} ({counted}). The first is completion {g} of prompt"
    f" {place.first_prompt + p}: {first.text}"
  )


def _some_places(prompts: PromptSet) -> list[int]:
  """Returns the indices of some rows, in a random order that is always the same."""
  count = min(len(prompts), _MOST_ROWS_TRIED)
  return np.random.default_rng(0).choice(len(prompts), count, replace=False).tolist()


# The types that a function accepts: by column, or by several columns of which it needs one.
_Kinds = Mapping[tuple[str, ...], tuple[type, ...]]


def _rows_of_tasks(
  rows: Sequence[tuple[str, Mapping[str, Any]]], kinds: _Kinds, tasks: Sequence[str]
) -> list[tuple[str, Mapping[str, Any]]]:
  """Selects the rows of `tasks` or, if that is empty, of each task with a row of all columns."""
  if not tasks:
    complete = [row for _, row in rows if all(_first(names, row) is not None for names in kinds)]
    tasks = [row.get("task") for row in complete or [row for _, row in rows]]
  known = set(map(str, tasks))
  return [one for one in rows if str(one[1].get("task")) in known]


def _unreadable(kinds: _Kinds, row: Mapping[str, Any]) -> str:
  """Returns why a row does not have the columns and types of `kinds`. "" if it has them."""
  for names, types in kinds.items():
    value = _first(names, row)
    if value is None:
      return f"has no {' or '.join(names)}"
    if not isinstance(value, types):
      return f"has {shown(value)} as {' or '.join(names)}"
  return ""


def _first(names: Sequence[str], row: Mapping[str, Any]) -> Any:
  """Returns the first value in these columns of a row that is not None, or None."""
  return next((row[name] for name in names if row.get(name) is not None), None)


def _trials(prompts: PromptSet, tasks: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
  """Yields the columns of made-up completions, for trial calls of a function for these tasks.

  In a mixture, columns of other tasks are None, and a function may then return early and read
  nothing. So there is one trial for each of several tasks, with a row with the fewest None.
  """
  # By task, (number of filled columns, -index) of its best row. The maximum of such pairs is the
  # first of several equally good rows.
  best: dict[str, tuple[int, int]] = {}
  rows = ((index, prompts.example(index)) for index in _some_places(prompts))
  candidates = (one for one in rows if not tasks or str(one[1].get("task")) in tasks)
  for index, example in itertools.islice(candidates, _MOST_COMPARED):
    task, filled = str(example.get("task")), sum(value is not None for value in example.values())
    best[task] = max(best.get(task, (-1, 0)), (filled, -index))
  best_rows = sorted(best.values(), reverse=True) or [(0, 0)]  # row 0 if no row is of these tasks
  for _, negative_index in best_rows[:_MOST_TRIALS]:
    yield _made_up_columns(prompts, -negative_index)


def _made_up_columns(prompts: PromptSet, place: int) -> dict[str, list[Any]]:
  """Returns the columns of two made-up completions of a prompt. One is too few to compare."""
  batch = prompt_batch(prompts, np.array([place, place]))
  ids = batch.prompts_PS[:, :1].tolist()  # one token, which need not match the text
  turns: dict[str, list[Any]] = {}
  if prompts.has_turns:
    made_up = [{"role": "assistant", "content": conversation.MADE_UP}]
    turns = {"turns": [made_up, made_up], "turn_rewards": [[None], [None]]}
  return {
    **batch.columns,
    **turns,
    "completions": [conversation.MADE_UP] * 2,
    "completion_ids": ids,
  }


def completion_columns(rollouts: Rollouts, prompts: PromptBatch) -> dict[str, list]:
  """Builds the arguments of reward functions: by name, a list with a value for each completion.

  Args:
    rollouts: The completions of the prompts that this process scores.
    prompts: The batch. Its columns contain only these prompts.

  Raises:
    RunFailed: A harness returned a column that the data has already.
  """
  P, G = rollouts.texts_PG.shape
  columns = {
    name: [value for value in values for _ in range(G)] for name, values in prompts.columns.items()
  }
  columns["completions"] = list(rollouts.texts_PG.ravel())
  columns["completion_ids"] = [
    sampled_ids(rollouts.completions, p, g) for p in range(P) for g in range(G)
  ]
  if rollouts.turns_PG is not None:
    talks = rollouts.turns_PG.ravel()  # the conversations
    columns["turns"] = [[turn.message for turn in one.turns] for one in talks]
    columns["turn_rewards"] = [one.rewards for one in talks]
    if any(one.environment for one in talks):  # unpickled where a function is called: `own_copy`
      columns["environments"] = [
        PickledEnvironment(*one.environment) if one.environment else None for one in talks
      ]
    # A harness may return other columns for each completion, so some values may be missing. None
    # has a name from above: environments/returned.py refuses those.
    for name in dict.fromkeys(name for one in talks for name in one.columns):
      if name in prompts.columns:
        raise RunFailed(
          f"environment.harness: the column {name} that it returned is one of the data: rename it"
        )
      columns[name] = [one.columns.get(name) for one in talks]
  return columns
