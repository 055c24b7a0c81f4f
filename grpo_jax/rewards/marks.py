"""Marks: attributes of a reward function that change how it is called.

A function has a mark if the attribute is true, as after `brevity.whole_groups = True`. An object
with `__call__` has it from its class. The functions here set marks as decorators.

  in_process      The function is called in the process of the run, with all completions that this
                  process scores at once, and without limits. For functions that are sure to end,
                  that use the devices of the run, or that keep state that must be in one place.
  whole_groups    The function compares the completions of a prompt. It is never called with a part
                  of them: if a call fails, no completion of the prompt has a reward.
  one_worker      For an async function: one worker makes all its calls, side by side, so that what
                  it remembers or counts is that of the whole run. If it has a parameter `at_once`,
                  a call begins only while fewer than about twice as many completions are under way.
  needs_every_row Where reward.tasks names tasks for the function, it is still called with the
                  completions of all tasks, and only its scores of the others are left out. For
                  functions that all processes compute together.
  conversational  With data.chat, the function gets `prompts` and `completions` as lists of
                  messages, as TRL passes them. False says that it gets texts. Without the mark,
                  that is seen at the start, in calls that are made up: `asking.py`.
  by_turn         With an environment, the function's rewards are those of `turn_rewards`, and each
                  turn with a reward is a step of process supervision.
  answer_of       For maj@k: a function of the same arguments that returns for each completion the
                  answer which the reward function reads there, or None where it reads none. An
                  answer may be anything. Without this mark, maj@k is left out.
  same_answer     Whether two of these answers are equal: same_answer(first, second). Without it,
                  they are compared with ==.
  reads           Of functions of this package: the columns that the function compares with, and the
                  types of values that it can read there. Where a row has another value, or none, it
                  gives None, and the run counts and names such rows at the start. The names of
                  several columns in one key mean any of them.
  prepare         A function without arguments that does slow work for all calls, such as an import.
                  It is called once, in the process that workers are forked from.
"""

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def in_process(function: F) -> F:
  """Calls the function in the process of the run."""
  function.__dict__["in_process"] = True
  return function


def by_turn(function: F) -> F:
  """Says that the rewards of the function are those of turns."""
  function.__dict__["by_turn"] = True
  return function


def whole_groups(function: F) -> F:
  """Says that the function is never called with a part of the completions of a prompt."""
  function.__dict__["whole_groups"] = True
  return function


def one_worker(function: F) -> F:
  """Lets one worker make all calls of the async function."""
  function.__dict__["one_worker"] = True
  return function


def prepared_by(prepare: Callable[[], Any]) -> Callable[[F], F]:
  """Calls `prepare` before workers call the function."""

  def mark(function: F) -> F:
    function.__dict__["prepare"] = prepare
    return function

  return mark


def checked_by(check: Callable[[str, dict[str, Any]], None]) -> Callable[[F], F]:
  """Calls `check` with the function's name and its parameters before a run starts.

  It raises ConfigError for parameters that cannot be used. See `rewards/options.py`.
  """

  def mark(function: F) -> F:
    function.__dict__["check_options"] = check
    return function

  return mark


def answers_by(
  answer_of: Callable[..., Any], same_answer: Callable[[Any, Any], bool] | None = None
) -> Callable[[F], F]:
  """Says which answer the function reads in a completion, and when two answers are equal."""

  def mark(function: F) -> F:
    function.__dict__["answer_of"] = answer_of
    if same_answer is not None:
      function.__dict__["same_answer"] = same_answer
    return function

  return mark


def reads(**columns: tuple[type, ...]) -> Callable[[F], F]:
  """Says which types of values the function can read in columns of the data."""

  def mark(function: F) -> F:
    function.__dict__["reads"] = {(name,): types for name, types in columns.items()}
    return function

  return mark


def reads_one_of(*columns: str) -> Callable[[F], F]:
  """Says that the function reads any of these columns of the data, with any values."""

  def mark(function: F) -> F:
    function.__dict__["reads"] = {columns: (object,)}
    return function

  return mark


def rows_checked_by(check: Callable[..., str]) -> Callable[[F], F]:
  """Lets `check` try the function on rows of the data before a run starts.

  It is called as check(where, function, rows): how messages begin, the function with its
  parameters, and pairs (name of a row, its fields) in a random order. It returns a warning or "",
  and raises ConfigError if the rows cannot be used.
  """

  def mark(function: F) -> F:
    function.__dict__["check_rows"] = check
    return function

  return mark


def has_mark(function: Callable[..., Any], mark: str) -> bool:
  """Whether a function has the mark of this name."""
  return bool(getattr(function, mark, False))
