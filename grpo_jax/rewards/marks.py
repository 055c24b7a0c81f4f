"""Marks: attributes of a reward function that change how it is called.

A function has a mark if the attribute is true, as after `brevity.whole_groups = True`. An object
with `__call__` may have it from its class. The functions of this module are decorators that set
marks.

  in_process      The process of the run calls the function, with all completions that the process
                  scores, and without limits. For functions that always end, that use the devices of
                  the run, or whose state must not be split between processes.
  whole_groups    The function compares the completions of a prompt, so a call always has all of
                  them. If it fails, no completion of the prompt has a reward.
  one_worker      For an async function: one worker makes all calls, concurrently, so that the state
                  of the function covers the whole run. If the function has a parameter `at_once`, a
                  call starts only while fewer than about 2 * at_once completions are in flight.
  needs_every_row The function gets the completions of all tasks even if reward.tasks names tasks
                  for it. Only the scores for other tasks are dropped. For functions that all
                  processes compute together.
  conversational  With data.chat, the function gets `prompts` and `completions` as lists of
                  messages, as in TRL. False means that it gets texts. Without the mark, trial calls
                  at the start find out what it reads: see `asking.py`.
  by_turn         With an environment, the function returns `turn_rewards`, and each turn with a
                  reward is a step of process supervision.
  answer_of       For maj@k: a function with the same arguments that returns for each completion the
                  answer that it gives, of any type, or None for no answer. Without this mark, there
                  is no maj@k.
  same_answer     same_answer(first, second) tells whether two of these answers are equal. Without
                  it they are compared with ==.
  reads           For functions of this package: a dict from a tuple of column names, any of which
                  will do, to the types of values that the function can read there. For a row
                  without such a value the score is None, and the run warns at the start.
  prepare         A function without arguments that does slow work for all calls, such as an import.
                  It is called once, in the process from which workers are forked.
"""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def in_process(function: F) -> F:
  """Makes the process of the run call the function."""
  function.__dict__["in_process"] = True
  return function


def by_turn(function: F) -> F:
  """Marks the function as one that returns `turn_rewards`."""
  function.__dict__["by_turn"] = True
  return function


def whole_groups(function: F) -> F:
  """Makes each call have all completions of a prompt."""
  function.__dict__["whole_groups"] = True
  return function


def one_worker(function: F) -> F:
  """Makes one worker call the async function, for the whole run."""
  function.__dict__["one_worker"] = True
  return function


def prepared_by(prepare: Callable[[], Any]) -> Callable[[F], F]:
  """Makes `prepare()` run before workers call the function."""

  def mark(function: F) -> F:
    function.__dict__["prepare"] = prepare
    return function

  return mark


def checked_by(check: Callable[[str, dict[str, Any]], None]) -> Callable[[F], F]:
  """Makes `check(name, parameters)` run before a run starts: see `rewards/options.py`.

  `name` begins error messages, and `parameters` has all parameters of the function by name. `check`
  raises ConfigError for parameters that cannot be used.
  """

  def mark(function: F) -> F:
    function.__dict__["check_options"] = check
    return function

  return mark


def answers_by(
  answer_of: Callable[..., Any], same_answer: Callable[[Any, Any], bool] | None = None
) -> Callable[[F], F]:
  """Sets the marks `answer_of` and `same_answer`, for maj@k."""

  def mark(function: F) -> F:
    function.__dict__["answer_of"] = answer_of
    if same_answer is not None:
      function.__dict__["same_answer"] = same_answer
    return function

  return mark


def reads(**columns: tuple[type, ...]) -> Callable[[F], F]:
  """Sets the mark `reads`: the types of values that the function can read, by column."""

  def mark(function: F) -> F:
    function.__dict__["reads"] = {(name,): types for name, types in columns.items()}
    return function

  return mark


def reads_one_of(*columns: str) -> Callable[[F], F]:
  """Sets the mark `reads`: the function needs one of these columns of the data, with any value."""

  def mark(function: F) -> F:
    function.__dict__["reads"] = {columns: (object,)}
    return function

  return mark


def rows_checked_by(check: Callable[..., str]) -> Callable[[F], F]:
  """Makes `check(where, function, rows)` try the function on rows of the data before a run starts.

  `where` begins messages, `function` has its parameters bound, and `rows` are pairs (name of a row,
  fields of the row) in a random order. `check` returns a warning or "", and raises ConfigError if
  the function cannot use the rows.
  """

  def mark(function: F) -> F:
    function.__dict__["check_rows"] = check
    return function

  return mark


def has_mark(function: Callable[..., Any], mark: str) -> bool:
  """Whether a function has the mark of this name."""
  return bool(getattr(function, mark, False))
